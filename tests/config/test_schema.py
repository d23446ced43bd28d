"""Configurations: recipes, overrides, and what mistakes are answered with."""

import inspect
import json
import pickle
import re
import sys
import types
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from poise import Phase, advantages, objective, regulators, tasks
from poise.config.schema import Config, ConfigError, ObjectiveConfig, TaskConfig, dump, load, recipes
from support.batches import random_batch
from support.configs import problem, problems

ROOT = Path(__file__).parents[2]
METHODS = ["ar", "ar-lopti", "grpo", "lopti", "nthr", "tr-grpo"]


# Models


def test_the_objective_mirrors_its_settings():
    theirs = {field.name: field.default for field in fields(objective.Settings)}
    assert {name: field.default for name, field in ObjectiveConfig.model_fields.items()} == theirs
    assert list(ObjectiveConfig.model_fields) == list(theirs)
    assert ObjectiveConfig().settings() == objective.Settings()
    changed = {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": None, "kl": "k2", "kl_coef": 0.1, "entropy_coef": 0.01,
               "aggregation": "fixed-length", "max_length": 7, "importance_cap": None}  # fmt: skip
    assert set(changed) == set(theirs)
    assert ObjectiveConfig(**changed).settings() == objective.Settings(**changed)


def test_every_advantage_is_a_function():
    for name in Config.model_fields["advantage"].annotation.__args__:
        assert callable(getattr(advantages, name.replace("-", "_")))


def test_defaults_work_and_cannot_be_changed():
    config = Config()
    assert config.model == "embedded"
    assert config.task.build().name == "kk"
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 3
    with pytest.raises(ValueError, match="frozen"):
        config.task.people = 3


def test_a_task_keeps_its_settings_beside_its_name():
    task = TaskConfig(name="kk", people=(2, 3))
    assert task.settings == {"people": [2, 3]}
    assert task.build() == tasks.get("kk", people="2-3")
    assert task.model_dump(mode="json") == {"name": "kk", "people": [2, 3]}


# Recipes


def test_the_shipped_recipes():
    assert recipes() == sorted([*METHODS, "demo"])
    link = ROOT / "recipes"
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert sorted(path.stem for path in link.glob("*.yaml")) == recipes()


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_is_read_and_its_regulator_runs(name):
    config = load(name)
    assert config.run == f"runs/{name}"
    batch = random_batch()
    phases = regulators.parse(config.regulator)(batch)
    settings = config.objective.settings()
    loss, _ = objective.policy_loss(
        batch.old_logp, batch, phases[0], settings, normalizer=objective.normalizer(batch, settings)
    )
    assert loss.isfinite()
    problem = next(config.task.build().problems("train", config.seed))
    assert config.task.build().score(problem, "").reward == -3


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_says_what_to_expect_and_what_is_ours(name):
    header = (ROOT / "recipes" / f"{name}.yaml").read_text().partition("\nmodel:")[0]
    if name == "demo":
        assert "are ours" in header
    else:
        assert re.search(r"arXiv \d{4}\.\d{5}", header)
        assert "\n# To expect: " in header
        assert "\n# Ours: " in header


@pytest.mark.parametrize("name", METHODS)
def test_the_settings_of_the_papers(name):
    config = load(name)
    assert (config.model, config.steps) == ("Qwen/Qwen2.5-3B-Instruct", 5 * 4500 // 64)
    assert (config.prompts, config.group, config.advantage) == (64, 8, "group-zscore")
    assert config.task.build() == tasks.get("kk", people="3-7")
    assert (config.rollout.max_prompt, config.rollout.max_tokens) == (400, 4096)
    optim = config.optim
    assert (optim.lr, optim.weight_decay, optim.betas, optim.grad_clip) == (1e-6, 0.01, (0.9, 0.999), 1.0)
    assert (optim.mini_batch, optim.warmup_steps) == (256, 0)
    assert (config.evaluation.samples, config.evaluation.temperature) == (1, 0)
    theirs = objective.Settings(kl_coef=0.001, importance_cap=None)
    if name == "nthr":
        theirs = objective.Settings(clip_low=0.2, clip_high=0.2, kl_coef=1e-4, importance_cap=None)
    assert config.objective.settings() == theirs
    assert config.rollout.temperature == (1.0 if name == "nthr" else 0.7)


@pytest.mark.parametrize(
    ("name", "regulator"),
    [
        ("demo", regulators.Identity()),
        ("grpo", regulators.Identity()),
        ("ar", regulators.AdvantageReweighting(0.2)),
        ("lopti", regulators.Lopti(0.4)),
        ("ar-lopti", regulators.AdvantageReweighting(0.3) | regulators.Lopti(0.5)),
        ("tr-grpo", regulators.TokenRegulation()),
        ("nthr", regulators.NTHR()),
    ],
)
def test_the_regulators_of_the_recipes(name, regulator):
    assert regulators.parse(load(name).regulator) == regulator


def test_the_demo_is_what_runs_without_a_word():
    assert load() == load(None) == load("demo")
    assert load().model == "embedded"


def test_a_recipe_of_ones_own(write):
    path = write("base: ar\nsteps: 7\noptim: {lr: 2e-6}\n")
    config = load(path)
    assert load(str(path)) == config
    assert (config.steps, config.optim.lr, config.optim.mini_batch) == (7, 2e-6, 256)
    assert config.regulator == "ar(alpha=0.2)"


def test_inheritance_goes_by_the_folder_of_the_recipe(write):
    write("base: grpo\nsteps: 5\nprompts: 3\n", "below.yaml")
    config = load(write("base: below.yaml\nprompts: 4\nrollout:\n  temperature: 0.9\n"))
    assert (config.steps, config.prompts, config.group) == (5, 4, 8)
    assert (config.rollout.temperature, config.rollout.max_tokens) == (0.9, 4096)


def test_an_empty_recipe_is_the_defaults(write):
    assert load(write("# nothing yet\n")) == Config()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["base: mine.yaml"], "recipe 'mine.yaml' inherits from itself: mine.yaml -> mine.yaml"),
        (["base: b.yaml", "base: c.yaml", "base: b.yaml"], "inherits from itself: b.yaml -> c.yaml -> b.yaml"),
        (["base: gpro"], "unknown recipe 'gpro'; did you mean 'grpo'? (allowed: ar, ar-lopti, demo,"),
        (["base: [grpo]"], "base = ['grpo']: must be the name or the path of a recipe"),
    ],
)  # fmt: skip
def test_inheritance_gone_wrong(write, texts, message):
    paths = [write(text, name) for text, name in zip(texts, ["mine.yaml", "b.yaml", "c.yaml"], strict=False)]
    assert message in problem(recipe=paths[0])


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("gppo", "'gppo'; did you mean 'grpo'? (allowed: ar, ar-lopti, demo, grpo, lopti, nthr, tr-grpo)"),
        ("no/such.yaml", "recipe 'no/such.yaml': there is no such file (shipped: ar, ar-lopti, demo,"),
        ("such.yaml", "there is no such file (shipped: ar,"),
    ],
)  # fmt: skip
def test_a_recipe_that_is_not_there(recipe, message):
    assert message in problem(recipe=recipe)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 3\noptim: {lr: 1\nseed: 1\n", r"mine\.yaml, line 3: "),
        ("steps: 3\n\tseed: 1\n", r"mine\.yaml, line 2: "),
        ("steps: 3\nseed: 1\nsteps: 4\n", r"mine\.yaml, line 3: the key 'steps' is given twice"),
        ("steps: !!python/object:os.system x\n", r"mine\.yaml, line 1: could not determine a constructor"),
        ("- steps\n", r"mine\.yaml: a recipe is made of lines key: value, got list"),
        ("\0", r"mine\.yaml: cannot be read as YAML: "),
    ],
)
def test_what_is_no_recipe_says_where(write, text, message):
    assert re.search(message, problem(recipe=write(text)))


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe\x00\x80")
    assert "cannot be read as YAML" in problem(recipe=tmp_path / "mine.yaml")


# Overrides


def test_overrides_reach_every_corner():
    config = load("grpo", [
        "task.people=2-3",
        "steps=1e1", "seed = 3", "optim.lr=3e-7", "optim.betas=[0.8, 0.9]", "objective.dual_clip=null",
        "lora.rank=4", "lora.targets=[q_proj, v_proj]", "tracking=wandb", "run=2026-01-02", "model=some/folder",
        "evaluation={every: 5, problems: 9}", "stop_at=0.9", "rollout.temperature=1", "remote_code=true",
    ])  # fmt: skip
    assert (config.steps, config.seed, config.optim.lr, config.optim.betas) == (10, 3, 3e-7, (0.8, 0.9))
    assert config.objective.dual_clip is None
    assert config.task.settings == {"people": "2-3"}
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (4, 32, ("q_proj", "v_proj"))
    assert (config.tracking, config.run, config.model) == (("wandb",), "2026-01-02", "some/folder")
    assert (config.evaluation.every, config.evaluation.problems, config.evaluation.temperature) == (5, 9, 0)
    assert (config.stop_at, config.rollout.temperature, config.remote_code) == (0.9, 1.0, True)
    assert config.optim.mini_batch == 256


@pytest.mark.parametrize(
    ("overrides", "regulator"),
    [
        (["regulator=ar", "regulator.alpha=0.3"], "ar(alpha=0.3)"),
        (["regulator.alpha=0.3", "regulator=ar"], "ar(alpha=0.3)"),
        (["regulator=ar(alpha=0.1) | lopti", "regulator.threshold=0.5"], "ar(alpha=0.1) | lopti(threshold=0.5)"),
        (["regulator=lopti", "regulator.order=high-first"], "lopti(order='high-first')"),
        (["regulator=nthr(eta=0.5)", "regulator.eta=null", "regulator.beta=5e-1"], "nthr(beta=0.5)"),
        (["regulator.passes=2"], "grpo(passes=2)"),
        (
            ["regulator=tr-grpo", "regulator.low=2", "regulator.high=3"],
            "tr-grpo(low=2, high=3)",
        ),  # alone low is too high
    ],
)
def test_settings_of_the_regulator_by_name(overrides, regulator):
    assert load("grpo", overrides).regulator == regulator


def test_settings_of_a_users_own_regulator(monkeypatch):
    module = types.ModuleType("users_module")
    exec("import poise\n@poise.regulator\ndef plain(batch, gain=1.0): return make(batch, gain)", vars(module))
    module.make = lambda batch, gain: [Phase.of(batch, gain)]
    monkeypatch.setitem(sys.modules, "users_module", module)
    config = load("demo", ["regulator=users_module.plain | lopti", "regulator.gain=0.5"])
    assert config.regulator == "users_module:plain(gain=0.5) | lopti"
    assert regulators.parse(config.regulator)(random_batch())[0].policy.max() == 0.5


def test_another_task_drops_the_settings_of_the_one_before(monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "other", lambda size=3: ("other", size))
    assert load("grpo", ["task.name=other"]).task.settings == {}
    assert load("grpo", ["task.size=4", "task.name=other"]).task.settings == {"size": 4}
    assert load("grpo", ["task.name=kk"]).task.settings == {"people": "3-7"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr=1e-6", "unknown key 'lr'; did you mean 'optim.lr'?"),
        ("stpes=3", "unknown key 'stpes'; did you mean 'steps'?"),
        ("optm.lr=3", "unknown key 'optm'; did you mean 'optim'?"),
        ("optim.clip_low=0.1", "unknown key 'optim.clip_low'; did you mean 'objective.clip_low'?"),
        ("rollout.temprature=1", "did you mean 'rollout.temperature' or 'evaluation.temperature'?"),
        ("optim.zzz=1", "unknown key 'optim.zzz'. (allowed in optim: betas, grad_clip, lr, micro_tokens,"),
        ("zzz=1", "unknown key 'zzz'. (allowed: advantage, algorithm, checkpoint_every, compile,"),
        ("task.poeple=3", "unknown key 'task.poeple'; did you mean 'task.people'?"),
        ("people=3", "unknown key 'people'; did you mean 'task.people'?"),
        ("passes=2", "unknown key 'passes'; did you mean 'regulator.passes'?"),
        ("task.people=99", "task: knights and knaves: people must be between 2 and 12, got 99"),
        ("task.people=5-3", "task: KnightsKnaves: people = '5-3' is empty; in a range the smaller number comes first"),
        ("task.people=two", "task: KnightsKnaves: people must be like 5, (3, 4) or '3-7', got 'two'"),
        ("task.noise=much", "task: KnightsKnaves: noise must be a number, got 'much'"),
        ("task.name=kq", "task: unknown task 'kq'; did you mean 'kk'? (allowed: kk)"),
        ("task=kk", "task = 'kk': must be a group of settings, key: value"),
        ("steps=0", "steps = 0: must be at least 1"),
        ("steps=1.5", "steps = 1.5: must be a whole number"),
        ("steps=true", "steps = True: must be a number"),
        ("steps='3'", "steps = '3': must be a number"),
        ("steps=", "steps = None: must be a whole number"),
        ("model=", "model = None: must be text"),
        ("model=''", "model = '': must not be empty"),
        ("optim.lr=-1", "optim.lr = -1: must be greater than 0"),
        ("optim.lr=.inf", "optim.lr = inf: must be a finite number"),
        ("optim.betas=[0.9]", "optim.betas.1 = [0.9]: is missing"),
        ("optim.betas=[0.9, 1.0]", "optim.betas.1 = 1.0: must be less than 1"),
        ("stop_at=90", "stop_at = 90: must be at most 1"),
        ("stop_at=0.9", "stop_at = 0.9: accuracy is measured only before and after training; set evaluation.every"),
        ("group=1", "group = 1: advantage 'group-zscore' compares the responses to a prompt with each other"),
        ("advantage=zscore", "'leave-one-out' or 'reinforce-pp'; did you mean 'group-zscore'?"),
        ("dtype=bf16", "dtype = 'bf16': must be 'auto', 'float32' or 'bfloat16'; did you mean 'bfloat16'?"),
        ("device=gpu", "device = 'gpu': must be auto, or a device of torch such as cpu, cuda or cuda:1"),
        ("remote_code=perhaps", "remote_code = 'perhaps': must be true or false"),
        ("tracking=3", "tracking = 3: must be a list"),
        ("lora.targets=all", "lora.targets = 'all': must be all-linear, or a list of module names such as"),
        ("lora.dropout=0.1", "lora.dropout = 0.1: must be 0: with dropout the update would not see the policy"),
        ("evaluation.temperature=0", "evaluation: samples = 4 at temperature 0: greedy samples are all the same"),
        ("objective.clip_low=3", "objective: clip_low must be between 0.0 and 1.0, got 3.0"),
        ("objective.kl=k4", "objective: unknown kl 'k4'; did you mean 'k3'? (allowed: k1, k2, k3)"),
        ("objective.aggregation=fixed-length", "objective: aggregation 'fixed-length' needs max_length"),
        ("regulator=lopty", "regulator = 'lopty': unknown regulator 'lopty'; did you mean 'lopti'?"),
        ("regulator=ar(alfa=1)", "regulator = 'ar(alfa=1)': unknown setting of ar 'alfa'; did you mean 'alpha'?"),
        ("regulator.alpha=1", "('grpo' has: passes; alpha is a setting of ar, tr-grpo, amplify)"),
        ("regulator.pases=2", "unknown key 'regulator.pases'; did you mean 'regulator.passes'? ('grpo' has: passes)"),
        ("regulator.passes=0", "regulator.passes = 0: grpo: passes must be between 1 and 100, got 0"),
        ("regulator.passes=0x" + "f" * 9000, "regulator.passes = a whole number of 36000 bits: "),
        ("regulator." + "a" * 9000 + "=1", "unknown key 'regulator.aaaa"),
        ("regulator=a." + "a" * 9000, "...aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa': is too long"),
        ("regulator=ar(alpha=" + "-" * 3000 + "1)", "cannot read the settings of 'ar' in 'ar(alpha=---"),
        ("regulator=subprocess.Popen('true')", "'subprocess.Popen' is not a regulator: let a class inherit from"),
        ("regulator=no_such_module.Mine", "there is no module 'no_such_module' to import"),
        ("a." * 5000 + "a=1", ": the key has 5001 levels, more than 20"),
        ("a" * 90_000 + "=1", "unknown key 'aaaa"),
        ("model=" + "a" * 90_000, "aaaa': is too long"),
        ("dtype=" + "a" * 90_000, "aaaa': must be 'auto', 'float32' or 'bfloat16'"),
        ("model=" + "a" * 200_000, "aaaa': cannot read the value: it has more than 100,000 characters"),
        ("steps=1e999999", "steps = inf: must be a finite number"),
        ("steps=1e30", "steps = 1e+30: is too large"),
        ("seed=99999999999999999999", "seed = 99999999999999999999: must be at most 2147483647"),
        ("optim.lr=1e999999", "optim.lr = inf: must be a finite number"),
        ("optim.betas=[" + "1," * 3000 + "]", "optim.betas = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, ...]: must have at most 2"),
        ("steps=!!int x", "override 'steps=!!int x': cannot read the value: cannot read the value 'x'"),
        ("steps=\0", "cannot read the value: unacceptable character #x0000"),
        ("lr", "override 'lr': write key=value, such as optim.lr=1e-6"),
        ("=3", "override '=3': write key=value, such as optim.lr=1e-6"),
        ("optim.=3", "override 'optim.=3': write key=value, such as optim.lr=1e-6"),
        ("optim.betas=[1", "override 'optim.betas=[1': cannot read the value: expected ',' or ']'"),
    ],
)  # fmt: skip
def test_mistakes_are_answered_with_what_was_meant(override, message):
    line = problem(override)
    assert message in line
    assert len(line) < 600


def test_a_setting_that_two_parts_have_is_ambiguous():
    line = problem("regulator=ar | amplify", "regulator.alpha=0.3")
    assert line == "regulator.alpha: ar and amplify both have it; write the regulator out, regulator='ar | amplify'"
    assert "unknown regulator 'lopty'" in problem("regulator=lopty", "regulator.alpha=0.3")
    assert problem("regulator=ar | amplify", "alpha=1").endswith("did you mean 'lora.alpha' or 'regulator.alpha'?")


def test_all_problems_are_told_at_once():
    assert len(problems("stpes=3", "lr=1", "group=0", "dtype=half")) == 4
    assert len(problems("lr", "x=[")) == 2
    assert len(problems("regulator.alpha=1", "regulator.passes=0")) == 2


def test_keys_that_are_no_text(write):
    assert "1" in problem(recipe=write("1: 2\n"))
    assert problem("task={}", recipe=write("task: 3\nzzz: 1\n")).startswith("unknown key 'zzz'")


def test_one_response_per_prompt_needs_no_group_with_reinforce_pp():
    assert load("demo", ["group=1", "advantage=reinforce-pp"]).group == 1


def test_the_error_is_a_value_error_and_travels_between_processes():
    with pytest.raises(ValueError, match=r"optim\.lr") as caught:
        load("demo", ["lr=1", "stpes=2"])
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) == "\n".join(again.problems)


# Writing


@pytest.mark.parametrize("name", recipes())
def test_a_dump_is_a_recipe(name, write):
    config = load(name)
    assert load(write(dump(config))) == config
    assert Config.model_validate(json.loads(json.dumps(config.model_dump(mode="json")))) == config
    assert yaml.safe_load(dump(config)) == config.model_dump(mode="json")


texts = st.text(min_size=1).filter(lambda text: text.isprintable()) | st.sampled_from(
    ["1e4", "1.5e3", "2026-01-02", "null", "yes", "3", "0x1f", "1:30", "~", "a: b", "# c", " d ", "é"]
)


@given(
    texts,
    st.sampled_from(["tensorboard", "wandb", "trackio"]),
    st.floats(1e-12, 10),
    st.none() | st.floats(1.01, 1e6),
    st.sampled_from(["2-3", 5, (3, 4)]),
    st.none() | st.fixed_dictionaries({"rank": st.integers(1, 9), "targets": st.lists(texts, min_size=1, max_size=2)}),
)
def test_whatever_is_in_it_survives_the_trip(tmp_path_factory, run, track, lr, dual, people, lora):
    groups = {"optim": {"lr": lr}, "objective": {"dual_clip": dual}, "task": {"people": people}, "lora": lora}
    config = Config(run=run, tracking=[track], **groups)
    path = tmp_path_factory.mktemp("trip") / "mine.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load(path) == config
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_the_docstring_tells_the_truth():
    example = re.search(r"load\((.*)\)\n", inspect.getdoc(sys.modules["poise.config.schema"]))[1]
    name, overrides = eval(f"({example})")
    config = load(name, overrides)
    assert (config.regulator, config.optim.lr, config.task.settings) == ("ar(alpha=0.3)", 2e-6, {"people": "3-5"})


def test_the_home_folder_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    config = load("demo", ["run=~/runs/x", "model=~/models/y"])
    assert (config.run, config.model) == ("/home/ada/runs/x", "/home/ada/models/y")
    assert load("demo", ["run=./~x"]).run == "./~x"
    with pytest.raises(ConfigError, match=r"run = '~nobody-here/x': .* there is no user 'nobody-here'"):
        load("demo", ["run=~nobody-here/x"])
