"""Runs on data of one's own: kills in the middle of an epoch, of a reward call and of an episode; data that changed."""

import json
import signal
from functools import partial

import pytest
import torch

from poise import trainer
from poise.models.loading import load_policy
from poise.runs.folder import RunFolder
from poise.tasks import RewardError, TaskError
from poise.tasks.data import Data
from poise.tasks.knights_knaves import generate
from poise.training import config as configs
from poise.training.building import check_data, steps_taken
from support.command_line import fails, poise
from support.small_runs import command, parameters

SMALL = [
    "model=embedded", "steps=4", "prompts=4", "group=3", "rollout.max_tokens=6", "evaluation.problems=3", "device=cpu",
    "checkpoint_every=1", "rollouts_every=0", "optim.lr=1e-4",
]  # fmt: skip
# After the second step the reward ends the trainer, the parent of its supervisor, and the environment its own process.
REWARD = """
import os, pathlib, signal
flag = pathlib.Path(__file__).with_name("flag")

def letters(completions, **rest):
    saved = pathlib.Path(__file__).with_name("RUN") / "checkpoints" / "step-000002"
    if ENDS and not flag.exists() and saved.exists():
        flag.touch()
        trainer = int(pathlib.Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(trainer, signal.SIGKILL)
    return [float(sum(map(completion.count, "aeiou"))) for completion in completions]
"""
ENVIRONMENT = """
import os, pathlib, signal
flag = pathlib.Path(__file__).with_name("flag")

class Echo:
    def reset(self, seed, **row):
        self.seed, self.said = seed, 0
        return f"say {seed % 7}"

    def say(self, word: str) -> str:
        \"\"\"Say a word.

        Args:
            word: the word
        \"\"\"
        return word

    def get_reward(self):
        saved = pathlib.Path(__file__).with_name("RUN") / "checkpoints" / "step-000002"
        if ENDS and not flag.exists() and saved.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

def letters(completions, **rest):
    return [float(sum(map(messages[-1]["content"].count, "aeiou"))) for messages in completions]
"""


def questions(path, count=10):
    rows = [{"question": "word " * (i + 1), "answer": str(i)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def same(one, other):
    a, b = (RunFolder.open(path, resume=False) for path in (one, other))
    for name, value in parameters(a).items():
        assert torch.equal(value, parameters(b)[name]), name
    untimed = lambda line: {k: v for k, v in line.items() if not k.startswith("time/")}  # noqa: E731
    lines = [[untimed(line) for line in folder.metrics()] for folder in (a, b)]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 4
    assert all(line["optim/grad_norm"] > 0 for line in lines[0])
    assert a.read_json("summary.json")["after"] == b.read_json("summary.json")["after"]


def killed(*args):
    """Train in a process of its own, which must be killed."""
    with command("train", *args) as process:
        told = process.stdout.read()
        assert process.wait(100) == -signal.SIGKILL, told


@pytest.mark.slow
def test_killed_in_a_reward_call_in_the_middle_of_an_epoch(tmp_path):
    """Nine problems in steps of four: the third step has the last one of an epoch, and three of the next."""
    data = questions(tmp_path / "questions.jsonl")
    for name, train in (("whole", partial(poise, "train")), ("killed", killed)):
        text = REWARD.replace("ENDS", str(name == "killed")).replace('"RUN"', repr(name))
        (tmp_path / f"{name}.py").write_text(text)
        train(*SMALL, f"data={data}", f"reward={tmp_path / name}.py:letters", f"run={tmp_path / name}")
    poise("train", "--resume", "--trust", f"run={tmp_path / 'killed'}")
    same(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
def test_killed_in_an_episode(tmp_path):
    for name, train in (("whole", partial(poise, "train")), ("killed", killed)):
        text = ENVIRONMENT.replace("ENDS", str(name == "killed")).replace('"RUN"', repr(name))
        (tmp_path / f"env_{name}.py").write_text(text)
        where = f"{tmp_path}/env_{name}.py"
        train(*SMALL, f"environment={where}:Echo", f"reward={where}:letters", f"run={tmp_path / name}")
    poise("train", "--resume", "--trust", f"run={tmp_path / 'killed'}")
    same(tmp_path / "whole", tmp_path / "killed")
    for line in RunFolder.open(tmp_path / "killed", resume=False).metrics():
        assert {"rollout/continued", "rollout/reread"} <= line.keys()


def puzzles(path, count=40):
    rows = [dict(generate(2, seed).problem().data) for seed in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", ["data", "environment", "kk"])
def test_a_run_does_not_go_on_with_other_data(tmp_path, kind):
    write = puzzles if kind == "kk" else questions
    file = write(tmp_path / "rows.jsonl")
    (tmp_path / "env.py").write_text(ENVIRONMENT.replace("ENDS", "False"))
    of_kind = {
        "data": [f"data={file}", "reward=exact"],
        "environment": [f"data={file}", f"environment={tmp_path}/env.py:Echo", f"reward={tmp_path}/env.py:letters"],
        "kk": [f"task.file={file}", "task.people=2"],
    }
    args = [*SMALL, *of_kind[kind], f"run={tmp_path / 'run'}"]
    trainer.train(configs.load("tiny", [*args, "steps=1"]), quiet=True)
    write(file, 39)
    longer = configs.load("tiny", [*args, "steps=2"])
    with pytest.raises(TaskError, match=r"rows.jsonl differ from the data with which the run in .* began"):
        trainer.train(longer, resume=True, quiet=True)


@pytest.mark.parametrize(
    "data",
    [
        ["data=own/a", "data.config=main"],
        ["data=own/a", "data.config=main", "data.streaming=true", "data.buffer=5"],
        ["data=[{name: own/a, config: main, weight: 2}, {name: own/b}]"],
    ],
    ids=["hub", "stream", "mixture"],
)
def test_a_run_on_hub_data_resumes_with_the_same_problems_and_refuses_others(hub, data, tmp_path):
    def fill(first):
        words = [{"question": "word " * i, "answer": str(i)} for i in range(first, 12)]
        hub.add("own/a", {("main", "train"): words, ("main", "test"): [{"question": "test", "answer": "1"}] * 3,
                          ("other", "train"): words})  # fmt: skip
        hub.add("own/b", {("default", "train"): [{"prompt": "say " * i, "solution": str(i)} for i in range(1, 5)]})

    (tmp_path / "mine.py").write_text(REWARD.replace("ENDS", "False"))
    args = [*SMALL, *data, f"reward={tmp_path}/mine.py:letters", "evaluation=off", "rollouts_every=1"]
    fill(1)
    for run, counts in (("whole", [4]), ("resumed", [2, 4])):
        for count in counts:
            config = configs.load("tiny", [*args, f"run={tmp_path / run}", f"steps={count}"])
            trainer.train(config, resume=count != counts[0], quiet=True)
    whole, resumed = (RunFolder.open(tmp_path / run, resume=False) for run in ("whole", "resumed"))
    for name, value in parameters(whole).items():
        assert torch.equal(value, parameters(resumed)[name]), name
    fill(2)
    with pytest.raises(TaskError, match=r"own/a main.* differ from the data with which the run in .* began"):
        trainer.train(configs.load("tiny", [*args, f"run={tmp_path / 'whole'}", "steps=5"]), resume=True, quiet=True)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('gold')", "KeyError: 'gold'"),
        ("return [1.0]", "12"),
        ("return [float('nan')] * len(completions)", "nan"),
        ("return ['yes'] * len(completions)", "'yes'"),
    ],
)
def test_a_reward_that_goes_wrong_stops_the_run_and_loses_nothing(tmp_path, body, message):
    data = questions(tmp_path / "questions.jsonl")
    (tmp_path / "mine.py").write_text(
        "calls = []\n\ndef wrong(completions, **rest):\n    calls.append(len(completions))\n"
        f"    if calls.count(12) > 1:\n        {body}\n    return [float(len(c)) for c in completions]\n"
    )
    args = [
        *SMALL,
        f"data={data}",
        f"reward={tmp_path}/mine.py:wrong",
        f"run={tmp_path / 'run'}",
        "checkpoint_every=50",
    ]
    with pytest.raises(RewardError, match=f"wrong.*{message}"):
        trainer.train(configs.load("tiny", args), quiet=True)
    assert RunFolder.open(tmp_path / "run").checkpoints() == [1]


def test_what_rewards_report_is_in_the_metrics_of_the_step(tmp_path):
    data = questions(tmp_path / "questions.jsonl")
    (tmp_path / "mine.py").write_text(
        "def told(completions, log_metric, **rest):\n    log_metric('rows', len(completions))\n"
        "    return [None if i % 4 == 0 else float(i) for i in range(len(completions))]\n"
    )
    args = [*SMALL, f"data={data}", f"reward={tmp_path}/mine.py:told", f"run={tmp_path / 'run'}", "steps=2"]
    trainer.train(configs.load("tiny", args), quiet=True)
    for line in RunFolder.open(tmp_path / "run", resume=False).metrics():
        assert line["reward/rows"] == 12
        assert "rollout/continued" not in line  # one turn
        assert "reward/failed" not in line  # that no reward applies to a row is no failure


def test_rewards_see_how_far_the_run_is(tmp_path):
    """As in TRL, ``global_step`` counts the steps taken; a resumed run goes on with the count, and so does eval."""
    data, run = questions(tmp_path / "questions.jsonl"), tmp_path / "run"
    (tmp_path / "mine.py").write_text(
        "def grows(completions, trainer_state, log_metric, **rest):\n"
        "    for name in ('global_step', 'max_steps', 'epoch'):\n"
        "        log_metric(name, getattr(trainer_state, name))\n"
        "    return [trainer_state.global_step + (i % 2) / 2 for i in range(len(completions))]\n"
    )
    args = [*SMALL, f"data={data}", f"reward={tmp_path}/mine.py:grows", f"run={run}"]
    trainer.train(configs.load("tiny", [*args, "steps=2"]), quiet=True)
    summary = trainer.train(configs.load("tiny", [*args, "steps=3"]), resume=True, quiet=True)
    folder = RunFolder.open(run, resume=False)
    lines = folder.metrics()
    assert [line["reward/global_step"] for line in lines] == [0, 1, 2]
    assert [line["reward/mean"] for line in lines] == [0.25, 1.25, 2.25]
    assert [line["reward/max_steps"] for line in lines] == [2, 2, 3]
    assert [line["reward/epoch"] for line in lines] == pytest.approx([0, 4 / 9, 8 / 9])
    assert folder.read_json("before.json")["reward"] < 1
    assert 3 <= summary["after"]["reward"] < 4
    for model, step in ((run, 3), (folder.newest() / "model", 3), ("embedded", 0)):
        assert steps_taken(str(model)) == step
    poise("eval", run, "--trust", "--json", tmp_path / "eval.json")
    assert json.loads((tmp_path / "eval.json").read_text())["reward"] == summary["after"]["reward"]


def test_prompts_that_a_template_makes_too_long_are_left_out(tmp_path):
    data = questions(tmp_path / "questions.jsonl", 20)
    policy = load_policy("embedded", device="cpu")
    long = "<|user|>" + "Is A a knight? " * 20
    policy.tokenizer.chat_template = long + "{% for m in messages %}{{ m.content }}{% endfor %}"
    lengths = [len(policy.encode([{"role": "user", "content": "word " * (i + 1)}])) for i in range(20)]
    task, notes = Data(str(data), reward="exact", held_out=0.0), []
    check_data(task, policy, lengths[9], notes.append)
    assert len(task.epoch("train", 0, 0)) == sum(length <= lengths[9] for length in lengths) < 20
    assert "10 train problems left out" in notes[0]


def test_data_whose_prompts_are_all_too_long_end_in_a_sentence(tmp_path):
    data = questions(tmp_path / "questions.jsonl", 20)
    settings = [*SMALL, f"data={data}", "reward=exact", "rollout.max_prompt=2", f"run={tmp_path / 'run'}"]
    said = fails("train", *settings)
    assert "left out, since their prompts are longer than rollout.max_prompt=2 tokens: raise rollout.max_prompt" in said
