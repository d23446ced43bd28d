"""``poise.train`` with Python objects: what is stored, what a resumed run needs, what it refuses, what it returns."""

import copy
import json
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import datasets
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import poise
from poise import Phase, Regulator
from poise._lib.user_code import UserCodeError
from poise.models.location import EMBEDDED, ModelError
from poise.runs.folder import RunFolder
from poise.tasks import Problem, Score, TaskError
from poise.tasks.data import task_of
from poise.training.config import ConfigError
from poise.training.resume import TrainError
from support.command_line import fails
from support.command_line import poise as command
from support.small_runs import parameters

ROWS = [{"question": f"word {i}", "answer": str(i)} for i in range(20)]
SMALL = {
    "recipe": "tiny", "quiet": True, "prompts": 2, "group": 3, "evaluation": "off", "rollout": {"max_tokens": 12},
    "rollouts_every": 1, "device": "cpu",
}  # fmt: skip


def letters(weight):
    """A closure: its weight is not in its source."""

    def different(completions, **_):
        return [weight * len(set(text)) for text in completions]

    return different


@dataclass(frozen=True)
class Softer(Regulator):
    """A method of the user's own."""

    power: float = 0.5

    def phases(self, batch):
        """w = p ** power."""
        return [Phase.of(batch, batch.prob**self.power)]


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(EMBEDDED)


@pytest.fixture(scope="module")
def objects(model):
    """What a person holds in Python: a model, a table, a closure, an instance."""
    return {
        "model": model,
        "data": datasets.Dataset.from_list(ROWS),
        "reward": [letters(0.1), "exact"],
        "regulator": poise.regulators.Lopti(0.3) | Softer(0.25),
    }


@pytest.fixture(scope="module")
def whole(objects, tmp_path_factory):
    """A run of three steps in one go."""
    before = {name: value.clone() for name, value in objects["model"].state_dict().items()}
    result = poise.train(**objects, **SMALL, steps=3, run=tmp_path_factory.mktemp("api") / "whole")
    assert all(torch.equal(value, before[name]) for name, value in objects["model"].state_dict().items())
    return result


@pytest.fixture(scope="module")
def cut(objects, whole):
    """The same run, resumed after two steps."""
    place = whole.run.with_name("cut")
    poise.train(**objects, **SMALL, steps=2, run=place)
    return poise.train(resume=place, **objects, steps=3, quiet=True)


def metrics(run):
    """Those that do not depend on the clock."""
    lines = RunFolder.open(run, resume=False).metrics()
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


def test_a_run_with_objects_resumes_bit_for_bit(whole, cut):
    assert metrics(cut.run) == metrics(whole.run)
    ours, theirs = (parameters(RunFolder.open(each.run, resume=False)) for each in (whole, cut))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_folder_keeps_names_and_fingerprints(whole):
    config = json.loads((whole.run / "config.json").read_text())
    assert config["model"] == "python:model"
    assert config["task"] == {"name": "data", "file": "python:data", "reward": ["python:different", "exact"]}
    assert config["regulator"] == "lopti(threshold=0.3) | python:Softer"
    (code,) = json.loads((whole.run / "code.json").read_text())
    assert {name: [*parts] for name, parts in code["code"].items() if name == "python:model"} == {
        "python:model": ["weights", "tokenizer"]
    }
    assert code["code"].keys() == {"python:model", "python:different", "python:Softer"}
    assert json.loads((whole.run / "data.json").read_text())["fingerprint"]


@pytest.mark.parametrize(
    ("name", "other", "kind", "message"),
    [
        ("reward", lambda _: [letters(0.2), "exact"], TrainError, "python:different: not the same object"),
        ("regulator", lambda _: poise.regulators.Lopti(0.3) | Softer(0.5), TrainError, "python:Softer: not the same"),
        ("regulator", lambda _: "lopti(threshold=0.3)", TrainError, "regulator differs"),
        ("data", lambda data: data.select(range(19)), TaskError, "the data in python:data differ"),
        ("model", lambda model: type(model)(model.config), TrainError, "python:model: not the same object"),
        ("reward", lambda _: [len, "exact"], TrainError, "task.reward differs"),
    ],
)
def test_other_objects_are_refused_by_name(whole, objects, name, other, kind, message):
    others = objects | {name: other(objects[name])}
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED) if name == "model" else None
    for steps in [4] if kind is TaskError else [4, 3]:  # also of a run that has nothing left to train
        with pytest.raises(kind, match=message):
            poise.train(resume=whole.run, **others, tokenizer=tokenizer, steps=steps, quiet=True)
    assert len(metrics(whole.run)) == 3


def test_missing_objects_are_named_from_python_and_on_the_command_line(whole, objects):
    call = f'poise.train(resume="{whole.run}", model=…, data=…, reward=…, regulator=…)'
    needed = "model (python:model), data (python:data), reward (python:different), regulator (python:Softer)"
    with pytest.raises(ConfigError) as error:
        poise.train(resume=whole.run, steps=4)
    assert needed in str(error.value)
    assert call in str(error.value)
    printed = fails("train", "--resume", whole.run, "steps=4")
    assert needed in printed
    assert call in printed
    with pytest.raises(ConfigError, match=r"cannot hold: regulator \(python:Softer\)"):
        poise.train(resume=whole.run, **{key: value for key, value in objects.items() if key != "regulator"})


def test_report_works_and_eval_and_diagnose_say_what_is_needed(whole):
    assert command("report", whole.run, "--out", whole.run / "other.html").exit_code == 0
    for name in ("eval", "diagnose"):
        printed = fails(name, whole.run)
        assert "data (python:data), reward (python:different)" in printed
        assert "name others, data=FILE reward=NAME" in printed
        assert "python:Softer" not in printed
    rows = whole.run.with_name("rows.jsonl")
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    measured = command("eval", whole.run, f"data={rows}", "reward=exact", "problems=1", "samples=1", "max_tokens=8")
    assert measured.exit_code == 0, measured.output


def test_the_result(whole, monkeypatch):
    assert whole.summary["steps"] == 3
    assert list(whole.curves["step"]) == [1, 2, 3]
    assert repr(whole) == f"<poise run {str(whole.run)!r}: 3 steps>"
    assert "data:image/png;base64,iVBORw0KGgo" in whole._repr_html_()
    assert not whole.model.training
    assert type(whole.model).__module__.startswith("transformers.")
    saved = parameters(RunFolder.open(whole.run, resume=False))
    assert all(torch.equal(value, saved[name]) for name, value in whole.model.named_parameters())
    tokens = whole.tokenizer("Who is a knight?", return_tensors="pt")
    assert whole.model.generate(**tokens, max_new_tokens=2).shape[1] == tokens["input_ids"].shape[1] + 2
    assert whole.report().read_text().startswith("<!doctype html>")
    assert whole.report(whole.run / "mine.html") == whole.run / "mine.html"
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert [row["step"] for row in whole.curves] == [1, 2, 3]


def test_a_loaded_model_trains_as_its_folder_does(model, tmp_path):
    runs = [poise.train(**SMALL, model=each, steps=2, run=tmp_path / "run") for each in (model, str(EMBEDDED))]
    assert runs[1].run == tmp_path / "run-2"  # a cell is run twice
    assert metrics(runs[0].run) == metrics(runs[1].run)


def test_lora_on_a_loaded_model(model, tmp_path):
    settings = SMALL | {"optim.lr": 1e-2, "objective": {"kl_coef": 0.01, "entropy_coef": 0.1}}
    result = poise.train(**settings, model=model, lora={"rank": 2}, steps=1, run=tmp_path / "run")
    changed = [
        name
        for (name, value), other in zip(result.model.named_parameters(), model.parameters(), strict=True)
        if not torch.equal(value, other)
    ]
    assert any("q_proj" in name for name in changed)
    assert not any("embed" in name for name in changed)
    with pytest.raises(ModelError, match=r"names no model .* passed to poise.train, the result of that call has"):
        poise.load_policy(str(result.run))


def test_what_has_a_name_need_not_be_passed_again(tmp_path):
    named = {
        "task": poise.tasks.get("kk", people=2),
        "regulator": poise.regulators.AdvantageReweighting(alpha=0.3),
        "algorithm": poise.Grpo(group=3),
        "advantage": poise.advantages.leave_one_out,
        "objective": {"surrogate": poise.surrogates.Cispo()},
    }
    result = poise.train(**SMALL, **named, steps=1, run=tmp_path / "run")
    config = RunFolder.open(result.run, resume=False).config
    assert config["task"] == {"name": "kk", "people": [2]}
    assert [config[key] for key in ("regulator", "algorithm", "advantage")] == [
        "ar(alpha=0.3)", "grpo(group=3)", "leave-one-out",
    ]  # fmt: skip
    assert config["objective"]["surrogate"] == "cispo"
    assert not (result.run / "code.json").exists()
    assert poise.train(resume=result.run, steps=2, quiet=True).summary["steps"] == 2
    assert command("train", "--resume", result.run, "steps=3", "--quiet").exit_code == 0


@dataclass(frozen=True)
class Echo:
    """A task of the user's own."""

    size: int = 3

    def problems(self, split, seed):
        """Endless."""
        number = seed * 1000 + (split == "test") * 500
        while True:
            yield Problem(f"echo/{number}", f"say {number % self.size}", "all", {})
            number += 1

    def score(self, problem, text):  # noqa: ARG002
        """By length."""
        return Score(len(set(text)) / 10, bool(text))


@dataclass(frozen=True)
class Twice:
    """An algorithm of the user's own."""

    def collect(self, problems, sampler, seed, memory=None):
        """Two attempts at each problem."""
        return poise.Grpo(2).collect(problems, sampler, seed, memory)


class Room:
    """An environment of the user's own."""

    def __init__(self, number=1):
        self.number = number

    def reset(self, **_):
        """The first message."""
        return "look around"

    def get_reward(self):
        """The same for all."""
        return float(self.number)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"task": Echo(size=5), "algorithm": Twice()}, {"task": {"name": "python:Echo"}, "algorithm": "python:Twice"}),
        ({"task": {"name": Echo, "size": 5}}, {"task": {"name": "python:Echo", "size": 5}}),
        ({"task": task_of(ROWS, reward=letters(1), held_out=0.2)},
         {"task": {"name": "data", "file": "python:data", "reward": "python:different", "held_out": 0.2}}),
        ({"environment": Room(2)}, {"task": {"name": "environment", "factory": "python:Room"}}),
        ({"environment": Room, "data": [{"prompt": f"go {i}"} for i in range(20)], "reward": lambda completions, **_: [
            float(i) for i, _ in enumerate(completions)]},
         {"task": {"name": "environment", "factory": "python:Room", "file": "python:data", "reward": "python:lambda"}}),
        ({"data": [{"name": ROWS, "weight": 2}, {"name": datasets.Dataset.from_list(ROWS[:9])}], "reward": "exact"},
         {"task": {"name": "data", "file": [{"name": "python:data", "weight": 2}, {"name": "python:data_2"}],
                   "reward": "exact"}}),
        ({"task": "math", "data": {"train": ROWS[:15], "test": ROWS[15:]}},
         {"task": {"name": "math", "file": "python:data"}}),
    ],
    ids=["task", "class", "task_of", "environment", "rows", "mixture", "splits"],
)  # fmt: skip
def test_objects_of_all_kinds(tmp_path, given, stored):
    result = poise.train(**SMALL, **given, steps=1, run=tmp_path / "run", **{"rollout.max_prompt": 300})
    config = RunFolder.open(result.run, resume=False).config
    assert {key: config[key] for key in stored} == stored
    needed = {key: value for key, value in given.items() if key != "algorithm" or "algorithm" in stored}
    assert poise.train(resume=result.run, **needed, steps=2, quiet=True).summary["steps"] == 2


def test_two_functions_of_one_name_and_a_table_to_hold_out(tmp_path):
    given = {"data": ROWS, "reward": [letters(0.1), letters(1.0)], "task": {"test_file": ROWS[:5]}}
    result = poise.train(**SMALL, **given, steps=1, run=tmp_path / "run")
    task = RunFolder.open(result.run, resume=False).config["task"]
    assert task["reward"] == ["python:different", "python:different_2"]
    assert task["test_file"] == "python:test_data"
    with pytest.raises(ConfigError, match=r'\*\*\{"task.test_file": …\}'):
        poise.train(resume=result.run)


def raising(**_):
    raise KeyError("gold")


class NoTask:
    """It cannot score a reply."""

    def problems(self, split, seed):
        """None."""


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"learning_rate": 1e-5}, ConfigError, "unknown key 'learning_rate'; did you mean 'optim.lr'"),
        ({"train_dataset": ROWS}, ConfigError, "unknown argument 'train_dataset'; did you mean 'data'"),
        ({"optim.lr": "high"}, ConfigError, "optim.lr = 'high': must be a number"),
        ({"reward": letters(1)}, ConfigError, "scores responses itself and has no setting reward"),
        ({"data": ROWS}, ConfigError, "a dataset needs a reward"),
        ({"data": ROWS, "reward": 3}, TypeError, "a reward must be a name, a callable or a list of these, got 3"),
        ({"data": 3, "reward": "exact"}, ConfigError, "data must be a file, a hub id, a datasets.Dataset"),
        ({"data": iter(ROWS), "reward": "exact"}, ConfigError, "can be read only once"),
        ({"model": 3}, TypeError, "expected a hub id, a folder or a loaded transformers model, got 3"),
        ({"tokenizer": object()}, ConfigError, "tokenizer: it goes with a loaded model"),
        ({"regulator": 3}, TypeError, "a regulator is a callable from TokenBatch to phases, got 3"),
        ({"algorithm": 3}, TypeError, r"an algorithm is an object with collect\(…\), got 3"),
        ({"environment": 3}, TypeError, "an environment is a class, a function or an object with reset, got 3"),
        ({"task": 3}, TypeError, "a task has problems"),
        ({"resume": "runs/nowhere"}, FileNotFoundError, "runs/nowhere"),
        ({"resume": "runs/x", "run": "runs/y"}, ConfigError, "remove run"),
        ({"recipe": "none"}, ConfigError, "unknown recipe 'none'"),
        ({"resume": True}, TypeError, 'resume: name the folder of the run, resume="runs/mine"; got True'),
        ({"recipe": 3}, TypeError, "recipe: expected a recipe's name, a YAML file or a poise.Config, got 3"),
        ({"callbacks": [3]}, TypeError, "callbacks: expected objects with on_start"),
        ({"callbacks": 3}, TypeError, "callbacks: expected objects with on_start"),
        ({"data": "python:data", "reward": "exact"}, ConfigError, "python:data stands for a Python object"),
        ({"regulator": lambda batch: batch.nothing}, UserCodeError, r"regulator 'python:lambda' failed: AttributeErr"),
        ({"data": ROWS, "reward": raising}, poise.tasks.RewardError, "raising.*raised KeyError: 'gold'"),
        ({"optim": {"lr": 1e-5}, "optim.lr": 1e-4}, ConfigError, "optim.lr has two values"),
        ({"evaluation.problems": 4}, ConfigError, "evaluation has two values"),
        ({"lora": LoraConfig(r=4)}, ConfigError, r"lora = LoraConfig.*must be a group of settings, \{key: value\}"),
        (
            {"task": NoTask()},
            ConfigError,
            r"NoTask is not a task: give NoTask problems\(split, seed\) and one of score",
        ),
        ({"task": NoTask}, ConfigError, "NoTask is not a task"),
        (
            {"data": {"question": ["a", "b"]}, "reward": "exact"},
            ConfigError,
            r"pass datasets.Dataset.from_dict\(data\)",
        ),
        (
            {"data": ROWS, "task.test_file": ROWS, "reward": "exact"},
            poise.tasks.TaskError,
            "no problem in split train; 20 of 20 questions in python:data left out of training, as they are held out",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mistakes_are_exceptions_that_say_what_is_wrong(tmp_path, monkeypatch, given, kind, message):
    monkeypatch.chdir(tmp_path)
    settings = {key: value for key, value in SMALL.items() if "resume" not in given or key == "quiet"}
    with pytest.raises(kind, match=message):
        poise.train(**settings | given)
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"name": "data", "file": "x.jsonl", "reward": letters(1)}, "reward"),
        ({"name": "data", "file": [{"name": object()}], "reward": "exact"}, "data"),
        ({"name": "environment", "factory": Room}, "environment"),
    ],
)
def test_a_config_refuses_objects_and_names_the_argument_that_takes_them(settings, argument):
    with pytest.raises(
        ValueError, match=rf"settings hold text and numbers; Python objects go to poise.train\({argument}="
    ):
        poise.Config(task=settings)


def test_a_config_is_a_recipe(tmp_path):
    config = poise.config.load("tiny", ["steps=1", "prompts=2", "group=2", "evaluation=off", "rollout.max_tokens=8"])
    seen = []
    result = poise.train(
        recipe=config, run=tmp_path / "run", quiet=True, callbacks=[SimpleNamespace(on_step=seen.append)]
    )
    assert result.summary["steps"] == len(seen) == 1
    assert isinstance(result.config, poise.Config)
    with pytest.raises(FileExistsError, match="is not empty"):
        poise.train(recipe=result.config, quiet=True, renumber=False)


def test_a_frozen_model_and_one_without_a_tokenizer_are_refused(model, tmp_path):
    frozen = AutoModelForCausalLM.from_pretrained(EMBEDDED).requires_grad_(False)
    with pytest.raises(ModelError, match="none of its weights requires a gradient"):
        poise.train(**SMALL, model=frozen, run=tmp_path / "run")
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model.config.to_dict() | {"_name_or_path": ""}))
    with pytest.raises(ModelError, match="pass its tokenizer too"):
        poise.train(**SMALL, model=made, steps=1, run=tmp_path / "run")
    with pytest.raises(TypeError, match="tokenizer: expected a tokenizer of transformers, or its name, got 3"):
        poise.train(**SMALL, model=made, tokenizer=3, steps=1, run=tmp_path / "run")
    settings = SMALL | {"device": torch.device("cpu"), "dtype": torch.float32}
    result = poise.train(**settings, model=made, tokenizer="embedded", steps=1, run=tmp_path / "run")
    assert (result.config.device, result.config.dtype) == ("cpu", "float32")


def test_a_model_with_an_adapter(model, tmp_path, capsys):
    """peft's models are merged and trained as a whole, with a note; those that cannot be merged are refused."""
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=2, task_type="CAUSAL_LM"))
    given = {"model": adapted, "data": ROWS, "reward": letters(0.1), "optim.lr": 1e-2}
    result = poise.train(**SMALL | {"quiet": False}, **given, steps=1, run=tmp_path / "run")
    assert "model: its adapter is merged, and all weights are trained; lora.rank=16" in capsys.readouterr().out
    assert not torch.equal(result.model.get_input_embeddings().weight, model.get_input_embeddings().weight)
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelError, match="only peft can merge: pass the adapter's folder"):
        poise.train(**SMALL, model=AutoModelForCausalLM.from_pretrained(tmp_path / "adapter"), tokenizer="embedded")


SCRIPT = """
import sys, poise
rows = [{"question": f"word {i}", "answer": str(i)} for i in range(20)]
weight = WEIGHT

def different(completions, **_):
    return [weight * len(set(text)) for text in completions]

def half(batch):
    return [poise.Phase.of(batch, 0.5)]

more = {"resume": "run"} if STEPS > 1 else {"run": "run", "recipe": "tiny", "prompts": 2, "group": 3,
    "evaluation": "off", "rollout": {"max_tokens": 12}, "device": "cpu"}
try:
    print(poise.train(data=rows, reward=different, regulator=half, steps=STEPS, quiet=True, **more))
except poise.trainer.TrainError as error:
    print("refused:", error)
"""


def test_functions_without_source_in_one_process(tmp_path, monkeypatch, capsys):
    """As typed into ``python -``: a quick stand-in for the test below."""
    monkeypatch.chdir(tmp_path)
    for weight, steps in (("0.1", 1), ("0.1", 2), ("0.2", 3), ("0.1", 3)):
        text = SCRIPT.replace("WEIGHT", weight).replace("STEPS", str(steps))
        exec(compile(text, "<stdin>", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["<poise run 'run': 1 steps>", "<poise run 'run': 2 steps>"]
    assert printed[2].startswith("refused: python:different: not the same object")
    assert printed[3] == "<poise run 'run': 3 steps>"


@pytest.mark.slow
def test_functions_without_source(tmp_path):
    """Typed into ``python -``, where no file has their source."""

    def typed(weight, steps):
        text = SCRIPT.replace("WEIGHT", weight).replace("STEPS", steps)
        done = subprocess.run(
            [sys.executable, "-"], input=text, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert typed("0.1", "1") == "<poise run 'run': 1 steps>\n"
    assert typed("0.1", "2") == "<poise run 'run': 2 steps>\n"
    assert "refused: python:different: not the same object" in typed("0.2", "3")


def test_a_config_made_in_python_explains_mistakes_as_the_command_line_does():
    with pytest.raises(ConfigError, match=r"optim.lr = -1: must be greater than 0\nunknown key 'stepz'.*'steps'"):
        poise.Config(task={"name": "kk"}, optim={"lr": -1}, stepz=3)
