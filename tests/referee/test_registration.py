"""Plans that bind: what is frozen, what may be added, and what the results say of it."""

import json

import pytest

from poise.referee.compare import plan_file, registration
from poise.referee.compare.command import _finish
from poise.referee.compare.processes import Processes
from poise.referee.compare.runner import Progress, Runner
from poise.training.config.documents import ConfigError
from support.command_line import fails, poise
from support.comparisons import SMALL, finish, make


def registered(tmp_path, *overrides, **changes):
    plan = make(tmp_path, "seeds=6", *overrides, **changes)
    plan.folder.mkdir(exist_ok=True)
    plan_file.check(plan)
    return plan, plan_file.register(plan)


def refusal(tmp_path, *overrides, **changes):
    with pytest.raises(ConfigError) as caught:
        plan_file.check(make(tmp_path, *overrides, **changes))
    (line,) = caught.value.problems
    return line


def results(plan, capsys):
    """Finish all runs of a plan with made-up scores; its results, and what was printed."""
    for run in plan.all_runs():
        finish(run, 0.5 + 0.1 * (run.arm.name != "grpo") + run.seed / 100)
    plan_file.check(plan)
    plan_file.write(plan)
    runner = Runner(plan, Processes(), Progress(quiet=True), jobs=1)
    assert _finish(plan, runner) == 0
    document = json.loads((plan.folder / "comparison.json").read_text())
    return document, " ".join(capsys.readouterr().out.split())


def test_what_is_registered_cannot_change(tmp_path):
    plan, checksum = registered(tmp_path, "measure=speed", "margin=0.07")
    same = ("seeds=6", "measure=speed", "margin=0.07")
    plan_file.check(make(tmp_path, *same))
    assert plan_file.register(plan) == checksum  # again
    for words, overrides, changes in (
        ("also has the arm 'ar'", same, {"regulator": "grpo; lopti"}),
        ("also has seed 5", ("seeds=5", *same[1:]), {}),
        ("optim.lr = 0.5, but", (*same, "optim.lr=0.5"), {}),
        ("measure.margin = 0.1, but", (*same, "margin=0.1"), {}),
        ("measure.longer = 3.0, but", (*same, "longer=3"), {}),
        ("measure.name = 'accuracy', but", ("seeds=6",), {}),
        ("baseline = 'ar', but", (*same, "baseline=ar"), {}),
    ):
        said = refusal(tmp_path, *overrides, **changes)
        assert "the plan registered in" in said
        assert words in said, said


def test_registered_learning_rates_stay_even_before_the_first_run(tmp_path):
    registered(tmp_path, "optim.lr=1e-4,2e-4", "tune=2")
    said = refusal(tmp_path, "seeds=6", "optim.lr=1e-4,2e-4,4e-4", "tune=2")
    assert "has other learning rates, or another tune=N" in said


def test_an_edited_registration_is_refused(tmp_path):
    plan, _ = registered(tmp_path)
    path = plan.folder / "plan.json"
    data = json.loads(path.read_text())
    for change in ({"seeds": [0, 1]}, {"checksum": "0" * 64}):
        path.write_text(json.dumps({**data, "registered": {**data["registered"], **change}}))
        assert "plan.json was edited since (its checksum" in refusal(tmp_path, "seeds=6")


def test_a_plan_is_registered_before_its_first_run(tmp_path):
    plan = make(tmp_path)
    finish(plan.all_runs()[0])
    plan_file.write(plan)
    with pytest.raises(ConfigError, match="have begun"):
        plan_file.register(plan)


def test_a_registered_plan_without_additions(tmp_path, capsys):
    plan, checksum = registered(tmp_path)
    document, printed = results(plan, capsys)
    assert document["registered"] == checksum
    assert document["exploratory"] == []
    assert f"Registered before the first run (checksum {checksum[:12]})." in printed
    assert "xploratory" not in printed
    assert plan_file.read_registered(plan) is not None  # still there


def test_arms_and_seeds_that_were_added_are_exploratory(tmp_path, capsys):
    plan, _ = registered(tmp_path)
    before, _ = results(plan, capsys)
    more = make(tmp_path, "seeds=8", regulator="grpo; ar; lopti")
    document, printed = results(more, capsys)
    assert [arm["name"] for arm in document["arms"]] == ["grpo", "ar"]
    assert document["arms"] == before["arms"]
    assert document["verdict"][: len(before["verdict"])] == before["verdict"]  # no look at more seeds is confessed
    assert [(arm["name"], len(arm["seeds"])) for arm in document["exploratory"]] == [
        ("grpo", 8),
        ("ar", 8),
        ("lopti", 8),
    ]
    assert "Exploratory, because arm lopti and seeds 6, 7 came after the registration:" in printed
    assert "lopti (exploratory)" in printed
    only_arms = registration.added(
        make(tmp_path, "seeds=6", regulator="grpo; ar; lopti"), plan_file.read_registered(plan)
    )
    assert str(only_arms) == "arm lopti"
    with pytest.raises(ConfigError, match="registered already, without arm lopti and seeds 6, 7"):
        plan_file.register(more)


def test_the_command_line(tmp_path):
    folder = tmp_path / "cmp"
    settings = ["compare", "tiny", *SMALL, "regulator=grpo; ar", "seeds=6", f"run={folder}"]
    said = poise(*settings, "--register")
    assert said.exit_code == 0, said.output
    assert json.loads((folder / "plan.json").read_text())["registered"]["checksum"] in said.output
    assert not (folder / "arms").exists()
    assert "also has seed 4" in fails(*settings, "seeds=4")
