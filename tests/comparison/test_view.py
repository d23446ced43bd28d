"""The progress of a comparison, in plain lines and on a terminal."""

import io

from rich.console import Console

from poise.comparison import view
from poise.comparison.results import RunResult
from poise.comparison.runner import Status
from support.comparisons import finish, make


def first_run(tmp_path):
    plan = make(tmp_path)
    return plan.run(plan.arms[0], plan.arms[0].variants[0], 0)


def test_a_line_for_every_run_that_ends(tmp_path):
    run, said = first_run(tmp_path), io.StringIO()
    finish(run, 0.625)
    with view.Progress(file=said) as progress:
        progress.update(Status(3, 10, [(run, 5.0), (run, 6.0)], 1, 125.0))
        progress.ended(run, RunResult.read(run.folder), "")
        progress.ended(run, None, "poise: \x1b[31mno space left")
        progress.note("note")
    assert said.getvalue().splitlines() == [
        "[3 done, 2 running, 4 left, 2:05 to the end] grpo, seed 0: accuracy 0.200 → 0.625, 100 tokens",
        r"[3 done, 2 running, 4 left, 2:05 to the end] grpo, seed 0: failed: poise: \x1b[31mno space left",
        "note",
    ]


def test_no_terminal_is_left_without_a_line_for_long(tmp_path):
    run, said, now = first_run(tmp_path), io.StringIO(), [0.0]
    with view.Progress(file=said, clock=lambda: now[0]) as progress:
        progress.note("begun")
        for now[0] in (10.0, 29.0, 31.0, 40.0):
            progress.update(Status(0, 6, [(run, now[0])], 0, None))
        finish(run, steps=1)
        now[0] = 62.0
        progress.update(Status(0, 6, [(run, 62.0)] * 6, 0, 90.0))
    step = "grpo, seed 0 (step 1/2)"
    assert said.getvalue().splitlines() == [
        "begun",
        "[0 done, 1 running, 5 left] grpo, seed 0 (accuracy before training)",
        f"[0 done, 6 running, 0 left, 1:30 to the end] {step}; {step}; {step}; {step} and 2 others",
    ]


def test_a_diverged_run_says_where(tmp_path):
    run, said = first_run(tmp_path), io.StringIO()
    finish(run, steps=1)
    view.Progress(file=said).ended(run, RunResult.read(run.folder), "")
    assert said.getvalue() == "grpo, seed 0: diverged at step 2: the gradient is not finite\n"


def test_the_view_of_a_terminal(tmp_path):
    run, said = first_run(tmp_path), io.StringIO()
    finish(run, steps=1)
    Console(file=said, width=100).print(view._panel(Status(1, 6, [(run, 61.0)], 0, None)))
    text = said.getvalue()
    assert "1 of 6 runs done, 1 running, 4 left" in text
    assert "grpo, seed 0" in text
    assert "step 1/2" in text
    assert "1:01" in text


def test_quiet_says_nothing(tmp_path):
    said = io.StringIO()
    progress = view.Progress(quiet=True, file=said)
    progress.ended(first_run(tmp_path), None, "why")
    progress.note("note")
    assert said.getvalue() == ""
