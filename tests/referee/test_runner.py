"""Which runs are started when, on processes that are not there."""

import json
import signal
from pathlib import Path

import pytest

from poise.referee.compare import runner
from poise.referee.compare.plan import read_plan
from poise.referee.compare.processes import RunExit
from poise.referee.compare.results import RunResult
from poise.referee.compare.runner import Runner, Status
from poise.referee.compare.worker import FAILED, STOPPED
from poise.runs.folder import RunFolder
from support.comparisons import SMALL, evaluation, finish, make


class Fake:
    """Processes that end at once, one at each look: as ``behave(run)`` says, which writes what a run leaves.

    A run measures its accuracy before training as soon as it is started, or if ``slow`` only at its end.
    """

    def __init__(self, behave=None, slow=False):
        self.behave, self.slow = behave or (lambda run: finish(run) or 0), slow
        self.started, self.running, self.stops, self.most, self.closed = [], [], 0, 0, False
        self.runs, self.before = {}, []

    def start(self, config, log, before=None):
        self.before.append(before)
        log.parent.mkdir(parents=True, exist_ok=True)
        self.started.append(config.run)
        if not self.slow and not Path(config.run).exists():
            RunFolder.create(config.run, config.model_dump(mode="json")).write_json("before.json", evaluation(0.2))
        self.running.append(config.run)
        self.most = max(self.most, len(self.running))

    def wait(self, seconds):
        del seconds
        if self.stops:
            ended, self.running = [RunExit(Path(run), STOPPED) for run in self.running], []
            return ended
        run = self.running.pop(0)
        return [RunExit(Path(run), self.behave(self.runs[run]))]

    def stop(self):
        self.stops += 1

    def close(self):
        self.closed = True


class Silent:
    def __init__(self):
        self.notes, self.ends = [], []

    def ended(self, run, result, why, status):
        del status
        self.ends.append((run.name, result.state if result else None, why))

    def note(self, text):
        self.notes.append(text)

    def update(self, status):
        self.status = status


def carry_out(plan, behave=None, *, jobs=2, interrupted=lambda: False, slow=False):
    """The runner at its end, with its processes; folders are shown as arm/seed."""
    processes = Fake(behave, slow)
    variants = [(arm, variant) for arm in plan.arms for variant in arm.variants]
    for arm, variant in variants:
        for seed in (*plan.seeds, *plan.settings.tuning_seeds):
            run = plan.run(arm, variant, seed)
            processes.runs[str(run.folder)] = run
    plan.folder.mkdir(exist_ok=True)
    runner = Runner(plan, processes, Silent(), jobs)
    runner.run(interrupted)
    short = [run.removeprefix(str(plan.folder / "arms") + "/") for run in processes.started]
    assert processes.closed
    return runner, short


def test_seed_by_seed_over_all_arms_and_nothing_twice(tmp_path):
    plan = make(tmp_path)
    runner, started = carry_out(plan)
    assert started == [f"{arm}/seed-{seed}" for seed in range(3) for arm in ("grpo", "ar")]
    assert runner.processes.most == 2
    assert (runner.view.status.done, runner.view.status.waiting) == (6, 0)
    _, again = carry_out(plan)
    assert again == []
    _, more = carry_out(make(tmp_path, "seeds=4", regulator="grpo; ar; lopti"))
    assert more == ["lopti/seed-0", "lopti/seed-1", "lopti/seed-2", "grpo/seed-3", "ar/seed-3", "lopti/seed-3"]


def test_the_accuracy_before_training_is_measured_once(tmp_path):
    runner, started = carry_out(make(tmp_path, "rollout.temperature=1.0,0.9", regulator="grpo; ar"), jobs=1)
    assert runner.processes.before[:2] == [None, None]  # at each temperature once
    assert len(started) == 12
    for run, before in zip(started[2:], runner.processes.before[2:], strict=True):
        assert before.name == "before.json"
        assert ("=1.0" in run) == ("=1.0" in before.parts[-3])


def test_a_run_that_waits_holds_up_none_that_begins_otherwise(tmp_path):
    axes = ["rollout.temperature=1.0,0.9", "regulator=grpo; ar", "seeds=2", f"run={tmp_path / 'cmp'}"]
    runner, started = carry_out(read_plan("tiny", [*SMALL, *axes]), jobs=3, slow=True)
    hot, cold = started[:2]  # the second arm of seed 0 waits for the first
    assert ("=1.0" in hot, "=1.0" in cold) == (True, False)
    assert all(run.endswith("seed-0") for run in started[:4])
    assert runner.processes.before.count(None) == 2


def test_runs_wait_for_the_one_that_measures_it(tmp_path):
    running = []

    class Counting(Fake):
        def wait(self, seconds):
            running.append(len(self.running))
            return super().wait(seconds)

    processes = Counting(slow=True)
    plan = make(tmp_path)
    processes.runs = {str(run.folder): run for run in plan.all_runs()}
    plan.folder.mkdir()
    Runner(plan, processes, Silent(), 2).run(lambda: False)
    assert running == [1, 2, 2, 2, 2, 1]
    first, *others = processes.before
    assert first is None
    assert {path.parent.name for path in others} >= {"seed-0"}


def test_each_arm_gets_the_rate_that_its_tuning_seeds_choose(tmp_path):
    plan = make(tmp_path, "optim.lr=1e-4,2e-4,4e-4", "tune=2", "seeds=2")
    best = {"grpo": 2e-4, "ar": 1e-4}

    def behave(run):
        if run.variant.rate == 4e-4 and run.seed == 10_001:
            finish(run, steps=1)  # diverges
            return FAILED
        finish(run, 0.9 if run.variant.rate in (best[run.arm.name], 4e-4) else 0.3)
        return 0

    runner, started = carry_out(plan, behave)
    assert len(started) == plan.size == 16
    compared = started[12:]
    assert all("seed-0" in run or "seed-1" in run for run in compared)
    assert [runner.variant_of(arm).rate for arm in plan.arms] == [2e-4, 1e-4]
    assert len({run.partition("/")[0] for run in compared}) == 2
    from poise.referee.compare.results import tuning_report

    told = tuning_report(plan, runner.result)
    assert [each["chosen"] for each in told] == [2e-4, 1e-4]
    assert told[0]["rates"][2] == {"rate": 4e-4, "scores": [0.9, 0.0], "mean": pytest.approx(0.45), "diverged": 1}


def test_a_diverged_run_is_a_result(tmp_path):
    def behave(run):
        if run.name == "ar, seed 1":
            finish(run, steps=1)
            return FAILED
        finish(run)
        return 0

    runner, started = carry_out(make(tmp_path), behave)
    assert len(started) == 6
    assert ("ar, seed 1", "diverged", "") in runner.view.ends
    assert not runner.failures
    assert carry_out(make(tmp_path))[1] == []


def test_a_failure_is_recorded_and_retried_by_the_next_command(tmp_path):
    plan, broken = make(tmp_path), True

    def behave(run):
        if run.name == "ar, seed 0" and broken:
            plan.log_of(run).write_text("step 1\npoise: no space left\n")
            return FAILED
        finish(run)
        return 0

    runner, started = carry_out(plan, behave)
    assert len(started) == 6
    (failure,) = json.loads((plan.folder / "failures.json").read_text()).values()
    assert (failure["arm"], failure["seed"], failure["last_lines"]) == ("ar", 0, ["step 1", "poise: no space left"])
    assert ("ar, seed 0", None, "poise: no space left") in runner.view.ends
    broken = False
    assert carry_out(plan, behave)[1] == ["ar/seed-0"]


def test_retries_on_request_and_a_kill_is_named(tmp_path):
    runner, started = carry_out(
        make(tmp_path, "retries=1"), lambda run: -signal.SIGKILL if run.name == "ar, seed 0" else finish(run) or 0
    )
    assert started.count("ar/seed-0") == 2
    (failure,) = runner.failures.values()
    assert failure["ended"] == "killed by SIGKILL (out of memory?)"


@pytest.mark.parametrize(("keep", "left"), [("models", 1), ("results", 0)])
def test_weights_of_finished_runs_are_kept_or_not(tmp_path, keep, left):
    def behave(run):
        (run.folder / "checkpoints" / "step-000002" / "model").mkdir(parents=True, exist_ok=True)
        return FAILED if run.name == "ar, seed 0" else finish(run) or 0

    plan = make(tmp_path, f"keep={keep}", "seeds=2")
    carry_out(plan, behave)
    found = {run.name: len(list(run.folder.glob("checkpoints/*"))) for run in plan.all_runs()}
    assert found.pop("ar, seed 0") == 1  # it has no result yet, and is resumed from there
    assert set(found.values()) == {left}
    carry_out(make(tmp_path, "keep=results", "seeds=2"), behave)  # and those that had finished before
    assert not any(list(run.folder.glob("checkpoints/*")) for run in plan.all_runs() if run.name in found)


def test_no_more_runs_after_the_first_ones_all_failed(tmp_path):
    runner, started = carry_out(make(tmp_path, "seeds=10"), lambda run: FAILED)  # noqa: ARG005
    assert len(started) <= 5
    assert "the first 3 runs all failed" in runner.view.notes[0]


def test_an_interruption_lets_runs_save_and_starts_no_more(tmp_path):
    looks = iter([False, True, True, True, True])
    runner, started = carry_out(make(tmp_path), interrupted=lambda: next(looks))
    assert runner.processes.stops == 1
    assert len(started) == 2
    assert runner.stopped
    assert not runner.failures
    assert len(carry_out(make(tmp_path))[1]) == 5


def test_folders_that_are_no_runs_of_the_plan_are_left_alone(tmp_path):
    plan = make(tmp_path)
    carry_out(plan)
    for name in ("grpo/seed-1.bad", "grpo/seed-1.old", "other/seed-0"):  # moved away, as a message says
        folder = RunFolder.create(plan.folder / "arms" / name, plan.arms[0].variants[0].config.model_dump(mode="json"))
        folder.log(1, {"tokens/sampled": 50.0})
    (plan.folder / "arms/grpo/seed-1.bad/summary.json").write_text("{")
    assert len(carry_out(make(tmp_path, "seeds=4"))[1]) == 2


def test_hours_end_with_whole_seeds(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(runner, "monotonic", lambda: now[0])

    def behave(run):
        now[0] += 60.0
        finish(run)
        return 0

    plan = make(tmp_path, "seeds=9", f"hours={7.5 / 60}")
    ended, started = carry_out(plan, behave, jobs=1)
    assert len(started) == 6
    assert ended.out_of_time
    assert "hours=0.125" in ended.view.notes[0]
    assert len(carry_out(plan, behave, jobs=1)[1]) == 6  # the same command continues


# Progress in lines


def first_run(tmp_path):
    plan = make(tmp_path)
    return plan.run(plan.arms[0], plan.arms[0].variants[0], 0)


def test_a_line_for_every_run_that_ends(tmp_path, capsys):
    run = first_run(tmp_path)
    finish(run, 0.625)
    progress, status = runner.Progress(), Status(3, 4, [run, run], 125.0)
    progress.ended(run, RunResult.read(run.folder), "", status)
    progress.ended(run, None, "poise: \x1b[31mno space left", status)
    progress.note("note")
    assert capsys.readouterr().err.splitlines() == [
        "[3 done, 2 running, 4 left, 2:05 to the end] grpo, seed 0: accuracy 0.200 → 0.625, 100 tokens",
        r"[3 done, 2 running, 4 left, 2:05 to the end] grpo, seed 0: failed: poise: \x1b[31mno space left",
        "note",
    ]


def test_nobody_is_left_without_a_line_for_long(tmp_path, monkeypatch, capsys):
    run, now = first_run(tmp_path), [0.0]
    monkeypatch.setattr(runner, "monotonic", lambda: now[0])
    progress = runner.Progress()
    progress.note("begun")
    for now[0] in (10.0, 29.0, 31.0, 40.0):
        progress.update(Status(0, 5, [run], None))
    finish(run, steps=1)
    now[0] = 62.0
    progress.update(Status(0, 0, [run] * 6, 90.0))
    step = "grpo, seed 0 (step 1/2)"
    assert capsys.readouterr().err.splitlines() == [
        "begun",
        "[0 done, 1 running, 5 left] grpo, seed 0 (accuracy before training)",
        f"[0 done, 6 running, 0 left, 1:30 to the end] {step}; {step}; {step}; {step} and 2 others",
    ]


def test_a_diverged_run_says_where(tmp_path, capsys):
    run = first_run(tmp_path)
    finish(run, steps=1)
    runner.Progress().ended(run, RunResult.read(run.folder), "", Status(1, 5, [], None))
    assert capsys.readouterr().err.endswith("grpo, seed 0: diverged at step 2: the gradient is not finite\n")


def test_quiet_says_nothing(tmp_path, capsys):
    progress = runner.Progress(quiet=True)
    progress.ended(first_run(tmp_path), None, "why", Status(0, 6, [], None))
    progress.note("note")
    assert capsys.readouterr().err == ""
