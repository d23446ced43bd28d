"""Tasks that score many attempts in one call, attempts without a verdict, and tasks with an end."""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from poise.models.loading import load_policy
from poise.runs.folder import RunFolder
from poise.sampling.draws import Sampling
from poise.sampling.native.engine import NativeEngine
from poise.sampling.sampler import Sampler
from poise.tasks import Problem, RewardError, Score, TaskError, draw, training_problems
from poise.trainer import Trainer
from poise.training.batches import drop_failed
from poise.training.building import build, build_sampler
from poise.training.config.schema import load
from poise.training.evaluation import evaluate
from support.tiny_models import prompts, tiny


@dataclass
class Together:
    """Every call is kept; the reward is the attempt's place in its call."""

    name = "together"
    size: int = 5
    failing: tuple[int, ...] = ()
    calls: list = field(default_factory=list)

    def epoch(self, split, seed, number):
        first = 0 if split == "train" else 100
        order = [(i + number + seed) % self.size + first for i in range(self.size)]
        return [Problem(str(i), f"say {i}", "easy", {}) for i in order]

    def score_all(self, attempts):
        self.calls.append(attempts)
        return [
            Score(float(i), i % 2 == 0, failed="it took too long" if i in self.failing else None)
            for i in range(len(attempts))
        ]


def play(task, count=6):
    model = tiny("llama")
    model.decode = lambda tokens: " ".join(map(str, tokens))
    encoded = prompts(count)
    model.encode = lambda messages, _=None: encoded[int(messages[0]["content"])]
    sampler = Sampler(model, NativeEngine(model, batch=4), task, max_tokens=20)
    return sampler.play([Problem(str(i), str(i), "", {}) for i in range(count)], seed=0)


def test_all_attempts_are_scored_in_one_call():
    task = Together()
    samples = play(task)
    (attempts,) = task.calls
    assert [attempt.problem.id for attempt in attempts] == [str(i) for i in range(6)]
    assert [sample.score.reward for sample in samples] == [0, 1, 2, 3, 4, 5]
    for attempt, sample in zip(attempts, samples, strict=True):
        assert attempt.prompt == [{"role": "user", "content": attempt.problem.prompt}]
        assert attempt.completion == [{"role": "assistant", "content": sample.text}] == sample.messages
        assert attempt.completion_ids == sample.tokens.tolist()


@pytest.mark.parametrize("scores", [[], [Score(1.0, True)] * 7, [Score(float("nan"), True)] * 6, [1.0] * 6])
def test_scores_that_do_not_fit_are_refused(scores):
    task = Together()
    task.score_all = lambda _: scores
    with pytest.raises(RewardError, match="together"):
        play(task)


def test_attempts_without_a_verdict_take_no_part():
    rows = [replace(sample, score=Score(1.0, True)) for sample in play(Together())] * 7  # 42
    hung = replace(rows[0], score=Score(0.0, False, failed="it took too long"))
    assert drop_failed(rows) == (rows, {})
    assert drop_failed([*rows[:20], hung, *rows[20:], hung]) == (rows, {"reward/failed": 2.0})
    with pytest.raises(TaskError, match=r"3 of 45 attempts got no verdict, more than 5%.*too long \(problem 0\)"):
        drop_failed([*rows, hung, hung, hung])
    kept = replace(rows[0], group=7)
    assert drop_failed([kept, kept, hung])[0] == [kept, kept]  # one is always allowed


def test_a_sample_whose_group_has_gone_is_dropped():
    row = play(Together(), 1)[0]
    first, second, alone = (replace(row, group=group) for group in (1, 1, None))
    hung = replace(first, score=Score(0.0, False, failed="it took too long"))
    assert drop_failed([first, second, hung, alone])[0] == [first, second, alone]
    assert drop_failed([first, hung, alone])[0] == [alone]
    assert drop_failed([first, hung]) == ([], {"reward/failed": 1.0})  # the step is skipped
    assert drop_failed([first, alone])[0] == [first, alone]  # a group of one that was one from the start


def test_a_run_goes_on_without_them(tmp_path):
    small = ["steps=2", "prompts=8", "group=4", "rollout.max_tokens=8", "evaluation.problems=50", "device=cpu"]
    config = load("tiny", [*small, f"run={tmp_path / 'run'}"])
    folder, task = RunFolder.create(config.run, config.model_dump(mode="json")), Together(failing=(3,))
    trainer = Trainer(config, folder, build(config, folder, task=task), quiet=True)
    summary = trainer.run()
    metrics = list(trainer.folder.metrics())
    assert [row["reward/failed"] for row in metrics] == [1.0, 1.0]
    first = [attempt.problem.id for attempt in task.calls[2]]  # after two calls for the first evaluation
    assert sorted(Counter(first).values()) == [4, 4, 8, 8, 8]  # an epoch of five problems, and three of the next
    assert summary["before"]["n"] == 5  # all there are
    assert summary["before"]["failed"] == 1


def test_an_epoch_has_every_problem_once_and_steps_go_on_in_the_middle():
    task = Together(size=5)
    seen = [
        problem.id
        for step in range(1, 11)
        for problem in training_problems(task, seed=3, step=step, step_seed=step * 77, count=3)
    ]
    epochs = [seen[at : at + 5] for at in range(0, 30, 5)]
    assert all(sorted(epoch) == ["0", "1", "2", "3", "4"] for epoch in epochs)
    assert epochs[0] != epochs[1]
    alone = training_problems(task, seed=3, step=7, step_seed=0, count=3)
    assert [problem.id for problem in alone] == seen[18:21]


def test_a_finite_task_gives_all_it_has_and_an_empty_one_says_so():
    assert len(draw(Together(size=5), "test", 0, 50)) == 5
    for problems in (
        lambda: draw(Together(size=0), "test", 0, 5),
        lambda: training_problems(Together(size=0), seed=0, step=1, step_seed=0, count=1),
    ):
        with pytest.raises(TaskError, match="no problem in split"):
            problems()


def test_the_evaluation_of_a_finite_task():
    config = load("tiny", ["rollout.max_tokens=8", "device=cpu"])
    sampler = build_sampler(config, load_policy("embedded", device="cpu"), print, task=Together(size=5))
    found = evaluate(sampler, problems=200, samples=2)
    assert len(found.sampled) == len(found.greedy) == 5


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_evaluation_at_temperature_0_decodes_once(temperature):
    task, policy = Together(size=5), load_policy("embedded", device="cpu")
    sampling = Sampling(temperature, top_p=0.9, top_k=3)
    sampler = Sampler(policy, NativeEngine(policy), task, sampling, max_tokens=8)
    found = evaluate(sampler, problems=5, samples=1)
    assert len(task.calls) == (2 if temperature else 1)
    assert len(found.greedy) == 5
    if not temperature:
        assert found.greedy == found.sampled
        assert found.greedy_cut_off == found.cut_off
    texts = [[attempt.completion[0]["content"] for attempt in call] for call in task.calls]
    assert texts[-1] == [sample.text for sample in sampler.greedy().play(draw(task, "test", 0, 5), seed=0)]


def test_an_evaluation_in_which_everything_fails_says_so_at_once():
    config = load("tiny", ["rollout.max_tokens=8", "device=cpu"])
    task = Together(size=5, failing=tuple(range(10)))
    sampler = build_sampler(config, load_policy("embedded", device="cpu"), print, task=task)
    with pytest.raises(TaskError, match="none of the 10 attempts got a verdict: it took too long"):
        evaluate(sampler, problems=5, samples=2)
