"""``poise compare`` with the embedded model: runs in processes of their own, killed, resumed and extended."""

import json
import os
import signal
from importlib.util import find_spec

import pytest

from poise.referee.compare import plan_file
from poise.referee.compare.command import _finish
from poise.referee.compare.processes import Processes
from poise.referee.compare.results import RunResult
from poise.referee.compare.runner import Progress, Runner
from poise.runs.folder import RunFolder
from support.command_line import fails, poise
from support.comparisons import SMALL, finish, make
from support.process_table import alive, children, session, wait_until
from support.small_runs import SHORT, command
from support.small_runs import run as train_run

ARMS = "regulator=grpo; tr-grpo"  # which weights the entropy term too


def arguments(folder, *more, arms=ARMS, seeds=2):
    return ["compare", "tiny", *SMALL, arms, f"seeds={seeds}", f"run={folder}", "jobs=2", *more]


def table(folder):
    """The results of a comparison, without times and places."""
    return {
        (path.parent.name, path.name): (
            [dict(point.scores) for point in result.curve],
            (path / "problems.json").read_text(),
            result.entropy,
            [line["optim/grad_norm"] for line in RunFolder(path).metrics()],
        )
        for path in sorted(folder.glob("arms/*/seed-*"))
        if (result := RunResult.read(path)).state == "finished"
    }


def written(folder):
    """When each run's results were written."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("arms/*/*/summary.json")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A comparison that was never interrupted: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("whole") / "cmp"
    result = poise(*arguments(folder))
    assert result.exit_code == 0, result.output
    return folder, result.output


@pytest.mark.long
def test_two_arms_and_two_seeds(whole):
    folder, said = whole
    found = json.loads((folder / "comparison.json").read_text())
    assert found["baseline"] == "grpo"
    assert [(arm["name"], arm["seeds"]) for arm in found["arms"]] == [("grpo", [0, 1]), ("tr-grpo", [0, 1])]
    assert "tr-grpo" in said
    runs = table(folder)
    assert len(runs) == 4
    entropies = {entropy for _, _, entropy, _ in runs.values()}
    assert len(entropies) == 4  # arms and seeds differ
    logs = {path.name for path in (folder / "logs").iterdir()}
    assert "grpo-seed-0.log" in logs
    assert len(logs) == 4
    evaluated = sorted(log.read_text().count("evaluating") for log in (folder / "logs").iterdir())
    assert evaluated == [2, 2, 2, 3]  # after each of the two steps, and before training once
    assert len({path.read_text() for path in folder.glob("arms/*/*/before.json")}) == 1


def test_results_that_were_seen_before_seeds_were_added_are_named(tmp_path, capsys):
    for seeds in (6, 7):
        plan = make(tmp_path, f"seeds={seeds}")
        for number, run in enumerate(plan.all_runs()):
            finish(run, 0.5 + number / 100)
        runner = Runner(plan, Processes(), Progress(quiet=True), jobs=1)
        plan.folder.mkdir(exist_ok=True)
        if not (plan.folder / "plan.json").exists():
            plan_file.write(plan)
        runner.run(lambda: False)
        assert _finish(plan, runner) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert ("Results were seen with 6 seeds before these 7" in printed) == (seeds == 7)
        assert "in at most 10 %" in printed or seeds == 6


def test_a_comparison_needs_two_arms():
    assert "there is only one arm" in fails("compare")


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_model_or_an_engine_that_is_not_there_is_refused_before_anything_is_written(tmp_path, dry):
    for mistake, said in (
        ("model=./nowhere", "poise: ./nowhere: there is no such folder"),
        ("rollout.engine=vllm", "vLLM"),
    ):
        if mistake.endswith("vllm") and find_spec("vllm"):
            continue
        (line,) = fails(*arguments(tmp_path / "cmp", mistake, *dry)).splitlines()
        assert said in line
        assert not (tmp_path / "cmp").exists()


@pytest.mark.long
@pytest.mark.slow
def test_killed_and_extended_it_ends_with_the_same_table(whole, tmp_path):
    """First a run is killed, which takes no other down; then all of it; then the command goes on with more."""
    folder = tmp_path / "cmp"
    with command(*arguments(folder)) as process:
        owner = folder / "arms" / "grpo" / "seed-0" / "owner.json"
        wait_until(lambda: owner.exists() and owner.read_text().endswith("\n"), 300)
        os.kill(json.loads(owner.read_text())["pid"], signal.SIGKILL)
        wait_until(lambda: (folder / "failures.json").exists() and len(written(folder)) >= 2, 300)
        (server,) = (pid for pid in children(process.pid) if session(pid))  # it leads a session
        family = session(server)
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not alive(family))  # nothing goes on
    (failure,) = json.loads((folder / "failures.json").read_text()).values()
    assert (failure["arm"], failure["seed"]) == ("grpo", 0)
    assert "killed by SIGKILL" in failure["ended"]
    before = written(folder)
    assert not list(folder.glob("arms/grpo/seed-0/summary.json"))

    assert "optim.weight_decay" in fails(*arguments(folder, "optim.weight_decay=0.5"))
    result = poise(*arguments(folder, arms=f"{ARMS}; lopti", seeds=3))
    assert result.exit_code == 0, result.output
    after = written(folder)
    assert before.items() <= after.items()  # nothing was done twice
    assert len(after) == 9
    assert table(whole[0]).items() <= table(folder).items()


@pytest.mark.long
@pytest.mark.slow
def test_ctrl_c_saves_what_runs(tmp_path):
    folder = tmp_path / "cmp"
    with command(*arguments(folder, "steps=500")) as process:
        wait_until(lambda: list(folder.glob("arms/*/*/metrics.jsonl")), 300)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=300)[0]
    assert process.returncode == 130, said
    assert "run the same command again to continue" in said
    steps = [RunResult.read(path.parent) for path in folder.glob("arms/*/*/checkpoints")]
    assert steps
    assert all(0 < run.steps < 500 for run in steps)
    assert not list(folder.glob("arms/*/*/owner.json"))


@pytest.mark.long
@pytest.mark.slow
def test_a_signal_ends_evaluations_at_once(tmp_path):
    folder = tmp_path / "cmp"
    with command(*arguments(folder, "evaluation.problems=20000")) as process:  # which would take minutes
        wait_until(lambda: any("evaluating" in log.read_text() for log in folder.glob("logs/*")), 300)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=300)[0]
    assert process.returncode == 130, said
    assert "run the same command again to continue" in said
    assert list(folder.glob("arms/*/*/config.json"))
    assert not list(folder.glob("arms/*/*/before.json"))
    assert not (folder / "failures.json").exists()
    assert any("stopped; continue with" in log.read_text() for log in folder.glob("logs/*"))


# All arms see the same problems in the same order


def problems(folder):
    """The problems of every step, in order, without repetitions."""
    return [list(dict.fromkeys(record["problem"] for record in folder.rollouts(step))) for step in folder.recorded()]


def test_all_arms_of_a_seed_see_the_same_problems(tmp_path):
    arms = ["regulator=lopti", "regulator=random-split | ar", "algorithm=rltr", "algorithm=erl(reflection_tokens=8)"]
    settings = [*SHORT, "rollout.max_tokens=4", "steps=2", "prompts=2", "group=2", "rollouts_every=1", "evaluation=off"]
    expected = problems(train_run(tmp_path, *settings, name="grpo")[0])
    assert [len(step) for step in expected] == [2, 2]
    assert expected[0] != expected[1]
    for arm in arms:
        assert problems(train_run(tmp_path, *settings, arm, name=arm.replace(" ", ""))[0]) == expected, arm
    assert problems(train_run(tmp_path, *settings, "seed=1", name="other")[0]) != expected
