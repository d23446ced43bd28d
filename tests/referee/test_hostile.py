"""What the report and the terminal make of texts, numbers and files that somebody made to do harm."""

import pytest

from poise._lib.errors import visible
from poise.runs.subscribers import warnings
from poise.runs.subscribers.warnings import RunWarning
from support.run_folders import HOSTILE, WORDS, look, make_run, next_frame, response, see

HIDDEN = (  # each is invisible or acts on what stands beside it
    "\ufe0f\u034f\u180e\u180b\U000e0100\U000e0041\u200b\u200d\u2060\ufeff\u00ad\u115f\u1160\u3164\uffa0\u17b4\u202e\u2066\u061c"
    "\u200f\ufff9\U0001d173\U0001bca0\x1b\x00\x7f\x9b\u2028"
)


def test_model_output_shows_as_text_and_runs_nothing(page, tmp_path):
    texts = dict.fromkeys(WORDS, HOSTILE)
    record = response(1, 0, text=HOSTILE, prompt=HOSTILE, problem=HOSTILE, difficulty=HOSTILE, parts={HOSTILE: 1.0})
    record |= {"gold": HOSTILE, "answer": HOSTILE}
    folder = make_run(tmp_path / "run", steps=(1,), records=[record] * 3, texts=texts, config={"regulator": HOSTILE})
    folder.log(2, {f"reward/accuracy/{HOSTILE}": 1.0})
    path = look(page, tmp_path, folder)
    for number in (1, 2):
        page.keyboard.press("j")
        see(page, ".pane p", f"response {number} ")
    page.hover(".tokens span[data-i='0']")
    for tab in ("result", "settings", "curves", "responses"):
        page.click(f"nav button:has-text('{tab}')")
        assert not {"\0", "\u202e", "\u2066", "\x1b"} & set(page.text_content("main"))
    page.wait_for_selector(".tokens span")
    page.fill("#search", "<script>")
    see(page, "#count", "3 of 3 responses", whole=True)
    next_frame(page)
    assert page.evaluate("window.hacked") is None
    assert page.query_selector("main img, main script, main svg[onload]") is None
    shown = page.text_content(".tokens span")
    assert shown.startswith("<script>window.hacked=1</script><img src=x")
    assert "\\u0000\\u001b[2J\\u202e evil \\u2066\\u2028" in shown
    assert not {"\0", "\u202e", "\u2066", "\x1b"} & set(page.text_content("main"))
    assert page.asked == [path.as_uri()]


def test_broken_utf8_shows_as_replacement_characters(page, tmp_path):
    broken = b"\xff\xfe caf\xc3".decode("utf-8", "replace")
    folder = make_run(
        tmp_path / "run", steps=(1,), records=[response(1, 0, text=broken)], texts=dict.fromkeys(WORDS, broken)
    )
    look(page, tmp_path, folder)
    page.wait_for_selector(".tokens span")
    assert page.text_content(".tokens span") == "\ufffd\ufffd caf\ufffd"


def test_the_policy_forbids_scripts_and_the_network(page, tmp_path):
    look(page, tmp_path, make_run(tmp_path / "run", steps=(1,)))
    page.evaluate(
        """() => new Promise((failed) => {
          document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.hacked=1'>");
          document.body.lastChild.addEventListener("error", failed);
        })"""
    )
    assert page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    assert page.evaluate("window.hacked") is None
    assert all("Content Security Policy" in told for told in page.wrong)
    page.wrong.clear()


# Characters that do not show


def test_the_report_shows_every_invisible_character(page, tmp_path):
    name = f"run{HIDDEN.replace(chr(0), '')}"  # all that a file system lets stand in a name
    answers = {"gold": HIDDEN, "answer": HIDDEN}
    record = response(
        1, 0, text=HIDDEN, prompt=HIDDEN, problem=HIDDEN, difficulty=HIDDEN, parts={HIDDEN: 1.0}, **answers
    )
    about = {"records": [record] * 3, "texts": dict.fromkeys(WORDS, HIDDEN), "config": {HIDDEN: {HIDDEN: HIDDEN}}}
    folders = [make_run(tmp_path / (name + number), steps=(1,), **about) for number in "ab"]
    for folder in folders:
        folder.write_json("environment.json", {HIDDEN: HIDDEN})
        folder.write_json("summary.json", {"before": {"accuracy": HIDDEN}, "after": {"accuracy": [HIDDEN]}})
        row = {"value": 0.5, "low": 0.4, "high": 0.6}
        folder.write_json("before.json", {"accuracy": 0.5, "n": 9, "samples": 1, "table": {HIDDEN: row}})
        warnings.save(folder, [RunWarning(HIDDEN, 1, HIDDEN, HIDDEN)])
        folder.log(2, {f"reward/accuracy/{HIDDEN}": 1.0, f"reg/{HIDDEN}/weight_p{HIDDEN}": 1.0})
    look(page, tmp_path, *folders)
    page.click("#pin")
    see(page, ".pane:nth-child(2) p", "response 0")
    page.hover(".pane:nth-child(1) .tokens span[data-i='0']")
    see(page, "#tip", "entropy")
    for tab in ("responses", "settings", "curves", "result"):
        page.click(f"nav button:has-text('{tab}')")
        shown = (
            page.title() + page.text_content("body > header") + page.text_content("main") + page.text_content("#tip")
        )
        labels = page.eval_on_selector_all("[aria-label]", "all => all.map((e) => e.getAttribute('aria-label')).join()")
        assert not set(HIDDEN) & set(shown + labels)
    assert "\\ufe0f\\u034f\\u180e\\u180b\\U000e0100\\U000e0041\\u200b" in page.text_content("#runs")


def test_report_and_terminal_agree_with_unicode_on_what_does_not_show(page, tmp_path):
    look(page, tmp_path, make_run(tmp_path / "run", steps=(1,)))
    ignorable, passed = page.evaluate(
        """() => {
          const every = Array.from({ length: 0x110000 }, (_, code) => String.fromCodePoint(code));
          const found = every.filter((c) => /[\\p{Default_Ignorable_Code_Point}\\p{Bidi_Control}]/u.test(c));
          return [found.map((c) => c.codePointAt(0)), found.filter((c) => visible(c) === c)];
        }"""
    )
    assert len(ignorable) > 4000
    assert passed == []
    assert all(visible(chr(code)).startswith("\\") for code in ignorable)


@pytest.mark.parametrize("char", list(HIDDEN))
def test_the_terminal_shows_every_invisible_character(char):
    shown = visible(f"a{char}b")
    assert shown != f"a{char}b"
    assert shown.isascii()
