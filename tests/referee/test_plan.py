"""What is typed or written in a file becomes arms, seeds and runs."""

import shutil

import pytest

from poise.referee.compare import plan_file
from poise.referee.compare.arms import alternatives
from poise.referee.compare.plan import read_plan
from poise.referee.compare.settings import TUNING
from poise.runs.folder import RunFolder
from poise.training.config.documents import ConfigError
from poise.training.config.groups import HELD_OUT
from poise.training.resume import keep_changes
from support.comparisons import SMALL, finish, make, write_rows


def names(plan):
    return [arm.name for arm in plan.arms]


def problem(*overrides, recipe="tiny", regulator="grpo; ar"):
    with pytest.raises(ConfigError) as caught:
        read_plan(recipe, [f"regulator={regulator}", *overrides])
    (line,) = caught.value.problems
    return line


@pytest.mark.parametrize(
    ("key", "text", "parts"),
    [
        ("regulator", "grpo; ar(alpha=0.2, ) | lopti;nthr", ["grpo", "ar(alpha=0.2, ) | lopti", "nthr"]),
        ("regulator", "mine.py:Mine(words='a;b'); grpo", ["mine.py:Mine(words='a;b')", "grpo"]),
        ("algorithm", "grpo, x", ["grpo, x"]),
        ("optim.lr", "5e-5,1e-4, 2e-4", ["5e-5", "1e-4", "2e-4"]),
        ("optim.betas", "[0.9, 0.99]", ["[0.9, 0.99]"]),
        ("optim.betas", "[0.9,0.99]; [0.9,0.999]", ["[0.9,0.99]", "[0.9,0.999]"]),
        ("optim.betas", "[0.9,0.99], [0.9,0.999]", ["[0.9,0.99]", "[0.9,0.999]"]),
        ("model", '"a, b"', ['"a, b"']),
        ("steps", "3", ["3"]),
    ],
)
def test_a_value_of_several_parts_is_an_axis(key, text, parts):
    assert alternatives(key, text) == parts


def test_axes_multiply_out_and_the_first_arm_is_the_baseline(tmp_path):
    plan = make(tmp_path, "objective.clip_high=0.2,0.28", "optim.betas=[0.8, 0.9]")
    assert names(plan) == [
        "grpo, objective.clip_high=0.2", "grpo, objective.clip_high=0.28",
        "ar, objective.clip_high=0.2", "ar, objective.clip_high=0.28",
    ]  # fmt: skip
    assert plan.baseline is plan.arms[0]
    config = plan.arms[3].variants[0].config
    assert (config.regulator, config.objective.clip_high, config.optim.betas) == ("ar", 0.28, (0.8, 0.9))
    assert make(tmp_path, "baseline=ar").baseline.name == "ar"


def test_runs_go_seed_by_seed_over_all_arms(tmp_path):
    plan = make(tmp_path)
    runs = plan.all_runs()
    assert [(run.arm.name, run.seed) for run in runs] == [(arm, seed) for seed in range(3) for arm in ("grpo", "ar")]
    assert runs[0].folder == tmp_path / "cmp" / "arms" / "grpo" / "seed-0"
    assert runs[0].config.seed == 0
    assert len({run.folder for run in runs}) == len(runs) == plan.size


def test_folders_depend_on_the_arm_alone(tmp_path):
    few = make(tmp_path, regulator="ar | lopti; grpo(passes=2)")
    many = make(tmp_path, "seeds=5", regulator="grpo; grpo(passes=2); ar | lopti")
    places = [{run.arm.name: run.folder.parent.name for run in plan.all_runs()} for plan in (few, many)]
    assert places[0].items() <= places[1].items()
    assert all(set(place) <= set("abcdefghijklmnopqrstuvwxyz0123456789=.-") for place in places[1].values())


def test_rates_are_arms_or_tuned(tmp_path):
    rates = "optim.lr=1e-4,2e-4"
    assert names(make(tmp_path, rates)) == [
        "grpo, optim.lr=1e-4", "grpo, optim.lr=2e-4", "ar, optim.lr=1e-4", "ar, optim.lr=2e-4",
    ]  # fmt: skip
    plan = make(tmp_path, rates, "tune=2")
    assert names(plan) == ["grpo", "ar"]
    tuning = plan.tuning_runs()
    assert [(run.variant.rate, run.seed) for run in tuning[:4]] == [(1e-4, TUNING), (2e-4, TUNING)] * 2
    assert plan.size == len(tuning) + 6 == 14
    compared = [plan.run(arm, arm.variants[1], 0) for arm in plan.arms]
    assert {run.config.evaluation.seed for run in tuning}.isdisjoint(run.config.evaluation.seed for run in compared)
    assert not {run.seed for run in tuning} & set(plan.seeds)


def test_a_file_has_axes_and_arms(tmp_path, write):
    path = write(
        """
        base: tiny
        seeds: 4
        tune: 1
        baseline: two passes
        steps: 3
        evaluation: {problems: 7}
        run: %s
        arms:
          - regulator: grpo
          - {name: two passes, regulator: grpo(passes=2)}
          - {regulator: ar, objective.clip_high: 0.28}
        axes:
          optim.lr: [1e-4, 2e-4]
        """ % (tmp_path / "here")
    )  # fmt: skip
    plan = read_plan(str(path), ["seeds=5"])
    assert names(plan) == ["grpo", "two passes", "ar, objective.clip_high=0.28"]
    assert (plan.baseline.name, plan.seeds, len(plan.settings.tuning_seeds)) == ("two passes", tuple(range(5)), 1)
    config = plan.arms[2].variants[1].config
    assert (config.steps, config.evaluation.problems, config.optim.lr) == (3, 7, 2e-4)
    assert plan.folder == tmp_path / "here"


def test_held_out_problems():
    def problems(*overrides):
        return read_plan("tiny", ["regulator=grpo; ar", *overrides]).arms[0].variants[0].config.evaluation.problems

    assert problems() == HELD_OUT == 1000  # the recipe has 300
    assert problems("evaluation.problems=50") == 50


def test_seeds_may_be_a_range(tmp_path):
    assert make(tmp_path, "seeds=20-22").seeds == (20, 21, 22)


def test_mistakes_are_answered():
    assert problem("seeds=1") == "seeds = 1: one seed cannot tell a difference from chance; use at least 2, ideally 10"
    assert "from 2 to 1000" in problem("seeds=0")
    assert "such as 20-29" in problem("seeds=5-3")
    assert problem(regulator="grpo; ; ar") == "regulator=grpo; ; ar: part 2 of 3 is empty"
    assert problem("optim.lr=1e-4,0.0001,2e-4", "tune=1") == "optim.lr has 1e-4 twice: remove one of them"
    assert problem(regulator="ar; ar(alpha=0.2)") == "arms 'ar' and 'ar(alpha=0.2)' are the same: remove one of them"
    assert "there is nothing to compare" in problem(regulator="grpo")
    assert problem(regulator="grpo,ar(alpha=0.2, )") == (
        'regulator=grpo,ar(alpha=0.2, ): to compare, separate with ";": regulator="grpo; ar(alpha=0.2, )"'
    )
    assert problem("algorithm=grpo; erl, rltr").endswith('separate with ";": algorithm="grpo; erl; rltr"')
    assert problem("baseline=lopti") == "baseline = 'lopti' is not among the arms; they are: grpo; ar"
    assert problem("seed=3").startswith("seed: a comparison has several seeds; write seeds=10")
    assert problem("sedes=3") == "unknown key 'sedes'; did you mean 'seeds'?"
    assert problem("optim.lrr=3") == "arm grpo: unknown key 'optim.lrr'; did you mean 'optim.lr'?"
    assert "did you mean 'lopti'" in problem(regulator="grpo; loptii")
    assert "all arms of a comparison see the same problems" in problem("task.people=2,3")
    assert "the same held-out problems" in problem("evaluation.problems=100,200")
    assert "name several" in problem("tune=2")
    assert problem("tune=2", "jobs=0", "optim.lr=1,2") == "jobs = 0: must be at least 1"
    assert problem("hours=-1") == "hours = -1: must be greater than 0"
    assert "must be a whole number" in problem("tune=x")
    assert "there is no such file" in problem(recipe="nowhere.yaml")
    assert "run = [1]" in problem("run=[1]")
    for typed in ("seeds=[1", "run=[1", "baseline=*x"):
        assert f"override '{typed}': cannot read the value" in problem(typed)


def test_mistakes_in_a_file_are_answered(write):
    def wrong(text):
        with pytest.raises(ConfigError) as caught:
            read_plan(str(write("base: tiny\n" + text)), [])
        return str(caught.value)

    assert wrong("axes: x") == "axes = 'x': must be a group of settings, {key: value}"
    assert wrong("axes: {regulator: ar}") == "axes.regulator = 'ar': must be a list"
    assert "axes.regulator = []: List should have at least 1 item" in wrong("axes: {regulator: []}")
    assert wrong("arms: {}") == "arms = {}: must be a list"
    assert wrong("arms: [{regulator: grpo}, ar]") == "arms.1 = 'ar': must be a group of settings, {key: value}"
    assert "two arms are named 'x'" in wrong("arms: [{name: x, regulator: ar}, {name: x, regulator: grpo}]")
    assert "two arms are named 'x y'" in wrong("arms: [{name: x y, regulator: ar}, {name: x  y, regulator: grpo}]")
    for name in (r'"\ud800"', r'"a\nb"', "null", "[x]"):
        assert "must be a single line of text" in wrong(f"arms: [{{name: {name}, regulator: ar}}, {{regulator: grpo}}]")
    assert wrong("arms: [{regulator: grpo}, {regulater: ar}]") == "unknown key 'regulater'; did you mean 'regulator'?"


# A folder that was used before


def begin(plan):
    """What a comparison leaves that was stopped after its first run."""
    plan_file.write(plan)
    finish(plan.run(plan.arms[0], plan.arms[0].variants[0], plan.seeds[0]))


def refused(plan):
    with pytest.raises(ConfigError) as caught:
        plan_file.check(plan)
    return str(caught.value)


def test_a_mistake_that_no_run_survived_may_be_mended(tmp_path):
    plan_file.write(make(tmp_path, "model=nowhere", "steps=9"))
    plan = make(tmp_path)
    plan_file.check(plan)
    begin(plan)
    plan_file.check(plan)
    assert "model = 'nowhere', but the comparison in" in refused(make(tmp_path, "model=nowhere"))


def test_the_same_comparison_goes_on_and_may_grow(tmp_path):
    plan = make(tmp_path)
    plan_file.check(plan)
    begin(plan)
    plan_file.check(plan)
    grown = make(tmp_path, "seeds=4", "jobs=2", regulator="grpo; lopti; ar")
    plan_file.check(grown)
    plan_file.write(grown)
    plan_file.check(grown)
    assert "also has the arm 'lopti', and poise never drops an arm" in refused(make(tmp_path, "seeds=4"))


def test_another_comparison_is_refused(tmp_path):
    begin(make(tmp_path))
    assert "optim.weight_decay = 0.5, but the comparison in" in refused(make(tmp_path, "optim.weight_decay=0.5"))
    assert "steps = 9" in refused(make(tmp_path, "steps=9"))
    assert "also has the arm 'ar'" in refused(make(tmp_path, regulator="grpo; lopti"))
    assert "also has seed 2" in refused(make(tmp_path, "seeds=2"))
    assert "also has the arm 'grpo'" in refused(make(tmp_path, "optim.lr=1e-4,4e-4", "tune=1"))


def test_rates_and_tuning_seeds_stay(tmp_path):
    rates = "optim.lr=1e-4,2e-4"
    begin(make(tmp_path, rates, "tune=2"))
    plan_file.check(make(tmp_path, rates, "tune=2", "seeds=4", regulator="grpo; ar; lopti"))
    for changed in (["optim.lr=1e-4,2e-4,4e-4", "tune=2"], [rates, "tune=3"]):
        assert "has other learning rates, or another tune=N" in refused(make(tmp_path, *changed))
    assert "also has the arm 'grpo, optim.lr=2e-4'" in refused(make(tmp_path, "optim.lr=1e-4,4e-4", "tune=2"))


def edit(path, **settings):
    folder = RunFolder(path)
    folder.write_config(folder.config | settings)


def test_a_run_with_other_settings_than_planned_is_refused(tmp_path):
    plan = make(tmp_path)
    plan.folder.mkdir()
    plan_file.write(plan)
    runs = plan.all_runs()
    finish(runs[0])
    finish(runs[3], steps=1)  # diverged
    plan_file.check(plan)
    edit(runs[3].folder, optim=plan.arms[1].variants[0].config.optim.model_dump(mode="json") | {"lr": 0.5})
    said = refused(plan)
    assert f"the run in {runs[3].folder} has optim.lr = 0.5, but the comparison plans 0.0002 for ar, seed 1" in said
    assert "if its config.json was edited, undo the edit; otherwise move the folder away" in said
    shutil.move(runs[3].folder, tmp_path / "away")
    plan_file.check(plan)
    edit(runs[0].folder, seed=7)
    assert "seed = 7, but the comparison plans 0 for grpo, seed 0" in refused(plan)


def test_a_run_on_data_that_were_edited_since_is_refused(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl")
    data = [f"task.file={rows}", "task.name=data", "task.reward=math"]
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("model: embedded\n")

    def planned():
        small = [setting for setting in SMALL if not setting.startswith("task.")]
        return read_plan(str(recipe), [*small, *data, "regulator=grpo; ar", "seeds=3", f"run={tmp_path / 'cmp'}"])

    plan = planned()
    plan.folder.mkdir()
    plan_file.write(plan)
    run = plan.all_runs()[0]
    finish(run)
    RunFolder(run.folder).write_json("data.json", {"fingerprint": run.config.task.build().fingerprint})
    plan_file.check(planned())
    rows.write_text(rows.read_text().replace("3 + 1?", "4 + 0?"))
    said = refused(planned())
    assert f"the data were edited since {run.folder} was trained" in said
    assert "move the folder away and run the command again to retrain this run" in said


SOFTER = """
import poise

@poise.regulator
def softer(batch):
    return [poise.Phase.of(batch, 0.5)]
"""


PLAIN = """
import poise

class Plain(poise.Regulator):
    def __init__(self, power=1.0):
        self.power = power

    def phases(self, batch):
        return [poise.Phase.of(batch, batch.prob**self.power)]
"""


def test_a_regulator_whose_class_is_no_dataclass_is_named_as_it_was_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").write_text(PLAIN)
    typed = ["grpo", "plain.py:Plain", "plain.py:Plain(power=2)"]
    plan = make(tmp_path, regulator="; ".join(typed))
    assert [arm.variants[0].identity["regulator"] for arm in plan.arms] == typed


def test_a_run_with_code_that_was_edited_since_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "softer.py").write_text(SOFTER)

    def planned(*more):
        return make(tmp_path, *more, regulator="grpo; softer.py:softer")

    plan = planned()
    plan.folder.mkdir()
    plan_file.write(plan)
    runs = plan.all_runs()
    for run in runs[:2]:
        finish(run)
        keep_changes(run.config, RunFolder(run.folder), 0)
    plan_file.check(planned("seeds=4"))
    (tmp_path / "softer.py").write_text(SOFTER.replace("0.5", "7.0"))
    said = refused(planned("seeds=4"))
    assert f"softer.py: this code was edited since {runs[1].folder} was trained, and one arm would mix both" in said
    assert "--trust-changed" in said
    accepted = planned("seeds=4")
    plan_file.check(accepted, trust_changed=True)
    plan_file.write(accepted)
    assert plan_file.mixed_code(accepted) == {"softer.py:softer": ["softer.py"]}
    (tmp_path / "softer.py").write_text(SOFTER.replace("0.5", "9.0"))
    config = accepted.all_runs()[3].config
    keep_changes(config, RunFolder.create(config.run, config.model_dump(mode="json")), 0)
    assert "this code was edited" in refused(planned("seeds=5"))


def test_runs_with_the_same_settings_written_otherwise_count(tmp_path):
    plan = make(tmp_path)
    plan.folder.mkdir()
    plan_file.write(plan)
    for run in plan.all_runs():
        finish(run)
    edit(run.folder, regulator="ar()", run="where/it/was/before")
    plan_file.check(plan)
    edit(run.folder, regulator="nowhere.py:Code")
    assert "regulator = 'nowhere.py:Code'" in refused(plan)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    assert "is the folder of a run" in refused(make(tmp_path, name="run"))
    (tmp_path / "file").touch()
    assert "is a file" in refused(make(tmp_path, name="file"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").touch()
    assert "holds no comparison" in refused(make(tmp_path, name="other"))
    (tmp_path / "other" / "plan.json").write_text("[")
    assert "is not a plan" in refused(make(tmp_path, name="other"))


def test_a_plan_keeps_the_looks_at_its_results(tmp_path):
    plan = make(tmp_path)
    plan.folder.mkdir()
    plan_file.write(plan)
    assert plan_file.read_looks(plan) == []
    plan_file.write(plan, [6, 8])
    plan_file.write(make(tmp_path, "seeds=4"))  # the same comparison, with more seeds
    assert plan_file.read_looks(plan) == [6, 8]


# Measures


@pytest.mark.parametrize(
    ("model", "recipe"), [([], "demo"), (["model=embedded-plain"], "demo"), (["model=embedded"], "tiny")]
)
def test_without_a_recipe_the_demo_or_the_recipe_of_a_model_that_ships_is_compared(model, recipe):
    arms = ["regulator=grpo; ar"]
    assert read_plan(None, [*arms, *model]).arms == read_plan(recipe, arms).arms


@pytest.mark.parametrize(("steps", "every"), [(64, 8), (100, 10), (390, 39), (97, 12), (8, 1), (3, 1)])
def test_runs_are_evaluated_at_least_eight_times(tmp_path, steps, every):
    (found,) = {arm.variants[0].config.evaluation.every for arm in make(tmp_path, f"steps={steps}").arms}
    assert found == every
    assert steps // every >= min(8, steps)


def test_the_users_own_curve_stays(tmp_path):
    assert make(tmp_path, "evaluation.every=0").arms[0].variants[0].config.evaluation.every == 0
    path = tmp_path / "own.yaml"
    path.write_text("base: tiny\nevaluation: {every: 3}\n")
    assert make(tmp_path, recipe=str(path)).arms[1].variants[0].config.evaluation.every == 3
    (tmp_path / "heir.yaml").write_text("base: own.yaml\nevaluation: {problems: 70}\n")
    assert make(tmp_path, recipe=str(tmp_path / "heir.yaml")).arms[1].variants[0].config.evaluation.every == 3


def test_tuning_runs_need_no_curve(tmp_path):
    plan = make(tmp_path, "steps=64", "optim.lr=1e-4,2e-4", "tune=1", "measure=speed")
    (tuning,) = {(run.config.evaluation.every, run.config.steps) for run in plan.tuning_runs()}
    assert tuning == (0, 64)
    kept = make(tmp_path, "optim.lr=1e-4,2e-4", "tune=1", "evaluation.every=2", "stop_at=0.9").tuning_runs()[0]
    assert kept.config.evaluation.every == 2  # the goal is watched


def test_the_baseline_runs_longer_where_speed_is_measured(tmp_path):
    def steps(*overrides):
        plan = make(tmp_path, "steps=64", *overrides)
        configs = [plan.run(arm, arm.variants[0], 0).config for arm in plan.arms]
        return plan.cut, [(config.steps, config.budget) for config in configs]

    assert steps() == (None, [(64, None), (64, None)])
    assert steps("measure=speed") == (64, [(128, None), (64, None)])
    assert steps("measure=speed", "longer=1.5", "budget=1000") == (64, [(96, 1500), (64, 1000)])
    assert steps("measure=speed", "longer=1") == (64, [(64, None), (64, None)])
    assert steps("measure=speed", "baseline=ar") == (64, [(64, None), (128, None)])


def test_mistakes_in_the_measure_are_answered():
    assert problem("measure=time") == "measure = 'time': must be 'accuracy' or 'speed'"
    assert problem("margin=0.1") == "margin = 0.1: this setting needs measure=speed"
    assert "longer = 0.5: must be at least 1" in problem("measure=speed", "longer=0.5")
    assert "margin = 'x': must be a number" in problem("measure=speed", "margin=x")


def test_the_measure_cannot_change_once_runs_have_begun(tmp_path):
    plan = make(tmp_path)
    finish(plan.all_runs()[0])
    plan_file.write(plan)
    plan_file.check(plan)
    with pytest.raises(ConfigError, match=r"measure.name = 'speed', but the comparison in .* has 'accuracy'"):
        plan_file.check(make(tmp_path, "measure=speed"))
