"""The progress of a comparison in lines."""

import io

from poise.comparison import runner
from poise.comparison.results import RunResult
from poise.comparison.runner import Status
from support.comparisons import finish, make


def first_run(tmp_path):
    plan = make(tmp_path)
    return plan.run(plan.arms[0], plan.arms[0].variants[0], 0)


def test_a_line_for_every_run_that_ends(tmp_path):
    run, said = first_run(tmp_path), io.StringIO()
    finish(run, 0.625)
    progress, status = runner.Progress(file=said), Status(3, 4, [run, run], 125.0)
    progress.ended(run, RunResult.read(run.folder), "", status)
    progress.ended(run, None, "poise: \x1b[31mno space left", status)
    progress.note("note")
    assert said.getvalue().splitlines() == [
        "[3 done, 2 running, 4 left, 2:05 to the end] grpo, seed 0: accuracy 0.200 → 0.625, 100 tokens",
        r"[3 done, 2 running, 4 left, 2:05 to the end] grpo, seed 0: failed: poise: \x1b[31mno space left",
        "note",
    ]


def test_nobody_is_left_without_a_line_for_long(tmp_path):
    run, said, now = first_run(tmp_path), io.StringIO(), [0.0]
    progress = runner.Progress(file=said, clock=lambda: now[0])
    progress.note("begun")
    for now[0] in (10.0, 29.0, 31.0, 40.0):
        progress.update(Status(0, 5, [run], None))
    finish(run, steps=1)
    now[0] = 62.0
    progress.update(Status(0, 0, [run] * 6, 90.0))
    step = "grpo, seed 0 (step 1/2)"
    assert said.getvalue().splitlines() == [
        "begun",
        "[0 done, 1 running, 5 left] grpo, seed 0 (accuracy before training)",
        f"[0 done, 6 running, 0 left, 1:30 to the end] {step}; {step}; {step}; {step} and 2 others",
    ]


def test_a_diverged_run_says_where(tmp_path):
    run, said = first_run(tmp_path), io.StringIO()
    finish(run, steps=1)
    runner.Progress(file=said).ended(run, RunResult.read(run.folder), "", Status(1, 5, [], None))
    assert said.getvalue().endswith("grpo, seed 0: diverged at step 2: the gradient is not finite\n")


def test_quiet_says_nothing(tmp_path):
    said = io.StringIO()
    progress = runner.Progress(quiet=True, file=said)
    progress.ended(first_run(tmp_path), None, "why", Status(0, 6, [], None))
    progress.note("note")
    assert said.getvalue() == ""
