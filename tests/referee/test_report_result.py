"""The report's first page: what a run has reached, driven in a real browser."""

import csv

import pytest

from poise._lib.files import sealed
from poise.referee.report.html.data import Source
from poise.runs.subscribers.warnings import RunWarning, save
from support.run_folders import HOSTILE, add_step, look, make_run, see

CONFIG = {
    "task": {"name": "kk", "people": "2-3"}, "steps": 4, "prompts": 16, "group": 8, "seed": 0, "algorithm": "grpo",
    "optim": {"lr": 2e-4},
}  # fmt: skip


def evaluation(average, greedy, difficulties=(2, 3), **more):
    """Held-out accuracy as ``Evaluation.summary`` writes it, with intervals of ±0.04."""
    values = {"avg@4": average, "pass@4": average + 0.3, "greedy": greedy}
    values |= {f"avg@4, difficulty {people}": average for people in difficulties}
    table = {name: {"value": v, "low": v - 0.04, "high": v + 0.04} for name, v in values.items()}
    return {
        "accuracy": average, "greedy": greedy, "n": 300, "samples": 4, "temperature": 1.0, "cut_off": 12,
        "table": table, **more,
    }  # fmt: skip


def finished(path, before=(0.353, 0.683), after=(0.575, 0.66), **about):
    folder = make_run(path, steps=(), config=CONFIG | about)
    for step in range(1, 5):
        accuracies = {"eval/kk/avg@4": 0.4, "eval/kk/greedy": 0.7} if step == 2 else {}
        more = {"reward/accuracy": step / 10, "tokens/total": 1000 * step, "time/step": 50.0}
        folder.log(step, more | accuracies)
    folder.write_json(
        "environment.json", {"device": "cpu: x86_64", "threads": 2, "system": "Linux", "parameters": 1_460_000}
    )
    folder.write_json("before.json", evaluation(*before))
    summary = {"steps": 4, "before": evaluation(*before), "after": evaluation(*after, cut_off=0)}
    folder.write_json("summary.json", summary)
    return folder


def cells(page, table=0):
    rows = page.locator("table").nth(table).locator("tbody tr").all()
    return [[" ".join(text.split()) for text in row.locator("td").all_inner_texts()] for row in rows]


def test_the_report_opens_with_what_was_reached(page, tmp_path):
    look(page, tmp_path, finished(tmp_path / "run"), tab="")
    assert page.locator("nav [aria-selected=true]").inner_text() == "result"
    assert page.inner_text(".headline") == ("0.353 → 0.575 avg@4 on 300 held-out problems · greedy 0.683 → 0.660")
    assert page.locator(".verdict li").all_inner_texts() == [
        "rose: avg@4 0.353 → 0.575, pass@4 0.653 → 0.875",
        "no clear change: greedy 0.683 → 0.660",
    ]
    assert [row[:4] for row in cells(page)] == [
        ["avg@4", "0.353 [0.313, 0.393]", "0.575 [0.535, 0.615]", "+0.222 [+0.142, +0.302]"],
        ["pass@4", "0.653 [0.613, 0.693]", "0.875 [0.835, 0.915]", "+0.222 [+0.142, +0.302]"],
        ["greedy", "0.683 [0.643, 0.723]", "0.660 [0.620, 0.700]", "−0.023 [−0.103, +0.057]"],
    ]
    assert "300 problems × 4 samples at temperature 1" in page.inner_text(".result")
    assert "1.0 % → 0.0 % of the samples were cut off, – → – unreadable" in page.inner_text(".result")
    page.click("summary:has-text('By difficulty')")
    assert cells(page, 1)[0][0] == "avg@4, difficulty 2"


def test_a_greedy_evaluation_is_shown_once(page, tmp_path):
    folder = finished(tmp_path / "run")
    row = {"value": 0.317, "low": 0.264, "high": 0.373}
    one = evaluation(0.3, 0.3) | {"samples": 1, "temperature": 0, "table": {"avg@1": row, "greedy": row}}
    folder.write_json("before.json", one)
    folder.write_json("summary.json", {"steps": 4, "before": one, "after": one})
    look(page, tmp_path, folder, tab="result")
    assert page.inner_text(".headline") == "0.317 → 0.317 greedy on 300 held-out problems"
    assert [row[0] for row in cells(page)] == ["greedy"]
    assert "300 problems, one greedy answer each; " in page.inner_text(".result")


def test_a_single_difficulty_repeats_nothing(page, tmp_path):
    folder = finished(tmp_path / "run")
    one = evaluation(0.3, 0.6, difficulties=("all",))
    folder.write_json("before.json", one)
    folder.write_json("summary.json", {"steps": 4, "before": one, "after": one})
    folder.log(5, {"reward/accuracy": 0.4, "reward/accuracy/all": 0.4, "eval/kk/avg@4/all": 0.4})
    look(page, tmp_path, folder, tab="result")
    assert [row[0] for row in cells(page)] == ["avg@4", "pass@4", "greedy"]
    assert page.locator("summary:has-text('By difficulty')").count() == 0
    page.click("#tab-curves")
    titles = page.locator(".card h3").all_inner_texts()
    assert "Accuracy in training" in titles
    assert not any("by difficulty" in title for title in titles)


def test_the_curve_of_the_result_begins_before_and_ends_after_training(page, tmp_path):
    look(page, tmp_path, finished(tmp_path / "run"), tab="result")
    assert page.locator(".legend button").all_inner_texts() == [
        "avg@4 0.575", "pass@4 0.875", "greedy 0.66", "accuracy in training 0.4",
    ]  # fmt: skip
    assert page.locator(".result .whisker").count() == 6
    assert page.locator(".card svg[aria-label^='avg'] circle").count() == 3 + 2 + 3  # greedy and avg@4 at step 2 too
    box = page.locator(".card svg[aria-label^='avg']").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.55, box["y"] + 60)
    assert page.locator(".legend button").first.inner_text() == "avg@4 0.4 at 2"
    page.click("#tab-curves")
    held_out = page.locator(".card:has(h3:text-is('Held-out accuracy'))")
    assert held_out.locator("circle").count() == 6
    page.locator("#smooth").fill("0.9")
    assert held_out.locator("path").count() == 2  # evaluations are not smoothed
    assert held_out.locator(".legend button").first.inner_text() == "kk/avg@4 0.575"
    assert held_out.locator("text[y='160']").all_text_contents() == ["0", "1", "2", "3", "4"]


def test_the_report_says_what_was_trained_on_what_for_how_long(page, tmp_path):
    look(page, tmp_path, finished(tmp_path / "run"), tab="result")
    assert dict(cells(page, 2)) == {
        "model": "tiny, 1.46M parameters",
        "task": "kk, people 2-3",
        "regulator": "grpo",
        "algorithm": "grpo",
        "learning rate": "0.0002",
        "seed": "0",
        "steps": "4 of 4",
        "responses": "512 (16 problems × 8 per step)",
        "sampled tokens": "4,000",
        "time": "3 min 20 s without evaluations",
        "machine": "cpu: x86_64, 2 threads, Linux",
    }


def test_results_of_two_runs_stand_below_each_other(page, tmp_path):
    one, two = finished(tmp_path / "one"), finished(tmp_path / "two", after=(0.6, 0.7), regulator="ar")
    look(page, tmp_path, one, two, tab="result")
    assert page.locator(".headline").count() == 0
    assert [row[:2] + row[4:5] for row in cells(page)[:3]] == [
        ["avg@4", "one", "+0.222 [+0.142, +0.302]"], ["", "two", "+0.247 [+0.167, +0.327]"],
        ["pass@4", "one", "+0.222 [+0.142, +0.302]"],
    ]  # fmt: skip
    assert page.locator(".unlike").count() == 0
    assert ["regulator", "grpo", "ar"] in cells(page, 2)
    assert page.locator(".verdict li").nth(2).inner_text().startswith("two: rose: avg@4 0.353 → 0.600")
    dashed = page.locator(".legend button:has(i.dashed)").all_inner_texts()
    assert [text.partition(" · ")[2].split()[0] for text in dashed] == ["pass@4", "greedy", "accuracy"] * 2


def test_runs_that_were_measured_on_other_problems_or_steps_are_named(page, tmp_path):
    one, two = finished(tmp_path / "one"), finished(tmp_path / "two")
    for folder, steps, problems in ((one, 4, "a"), (two, 3, "b")):
        found = {"before": evaluation(0.3, 0.6), "after": evaluation(0.5, 0.6, problems=problems)}
        folder.write_json("summary.json", sealed({"steps": steps, **found}))
    two.write_json("summary.json", two.read_json("summary.json") | {"tokens": 5})
    look(page, tmp_path, one, two, tab="result")
    assert page.locator(".unlike").all_inner_texts() == [
        "These runs were measured on different held-out problems.",
        "These runs were measured after different numbers of steps: one 4, two 3.",
    ]
    assert page.inner_text("#main > .warnings li").startswith("two: summary.json was changed after the run wrote it.")


def test_the_curves_of_many_runs_have_one_line_each(page, tmp_path):
    folders = [finished(tmp_path / name) for name in ("one", "two", "three", "four")]
    look(page, tmp_path, *folders, tab="result")
    assert page.locator(".legend button").all_inner_texts() == [
        f"{folder.path.name} · avg@4 0.575" for folder in folders
    ]


def test_a_run_under_way_shows_what_it_has(page, tmp_path):
    folder = finished(tmp_path / "run")
    (folder.path / "summary.json").unlink()
    look(page, tmp_path, folder, tab="result")
    assert page.inner_text(".headline") == (
        "0.353 → … avg@4 on 300 held-out problems, at step 4 of 4 · greedy 0.683 → …"
    )
    assert cells(page)[0][:4] == ["avg@4", "0.353 [0.313, 0.393]", "–", "–"]
    assert page.locator(".whisker").count() == 3


def test_a_run_without_evaluations_says_so(page, tmp_path):
    look(page, tmp_path, make_run(tmp_path / "run"), tab="result")
    assert "No held-out accuracy has been measured" in page.inner_text("#main")
    assert "2 of" in dict(cells(page))["steps"]


@pytest.mark.parametrize(
    "damage", [{"after": {"accuracy": HOSTILE}}, {"after": evaluation(0.5, 0.5) | {"table": []}}, []]
)
def test_a_damaged_summary_counts_as_none(page, tmp_path, damage):
    folder = finished(tmp_path / "run")
    folder.write_json("summary.json", damage)
    look(page, tmp_path, folder, tab="result")
    assert page.inner_text(".headline").startswith("0.353 → …")


def test_a_run_that_diverged_says_so_first(page, tmp_path):
    folder = finished(tmp_path / "run")
    step = folder.metrics()[-1]["step"] + 1
    folder.write_json("diverged.json", {"step": step, "why": HOSTILE})
    look(page, tmp_path, folder, tab="result")
    assert page.locator("#main > *").first.get_attribute("class") == "warnings"
    assert page.inner_text(".warnings li").startswith("The run diverged: <script>window.hacked=1</script>")
    assert f"(after step {step}) Start again with a smaller optim.lr" in page.inner_text(".warnings li")
    assert page.evaluate("window.hacked") is None


def test_a_run_that_went_on_past_the_step_where_it_diverged_does_not(page, tmp_path):
    folder = finished(tmp_path / "run")
    folder.write_json("diverged.json", {"step": folder.metrics()[-1]["step"], "why": "inf"})
    look(page, tmp_path, folder, tab="result")
    assert page.locator(".warnings").count() == 0


def test_warnings_of_several_runs_name_them_and_stand_out(page, tmp_path):
    folder = finished(tmp_path / "run")
    save(folder, [RunWarning("cut-off", 0, "All were cut off.", "Raise rollout.max_tokens.")])
    look(page, tmp_path, folder, make_run(tmp_path / "other"), tab="")
    assert page.inner_text("#main > .warnings li") == "run: All were cut off. Raise rollout.max_tokens."
    edge = page.eval_on_selector(".warnings li", "li => getComputedStyle(li).borderLeftColor")
    assert edge == "rgb(213, 94, 0)"


def test_a_watched_report_shows_a_warning_when_it_is_said(page, served):
    folder, url = served
    page.goto(f"{url}/#result")
    see(page, "#main", "No held-out accuracy")
    save(folder, [RunWarning("no-spread", 5, "All rewards are equal.", "Raise group=.")])
    see(page, ".warnings li", "All rewards are equal.")


def test_hostile_settings_and_measures_are_text(page, tmp_path):
    folder = finished(tmp_path / "run", task=HOSTILE, prompts=HOSTILE, model={"a": HOSTILE}, steps=[HOSTILE])
    summary = evaluation(0.5, 0.5)
    summary["table"] = {HOSTILE: summary["table"]["greedy"]}
    folder.write_json("summary.json", {"steps": HOSTILE, "after": summary})
    look(page, tmp_path, folder, tab="result")
    see(page, "table", "<script>window.hacked=1</script>")
    assert page.locator("main script, main img").count() == 0
    assert page.evaluate("window.hacked") is None


def test_the_result_can_be_saved_as_a_table(page, tmp_path):
    look(page, tmp_path, finished(tmp_path / "=run"), tab="result")
    with page.expect_download() as download:
        page.click("#csv")
    assert download.value.suggested_filename == "result.csv"
    with open(download.value.path(), newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["run", "measure", "when", "value", "low", "high"]
    assert rows[2][:4] == ["'=run", "avg@4", "after", "0.575"]  # no formula for a spreadsheet


def test_a_watched_report_shows_the_result_when_it_comes(page, served):
    folder, url = served
    page.goto(f"{url}/#result")
    see(page, "#main", "No held-out accuracy")
    folder.write_json("before.json", evaluation(0.25, 0.5))
    see(page, ".headline", "0.250 → …")
    add_step(folder, 2)
    folder.write_json("summary.json", {"steps": 2, "after": evaluation(0.5, 0.5)})
    see(page, ".headline", "0.250 → 0.500")
    assert Source([folder.path]).index()["runs"][0]["done"] == 2


def test_a_summary_that_was_changed_is_named(tmp_path):
    folder = finished(tmp_path / "run")
    folder.write_json("summary.json", sealed(folder.read_json("summary.json")))
    assert Source([folder.path]).index()["runs"][0]["warnings"] == []
    folder.write_json("summary.json", folder.read_json("summary.json") | {"tokens": 5})
    (said,) = Source([folder.path]).index()["runs"][0]["warnings"]
    assert "summary.json was changed" in said["what"]
