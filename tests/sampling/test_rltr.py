"""RLTR: rewards, groups, advantages and masks worked out by hand, with engines that say what they are told to."""

import math
import os
import re
import signal
from dataclasses import replace

import pytest
import torch

from poise.batch import Prompt
from poise.models.loading import load_policy
from poise.referee.diagnose import diagnose
from poise.runs.folder import RunFolder
from poise.sampling.algorithms import Rltr, get
from poise.sampling.draws import streams, uniform
from poise.sampling.rltr import MARKS, answer_place, prefix, reasoning_tokens, whole_text
from poise.sampling.sampler import Sampler
from poise.tasks import Problem, Score, TaskError
from poise.training.batches import drop_failed, make_batch
from poise.training.config.run_settings import to_diagnose
from poise.training.steps import Clock
from support.command_line import poise
from support.configs import problem
from support.scripted import Scripted
from support.small_runs import SHORT, SMALL, command, parameters, run
from support.tiny_models import bytes_policy

RIGHT = "<think>A is a knight.</think><answer>7</answer><|end|>"  # 7 tokens before the answer
WRONG = "<think>A is a knave.</think><answer>8</answer><|end|>"
OTHER = "<think>B is a knight.</think><answer>7</answer><|end|>"


class Sevens:
    """The answer is 7."""

    name = "sevens"

    def problems(self, split, seed):
        return (Problem(f"{split}/{seed}/{i}", f"Is A a knight {i}?", "all", {}) for i in range(9))

    def score(self, problem, text):
        del problem
        if "hangs" in text:
            return Score(0.0, False, failed="hangs")
        right = text.endswith("<answer>7</answer>")
        parts = {"format": 1.0 if text.endswith("</answer>") else -1.0, "answer": 2.0 if right else -1.5}
        return Score(sum(parts.values()), right, parts, "7" if right else None)


@pytest.fixture(scope="module")
def policy():
    return load_policy("embedded", device="cpu")


def ids(policy, text):
    return policy.tokenizer(text)["input_ids"]


def sampler(policy, replies, receiver, *, max_tokens=12, other=None):
    """The policy says ``replies``, in their order; ``receiver(number, prompt)`` is what the receiver says."""
    own = Scripted(policy, lambda number, *_: replies[number])
    other = other or policy
    script = Scripted(other, lambda number, _, prompt: receiver(number, prompt))
    others = {"receiver": Sampler(other, script, Sevens(), max_tokens=max_tokens)}
    return Sampler(policy, own, Sevens(), max_tokens=max_tokens, others=others)


def collect(algorithm, sampled, problems=1):
    return algorithm.collect(list(Sevens().problems("train", 0))[:problems], sampled, seed=5)[0]


def test_rewards_groups_advantages_and_masks_by_hand(policy):
    replies = [RIGHT, WRONG, OTHER, "<answer>7</answer><|end|>", "<|end|>", "A B C D<|end|>", ids(policy, "A B") * 6]
    start = len(policy.encode("Is A a knight 0?"))
    seven, eight = "</think><answer>7</answer><|end|>", "</think><answer>8</answer><|end|>"

    said = {
        "<think>A is a knight": seven, "<think>A is a knave": seven, "<think>B is a knight": eight, "A B C": eight,
        "A BA BA BA BA": "<answer>7</answer>",
    }  # fmt: skip
    played = sampler(policy, replies, lambda _, prompt: said[policy.decode(prompt[start:])])
    algorithm = Rltr(group=7, transfer=0.5, low=0.75, high=0.75)
    samples = collect(algorithm, played)
    # format + answer + transfer; of the wrong responses the second one's reasoning transfers, and the last one's.
    expected = [3.0 + 0.5, -0.5 + 0.5, 3.0, 3.0, -2.5, -2.5, -2.5 + 0.5]
    assert [sample.score.reward for sample in samples] == expected
    assert [sample.score.parts["transfer"] for sample in samples] == [0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.5]
    assert [sample.score.correct for sample in samples] == [True, False, True, True, False, False, False]
    assert [sample.notes["prefix"] for sample in samples] == [5, 5, 5, 0, 0, 3, 9]
    assert [sample.notes["cut"] for sample in samples] == [0.75] * 7
    assert [sample.group for sample in samples] == [0] * 7
    assert all(
        sample.role == "first" and sample.own.all() for sample in samples
    )  # nothing of the receiver's is trained

    judged, _ = drop_failed(samples)
    batch = make_batch(judged, policy)
    assert batch.mask.sum(1).tolist() == [11, 11, 11, 4, 1, 5, 12]
    mean = sum(expected) / 7
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in expected) / 6)
    by_hand = [(reward - mean) / (deviation + 1e-6) for reward in expected]
    assert batch.advantages.tolist() == pytest.approx(by_hand, rel=1e-5)
    assert algorithm.metrics(judged) == pytest.approx(
        {
            "transfer/mean": 3 / 7, "transfer/after_right": 1 / 2, "transfer/after_wrong": 2 / 3,
            "transfer/cut/0.75": 3 / 5, "transfer/uncut": 2 / 7,
        }
    )  # fmt: skip


SEVEN, EIGHT = "</think><answer>7</answer><|end|>", "</think><answer>8</answer><|end|>"


def test_equal_prefixes_of_a_problem_are_continued_once(policy):
    played = sampler(policy, [RIGHT, WRONG, OTHER, RIGHT] * 2, lambda number, _: [SEVEN, EIGHT, EIGHT, SEVEN][number])
    samples = collect(Rltr(group=4, low=0.5, high=0.5), played, problems=2)  # half of it does not tell right from wrong
    (asked,) = played.others["receiver"].engine.asked
    known = [policy.encode(f"Is A a knight {i}?") for i in (0, 1)]
    begun = [ids(policy, text) for text in ("<think>A is", "<think>B is")]
    expected = [Prompt(tuple(prompt + tokens)) for prompt in known for tokens in begun]
    assert [request.prompt for request in asked] == expected
    assert [sample.notes["transfer"] for sample in samples] == [1, 1, 0, 1, 0, 0, 1, 0]
    assert [sample.group for sample in samples] == [0] * 4 + [1] * 4


def test_several_continuations_are_averaged(policy):
    played = sampler(policy, [RIGHT, OTHER], lambda number, _: [SEVEN, EIGHT, EIGHT, SEVEN, SEVEN, SEVEN][number])
    samples = collect(Rltr(group=2, transfer=0.3, continuations=3, low=0.5, high=0.5), played)
    (asked,) = played.others["receiver"].engine.asked
    assert [request.number for request in asked] == list(range(6))  # each with random numbers of its own
    assert [sample.notes["transfer"] for sample in samples] == [1 / 3, 1.0]
    assert [sample.score.reward for sample in samples] == [3 + 0.3 * (1 / 3), 3.3]


def test_cuts_are_uniform_between_low_and_high(policy):
    algorithm = Rltr(group=2, low=0.2, high=0.6)
    played = sampler(policy, [RIGHT, WRONG], lambda *_: SEVEN)
    samples = collect(algorithm, played)
    own = int(streams(5, torch.tensor(-1)))
    points = uniform(own, torch.arange(2), torch.tensor([-1, -1])).tolist()
    assert [sample.notes["cut"] for sample in samples] == pytest.approx([0.6 - 0.4 * point for point in points])
    assert [sample.notes["prefix"] for sample in samples] == [int(7 * sample.notes["cut"]) for sample in samples]
    cuts = algorithm._cuts(own, 4000)
    assert 0.2 < min(cuts) < 0.21
    assert 0.59 < max(cuts) <= 0.6
    assert sum(cuts) / 4000 == pytest.approx(0.4, abs=0.01)


def test_a_cut_is_rounded_down_from_what_was_typed(policy):
    receiver = Sampler(policy, Scripted(policy, None), Sevens(), max_tokens=400)
    for share, count, length in [(0.29, 100, 29), (0.35, 180, 63), (0.57, 7, 3), (1.0, 7, 7)]:
        assert len(prefix((ids(policy, "A B") * 90)[:count], share, MARKS, policy, receiver)) == length


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("<think>x</think><answer>(1) A is a knight</answer>", "<answer>"),
        ("I write it in \\boxed{}. So 2 + 5 and \\boxed{7}", "\\boxed{7}"),
        ("#### Step 1: add 2\n#### Step 2: add 5\nso it is\n#### 7", "#### 7"),
        ("<think>\\boxed{7}? yes</think>\\boxed{7}", "\\boxed{7}? yes"),  # the first one gives it away
        ("<answer>\\boxed{7}</answer>", "<answer>"),
        ("**7**: <answer> **7**</answer>", "<answer>"),
        ("so <answer>(1) A is a kn", "<answer>"),  # cut off within the answer
        ("#### Step 1\n#### Step 2, cut off", "#### Step 2"),  # no answer: the last mark
        ("<answer>", "<answer>"),
        ("the answer is 7", None),
        ("", None),
    ],
)
def test_where_the_answer_begins(text, place):
    assert answer_place(text, MARKS) == (None if place is None else text.index(place))


def test_marks_are_a_setting():
    assert answer_place("a SO: 7 b", Rltr(marks=["SO:"]).marks) == 2
    assert Rltr(marks="SO:").marks == ("SO:",)
    assert answer_place("7", Rltr(marks=[]).marks) is None
    hostile = "####" * 50_000 + "<answer>" + "7" * 50_000 + "</answer>"  # not linear, this would take hours
    assert answer_place(hostile, MARKS) == 0


def test_no_token_of_a_mark_is_reasoning():
    policy = bytes_policy()
    tokens = policy.tokenizer("é b <answer>7</answer>")["input_ids"]
    assert reasoning_tokens(policy, tokens) == len("é b ".encode())
    assert reasoning_tokens(policy, [*tokens[:3], *policy.end_tokens]) == 3
    assert reasoning_tokens(policy, tokens[:6]) == 6  # all but the mark's first letter is still to come
    assert reasoning_tokens(policy, []) == 0


def test_a_receiver_with_another_vocabulary_reads_text(policy):
    other = bytes_policy()
    response = "<think>A € is</think><answer>7</answer><|end|>"
    played = sampler(
        policy, [response, RIGHT], lambda *_: " so<answer>7</answer><|im_end|>", max_tokens=60, other=other
    )
    said = []
    algorithm = Rltr(group=2, low=0.55, high=0.55)
    algorithm.check(played, said.append)
    assert said == ["the receiver's vocabulary differs from the policy's, so prefixes are passed as text"]
    samples = collect(algorithm, played)
    (asked,) = played.others["receiver"].engine.asked
    texts = [other.tokenizer.decode(request.prompt.tokens) for request in asked]
    frame = "<|im_start|>user\nIs A a knight 0?<|im_end|>\n<|im_start|>assistant\n"  # its own chat template
    tokens = ids(policy, response)
    cut = tokens[: int(0.55 * (tokens.index(ids(policy, "<answer>")[0])))]
    assert policy.decode(cut).endswith("\ufffd")  # in the middle of a character
    assert texts == [f"{frame}<think>A ", f"{frame}<think>A is"]
    assert [request.stop for request in asked] == [other.end_tokens] * 2
    assert [sample.notes["transfer"] for sample in samples] == [1.0, 1.0]
    assert other.end_tokens != policy.end_tokens


def test_characters_are_passed_on_whole():
    policy = bytes_policy()
    tokens = policy.tokenizer("a€😀")["input_ids"]
    texts = [whole_text(policy, tokens[:n]) for n in range(len(tokens) + 1)]
    assert texts == ["", "a", "a", "a", "a€", "a€", "a€", "a€", "a€😀"]


def test_a_prefix_holds_nothing_that_would_end_the_receivers_reply(policy):
    """A receiver of the same vocabulary may end its turns with another token, and have a shorter embedding."""
    tokens = ids(policy, "A B C D")
    receiver = Sampler(policy, None, Sevens(), max_tokens=99)
    cut = lambda **changes: prefix(tokens, 1.0, MARKS, policy, replace(receiver, **changes))  # noqa: E731
    assert cut() == tokens
    assert cut(max_tokens=3) == tokens[:2]  # room for one token
    assert cut(max_tokens=1) == []

    class Other:
        tokenizer, vocabulary_hash = policy.tokenizer, policy.vocabulary_hash
        end_tokens = (tokens[2],)

        def head(self):
            return replace(policy.head(), weight=policy.head().weight[:400])

    assert cut(policy=Other()) == tokens[:2]
    Other.end_tokens = ()
    assert tokens[3] > 400
    assert cut(policy=Other()) == tokens[:3]


def test_attempts_without_a_verdict_take_no_part(policy):
    replies = ["it hangs<|end|>", RIGHT, OTHER]
    played = sampler(policy, replies, lambda number, _: ["so it hangs<|end|>", SEVEN, EIGHT, SEVEN][number])
    algorithm = Rltr(group=3, continuations=2, low=0.5, high=0.5)
    samples = collect(algorithm, played)
    (asked,) = played.others["receiver"].engine.asked
    assert len(asked) == 4
    assert samples[0].score == Score(0.0, False, failed="hangs")
    assert [sample.notes["transfer"] for sample in samples[1:]] == [1.0, 0.5]  # of one continuation, and of two
    assert algorithm.metrics([samples[0]]) == {}
    played = sampler(policy, [RIGHT, OTHER, "<|end|>"], lambda number, _: ["it hangs<|end|>", SEVEN][number])
    algorithm = Rltr(group=3, low=0.5, high=0.5)
    samples = collect(algorithm, played)
    assert [sample.score.reward for sample in samples] == [3.0, 3.5, -2.5]
    assert algorithm.metrics(samples) == pytest.approx(
        {
            "transfer/mean": 1 / 2, "transfer/after_right": 1.0, "transfer/cut/0.5": 1.0, "transfer/uncut": 1 / 3,
            "transfer/failed": 1.0,
        }
    )  # fmt: skip


def test_the_answer_may_be_weighted_too(policy):
    played = sampler(policy, [RIGHT, WRONG], lambda number, _: [SEVEN, EIGHT][number])
    samples = collect(Rltr(group=2, transfer=0.25, answer=0.5, low=0.8, high=0.8), played)
    assert [dict(sample.score.parts) for sample in samples] == [
        {"format": 1.0, "answer": 1.0, "transfer": 0.25},
        {"format": 1.0, "answer": -0.75, "transfer": 0.0},
    ]
    assert [sample.score.reward for sample in samples] == [2.25, 0.25]
    bare = Rltr(group=2, answer=0.5)
    with pytest.raises(TaskError, match=r"answer = 0.5 .* reward of 1 is not .*its parts: {'exact': 1.0}"):
        bare._score(Score(1.0, True, {"exact": 1.0}), 1.0)
    with pytest.raises(TaskError, match=r"reward of 2 is not .*its parts: {'answer': 1.0}"):
        bare._score(Score(2.0, True, {"answer": 1.0}), 1.0)  # rewards of a dataset may have weights


def test_the_receivers_time_is_its_own(policy):
    clock, played = Clock(), sampler(policy, [RIGHT, WRONG], lambda *_: SEVEN)
    collect(Rltr(group=2), played)
    clock.spent |= played.counts.seconds
    assert set(clock.spent) == {"rollout", "score", "transfer"}
    metrics = clock.metrics(1)
    assert metrics["time/other"] > 0
    parts = [value for name, value in metrics.items() if name.startswith("time/")][:-2]
    assert sum(parts) == pytest.approx(metrics["time/step"])


# Whole runs

TINY = ["prompts=2", "evaluation.problems=1", "evaluation.samples=1", "rollout.max_tokens=64", "rollouts_every=1"]


def test_without_its_weight_it_is_grpo_bit_for_bit(tmp_path):
    settings = [*TINY, "steps=2", "evaluation=off", "optim.lr=1e-3"]
    grpo, _ = run(tmp_path, *settings, name="grpo")
    rltr, _ = run(tmp_path, *settings, "algorithm=rltr(transfer=0)", name="rltr")
    first, second = parameters(grpo), parameters(rltr)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert all(line["optim/grad_norm"] > 0 for line in grpo.metrics())
    for one, other in zip(grpo.metrics(), rltr.metrics(), strict=True):
        shared = {name: value for name, value in one.items() if not name.startswith(("time/", "tokens/"))}
        assert shared == {name: other[name] for name in shared}
    assert any(line["transfer/mean"] > 0 for line in rltr.metrics())  # the receiver runs all the same


@pytest.mark.usefixtures("short_evaluation")
@pytest.mark.parametrize(
    "settings", [["regulator=ar"], ["regulator=lopti", "lora.rank=4"], ["regulator=nthr"]], ids=str
)
def test_it_composes(tmp_path, settings):
    folder, _ = run(tmp_path, *TINY, "steps=1", "seed=1", "algorithm=rltr(continuations=2)", *settings)
    (line,) = folder.metrics()
    assert line["optim/grad_norm"] > 0
    assert 0 < line["transfer/mean"] <= 1
    assert line["reward/transfer"] == pytest.approx(0.5 * line["transfer/mean"])
    for record in folder.rollouts(1):
        notes, parts = record["notes"], record["parts"]
        assert notes["transfer"] in (0, 0.5, 1)
        assert 0 < notes["cut"] <= 1
        assert parts["transfer"] == 0.5 * notes["transfer"]
        assert record["reward"] == parts["format"] + parts["answer"] + parts["transfer"]


KILLED = """
import os, signal
from poise.__main__ import main
from poise.training.frozen_models import FrozenEngine
sample, calls = FrozenEngine.sample, []
def killing(engine, requests, *rest):
    calls.append(1)
    if len(calls) == 2:
        first = lambda i, tokens: os.kill(os.getpid(), signal.SIGKILL)  # as soon as one continuation has ended
        return sample(engine, requests, *rest[:2], first)
    return sample(engine, requests, *rest)
FrozenEngine.sample = killing
main()
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="SIGKILL")
@pytest.mark.slow
def test_a_run_killed_while_the_receiver_samples_resumes_bit_for_bit(tmp_path):
    settings = [*SMALL, *TINY, "steps=3", "checkpoint_every=1", "group=2", "algorithm=rltr", "optim.lr=1e-3"]
    assert poise("train", "tiny", *settings, f"run={tmp_path / 'whole'}").exit_code == 0
    killed = f"run={tmp_path / 'killed'}"
    with command("train", "tiny", *settings, killed, start=("-c", KILLED)) as process:
        shown = process.stdout.read()
        assert process.wait() == -signal.SIGKILL, shown
    assert poise("train", "--resume", killed).exit_code == 0
    whole, resumed = (RunFolder.open(tmp_path / name, resume=False) for name in ("whole", "killed"))
    assert all(torch.equal(value, parameters(resumed)[name]) for name, value in parameters(whole).items())
    for one, other in zip(whole.metrics(), resumed.metrics(), strict=True):
        assert [(k, v) for k, v in one.items() if "time/" not in k] == [
            (k, v) for k, v in other.items() if "time/" not in k
        ]
    assert whole.rollouts(3) == resumed.rollouts(3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rltr(transfr=1)", "unknown setting of rltr 'transfr'; did you mean 'transfer'"),
        ("rltr(transfer=-1)", "transfer must be between 0.0 and 1000.0, got -1"),
        ("rltr(transfer='much')", "transfer must be a number"),
        ("rltr(low=0.8, high=0.2)", "low = 0.8, high = 0.2: .* low must not be above high"),
        ("rltr(high=0)", "high must be above 0"),
        ("rltr(high=2)", "high must be between 0.0 and 1.0"),
        ("rltr(continuations=0)", "continuations must be between 1"),
        ("rltr(continuations=1.5)", "continuations must be a whole number"),
        ("rltr(receiver=3)", "receiver must be 'start' or a model's name in quotes"),
        ("rltr(marks=[1])", "marks must be a list of texts"),
    ],
)
def test_wrong_settings_are_named(text, message):
    with pytest.raises((TypeError, ValueError), match=message):
        get(text, 2)


def test_mistakes_are_answered_with_what_to_do(tmp_path):
    assert "algorithm" in problem("algorithm=rltr(transfer=-1)")
    for overrides, message in [
        (["task.name=frozenlake"], r"task 'frozenlake' plays episodes of several turns.*use algorithm=grpo"),
        (["algorithm=rltr(receiver='./nowhere')"], r"receiver = './nowhere': ./nowhere: there is no such folder"),
    ]:
        settings = [item for item in SMALL if not item.startswith(("task.", "evaluation.samples"))]
        said = poise(
            "train", "grpo", "model=embedded", *settings, "algorithm=rltr", *overrides, f"run={tmp_path / 'run'}"
        )
        assert said.exit_code == 1
        assert re.search(message, said.stderr), said.stderr
        assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("short_evaluation")
def test_a_run_with_it_can_be_diagnosed(tmp_path):
    """Where the receiver is the model that the run started with, and the policy what the run made of it."""
    made, _ = run(tmp_path, *TINY, *SHORT, "steps=1", "group=2", "lora.rank=2", "algorithm=rltr")
    settings = to_diagnose(str(made.path), [])
    folder = RunFolder.create(tmp_path / "out", settings.model_dump(mode="json"))
    said = []
    diagnose(settings, folder, methods=["grpo"], batches=1, warmup=1, say=said.append)
    assert "the run's starting weights (embedded), frozen" in said[0]
    assert all("transfer" in record["notes"] for record in folder.rollouts(1))
