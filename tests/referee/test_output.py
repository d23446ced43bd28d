"""The files of a comparison, the table in the terminal, and the page in a real browser."""

import csv
import json
from dataclasses import replace

import pytest

from poise.referee.compare import output
from poise.referee.compare.analysis import analyse
from poise.referee.compare.output import STYLES
from poise.referee.compare.results import Arm
from poise.runs.subscribers.console import Console
from support.arms import made_arm, made_run
from support.run_folders import HOSTILE, see


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comparison")
    hostile = made_arm(f"lopti {HOSTILE}", 0.0, passes=2, settings={"regulator": HOSTILE, "steps": 100})
    runs = dict(hostile.runs)
    runs[3] = replace(made_run(3, 0.1, start=0.5, steps=40), state="diverged", why=HOSTILE)
    del runs[5]
    arms = [made_arm("grpo", 0.0), made_arm("ar", 0.06), Arm(hostile.name, hostile.settings, runs)]
    document = analyse(arms, "grpo", range(10))
    output.write(folder, document, arms)
    return folder, document


def test_the_files(written):
    folder, document = written
    assert json.loads((folder / "comparison.json").read_text()) == document
    assert sorted(path.name for path in folder.iterdir()) == [
        "comparison.csv", "comparison.html", "comparison.json", "comparison.png", "runs.csv",
    ]  # fmt: skip
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_the_tables(written):
    folder, document = written
    with (folder / "comparison.csv").open(newline="") as file:
        arms = list(csv.DictReader(file))
    assert [arm["seeds"] for arm in arms] == ["10", "10", "9"]
    assert float(arms[1]["difference"]) == document["arms"][1]["difference"]["mean"]
    assert arms[0]["difference"] == ""
    with (folder / "runs.csv").open(newline="") as file:
        runs = list(csv.DictReader(file))
    assert len(runs) == 29
    assert [run["state"] for run in runs].count("diverged") == 1
    assert runs[-1]["settings.steps"] == "100"  # beside the steps that the run has taken


def test_the_terminal(written, capsys):
    with Console(0) as console:
        output.show(written[1], console)
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert "baseline" in text
    assert "10 seeds find" in text
    assert "\x1b[2J" not in text


def test_the_page(page, written):
    folder, document = written
    page.goto((folder / "comparison.html").as_uri())
    see(page, "ul.verdict", document["verdict"][0])
    assert page.locator("svg").count() == 4
    assert page.locator(".forest-row").count() == 2
    assert page.locator(".forest-row").first.locator(".seed").count() == 10
    assert "dashed lines" in page.locator("#main").inner_text()
    see(page, "table", "lopti <script>")  # as text
    assert page.evaluate("() => window.hacked") is None
    page.locator(".forest-row").first.hover()
    see(page, "#tip", "p, corrected")
    before = page.evaluate("() => document.documentElement.dataset.theme")
    page.locator("#theme").click()
    assert page.evaluate("() => document.documentElement.dataset.theme") != before


@pytest.mark.parametrize("seeds", [2, 4])
def test_the_page_explains_what_is_drawn(page, tmp_path, seeds):
    arms = [made_arm("grpo", 0.0, seeds=seeds), made_arm("ar", 0.0, seeds=seeds)]
    output.write_page(tmp_path / "comparison.html", analyse(arms, "grpo"))
    page.goto((tmp_path / "comparison.html").as_uri())
    see(page, "#main", "every seed (small, below)")
    shown = page.locator("#main").inner_text()
    assert "dashed lines" not in shown
    assert ("A dashed interval" in shown) == (page.locator(".forest-row line").count() > 0) == (seeds > 2)


@pytest.mark.parametrize("seeds", [0, 1])
def test_the_page_of_a_comparison_that_has_just_begun(page, tmp_path, seeds):
    arms = [made_arm("grpo", 0.0, seeds=seeds), made_arm("ar", 0.0, seeds=seeds)]
    output.write(tmp_path, analyse(arms, "grpo", range(3)), arms)
    page.goto((tmp_path / "comparison.html").as_uri())
    see(page, "ul.verdict", "nothing to compare")
    see(page, "table", "baseline")
    p = page.locator("table tr", has_text="ar").locator("td").nth(6)
    assert p.first.inner_text() == ("1" if seeds else "–")  # no p where nothing was measured


def test_the_terminal_shows_no_p_where_nothing_was_measured(capsys):
    arms = [made_arm("grpo", 0.0, seeds=0), made_arm("ar", 0.0, seeds=0)]
    with Console(0) as console:
        output.show(analyse(arms, "grpo", range(3)), console)
    printed = capsys.readouterr()
    row = next(line for line in (printed.out + printed.err).splitlines() if line.startswith("ar "))
    assert row.split()[:5] == ["ar", "0", "–", "–", "–"]


def test_at_temperature_0_greedy_accuracy_is_not_shown_twice(page, tmp_path, capsys):
    document = analyse([made_arm("grpo", 0.0), made_arm("ar", 0.06)], "grpo")
    for temperature in (1.0, 0):
        document["settings"] = {"evaluation": {"temperature": temperature}}
        with Console(0) as console:
            output.show(document, console)
        title = capsys.readouterr().out.splitlines()[0]
        assert ("greedy" in title) == (temperature == 1)
        output.write_page(tmp_path / "comparison.html", document)
        page.goto((tmp_path / "comparison.html").as_uri())
        see(page, "#main", "Other scores")
        assert (page.locator("th", has_text="greedy").count() == 1) == (temperature == 1)


def test_the_page_says_how_the_comparison_was_made(page, tmp_path):
    arms = [made_arm("grpo", 0.0), made_arm("lopti", 0.0, passes=2)]
    rates = [{"rate": 1e-4, "mean": 0.42, "diverged": 1}, {"rate": 2e-4, "mean": None, "diverged": 0}]
    made = {
        "tuning": [{"arm": "grpo", "chosen": 1e-4, "rates": rates}],
        "failures": [{"arm": "lopti", "seed": 3, "ended": HOSTILE, "log": "logs/x.log"}],
    }
    output.write_page(tmp_path / "comparison.html", analyse(arms, "grpo") | made)
    page.goto((tmp_path / "comparison.html").as_uri())
    see(page, "ul.verdict", "10 seeds")
    shown = page.locator("#main").inner_text()
    for text in ("1e-4: 42.0 (1 diverged), 2e-4: –", "logs/x.log"):
        assert text in shown
    assert page.evaluate("() => window.hacked") is None


def test_the_page_shows_speed_controls_and_what_is_exploratory(page, tmp_path, capsys):
    base = made_arm("grpo", 0.0, steps=200)
    arms = [base, made_arm("ar", 0.0), replace(made_arm("slow", -0.1), control="why")]
    document = analyse(arms, "grpo", cut=100)
    document["exploratory"] = [{**document["arms"][1], "name": "later"}]
    output.write(tmp_path, document, arms)
    page.goto((tmp_path / "comparison.html").as_uri())
    see(page, "table", "p (speed)")
    see(page, "table", "slow (control)")
    shown = page.locator("#main").inner_text()
    assert "All after 100 steps." in shown
    assert "Exploratory" in shown
    assert document["arms"][1]["speed"]["text"] in shown
    with Console(0) as console:
        output.show(document, console)
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert all(
        words in text for words in ("later (exploratory)", "slow (control)", document["arms"][1]["speed"]["text"])
    )
    with (tmp_path / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["exploratory"] for row in rows] == ["False", "False", "False", "True"]
    assert float(rows[1]["speed"]) == document["arms"][1]["speed"]["mean"]


# The picture


def test_arms_can_be_told_apart():
    assert len(set(STYLES)) == len(STYLES) >= 30
    colours, markers, _ = zip(*STYLES[:8], strict=True)
    assert len(set(colours)) == len(set(markers)) == 8
