"""The report, driven in a real browser."""

import json
import re
import struct
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poise import regulators
from poise.diagnostics import Intervals, dominance
from poise.referee.diagnose import combine, verdict
from poise.referee.report.html import write_report
from poise.referee.report.html.data import Source
from poise.referee.report.html.page import in_html
from poise.runs.folder import RunFolder
from poise.runs.subscribers import warnings
from poise.runs.subscribers.warnings import RunWarning
from support.run_folders import HOSTILE, WORDS, add_step, look, make_run, next_frame, response, see
from support.softmax_table import Table

# The data


@given(st.text())
def test_any_text_is_inert_in_the_page(text):
    written = in_html({text: [text]})
    assert not set(written) & set(b"<>&\x00")
    assert written.isascii()
    assert json.loads(written) == {text: [text]}


def test_blocks_hold_the_exact_values(tmp_path):
    folder = make_run(tmp_path / "run")
    source = Source([folder.path])
    index = source.index()
    run = index["runs"][0]
    assert len(index["rows"]) == 12
    kept, _ = folder.tokens(2)
    block = zlib.decompress(source.block((0, 2, 3)))
    size = struct.unpack_from("<I", block)[0]
    assert block[4 : 4 + size].decode() == "alpha beta answer2x3"
    at = 4 + -(-size // 4) * 4
    assert struct.unpack_from("<I", block, at)[0] == 0  # no environment spoke
    at += 4
    for name in run["fields"]:
        values = torch.tensor(struct.unpack_from(f"<4{'i' if name == 'id' else 'f'}", block, at))
        expected = kept[name][12:16]
        if name == "id":
            assert [run["words"][i] for i in values.tolist()] == [WORDS[i] for i in expected.tolist()]
        else:
            assert torch.equal(values.nan_to_num(9), expected.nan_to_num(9)), name
        at += 16
    assert at == len(block)
    with pytest.raises(KeyError):
        source.block((0, 2, 99))


def test_what_the_environment_said_stands_between_the_replies(page, tmp_path):
    said = "You moved left.\n" + HOSTILE
    folder = make_run(tmp_path / "run", steps=(1,), records=[response(1, 0, environment=[[2, said]]), response(1, 1)])
    look(page, tmp_path, folder)
    see(page, ".environment", "You moved left.")
    kinds = page.eval_on_selector(
        ".tokens", "(box) => [...box.children].map((each) => each.className === 'environment')"
    )
    assert kinds == [False, False, True, False, False]
    assert page.evaluate("() => window.hacked") is None
    page.keyboard.press("j")
    see(page, ".pane h3", "Wrong")
    assert page.locator(".environment").count() == 0


def test_a_retry_can_be_followed_from_row_to_row(page, tmp_path):
    roles = [{}, *({"role": role} for role in ("reflection", "second", "consolidated"))]
    retry = [response(1, 0, problem="p/0", notes={"attempt": 1.0, "readable": 1.0}, **role) for role in roles]
    folder = make_run(tmp_path / "run", steps=(1,), records=[response(1, 1, problem="p/0"), *retry])
    look(page, tmp_path, folder)
    names = ["first attempt", "first attempt", "reflection", "second attempt", "consolidated"]
    for row, name in enumerate(names):
        see(page, f"#row-{row}", f"· {name}")
    see(page, ".pane", "first attempt")
    assert page.locator(".pane button").count() == 0  # the first row was not tried again
    page.click("#row-1")
    see(page, ".pane", "readable")
    page.click(".pane button:has-text('second')")
    see(page, ".pane p", "response 3")
    page.select_option("#f-role", "consolidated")
    see(page, "#count", "1 of 5")


def test_a_step_that_a_resumed_run_wrote_anew_is_read_anew(tmp_path):
    folder = make_run(tmp_path / "run", steps=(1,))
    source = Source([folder.path])
    before = source.index()["rows"][0], source.block((0, 1, 0))
    add_step(folder, 1, records=[response(1, 0, reward=-9.0, text="another")])
    rows = source.index()["rows"]
    assert len(rows) == 1
    assert rows[0] != before[0]
    assert source.block((0, 1, 0)) != before[1]


def test_steps_are_listed_once_however_many_responses_there_are(tmp_path, monkeypatch):
    listed = []
    recorded = RunFolder.recorded
    monkeypatch.setattr(RunFolder, "recorded", lambda folder: listed.append(folder) or recorded(folder))
    for name, steps in (("short", range(1, 3)), ("long", range(1, 21))):
        folder = make_run(tmp_path / name, steps=steps)
        listed.clear()
        write_report([folder.path], tmp_path / "report.html")
        assert len(listed) == 2  # for the index, and for the blocks


# The page


def test_hovering_a_token_shows_its_exact_values(page, tmp_path):
    folder = make_run(tmp_path / "run", steps=(1,))
    look(page, tmp_path, folder)
    kept, _ = folder.tokens(1)
    page.click("#row-2")
    see(page, ".pane p", "response 2")
    page.hover(".tokens span[data-i='1']")
    shown = page.inner_text("#tip")
    assert f"{kept['logp'][9].exp().item():.6f}"[:7] in shown
    assert f"{kept['entropy'][9].item():.5f}"[:6] in shown
    assert "2 of 4" in shown
    page.hover("h1")
    assert page.is_hidden("#tip")


def test_the_shading_switch_shades_by_what_it_says(page, tmp_path):
    folder = make_run(tmp_path / "run", steps=(1,))
    look(page, tmp_path, folder)
    kept, _ = folder.tokens(1)
    page.wait_for_selector(".tokens span")

    def strengths():
        alphas = page.eval_on_selector_all(".tokens span", "all => all.map(s => getComputedStyle(s).backgroundColor)")
        return [float(m[1]) if (m := re.search(r", ([\d.]+)\)$", colour)) else 1.0 for colour in alphas]

    p = kept["logp"][:4].exp()
    assert strengths() == pytest.approx((0.62 * (1 - p)).tolist(), abs=0.01)
    page.select_option("#shade", "weight")
    weight = (kept["weight/low"] + kept["weight/high"])[:4] - 1
    see(page, ".ends", "weight")
    assert weight.abs().max() < 1
    assert strengths() == pytest.approx((0.62 * weight.abs()).tolist(), abs=0.01)  # full at 0
    assert page.locator(".ends span").all_inner_texts()[::2] == ["0", "2"]
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("s")
    see(page, ".ends", "advantage")
    assert page.eval_on_selector("#shade", "s => s.value") == "advantage"
    for name in ("gradient", "nthr", "entropy"):
        page.select_option("#shade", name)
        see(page, ".ends", f"{name}:")


def test_filters_filter(page, tmp_path):
    look(page, tmp_path, make_run(tmp_path / "run", steps=(1, 2)))
    page.wait_for_selector(".item")
    see(page, "#count", "12 of 12 responses", whole=True)
    for name, value, left in (("step", "2", 6), ("difficulty", "3", 2), ("correct", "true", 1)):
        page.select_option(f"#f-{name}", value)
        see(page, "#count", f"{left} of 12 responses", whole=True)
    for name in ("step", "difficulty", "correct"):
        page.select_option(f"#f-{name}", "")
    page.fill("#f-from", "0")
    see(page, "#count", "6 of 12 responses", whole=True)
    page.fill("#f-from", "")
    page.fill("#search", "ANSWER2x5")
    see(page, "#count", "1 of 12 responses", whole=True)
    see(page, ".pane p", "response 5 ")
    page.fill("#search", "question 1")
    see(page, "#count", "4 of 12 responses", whole=True)
    page.fill("#search", "nowhere to be found")
    see(page, "#count", "0 of 12 responses", whole=True)


def test_keys_move(page, tmp_path):
    look(page, tmp_path, make_run(tmp_path / "run", steps=(1,)))
    page.wait_for_selector(".tokens span")
    for key, expected in (("j", 1), ("j", 2), ("k", 1)):
        page.keyboard.press(key)
        see(page, ".pane p", f"response {expected} ")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "2 of 4" in page.inner_text("#tip")
    page.keyboard.press("ArrowLeft")
    assert "1 of 4" in page.inner_text("#tip")
    page.keyboard.press("c")
    page.keyboard.press("j")
    page.wait_for_selector(".pane:nth-child(2)")


def test_two_runs_side_by_side(page, tmp_path):
    one = make_run(tmp_path / "one", steps=(1,))
    two = make_run(tmp_path / "two", steps=(1, 2, 3), config={"regulator": "ar"})
    look(page, tmp_path, one, two, tab="settings")
    assert re.search(r'regulator\s+"grpo"\s+"ar"', page.inner_text("h2:has-text('Settings that differ') + div"))
    assert "optim.lr" not in page.inner_text("h2:has-text('Settings that differ') + div")
    page.click("nav button:has-text('responses')")
    page.click("#pin")
    page.wait_for_selector(".pane:nth-child(2)")
    assert page.inner_text(".pane:first-child p").startswith("one · step 1 · response 0")
    assert page.inner_text(".pane:last-child p").startswith("two · step 1 · response 0")
    page.select_option("#f-run", "1")
    see(page, "#count", "18 of 24 responses", whole=True)


def test_the_first_page_begins_with_the_warnings(page, tmp_path):
    folder = make_run(tmp_path / "run")
    warnings.save(folder, [RunWarning("no-spread", 3, f"Equal rewards {HOSTILE}.", "Raise group=.")])
    look(page, tmp_path, folder, tab="")
    shown = page.locator("#main > .warnings li")
    assert shown.count() == 1
    assert shown.inner_text().startswith("Equal rewards")
    assert shown.inner_text().endswith("(after step 3) Raise group=.")
    page.get_by_role("tab", name="responses").click()
    assert page.locator("#main .warnings").count() == 0


def test_the_figures_of_diagnose(page, tmp_path):
    table = Table(rows=20)
    methods = {name: regulators.parse(name) for name in ("grpo", "ar(alpha=0.5)")}
    optimizer = torch.optim.SGD([table.logits], lr=0.1)
    found = dominance(table.loop(), methods, optimizer)[0]
    mean, error = combine([found, found])
    folder = make_run(tmp_path / "run")
    (folder.path / "diagnose").mkdir()
    names = Intervals().names
    written = {"intervals": names, "mean": mean, "error": error, "verdict": verdict(mean, error, names, batches=2)}
    suspect = {"score": 2.5, "p": 0.125, "text": HOSTILE, "before": "so", "step": 1, "row": 0}
    folder.write_json("diagnose/diagnose.json", {**written, "settings": {"batches": 2}, "suspects": [suspect]})
    look(page, tmp_path, folder, tab="dominance")
    assert written["verdict"][0] in page.inner_text(".verdict")
    cards = {card.query_selector("h3").inner_text(): card for card in page.query_selector_all(".card")}
    assert len([name for name in cards if re.match(r"\([a-f]\)", name)]) == 8  # (a) and (d) have two
    moved = [row["moved"] for row in mean["regulators"]["grpo"]["influence"]]
    cells = [text.text_content() for text in cards["Cross-influence"].query_selector_all("text.value")]
    assert [float(cell) for cell in cells] == pytest.approx([v for row in moved for v in row], rel=1e-2)
    cards["(d) Gradient norm"].query_selector_all(".bar-mark")[0].hover()
    assert f"{mean['regulators']['grpo']['norm'][0]:.4g}" in page.inner_text("#tip")
    page.select_option("article select", "ar(alpha=0.5)")
    first = page.text_content(".card:has(h3:text-is('Cross-influence')) svg")
    page.select_option("article select", "grpo")
    assert page.text_content(".card:has(h3:text-is('Cross-influence')) svg") != first
    assert page.text_content("td code").startswith("<script>")
    assert page.evaluate("window.hacked") is None


def test_responses_without_tokens_or_scores(page, tmp_path):
    folder = make_run(tmp_path / "run", steps=(1,), records=[response(1, 0), response(1, 1)])
    arrays, _ = folder.tokens(1)
    count = 4
    kept = {name: values[:count] for name, values in arrays.items()} | {"nthr": torch.full((count,), torch.nan)}
    folder.save_tokens(1, kept | {"start": torch.tensor([0, 0, count], dtype=torch.int32)}, WORDS)
    look(page, tmp_path, folder)
    see(page, ".pane p", "response 0 · 0 tokens")
    page.select_option("#shade", "nthr")
    page.click("#row-1")
    see(page, ".pane p", "response 1 ")
    assert "Infinity" not in page.inner_text(".ends")


def test_leaving_while_a_response_is_being_read(page, tmp_path):
    look(page, tmp_path, make_run(tmp_path / "run", steps=(1,)))
    page.wait_for_selector(".tokens span")
    page.evaluate(
        """async () => {
          document.querySelector("#row-2").click();
          document.querySelector("#tab-curves").click();
          await viewer.show(); // reads the same response, and ends after it
        }"""
    )
    assert page.locator("#unzoom").count() == 1


def test_on_a_phone_tables_scroll_and_words_stay_whole(browser, tmp_path):
    runs = [make_run(tmp_path / name).path for name in ("short", "a_name_that_is_rather_long")]
    path = write_report(runs, tmp_path / "report.html")
    phone = browser.new_page(viewport={"width": 390, "height": 800})
    phone.goto(path.as_uri() + "#result")
    phone.wait_for_selector("td")
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    heights = phone.evaluate(
        """() => [...document.querySelectorAll("th, td")].filter((cell) =>
          /^\\w+$/.test(cell.textContent)).map((cell) => {
          const inside = document.createRange();
          inside.selectNodeContents(cell);
          return inside.getBoundingClientRect().height;
        })"""
    )
    assert heights
    assert max(heights) < 30  # of one line: 20
    phone.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes_and_phones(browser, tmp_path, scheme):
    path = write_report([make_run(tmp_path / "run").path], tmp_path / "report.html")
    phone = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)
    phone.goto(path.as_uri() + "#responses")
    phone.wait_for_selector(".tokens span")
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    assert phone.evaluate("document.documentElement.dataset.theme") == scheme
    assert contrast(phone, "body") > 7
    assert contrast(phone, ".muted") > 4.5
    for tone in ("warm", "cool"):  # the strongest shade, as over a card
        phone.evaluate(
            "tone => { const mark = document.createElement('mark'); mark.id = tone; document.body.append(mark);"
            "mark.style.color = 'var(--ink)';"
            "mark.style.background = `color-mix(in srgb, rgb(var(--${tone})) 75%, var(--card))` }",
            tone,
        )
        assert contrast(phone, f"#{tone}", behind=f"#{tone}") > 4.5
    phone.click("#theme")
    assert phone.evaluate("document.documentElement.dataset.theme") != scheme
    phone.close()


def contrast(page, selector, behind="body"):
    """WCAG's ratio between an element's text and what is behind it."""
    colours = page.evaluate(
        "all => all.map(([selector, name]) => getComputedStyle(document.querySelector(selector))[name])",
        [[selector, "color"], [behind, "backgroundColor"]],
    )

    def light(colour):
        whole = 1 if colour.startswith("color(") else 255
        parts = [float(v) / whole for v in re.findall(r"[\d.]+", colour)[:3]]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted(map(light, colours), reverse=True)
    return (high + 0.05) / (low + 0.05)


# Many responses


def test_of_ten_thousand_responses_only_those_in_sight_are_drawn(page, tmp_path):
    """As many as on experiments/performance/report.py's page, which measures how long it takes."""
    folder = make_run(tmp_path / "run", steps=range(1, 11), responses=1000, length=4)
    look(page, tmp_path, folder)
    page.wait_for_selector(".tokens span")
    see(page, "#count", "10,000 of 10,000 responses", whole=True)
    assert len(page.query_selector_all(".item")) < 60
    page.evaluate(
        "window.added = 0; new MutationObserver(all => all.forEach(one => added += one.addedNodes.length))"
        ".observe(document.getElementById('list'), { childList: true, subtree: true })"
    )
    for top in range(0, 460_000, 46_000):
        page.eval_on_selector("#list", f"l => l.scrollTop = {top}")
        page.wait_for_selector(f"#row-{top // 46}", state="attached")
    page.click(f"#row-{46_000 * 9 // 46 + 1}")
    see(page, ".pane p", "step 10")
    assert len(page.query_selector_all(".item")) < 60
    assert 9 < page.evaluate("window.added") < 11 * 60 * 4  # at most four nodes for each in sight, at eleven places


# Watching


def test_watching_refreshes(page, served):
    folder, url = served
    page.goto(f"{url}/#responses")
    page.wait_for_selector(".tokens span")
    see(page, "#count", "6 of 6 responses", whole=True)
    page.click("#row-3")
    add_step(folder, 2)
    see(page, "#count", "12 of 12 responses", whole=True)
    assert page.inner_text("#live") == "live · step 2"
    assert "response 3" in page.inner_text(".pane")  # what one looks at stays
    page.click("nav button:has-text('curves')")
    add_step(folder, 3)
    see(page, ".legend", "mean 0.3", whole=True)
    assert all(asked.startswith(url) for asked in page.asked)


def test_a_refresh_does_not_scroll(page, served):
    folder, url = served
    add_step(folder, 2, responses=100)
    page.goto(f"{url}/#responses")
    see(page, "#count", "106 of 106 responses", whole=True)
    page.set_viewport_size({"width": 900, "height": 300})
    page.evaluate("document.getElementById('list').scrollTop = 2000; window.scrollTo(0, 150)")
    add_step(folder, 3)
    see(page, "#count", "112 of 112 responses", whole=True)
    page.wait_for_selector("#row-43", state="attached")
    next_frame(page)
    assert page.evaluate("[document.getElementById('list').scrollTop, window.scrollY]") == [2000, 150]
    assert page.locator("#row-43").count() == 1
