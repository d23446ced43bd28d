"""The user's own code as ``file.py:Name``: tasks, regulators, algorithms; and the short forms of a task."""

import json
import re
import sys
from pathlib import Path

import pytest

import poise
from poise import regulators, tasks
from poise._lib import user_code
from poise.sampling import algorithms
from poise.training.config.schema import ConfigError, load, restore
from support.command_line import SMALL, fails
from support.command_line import poise as run

MINE = """
from __future__ import annotations
from dataclasses import dataclass
from pathlib import Path
import beside
import poise
from poise.tasks import Problem, Score

Path("ran").touch()

@dataclass(frozen=True)
class Sums:
    largest: int = 9

    def problems(self, split, seed):
        for number in range(10**6):
            yield Problem(f"{split}-{seed}-{number}", f"{number % self.largest} + 1 =", "easy", {"sum": number + 1})

    def score(self, problem, text):
        return Score(float(len(text) % 3), len(text) % 2 == 0)

@poise.task
def easy(size: int = 3):
    return Sums(largest=size)

@poise.task
def broken():
    return 3

@poise.task
def raises():
    raise RuntimeError("no luck")

@dataclass(frozen=True)
class Half(poise.Regulator):
    weight: float = 0.5

    def phases(self, batch):
        return [poise.Phase.of(batch, self.weight)]

@poise.algorithm
@dataclass(frozen=True)
class Twice:
    group: int = 2

    def collect(self, problems, sampler, seed, memory=None): ...

class Nothing:
    pass
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(user_code, "FOLDERS", [str(tmp_path)])
    before = set(sys.modules)
    Path("code").mkdir()
    Path("code/mine.py").write_text(MINE)
    Path("code/beside.py").write_text("")
    Path("flat.py").write_text(MINE.replace("import beside\n", ""))
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("mine", "flat", "beside", "bare")):
            del sys.modules[name]


def test_a_task_is_found_by_file_and_by_module():
    for name in ("code/mine.py:Sums", "./code/mine.py:Sums", "flat.py:Sums", "flat.Sums", "flat:Sums"):
        task = tasks.get(name, largest=4)
        assert (task.largest, task.name) == (4, "Sums")
        assert tasks.settings_of(name) == ["largest"]
    assert tasks.get("flat.py:easy", size=2).largest == 2
    assert poise.task is tasks.task


def test_a_task_of_ones_own_trains_resumes_and_is_measured():
    run_ = ["task.name=code/mine.py:Sums", "task.largest=5", "run=mine"]
    small = [each for each in SMALL if not each.startswith("task.")]
    assert run("train", "tiny", *small, *run_).exit_code == 0
    assert "--trust" in fails("train", "tiny", *small, *run_)  # in the command that resumes
    assert "add --trust" in fails("train", "--resume", "run=mine", "steps=2")
    assert run("train", "--resume", "run=mine", "steps=2", "--trust", "--quiet").exit_code == 0
    shown = run("eval", "mine", "--trust", "problems=1", "samples=1", "max_tokens=4").output
    assert "on task code/mine.py:Sums (largest=5)" in shown


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:Sums", "there is no file"),
        ("code/mine.py:Sumz", "did you mean 'Sums'"),
        ("code/mine.py:Nothing", "is not a task: give a class problems(split, seed) and one of score"),
        ("code/mine.py:Path", "is not a task"),
        ("code/mine.py:broken", "is not a task: it lacks problems"),
        ("code/mine.py:raises", "RuntimeError: no luck"),
        ("no_such_module.Sums", "there is no module 'no_such_module' to import"),
        ("kx", "unknown task 'kx'; did you mean 'kk'?"),
    ],
)
def test_mistakes_are_answered(name, message):
    with pytest.raises(ConfigError) as caught:
        load("tiny", [f"task.name={name}"])
    assert message in str(caught.value)


def test_an_unknown_generator_of_reasoning_gym_is_named():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match="no_such_generator"):
        load("tiny", ["task.name=rg/no_such_generator"])


BARE = """
import poise

class Task:
    size: int = 3

    def problems(self, split, seed):
        yield poise.tasks.Problem("0", "?", "easy", {})

    def score(self, problem, text):
        return True

class Reward:
    size: int = 3

    def __call__(self, completions, **columns):
        return [0.0 for _ in completions]

class Weight(poise.Regulator):
    size: float = 1.0

    def phases(self, batch):
        return [poise.Phase.of(batch, self.size)]

@poise.regulator
class Marked:
    size: float = 1.0

    def __call__(self, batch):
        return [poise.Phase.of(batch, self.size)]

@poise.regulator
def function(batch):
    return [poise.Phase.of(batch, 1.0)]

@poise.algorithm
class Algorithm:
    size: int = 3
"""


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (["task.name=bare.py:Task", "task.size=4"], "Task"),
        (["data=rows.jsonl", "reward=bare.py:Reward(size=4)"], "Reward"),
        (["regulator=bare.py:Weight(size=4)"], "Weight"),
        (["regulator=bare.py:Weight(4)"], "Weight"),
        (["regulator=ar | bare.py:Marked(size=4)"], "Marked"),
        (["algorithm=bare.py:Algorithm(size=4)"], "Algorithm"),
    ],
)
def test_a_class_whose_dataclass_was_forgotten_is_told_so(settings, name, tmp_path):
    (tmp_path / "bare.py").write_text(BARE)
    (tmp_path / "rows.jsonl").write_text('{"question": "1", "answer": "1"}\n' * 20)
    with pytest.raises(ConfigError, match=f"write @dataclass above class {name}, and its fields"):
        load("tiny", settings)


@pytest.mark.parametrize(
    ("setting", "listed"),
    [
        ("task.name=flat.py:Sumz", "did you mean 'Sums'? (allowed: Sums, easy, broken, raises)"),
        ("regulator=flat.py:Hal", "did you mean 'Half'? (allowed: Half)"),
        ("algorithm=flat.py:Twize", "did you mean 'Twice'? (allowed: Twice)"),
    ],
)
def test_only_what_a_setting_can_name_is_suggested(setting, listed):
    with pytest.raises(ConfigError) as error:  # and not what the file imports, or has for other settings
        load("tiny", [setting])
    assert listed in str(error.value)


def test_where_no_dataclass_was_forgotten_none_is_asked_for(tmp_path):
    (tmp_path / "bare.py").write_text(BARE)
    for settings in (
        ["task.name=flat.py:Sums", "task.largets=4"],
        ["regulator=flat.py:Half(wait=4)"],
        ["regulator=bare.py:function(size=4)"],
        ["regulator=grpo(size=4)"],
    ):
        with pytest.raises(ConfigError) as error:
            load("tiny", settings)
        assert "@dataclass" not in str(error.value)
    with pytest.raises(ConfigError, match=r"unknown key 'task.largets'; did you mean 'task.largest'\?"):
        load("tiny", ["task.name=flat.py:Sums", "task.largets=4"])


def test_an_error_in_the_file_names_its_line():
    Path("bad.py").write_text("x = 1\nraise RuntimeError('half-way')\n")
    with pytest.raises(ValueError, match=r"importing bad.py failed: .*bad.py, line 2: RuntimeError: half-way"):
        tasks.get("bad.py:Sums")
    with pytest.raises(ValueError, match="half-way"):  # it is not left half loaded
        tasks.get("bad.py:Sums")
    with pytest.raises(ConfigError, match=r"unknown key 'task\.larges'"):
        load("tiny", ["task.name=flat.py:Sums", "task.larges=3"])


RAISES = """
from poise.tasks import Problem

class NoFields:
    def __init__(self): self.first = Problem("a")
    def problems(self, split, seed): yield self.first
    def score(self, problem, text): return True

class HalfAProblem:
    def problems(self, split, seed): yield Problem("a", "b")
    def score(self, problem, text): return True

class Whole:
    def problems(self, split, seed):
        while True: yield Problem("a", "b", "all", {})

class NoScore(Whole):
    def score(self, problem, text): raise ValueError("oh no")

class NoEpisode(Whole):
    def episode(self, problem): raise ValueError("oh no")

class NoStart(Whole):
    def episode(self, problem): return self
    def start(self): raise ValueError("oh no")
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoFields", r"TypeError: .*'difficulty', and 'data' \(.*raises\.py, line 5\)"),
        ("HalfAProblem", r"problems\(\) of task 'HalfAProblem' raised TypeError: .* \(.*raises\.py, line 10\)"),
        ("NoScore", r"score\(\) of task 'NoScore' raised ValueError: oh no \(.*raises\.py, line 18\) \(problem a\)"),
        ("NoEpisode", r"episode\(\) of task 'NoEpisode' raised ValueError: oh no \(.*raises\.py, line 21\)"),
        ("NoStart", r"start\(\) of task 'NoStart' raised ValueError: oh no \(.*raises\.py, line 25\)"),
    ],
)
def test_a_task_that_raises_names_its_line(name, message):
    Path("raises.py").write_text(RAISES)
    said = fails("train", f"task.name=raises.py:{name}", "model=embedded", "steps=1", "prompts=2", "group=2",
                 "evaluation.problems=2", "rollout.max_tokens=4", "device=cpu", f"run={name}")  # fmt: skip
    assert re.search(message, said.splitlines()[-1])


def test_regulators_and_algorithms_come_from_files_too():
    config = load("tiny", ["regulator=ar | code/mine.py:Half(weight=0.25)"])
    assert regulators.text(regulators.parse(config.regulator)) == config.regulator
    assert algorithms.get("code/mine.py:Twice", 4).group == 4


FOREIGN = [
    {"name": "code/mine.py:Sums"},
    {"name": "flat.Sums"},
    {"name": "environment", "factory": "flat.py:Sums"},
    {"name": "data", "file": "rows.jsonl", "reward": "flat.py:easy"},
    {"name": "data", "file": "rows.jsonl", "reward": ["exact", "flat.easy"]},
]


@pytest.mark.parametrize("task", FOREIGN, ids=str)
def test_the_task_of_a_foreign_run_runs_no_code(task):
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"question": f"{i}?", "answer": str(i)}) + "\n" for i in range(40))
    )
    document = load("tiny").model_dump(mode="json") | {"task": task}
    assert user_code.asks_for_code(document)
    with pytest.raises(ConfigError, match="add --trust"):
        restore(document)
    Path("run/checkpoints/step-000001/model").mkdir(parents=True)
    Path("run/config.json").write_text(json.dumps(document))
    Path("run/metrics.jsonl").touch()
    for command in (["train", "--resume", "run=run"], ["eval", "run"], ["diagnose", "run"]):
        fails(*command)
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("task", "asks"),
    [
        ({"name": "kk"}, False), ({"name": "rg/chain_sum"}, False),
        ({"name": "data", "file": "a.b:c", "reward": "regex(pattern='a.b:(c|d)')"}, False),
        ({"name": "poise.tasks.Sokoban"}, False), ({"name": "poise.py:Mine"}, True), ("kk", False),
    ],
)  # fmt: skip
def test_which_tasks_ask_for_code(task, asks):
    assert user_code.asks_for_code({"task": task}) is asks


def test_what_the_user_types_on_top_of_a_foreign_run_is_consent():
    document = load("tiny").model_dump(mode="json")
    typed = {"task": {"name": "flat.py:Sums"}}
    assert restore(document | typed, typed=typed).task.name == "flat.py:Sums"
    with pytest.raises(ConfigError, match="add --trust"):
        restore(document | {"task": {"name": "code/mine.py:Sums"}}, typed=typed)


def test_a_foreign_model_folder_does_not_choose_code():
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("model/warmstart.yaml").write_text("task: flat.py:Sums\ntask_settings: {}\n")
    assert "the model in model asks to run code" in fails("eval", "model")
    assert not Path("ran").exists()


# Short forms


class Stand:
    """A stand-in that takes what the short forms give."""

    name = "stand"

    def __init__(self, file=None, factory=None, reward=(), reward_weights=None, reward_timeout=30, template=""):
        self.given = (file, factory, reward, reward_weights, reward_timeout, template)

    def problems(self, split, seed): ...

    def score(self, problem, text): ...


@pytest.fixture
def _stand(monkeypatch):
    for name in ("data", "environment"):
        monkeypatch.setitem(tasks.TASKS, name, Stand)


@pytest.mark.usefixtures("_stand")
def test_short_forms_expand(tmp_path):
    config = load(None, ["data=q.jsonl", "reward=[a.py:x, math]", "reward_weights=[1, 2]", "reward_timeout=5"])
    assert config.task.name == "data"
    assert config.task.build().given == ("q.jsonl", None, ["a.py:x", "math"], [1, 2], 5, "")
    assert load("tiny", ["environment=e.py:E"]).task.model_dump() == {"name": "environment", "factory": "e.py:E"}
    both = load("tiny", ["data=q.jsonl", "environment=e.py:E"]).task
    assert (both.name, both.settings) == ("environment", {"factory": "e.py:E", "file": "q.jsonl"})
    assert load("tiny", ["data=q", "task.name=data", "task.template=x"]).task.settings["template"] == "x"
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("data: q.jsonl\nreward: math\ntask: {template: t}\n")
    assert load(recipe, ["reward=exact"]).task.build().given == ("q.jsonl", None, "exact", None, 30, "t")
    assert load(recipe, ["data=r.jsonl"]).task.settings == {"file": "r.jsonl", "reward": "math", "template": "t"}


@pytest.mark.usefixtures("_stand")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data=q", "task.name=kk"], "data=q means task.name=data, but task.name=kk is also set: remove one"),
        (
            ["environment=e.py:E", "task.name=data"],
            "environment=e.py:E means task.name=environment, but task.name=data",
        ),
        (["data=q", "task.file=r"], "data is short for task.file, and both are set: remove one of them"),
        (["reward=math"], "task 'kk' scores responses itself and has no setting reward; reward= goes with data=FILE"),
    ],
)
def test_short_forms_that_contradict(overrides, message):
    with pytest.raises(ConfigError) as caught:
        load("tiny", overrides)
    assert message in str(caught.value)


def test_a_prefix_is_given_the_rest_of_the_name(monkeypatch):
    monkeypatch.setitem(tasks.PREFIXES, "some", lambda rest: lambda size=1: Stand(file=(rest, size)))
    assert load("tiny", ["task.name=some/thing/else", "task.size=2"]).task.build().given[0] == ("thing/else", 2)
    assert tasks.settings_of("some/thing") == ["size"]
    assert "some/NAME" in tasks.names()
    with pytest.raises(ConfigError, match=r"unknown key 'task.sise'"):
        load("tiny", ["task.name=some/thing", "task.sise=2"])


def test_a_file_without_a_name_is_asked_for_one(tmp_path):
    (tmp_path / "mine.py").write_text("class Mine: ...\n")
    with pytest.raises(ValueError, match=r"name a class or function of the file, .*mine\.py:Name"):
        user_code.load("environment", str(tmp_path / "mine.py"))
