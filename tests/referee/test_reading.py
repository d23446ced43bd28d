"""Reading responses in the report: answers, plain text, links, the keyboard, the tooltip, paper; in a real browser."""

import torch

from poise.referee.report.html import write_report
from support.run_folders import HOSTILE, WORDS, add_step, look, make_run, next_frame, response, see


def test_the_right_answer_stands_beside_the_response_with_the_one_that_was_read(page, tmp_path):
    records = [
        response(1, 0, gold="(1) Ada is a knight", answer="knave"),
        response(1, 1, gold=HOSTILE),
        response(1, 2),
        response(1, 3, gold="x" * 4000, answer=HOSTILE),
    ]
    look(page, tmp_path, make_run(tmp_path / "run", steps=(1,), records=records))
    see(page, ".answers", "Right answer")
    assert page.locator(".answers dd").all_inner_texts() == ["(1) Ada is a knight", "knave"]
    page.keyboard.press("j")
    see(page, ".answers .gold", "<script>window.hacked=1</script>")
    assert page.locator(".answers dd").nth(1).inner_text() == "none"
    page.keyboard.press("j")
    see(page, ".pane p", "response 2 ")
    assert page.locator(".answers").count() == 0  # a run from before answers were recorded
    page.keyboard.press("j")
    see(page, ".pane p", "response 3 ")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200
    assert page.evaluate("window.hacked") is None


def test_plain_text_joins_the_bytes_of_a_character(page, tmp_path):
    texts = dict.fromkeys(WORDS, "\ufffd")  # each token holds a part of a character
    record = response(1, 0, text="Knights ⚔️ and naïve 騎士\x00")
    look(page, tmp_path, make_run(tmp_path / "run", steps=(1,), records=[record], texts=texts))
    see(page, ".tokens", "\ufffd")
    assert page.text_content(".plain") == "Knights ⚔\\ufe0f and naïve 騎士\\u0000"
    page.click("summary:has-text('Plain text')")
    assert page.locator(".plain").is_hidden()


def test_a_part_that_was_closed_stays_closed(page, tmp_path):
    look(page, tmp_path, make_run(tmp_path / "run", steps=(1,)))
    page.click("summary:has-text('Prompt')")
    page.keyboard.press("j")
    see(page, ".pane p", "response 1 ")
    assert page.locator("details[open] summary").all_inner_texts() == ["Parts of the score", "Plain text"]


# Links


def test_the_address_leads_back_to_the_response(page, tmp_path):
    path = look(page, tmp_path, make_run(tmp_path / "run", steps=(1, 2), responses=100))
    page.click("#row-3")
    see(page, ".pane p", "response 3 ")
    assert page.url.endswith("#responses/0/1/3")
    assert page.get_attribute(".pane .link", "href") == "#responses/0/1/3"
    page.goto("about:blank")
    page.goto(path.as_uri() + "#responses/0/2/61")
    see(page, ".pane p", "step 2 · response 61 ")
    assert page.locator("#row-161[aria-selected=true]").is_visible()  # the list has scrolled to it


def test_a_link_lifts_the_filters_that_hide_its_response(page, tmp_path):
    look(page, tmp_path, make_run(tmp_path / "run", steps=(1, 2)))
    page.select_option("#f-step", "2")
    see(page, "#count", "6 of 12")
    page.evaluate("location.hash = '#responses/0/1/4'")
    see(page, ".pane p", "step 1 · response 4 ")
    see(page, "#count", "12 of 12")


def test_a_link_to_a_response_that_is_not_there(page, tmp_path):
    path = look(page, tmp_path, make_run(tmp_path / "run", steps=(1,)))
    for address in ("0/7/0", "9/1/0", "x/<script>/1", "0"):
        page.goto("about:blank")
        page.goto(f"{path.as_uri()}#responses/{address}")
        see(page, "#main", "The response of this link is not in this report.")
        see(page, ".pane p", "response 0 ")


# The list


def test_a_search_without_hits_shows_no_response(page, tmp_path):
    look(page, tmp_path, make_run(tmp_path / "run", steps=(1,)))
    see(page, ".pane p", "response 0 ")
    page.fill("#search", "nowhere to be found")
    see(page, "#panes", "No response matches these filters.", whole=True)
    assert page.locator(".item").count() == 0
    assert page.url.endswith("#responses")
    page.fill("#search", "")
    see(page, ".pane p", "response 0 ")


def test_arrow_keys_in_the_list(page, tmp_path):
    look(page, tmp_path, make_run(tmp_path / "run", steps=(1,), responses=40))
    page.focus("#list")
    for key, expected in (
        ("ArrowDown", 1),
        ("ArrowDown", 2),
        ("ArrowUp", 1),
        ("End", 39),
        ("ArrowDown", 39),
        ("Home", 0),
    ):
        page.keyboard.press(key)
        see(page, ".pane p", f"response {expected} ")
        assert page.locator(f"#row-{expected}[aria-selected=true]").is_visible()
    assert page.evaluate("document.activeElement.id") == "list"


# Focus


def test_the_focus_stays(page, tmp_path):
    look(page, tmp_path, make_run(tmp_path / "run", steps=(1,)))
    page.focus("#tokens-0")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("s")  # another shading draws the response anew
    see(page, ".ends", "weight:")
    assert page.evaluate("document.activeElement.id") == "tokens-0"
    assert page.locator(".tokens .at").get_attribute("data-i") == "1"
    page.keyboard.press("ArrowRight")
    see(page, "#tip", "3 of 4")
    page.keyboard.press("j")
    see(page, ".pane p", "response 1 ")
    assert page.evaluate("document.activeElement.id") == "tokens-0"
    assert page.locator(".tokens .at").count() == 0


def test_arrow_keys_turn_the_tabs_and_keep_the_focus(page, tmp_path):
    look(page, tmp_path, make_run(tmp_path / "run", steps=(1,)))
    page.focus("#tab-responses")
    for key, expected in (
        ("ArrowRight", "settings"),
        ("ArrowRight", "result"),
        ("ArrowLeft", "settings"),
        ("ArrowLeft", "responses"),
    ):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.id") == f"tab-{expected}"
        assert page.locator("nav [aria-selected=true]").inner_text() == expected
    page.click("#tab-curves")
    assert page.evaluate("document.activeElement.id") == "tab-curves"


def test_a_refresh_keeps_the_focus(page, served):
    folder, url = served
    page.goto(f"{url}/#responses")
    page.wait_for_selector(".tokens span")
    page.focus("#tokens-0")
    page.keyboard.press("ArrowRight")
    add_step(folder, 2)
    see(page, "#count", "12 of 12 responses", whole=True)
    next_frame(page)
    assert page.evaluate("document.activeElement.id") == "tokens-0"
    assert page.locator(".tokens .at").get_attribute("data-i") == "0"
    page.click("#tab-curves")
    page.focus("#smooth")
    add_step(folder, 3)
    see(page, ".legend", "mean 0.3", whole=True)
    assert page.evaluate("document.activeElement.id") == "smooth"


# The tooltip


def overlap(page, selector):
    """Whether the tooltip covers a part of an element."""
    a, b = page.locator("#tip").bounding_box(), page.locator(selector).bounding_box()
    beside = a["x"] + a["width"] <= b["x"] or b["x"] + b["width"] <= a["x"]
    return not (beside or a["y"] + a["height"] <= b["y"] or b["y"] + b["height"] <= a["y"])


def test_escape_closes_the_tooltip_until_one_points_elsewhere(page, tmp_path):
    look(page, tmp_path, make_run(tmp_path / "run", steps=(1,)))
    page.hover(".tokens span[data-i='0']")
    see(page, "#tip", "1 of 4")
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")
    box = page.locator(".tokens span[data-i='0']").bounding_box()
    page.mouse.move(box["x"] + 3, box["y"] + 3)
    assert page.is_hidden("#tip")
    page.hover(".tokens span[data-i='1']")
    see(page, "#tip", "2 of 4")
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")
    see(page, "#tip", "1 of 4")  # the first token that the keys reach
    page.locator("#search").focus()
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")


def test_the_tooltip_covers_no_other_token(page, tmp_path):
    look(page, tmp_path, make_run(tmp_path / "run", steps=(1,), records=[response(1, i) for i in (0, 1)], length=300))
    page.wait_for_selector(".tokens span")
    for number in (0, 90, 299):
        page.hover(f".tokens span[data-i='{number}']")
        see(page, "#tip", f"{number + 1} of 300")
        assert not overlap(page, ".tokens")
    page.click("#pin")
    page.keyboard.press("j")
    page.wait_for_selector(".pane:nth-child(2)")
    for pane in ("#tokens-0", "#tokens-1"):
        page.hover(f"{pane} span[data-i='90']")
        see(page, "#tip", "91 of 300")
        assert not overlap(page, pane)


def test_on_a_phone_the_tooltip_covers_no_near_token(page, tmp_path):
    page.set_viewport_size({"width": 390, "height": 600})
    look(page, tmp_path, make_run(tmp_path / "run", steps=(1,), records=[response(1, 0)], length=2000))
    page.wait_for_selector(".tokens span")
    for number in (0, 700, 1999):
        page.locator(f".tokens span[data-i='{number}']").scroll_into_view_if_needed()
        page.hover(f".tokens span[data-i='{number}']")
        see(page, "#tip", f"{number + 1} of 2000")
        near = [max(0, number - 5), min(1999, number + 5)]
        assert not any(overlap(page, f".tokens span[data-i='{other}']") for other in (number, *near))


def test_the_tooltip_of_a_bar_covers_no_other_bar(page, tmp_path):
    look(page, tmp_path, make_run(tmp_path / "run", steps=(1,)), tab="settings")
    series = "[{ label: 's', values: [1, 2, 3], errors: [] }]"
    page.evaluate(f"document.getElementById('main').append(card('x', '', bars(['a', 'b', 'c'], {series})))")
    page.evaluate("window.scrollTo(0, 1e6)")
    for number in range(3):
        page.locator(".bar-mark").nth(number).hover()
        see(page, "#tip", "abc"[number])
        assert not overlap(page, ".card svg")


# Scales and paper


def test_the_scale_of_weights_begins_at_zero(page, tmp_path):
    folder = make_run(tmp_path / "run", steps=(1,), records=[response(1, 0)])
    arrays, _ = folder.tokens(1)
    arrays = {name: values for name, values in arrays.items() if not name.startswith("weight/")}
    folder.save_tokens(1, arrays | {"weight/all": torch.tensor([0.0, 0.5, 1.0, 5.0])}, WORDS)
    look(page, tmp_path, folder)
    page.select_option("#shade", "weight")
    see(page, ".ends", "weight:")
    assert page.locator(".ends span").all_inner_texts()[::2] == ["0", "5"]
    shades = page.locator(".tokens span").evaluate_all("all => all.map(s => s.style.background)")
    assert shades == ["rgba(var(--cool), 0.155)", "rgba(var(--cool), 0.077)", "", "rgba(var(--warm), 0.620)"]
    assert "transparent 20%" in page.eval_on_selector(".scale", "s => s.style.background")  # at 1


def test_on_paper(page, tmp_path):
    page.emulate_media(color_scheme="dark")
    path = write_report([make_run(tmp_path / "run", steps=(1,)).path], tmp_path / "report.html")
    page.goto(path.as_uri() + "#responses")
    page.wait_for_selector(".tokens span")
    page.emulate_media(media="print")
    for hidden in ("nav", ".bar", ".list", ".hints", "#theme"):
        assert page.locator(hidden).first.is_hidden(), hidden
    for shown in (".tokens", ".plain", ".scale", "h1"):
        assert page.locator(shown).is_visible(), shown
    assert page.eval_on_selector("body", "b => getComputedStyle(b).backgroundColor") == "rgb(255, 255, 255)"
    assert page.eval_on_selector("body", "b => getComputedStyle(b).color") == "rgb(0, 0, 0)"
    assert page.eval_on_selector("header", "h => getComputedStyle(h).position") == "static"
    assert len(page.pdf()) > 1000
