"""Recipes: the shipped ones, those of a user, and how one inherits from another."""

import re
from pathlib import Path

import pytest

from poise import objective, regulators, tasks
from poise.models.location import SHIPPED
from poise.sampling.erl import Erl
from poise.training.config.documents import RECIPES
from poise.training.config.schema import Config, load, recipes
from support.batches import random_batch
from support.configs import problem

ROOT = Path(__file__).parents[2]
METHODS = ["ar", "ar-lopti", "grpo", "lopti", "nthr", "tr-grpo"]
ALGORITHMS = ["erl", "rltr"]


def test_the_shipped_recipes():
    assert recipes() == sorted([*METHODS, *ALGORITHMS, "demo", "grpo-24gb", "tiny"])
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
    settings = config.objective
    loss, _ = objective.policy_loss(
        batch.old_logp, batch, phases[0], settings, normalizer=objective.normalizer(batch, settings)
    )
    assert loss.isfinite()
    task = config.task.build()
    problem = next(task.problems("train", config.seed))
    episode = tasks.begin(task, problem)
    assert episode.start()
    episode.step("")
    assert episode.score().reward == (-3 if task.name == "kk" else 0)


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_says_what_to_expect_and_what_is_ours(name):
    header = (ROOT / "recipes" / f"{name}.yaml").read_text().partition("\nmodel:")[0]
    if name in ("demo", "tiny"):
        assert "are ours" in header
    else:
        assert re.search(r"arXiv \d{4}\.\d{5}", header)
        assert "\n# To expect: " in header
        assert "\n# Ours: " in header


@pytest.mark.parametrize("name", METHODS)
def test_the_settings_of_the_papers(name):
    config = load(name)
    assert (config.model, config.steps) == ("Qwen/Qwen2.5-3B-Instruct", 5 * (5000 // 64))
    assert config.task.prefill == "<think>"
    assert (config.optim.same_order, config.optim.average_over) == (True, 8)
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
    assert config.objective == theirs
    assert config.rollout.temperature == (1.0 if name == "nthr" else 0.7)


def test_the_settings_of_erl():
    config = load("erl")
    assert config.build_algorithm() == Erl(4, memory=True, reflection_tokens=2048, temperature=0.5, top_p=0.9)
    assert (config.prompts, config.group, config.steps) == (64, 4, 10 * 10_000 // 64)
    assert (config.optim.lr, config.optim.mini_batch, config.rollout.temperature) == (1e-6, 64 * 4, 0.7)
    assert config.objective == objective.Settings(
        clip_low=0.2, clip_high=0.28, dual_clip=3.0, kl_coef=0.001, aggregation="seq-mean-token-sum",
        importance_cap=None,
    )  # fmt: skip
    assert config.task.build() == tasks.get("frozenlake", rules="withheld")


@pytest.mark.parametrize(
    ("name", "regulator"),
    [
        ("demo", regulators.Identity()),
        ("tiny", regulators.Identity()),
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


def test_the_recipe_of_rltr_is_grpo_s_but_for_the_algorithm_and_the_evaluation():
    config = load("rltr")
    assert config.algorithm.startswith("rltr(")
    kept = {"run": "runs/grpo", "algorithm": "grpo", "evaluation": load("grpo").evaluation}
    assert config.model_copy(update=kept) == load("grpo")


def test_the_demo_is_what_runs_without_a_word():
    assert load() == load(None) == load("demo")
    assert load().model == "embedded-plain"
    assert load(None, ["steps=3", "task.people=2"]) == load("demo", ["steps=3", "task.people=2"])


def test_a_model_that_ships_brings_its_recipe():
    assert {*RECIPES} == {*SHIPPED}
    for model, name in RECIPES.items():
        assert load(None, [f"model={model}"]) == load(name)
        assert load(name).model == model


def test_own_data_without_a_recipe_take_the_other_settings_of_the_demo(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    own = load(None, [f"data={path}", "reward=exact"])
    assert own == load("demo", [f"data={path}", "reward=exact"])
    assert own.task.settings == {"file": str(path), "reward": "exact"}
    assert own.rollout == load("tiny").rollout


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


def test_a_recipe_of_a_task_alone_is_the_defaults(write):
    assert load(write("task: {name: kk}\n")) == Config(task={"name": "kk"})


@pytest.mark.parametrize("text", ["# nothing yet\n", "task: {people: 3}\n", "task: {}\n", "steps: 3\n"])
def test_a_recipe_without_a_task_is_told_what_to_write(write, text):
    told = problem(recipe=write(text))
    assert told.startswith("no task is named: write task.name=NAME (kk, ")
    assert "data=FILE reward=NAME" in told
    assert "environment=file.py:Class" in told


def test_a_model_of_ones_own_without_a_recipe_has_the_defaults_for_pretrained_models():
    config = load(None, ["model=some/model", "task.name=kk"])
    assert config == Config(model="some/model", task={"name": "kk"})


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
        ("gppo", f"'gppo'; did you mean 'grpo'? (allowed: {', '.join(recipes())})"),
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
        ("steps: 3\nseed: 1\nsteps: 4\n", r"mine\.yaml, line 3: found duplicate key \"steps\""),
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


def test_keys_that_are_no_text(write):
    assert "1" in problem(recipe=write("task: {name: kk}\n1: 2\n"))
    assert problem("task={name: kk}", recipe=write("task: 3\nzzz: 1\n")).startswith("unknown key 'zzz'")
