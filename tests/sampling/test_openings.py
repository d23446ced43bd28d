"""Attempts that open in other words, or whose reply somebody else began."""

import copy
from dataclasses import replace
from itertools import islice

import pytest
import torch

from poise import tasks
from poise.batch import Prompt
from poise.models.loading import load_policy
from poise.objective import Settings
from poise.runs.subscribers.recorder import response_records
from poise.sampling.sampler import Sampler
from poise.sampling.trajectories import metrics_of
from poise.tasks import Problem, Score, TaskError
from poise.training.batches import make_batch
from poise.training.building import build_sampler
from poise.training.config import load
from poise.training.steps import response_metrics
from support.scripted import Scripted
from support.twice import Twice


class Echo:
    """Scores a reply by its length."""

    name = "echo"

    def problems(self, split, seed):
        return (Problem(f"{split}/{seed}/{i}", f"Is A a knight {i}?", "all", {}) for i in range(9))

    def score(self, problem, text):
        del problem
        return Score(float(len(text)), correct=text == "A is a knight.", answer=text)


@pytest.fixture(scope="module")
def policy():
    return load_policy("embedded", device="cpu")


def test_an_opening_replaces_what_the_attempt_is_shown(policy):
    engine = Scripted(policy, lambda number, *_: f"no {number}<|end|>")
    problems = list(islice(Echo().problems("train", 0), 2))
    advice = [[], [{"role": "system", "content": "Think."}]]
    sampler = Sampler(policy, engine, Echo(), max_tokens=9)
    samples = sampler.play(problems, seed=0, opening=lambda i, messages: [*advice[i], *messages])
    plain = sampler.play(problems, seed=0)
    assert samples[0].prompt == plain[0].prompt
    shown = [{"role": "system", "content": "Think."}, {"role": "user", "content": problems[1].prompt}]
    assert samples[1].prompt == Prompt(tuple(policy.encode(shown))) != plain[1].prompt
    assert [sample.text for sample in samples] == ["no 0", "no 1"]
    assert samples[1].episode is not None


def test_a_reply_that_is_begun_is_scored_whole_and_owned_in_part(policy):
    prefix = policy.tokenizer("A is a")["input_ids"]
    engine = Scripted(policy, lambda number, *_: " knight.<|end|>" if number == 0 else "A is a knight.<|end|>")
    problems = list(islice(Echo().problems("train", 0), 2))
    begun, whole = Sampler(policy, engine, Echo(), max_tokens=9).play(problems, seed=0, begun=[prefix, []])
    assert begun.text == whole.text == "A is a knight."
    assert begun.score.correct
    asked = engine.asked[0]
    assert [request.max_tokens for request in asked] == [9 - len(prefix), 9]
    assert asked[0].prompt == begun.prompt.then(prefix)
    assert begun.tokens[: len(prefix)].tolist() == prefix
    assert begun.own.tolist() == [False] * len(prefix) + [True] * (len(begun.tokens) - len(prefix))
    assert whole.own.all()
    assert not begun.logp[~begun.own].any()


def test_summaries_are_over_first_attempts(policy):
    class Said:
        def metrics(self, samples):
            return {"second/rows": float(sum(sample.role == "second" for sample in samples))}

    engine = Scripted(policy, lambda number, *_: "A is a knight.<|end|>" if number else "no<|end|>")
    problems = list(islice(Echo().problems("train", 0), 2))
    first, second = Sampler(policy, engine, Echo(), max_tokens=9).play(problems, seed=0)
    rows = [replace(first, advantage=1.0), replace(second, advantage=1.0, role="second", notes={"cut": 0.5})]
    batch = make_batch(rows, policy)
    metrics = response_metrics(rows, batch, Settings()) | metrics_of(Said(), rows)
    assert metrics["reward/mean"] == 2.0
    assert metrics["reward/accuracy"] == 0.0
    assert metrics["rollout/length"] == len(first.tokens)
    assert metrics["second/rows"] == 1.0
    records = list(response_records(1, rows, Echo(), policy.read))
    assert "role" not in records[0]
    assert records[1]["role"] == "second"
    assert records[1]["notes"] == {"cut": 0.5}
    assert torch.equal(batch.mask[1], torch.ones_like(batch.mask[1]))


def test_a_prefill_begins_every_reply_and_is_nobodys(policy):
    prefill = policy.tokenizer("A is a")["input_ids"]
    engine = Scripted(policy, lambda *_: " knight.<|end|>")
    problems = list(islice(Echo().problems("train", 0), 2))
    sampler = Sampler(policy, engine, Echo(), max_tokens=9, prefill="A is a")
    samples = sampler.play(problems, seed=0)
    assert [request.max_tokens for request in engine.asked[0]] == [9, 9]
    for sample in samples:
        assert sample.prompt == Prompt((*policy.encode(sample.problem.prompt), *prefill))
        assert sample.text == "A is a knight."
        assert sample.score.correct
        assert sample.own.all()  # only what the model wrote is in the row behind the prompt
        assert policy.decode(sample.tokens.tolist()) == " knight."
    begun = policy.tokenizer(" knight")["input_ids"]
    engine = Scripted(policy, lambda *_: ".<|end|>")
    (sample,) = replace(sampler, engine=engine).play(problems[:1], seed=0, begun=[begun])
    assert sample.text == "A is a knight."
    assert engine.asked[0][0].prompt == Prompt((*policy.encode(problems[0].prompt), *prefill, *begun))


def test_a_prefill_begins_the_later_turns_too(policy):
    engine = Scripted(policy, lambda *_: " knight.<|end|>")
    (problem,) = islice(Twice().problems("train", 0), 1)
    (sample,) = Sampler(policy, engine, Twice(), max_tokens=9, prefill="A is a").play([problem], seed=0)
    assert [message["content"] for message in sample.messages if message["role"] == "assistant"] == [
        "A is a knight.",
        "A is a knight.",
    ]
    words = policy.tokenizer("A is a")["input_ids"]
    assert list(engine.asked[1][0].prompt.tokens[-len(words) :]) == words
    assert policy.decode(sample.tokens[sample.own].tolist()).count("knight") == 2
    assert "A is a" not in policy.decode(sample.tokens[sample.own].tolist())


def test_a_prefill_is_a_setting_of_every_task(policy):
    config = load("tiny", ["task.prefill=<think>", "rollout.max_tokens=8"])
    assert config.task.settings == {"people": "2-3"}
    sampler = build_sampler(config, policy, lambda _: None)
    problems = sampler.task.problems("test", 0)
    (sample,) = sampler.play([next(problems)], seed=0)
    tag = policy.tokenizer("<think>", add_special_tokens=False)["input_ids"]
    assert sample.text.startswith("<think>")
    assert list(sample.prompt.tokens[-len(tag) :]) == tag


def opening_think(policy):
    """The policy with a template that opens a thought, as those of Qwen3-Thinking and of R1's distilled models do."""
    made = copy.copy(policy)
    made.tokenizer = copy.deepcopy(policy.tokenizer)
    made.tokenizer.chat_template = policy.tokenizer.chat_template.replace(
        "<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}"
    )
    return made


def test_a_reply_begins_with_the_thought_that_the_template_opens(policy, tmp_path):
    policy, task = opening_think(policy), tasks.get("kk", people=2)
    (problem,) = islice(task.problems("train", 0), 1)
    closed, open_ended = f"So.</think><answer>{task.gold(problem)}</answer><|end|>", "So it is 5.<|end|>"
    (sample,) = Sampler(policy, Scripted(policy, lambda *_: closed), task, max_tokens=99).play([problem], seed=0)
    assert sample.text.startswith("<think>\nSo.</think>")
    assert sample.score.reward == 3.0
    assert sample.own.all()
    assert policy.decode(sample.tokens.tolist()).startswith("So.")
    (tmp_path / "rows.jsonl").write_text('{"question": "What?", "answer": "5"}\n' * 2)
    data = tasks.get("data", file=str(tmp_path / "rows.jsonl"), reward="number", held_out=0.0)
    for said, reward in ((open_ended, 0.0), ("So.</think>It is 5.<|end|>", 1.0)):  # an open thought is not paid
        sampler = Sampler(policy, Scripted(policy, lambda *_, said=said: said), data, max_tokens=99)
        assert sampler.play(data.epoch("train", 0, 0)[:1], seed=0)[0].score.reward == reward
    (sample,) = Sampler(policy, Scripted(policy, lambda *_: "Hm.<|end|>"), Twice(), max_tokens=9).play(
        list(islice(Twice().problems("train", 0), 1)), seed=0
    )
    replies = [message["content"] for message in sample.messages if message["role"] == "assistant"]
    assert replies == ["<think>\nHm.", "<think>\nHm."]


def test_a_thought_that_would_be_opened_twice_is_refused(policy, tmp_path):
    notes = []
    build_sampler(load("tiny"), opening_think(policy), notes.append)
    assert sum("the chat template opens <think>" in note for note in notes) == 1
    with pytest.raises(TaskError, match="the model's chat template opens <think> already"):
        build_sampler(load("tiny", ["task.prefill=<think>"]), opening_think(policy), notes.append)
    (tmp_path / "rows.jsonl").write_text('{"question": "What?", "answer": "5"}\n' * 9)
    data = ["task.name=data", f"task.file={tmp_path}/rows.jsonl", "task.reward=format(opened=True)"]
    with pytest.raises(TaskError, match=r"format\(opened=True\).*remove opened"):
        build_sampler(load("grpo", data), opening_think(policy), notes.append)
    silent = opening_think(policy)
    silent.tokenizer.chat_template = "{% for message in messages %}<|user|>{{ message.content }}<|end|>{% endfor %}"
    build_sampler(load("tiny"), silent, notes.append)
    assert sum("the chat template has no generation prompt" in note for note in notes) == 1
