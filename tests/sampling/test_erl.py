"""ERL: rewards, groups, advantages and masks worked out by hand, on texts that are known."""

import json
import signal
from collections import deque
from math import sqrt

import pytest
import torch

from poise import regulators, trainer
from poise.batch import Prompt
from poise.models.loading import load_policy
from poise.models.policy import ModelError
from poise.models.prompts import PromptError, plain
from poise.models.scoring import score_batch
from poise.objective import Settings
from poise.runs.folder import RunFolder
from poise.sampling.erl import CUT_OFF, GAP, Erl, read_advice
from poise.sampling.sampler import Sampler
from poise.sampling.trajectories import metrics_of
from poise.tasks import Problem, Score
from poise.training.batches import drop_failed, make_batch, without_consolidated
from poise.training.steps import response_metrics
from support.configs import problem
from support.scripted import Scripted
from support.small_runs import SHORT, command, make, parameters, run

ASKED = "You tried a task and failed."
CHATML = (
    "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)


class Colours:
    """One reply: red is right. Rewards are 2 and −1, so that reward and success differ."""

    name = "colours"

    def problems(self, split, seed):
        return (Problem(f"{split}/{seed}/{i}", f"Which colour {i}?", "all", {}) for i in range(9))

    def score(self, problem, text):
        del problem
        if "silence" in text:
            return Score(0.0, correct=False, failed="nobody judged it")
        return Score(2.0 if text == "red" else -1.0, correct=text == "red")

    def feedback(self, problem, text):
        del problem
        return f"{text[:9]} is not the colour."


class Doors:
    """Two replies; the second one counts."""

    name = "doors"

    def problems(self, split, seed):
        return (Problem(f"{split}/{seed}/{i}", f"Two doors {i}.", "all", {}) for i in range(9))

    def episode(self, problem):
        return DoorsEpisode(problem)


class DoorsEpisode:
    def __init__(self, problem):
        self.problem, self.replies = problem, []

    def start(self):
        return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": self.problem.prompt}]

    def step(self, reply):
        self.replies.append(reply)
        return [{"role": "user", "content": "And then?"}] if len(self.replies) == 1 else []

    def score(self):
        right = self.replies[-1] == "red"
        return Score(float(right), correct=right)


class Play:
    """A sampler whose replies are scripted: those to the plain problem, the reflections, and the second attempts."""

    def __init__(self, policy, first, reflections=(), second=(), task=None, **settings):
        self.policy, self.replies = policy, [deque(first), deque(reflections), deque(second)]
        self.questions, self.openings, self.calls = [], [], 0
        self.engine = Scripted(policy, self.say)
        self.task = task or Colours()
        self.sampler = Sampler(policy, self.engine, self.task, **{"max_tokens": 40, **settings})

    def say(self, number, turn, prompt):
        del number, turn
        text = self.policy.tokenizer.decode(prompt)
        if ASKED in text:
            self.questions.append(text)
            return self.replies[1].popleft()
        return (self.replies[0] or self.replies[2]).popleft()

    def collect(self, algorithm, problems=1, memory=None):
        asked = list(self.task.problems("train", 0))[:problems]
        samples, memory = algorithm.collect(asked, self.sampler, 7, memory)
        assert not any(self.replies)
        return samples, memory


@pytest.fixture(scope="module")
def policy():
    return load_policy("embedded", device="cpu")


@pytest.fixture
def chatml(policy):
    policy.tokenizer.chat_template, before = CHATML, policy.tokenizer.chat_template
    yield policy
    policy.tokenizer.chat_template = before


def ended(*texts):
    return [f"{text}<|end|>" for text in texts]


def of_role(samples, role):
    return [sample for sample in samples if sample.role == role]


def advice(text):
    return f"It was wrong. <prompt>{text}</prompt>"


FIRST = ended("red", "blue", "green", "red", "blue", "red")  # of two problems: two fail, one fails
REFLECTIONS = ended(advice("Say red."), "no tags at all", advice("Never blue."))
SECOND = ended("red", "green", "red")


def played(policy, **settings):
    play = Play(policy, FIRST, REFLECTIONS, SECOND)
    samples, _ = play.collect(Erl(3, **settings), problems=2)
    return play, samples


def test_rows_groups_and_advantages_are_those_worked_out_by_hand(policy):
    _, samples = played(policy)
    roles = [sample.role for sample in samples]
    assert roles == ["first"] * 6 + ["reflection"] * 3 + ["second"] * 3 + ["consolidated"] * 3
    assert [sample.score.reward for sample in samples] == [2, -1, -1, 2, -1, 2] + [2, -1, 2] * 3
    assert [sample.notes.get("attempt") for sample in samples] == [None, 2, 3, None, 2, None] + [2, 3, 2] * 3
    batch = make_batch(samples, policy)
    # First attempts 2, −1, −1 and 2, −1, 2 with standard deviation √3; then 2, −1 with 3/√2; then a lone success.
    pair = [1 / sqrt(2), -1 / sqrt(2), 1.0]
    expected = [2 / sqrt(3), -1 / sqrt(3), -1 / sqrt(3), 1 / sqrt(3), -2 / sqrt(3), 1 / sqrt(3), *pair, *pair, 1, 0, 1]
    torch.testing.assert_close(batch.advantages, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert batch.groups.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 4, 5, 6, 7, 8]


def test_reinforce_pp_normalises_each_role_by_itself(policy):
    _, samples = played(policy)
    batch = make_batch(samples, policy, advantage="reinforce-pp")
    first = [1, -1, -1, 1, -1, 1]  # 2 or −1, three of each
    torch.testing.assert_close(batch.advantages, torch.tensor([*first, 1, -1, 1, 1, -1, 1, 1.0, 0, 1]))


def test_summaries_and_nthr_leave_consolidated_rows_out(policy):
    _, samples = played(policy)
    batch = make_batch(samples, policy, hidden=True)
    phases = regulators.parse("nthr(self_inclusive=True, eta=0)")(batch)
    assert phases[0].metrics["scored_share"] == 1.0  # four groups of two or more, all with right and wrong rows
    assert not (phases[0].policy[-3:] != batch.mask[-3:]).any()
    few, part = without_consolidated(samples, phases, batch)
    assert len(part.mask) == len(few[0].policy) == 12
    assert part.groups.tolist() == batch.groups.tolist()[:12]
    summary = regulators.summary(few, part)
    assert summary["reg/all/scored_share"] == 1.0
    assert summary["reg/all/weight_mean"] == pytest.approx(float(phases[0].policy[:12].sum() / batch.mask[:12].sum()))


def test_prompts_and_tokens_are_what_was_sampled(policy):
    play, samples = played(policy)
    first, reflection, second, consolidated = (
        of_role(samples, role) for role in ("first", "reflection", "second", "consolidated")
    )
    asked = [sample.problem.prompt for sample in first]
    # The embedded model's template has no system role: advice stands before the question.
    texts = [f"Say red.\n\n{asked[1]}", asked[2], f"Never blue.\n\n{asked[4]}"]
    assert [list(sample.prompt.tokens) for sample in second] == [policy.encode(text) for text in texts]
    assert [sample.problem.prompt for sample in second] == texts
    assert [list(sample.prompt.tokens) for sample in consolidated] == [policy.encode(asked[row]) for row in (1, 2, 4)]
    for a, b, said in zip(second, consolidated, SECOND, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() == policy.tokenizer(said)["input_ids"]
        assert a.own.all()
        assert b.own.all()
    assert [sample.text for sample in reflection] == [
        policy.decode(policy.tokenizer(x)["input_ids"]) for x in REFLECTIONS
    ]
    question = reflection[0].problem.prompt
    assert asked[1] in question
    assert "Your attempt:\nblue\n" in question
    assert "The result:\nblue is not the colour.\n" in question
    assert Prompt(tuple(policy.encode(question))) == reflection[0].prompt == play.engine.asked[1][0].prompt


def test_consolidated_rows_are_scored_by_the_policy_and_the_others_by_the_sampler(policy):
    _, samples = played(policy)
    batch = make_batch(samples, policy)
    rows = [row for row, sample in enumerate(samples) if sample.role == "consolidated"]
    logp, _ = score_batch(policy, batch.rows(rows), 1.0)
    assert torch.equal(batch.old_logp[rows], logp)
    for row, sample in enumerate(samples[:12]):
        assert torch.equal(batch.old_logp[row, : len(sample.tokens)], sample.logp)
    _, samples = played(policy, temperature=0.5)  # reflections at another temperature than the update's
    assert all(sample.logp is None for sample in of_role(samples, "reflection"))
    assert all(sample.logp is not None for sample in of_role(samples, "second"))


def test_lone_rows_may_be_dropped_and_consolidation_switched_off(policy):
    _, samples = played(policy, lone="drop")
    assert [sample.role for sample in samples[6:]] == ["reflection"] * 2 + ["second"] * 2 + ["consolidated"] * 3
    _, samples = played(policy, consolidation=False)
    assert [sample.role for sample in samples[6:]] == ["reflection"] * 3 + ["second"] * 3


def test_metrics(policy):
    for settings, rows in [({}, 3), ({"lone": "drop"}, 3), ({"consolidation": False}, 0)]:
        play, samples = played(policy, **settings)
        lengths = [len(policy.tokenizer(text)["input_ids"]) for text in REFLECTIONS]
        assert Erl(3, **settings).metrics(samples) == pytest.approx(
            {
                "first/success": 1 / 2, "second/retried": 1 / 2, "second/success": 2 / 3, "second/lone": 1,
                "reflection/readable": 2 / 3, "reflection/shown": 2 / 3, "reflection/length": sum(lengths) / 3,
                "reflection/unasked": 0, "consolidated/rows": rows,
            }
        )  # fmt: skip
        assert play.sampler.max_prompt is None


def test_when_all_succeed_there_is_nothing_to_reflect_on(policy):
    samples, memory = Play(policy, ended("red", "red")).collect(Erl(2, memory=True))
    assert [sample.role for sample in samples] == ["first", "first"]
    assert memory is None
    metrics = Erl(2).metrics(samples)
    assert metrics["second/retried"] == 0
    assert "second/success" not in metrics


def test_attempts_without_a_verdict_are_neither_retried_nor_counted(policy):
    first = ended(*["silence"], *["blue"] * 3, *["red"] * 40)
    second = ended("red", "silence", "blue")
    play = Play(policy, first, ended(*[advice("Go.")] * 3), second)
    samples, _ = play.collect(Erl(44))
    assert len(play.questions) == 3
    judged, failed = drop_failed(samples)
    assert failed == {"reward/failed": 2.0}
    assert [sample.role for sample in judged[43:]] == ["reflection"] * 2 + ["second"] * 2 + ["consolidated"] * 2
    assert Erl(44).metrics(judged)["second/success"] == 1 / 2


def test_a_step_without_first_attempts_has_no_metrics_of_them(policy):
    algorithm = Erl(2)
    play = Play(policy, ended("silence", "blue"), ended(advice("Say red.")), ended("red"))
    samples, _ = play.collect(algorithm)
    judged, _ = drop_failed(samples)  # "blue" has nothing to be compared with any more
    assert [sample.role for sample in judged] == ["reflection", "second", "consolidated"]
    batch = make_batch(judged, policy)
    assert batch.advantages.tolist() == [1, 1, 1]
    assert response_metrics(judged, batch, Settings())["reward/mean"] == batch.rewards.mean()
    metrics = metrics_of(algorithm, judged)
    assert not [name for name in metrics if name.startswith(("first/", "second/"))]


def test_a_template_that_refuses_the_question_leaves_the_attempt_unasked(chatml):
    refuses = "{% for m in messages %}{% if m.content|length > 99 %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    chatml.tokenizer.chat_template = refuses + CHATML
    samples, _ = Play(chatml, ended("red", "blue")).collect(Erl(2))
    assert Erl(2).metrics(samples)["reflection/unasked"] == 1


def test_several_turns(chatml):
    first = ended("left", "up", "blue", "red")  # the two attempts take turns
    second = ended("down", "red")
    play = Play(chatml, first, ended(advice("Look.")), second, task=Doors())
    samples, _ = play.collect(Erl(2))
    reflection, again, consolidated = samples[2:]
    question = reflection.problem.prompt
    assert "System: Be brief.\nUser: Two doors 0." in question
    assert "Your attempt:\nYou: left\nEnvironment: And then?\nYou: blue\n" in question
    assert "The attempt failed: reward 0.00 after 2 turns." in question
    opening = [{"role": "system", "content": "Look."}, {"role": "user", "content": "Two doors 0."}]
    assert list(again.prompt.tokens) == chatml.encode(opening)
    assert consolidated.prompt == samples[0].prompt
    assert torch.equal(again.own, consolidated.own)
    assert torch.equal(again.tokens, consolidated.tokens)
    words = [chatml.tokenizer(text)["input_ids"] for text in second]
    assert again.tokens[again.own].tolist() == [*words[0], *words[1]]
    assert not again.own.all()
    assert [sample.advantage for sample in (reflection, again, consolidated)] == [1.0] * 3


class TestLimits:
    def test_a_long_attempt_is_shortened_in_the_middle(self, policy):
        long = "begin " + "knight " * 300 + "end"
        samples, _ = Play(
            policy, ended(long, "red"), ended("x"), ended("blue"), max_tokens=900
        ).collect(Erl(2, reflection_tokens=600))  # fmt: skip
        reflection = of_role(samples, "reflection")[0]
        assert len(reflection.prompt.tokens) + 600 <= 1024  # positions of the embedded model
        attempt = reflection.problem.prompt.partition("Your attempt:\n")[2].partition("\n\nThe result")[0]
        assert attempt.startswith("begin knight")
        assert attempt.endswith("knight end")
        assert GAP in attempt

    def test_what_does_not_fit_at_all_is_not_asked(self, policy):
        algorithm = Erl(2, reflection_tokens=1000)
        samples, _ = Play(policy, ended("blue", "red")).collect(algorithm)
        assert [sample.role for sample in samples] == ["first", "first"]
        assert algorithm.metrics(samples)["reflection/unasked"] == 1.0

    def test_memory_that_does_not_fit_is_left_out(self, policy):
        play = Play(policy, ended("blue", "red"), ended("x"), ended("blue"))
        play.collect(Erl(2, memory=True), memory={"advice": "knight " * 900})
        assert "knight knight" not in play.questions[0]

    def test_advice_that_does_not_fit_is_not_shown(self, policy):
        play = Play(policy, ended("blue", "red"), ended(advice("knight " * 150)), ended("red"), max_tokens=900)
        samples, _ = play.collect(Erl(2, reflection_tokens=400))
        (reflection,), (second,) = of_role(samples, "reflection"), of_role(samples, "second")
        assert second.prompt == samples[0].prompt
        assert samples[0].notes == {
            "attempt": 1, "readable": 1, "shown": 0, "second": 1, "length": len(reflection.tokens),
        }  # fmt: skip

    def test_an_attempt_that_was_cut_off_is_told(self, policy):
        size = len(policy.tokenizer("blue")["input_ids"])
        play = Play(policy, ["blue", "red<|end|>"], ended("x"), ended("red"), max_tokens=size)
        play.collect(Erl(2))
        assert f"blue is not the colour. {CUT_OFF}" in play.questions[0]


def test_memory_is_the_last_advice_that_helped(policy):
    algorithm = Erl(3, memory=True)
    play = Play(
        policy, ended("blue", "blue", "blue"), ended(advice("One."), advice("Two."), "x"), ended("red", "blue", "red")
    )
    _, memory = play.collect(algorithm, memory={"advice": "Zero."})
    assert all("led to success before:\nZero.\n" in question for question in play.questions)
    assert memory == {"advice": "One."}
    _, kept = Play(policy, ended("blue", "red", "red"), ended(advice("Two.")), ended("blue")).collect(
        algorithm, memory=memory
    )
    assert kept == memory
    play = Play(policy, ended("blue", "red", "red"), ended(advice("Two.")), ended("red"))
    assert play.collect(Erl(3), memory=None)[1] is None
    assert "before" not in play.questions[0].partition("The result")[2]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<prompt>a</prompt>", "a"),
        ("<prompt>a</prompt> then <PROMPT> b\n</Prompt>", "b"),
        ("<prompt>a<prompt>b</prompt>c</prompt>", "b"),
        ("</prompt>a<prompt>", None),
        ("<prompt>a", None),
        ("<prompt>a</prompt><prompt>b", "a"),
        ("<prompt>  </prompt>", None),
        ("", None),
        ("<prompt>" * 200_000, None),
        ("<prompt>" + "</prompt>" * 200_000, None),
        ("<prompt>" + "x" * 1_000_000 + "</prompt>", "x" * 1_000_000),
    ],
)
def test_the_advice_in_a_reflection(text, found):
    assert read_advice(text) == found


@pytest.mark.parametrize(
    "said", ["", "xy " * 3_500, "{task} {0} %s", "a <|end|> b <|assistant|> c", "\x00\u202e\ud7ff"]
)
@pytest.mark.parametrize("template", [None, CHATML])
def test_any_reflection_is_data(policy, said, template, monkeypatch):
    """Advice comes from the text alone, as an engine may return any: no control token comes out of it."""
    if template:
        monkeypatch.setattr(policy.tokenizer, "chat_template", template)
    monkeypatch.setattr("poise.sampling.erl.read_advice", lambda _: said or None)
    play = Play(policy, ended("blue", "red"), ended("x"), ended("red"))
    samples, memory = play.collect(Erl(2, memory=True))
    plain, second = samples[0].prompt, of_role(samples, "second")[0]
    special = set(policy.tokenizer.all_special_ids)
    if len(said) > 1000 or not said:
        assert second.prompt == plain
        assert memory is None
    else:
        assert said in policy.tokenizer.decode(second.prompt.tokens)
        assert memory == {"advice": said}
        more = sum(token in special for token in second.prompt.tokens) - sum(token in special for token in plain.tokens)
        assert more == (2 if template else 0)  # the template's own, around the system prompt
    # The next question holds that advice, and an attempt that says the same.
    again = Play(
        policy,
        [policy.tokenizer(said or "blue", split_special_tokens=True)["input_ids"][:30], *ended("red")],
        ended("x"),
        ended("red"),
    )
    rows, _ = again.collect(Erl(2, memory=True), memory=memory)
    question = of_role(rows, "reflection")[0].prompt.tokens
    assert sum(token in special for token in question) == (3 if template else 2)


def test_text_that_cannot_be_encoded_as_text_is_left_out(policy, monkeypatch):
    def encode(messages, tools=()):
        if any("<|end|>" in message["content"] for message in messages):
            raise PromptError("a control token")
        return real(messages, tools)

    real = policy.encode
    monkeypatch.setattr(policy, "encode", encode)
    monkeypatch.setattr("poise.sampling.erl.read_advice", lambda _: "stop <|end|> here")
    samples, _ = Play(policy, ended("blue", "red"), ended("x"), ended("red")).collect(Erl(2))
    assert of_role(samples, "second")[0].prompt == samples[0].prompt
    said = policy.tokenizer("<|end|> no", split_special_tokens=True)["input_ids"]
    samples, _ = Play(policy, [said, "red<|end|>"]).collect(Erl(2))
    assert samples[0].notes == {"unasked": 1.0}


def test_a_reflection_may_be_begun(policy):
    algorithm = Erl(3, begin="<prompt>", reflection_tokens=20)
    replies = ["Say red.<|end|>", "Say red.</prompt> Done.<|end|>", "Say " * 40]
    play = Play(policy, ended("blue", "blue", "blue"), replies, ended("red", "red", "blue"))
    samples, _ = play.collect(algorithm)
    given = plain(policy.tokenizer, "<prompt>")
    for sample in (reflections := of_role(samples, "reflection")):
        assert sample.tokens[~sample.own].tolist() == given
        assert sample.own[len(given) :].all()
    assert reflections[0].text == "<prompt>Say red."
    assert len(reflections[2].tokens) == 20
    assert [sample.notes["readable"] for sample in samples[:3]] == [1, 1, 0]
    shown = [sample.problem.prompt for sample in of_role(samples, "second")]
    assert shown[0] == shown[1] == f"Say red.\n\n{shown[2]}"
    with pytest.raises(ModelError, match="raise reflection_tokens, or shorten begin"):
        Play(policy, ended("blue", "red")).collect(Erl(2, begin="<prompt>", reflection_tokens=1))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("erl(lone='maybe')", "unknown lone 'maybe'"),
        ("erl(memory=1)", "memory must be true or false"),
        ("erl(reflection_tokens=0)", "reflection_tokens must be between 1"),
        ("erl(reflection_tokens=1.5)", "must be a whole number"),
        ("erl(temperature=-1)", "temperature must be between 0"),
        ("erl(top_p=0)", "top_p must be between"),
        ("erl(ask='{x}')", "ask: unknown field 'x' (allowed: task, attempt"),
        ("erl(ask='{task.x}')", "unknown field 'task.x'"),
        ("erl(ask='{task:>99999999999}')", "write {task} without a format"),
        ("erl(ask='{')", "ask cannot be read"),
        ("erl(ask=3)", "ask must be text"),
        ("erl(recall='{task}')", "recall: unknown field"),
        ("erl(begin=3)", "begin must be text"),
        ("erl(group='x')", "group must be a whole number"),
        ("grpo(group=0)", "group must be a whole number of at least 1"),
        ("grpo(group=1)", "so there must be at least 2"),
    ],
)
def test_mistakes_in_settings_are_named(override, message):
    assert message in problem(f"algorithm={override}")


# Runs


def without_times(folder):
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in folder.metrics()]


def test_without_reflection_it_is_grpo_bit_for_bit(tmp_path):
    settings = (*SHORT, "steps=2", "prompts=2", "rollouts_every=0", "evaluation=off")
    grpo, _ = run(tmp_path, *settings, name="grpo")
    erl, _ = run(tmp_path, *settings, "algorithm=erl(reflection=false)", name="erl")
    assert all(line["optim/grad_norm"] > 0 for line in grpo.metrics())
    expected = parameters(grpo)
    assert all(torch.equal(value, expected[name]) for name, value in parameters(erl).items())
    for a, b in zip(without_times(grpo), without_times(erl), strict=True):
        assert a.items() <= b.items()
        assert b.keys() - a.keys() == {"first/success"}


@pytest.mark.parametrize("settings", [("regulator=ar | lopti | nthr",), ("lora.rank=4", "objective.kl_coef=0.01")])
def test_it_trains_with_every_regulator_and_with_lora(tmp_path, settings, monkeypatch):
    monkeypatch.setattr("poise.sampling.erl.read_advice", lambda _: "Think of every knave.")
    folder, _ = run(
        tmp_path, "steps=1", "algorithm=erl(reflection_tokens=8)", "rollouts_every=1", "evaluation=off",
        "task.people=3", *settings,
    )  # fmt: skip
    (line,) = folder.metrics()
    roles = [record.get("role", "first") for record in folder.rollouts(1)]
    assert {*roles} == {"first", "reflection", "second", "consolidated"}
    assert line["optim/grad_norm"] > 0
    assert line["consolidated/rows"] == roles.count("consolidated") == 16 - line["first/success"] * 16
    assert line["reward/accuracy"] == line["first/success"]
    assert line["reflection/length"] == 8
    second = next(record for record in folder.rollouts(1) if record.get("role") == "second")
    assert second["prompt"].startswith("Think of every knave.\n\n")


IN_A_RETRY = """
import os, signal
from poise.__main__ import main
from poise.sampling import erl
from poise.sampling.sampler import Sampler
erl.read_advice = lambda text: text[:9]
real, calls = Sampler.play, []
def play(sampler, *args, **kwargs):
    calls.append(kwargs)
    if sum("opening" in call for call in calls) == 4:  # the second attempts of step 2
        os.kill(os.getpid(), signal.SIGKILL)
    return real(sampler, *args, **kwargs)
Sampler.play = play
main()
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_run_killed_inside_a_retry_resumes_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr("poise.sampling.erl.read_advice", lambda text: text[:9])
    settings = [
        "steps=2", "checkpoint_every=1", "algorithm=erl(memory=true, reflection_tokens=8)", "evaluation.problems=1",
        "rollouts_every=0",
    ]  # fmt: skip
    whole, _ = run(tmp_path, *settings, name="whole")
    config = make(tmp_path, *settings, name="killed")
    (tmp_path / "killed.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    with command("train", str(tmp_path / "killed.yaml"), start=("-c", IN_A_RETRY)) as process:
        shown = process.stdout.read()
        assert process.wait() == -signal.SIGKILL, shown
    killed = RunFolder.open(config.run, resume=False)
    assert killed.checkpoints() == [1]
    remembered = json.loads((killed.newest() / "memory.json").read_text())
    assert remembered["advice"]
    trainer.train(config, resume=True, quiet=True)
    assert without_times(whole) == without_times(killed)
    assert json.loads((whole.newest() / "memory.json").read_text()) == json.loads(
        (killed.newest() / "memory.json").read_text()
    )
    expected = parameters(whole)
    assert all(torch.equal(value, expected[name]) for name, value in parameters(killed).items())
