"""What TRL's pages show runs here as it is, and gives the numbers that TRL's own trainer gets from it."""

import math
import sys

import pytest

trl = pytest.importorskip("trl", reason="TRL is not installed (extra 'trl')")

import trl.rewards as trl_rewards  # noqa: E402

from poise import rewards  # noqa: E402
from poise._lib import user_code  # noqa: E402
from support import trl_runs  # noqa: E402

# The shapes that TRL's page on GRPO shows: by tokens, by characters, a format, a reference, two kinds of problems, a
# coroutine, one that logs, one that follows the training; as one person might have them in a file.
FILE = r"""
import asyncio
import re


def by_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def by_characters(completions, **kwargs):
    return [float(sum(len(message["content"]) for message in completion)) for completion in completions]


def tagged(completions, **kwargs):
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    return [1.0 if re.match(pattern, completion[0]["content"]) else 0.0 for completion in completions]


def reference(completions, ground_truth, **kwargs):
    found = [re.search(r"\\boxed\{(.*?)\}", completion[0]["content"]) for completion in completions]
    return [1.0 if match and match[1] == gold else 0.0 for match, gold in zip(found, ground_truth)]


def only_math(prompts, completions, task, **kwargs):
    return [(1.0 if "4" in c[0]["content"] else -1.0) if t == "math" else None for c, t in zip(completions, task)]


def only_code(prompts, completions, task, **kwargs):
    return [(0.5 if "def" in c[0]["content"] else -0.5) if t == "code" else None for c, t in zip(completions, task)]


async def waits(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion[0]["content"] else 0.0 for completion in completions]


def logs(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    values = [float(gold in completion[0]["content"]) for completion, gold in zip(completions, ground_truth)]
    if log_extra:
        log_extra("golden_answer", list(ground_truth))
    if log_metric:
        log_metric("accuracy", sum(values) / len(values))
    return values


def follows(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step)] * len(completions)
"""
NAMES = ["by_tokens", "by_characters", "tagged", "reference", "only_math", "only_code", "waits", "logs", "follows"]
TEXTS = [
    r"<think>2+2 is 4</think><answer>\boxed{4}</answer>",
    r"<think>hm</think> So it is \boxed{\frac{1}{2}}",
    "<think>def f(): pass</think><answer>def f(): return 1</answer>",
    r"The answer is \boxed{0.5} \boxed{0.5} \boxed{0.5}",
    "",
    "poem poem poem poem poem poem",
]
COLUMNS = {
    "ground_truth": ["4", "4", "def", "0.5", "0.5", "poem"],
    "solution": ["$4$", r"$\frac{1}{2}$", "no formula here", "$0.5$", "$0.5$", "$7$"],
    "task": ["math", "math", "code", "code", "other", "other"],
}
PROMPTS = [[{"role": "user", "content": f"Question {i}"}] for i in range(len(TEXTS))]
COMPLETIONS = [[{"role": "assistant", "content": text}] for text in TEXTS]
IDS = [list(range(5, 5 + len(text))) for text in TEXTS]
WEIGHTS = [1.0, 0.5, -2.0, 0.1, 3.0, 0.25, 1.0, 1.0, 1.0]


@pytest.fixture
def documented(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(user_code, "FOLDERS", [str(tmp_path)])
    (tmp_path / "documented.py").write_text(FILE)
    import documented

    yield documented
    del sys.modules["documented"]


def trls(tmp_path, functions, weights=None):
    """Per row what TRL's trainer gets from each function, None for NaN, and the reward that it makes of them."""
    settings = {} if weights is None else {"reward_weights": weights}
    trainer = trl_runs.build(tmp_path / "trl", kind=trl.GRPOTrainer, reward=list(functions), **settings)
    trainer.state.global_step = 7
    columns = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]
    inputs = [{"prompt": prompt, **row} for prompt, row in zip(PROMPTS, columns, strict=True)]
    values = trainer._calculate_rewards(inputs, PROMPTS, COMPLETIONS, IDS)
    rows = [[None if math.isnan(value) else value for value in row] for row in values.tolist()]
    return rows, (values * trainer.reward_weights).nansum(dim=1).tolist()


def ours(specs, weights=None, **settings):
    with rewards.Rewards(specs, weights, **settings) as scorer:
        state = rewards.TrainerState(global_step=7)
        ids = [f"q{i}" for i in range(len(TEXTS))]
        verdicts = scorer.score(PROMPTS, COMPLETIONS, IDS, COLUMNS, ids, state)
        return verdicts, [[v.parts.get(name) for name in scorer.names] for v in verdicts]


@pytest.mark.parametrize("quick", [True, False])
def test_documented_functions_give_the_same_rewards_in_both(tmp_path, documented, quick):
    values, sums = trls(tmp_path, [getattr(documented, name) for name in NAMES], WEIGHTS)
    verdicts, parts = ours([f"documented.{name}" for name in NAMES], WEIGHTS, quick=quick)
    assert [v.reward for v in verdicts] == pytest.approx(sums, abs=1e-5)
    assert parts == [[None if value is None else pytest.approx(value) for value in row] for row in values]
    assert [v.extra["golden_answer"] for v in verdicts] == COLUMNS["ground_truth"]


def test_rows_to_which_nothing_applies_are_left_out_in_both(tmp_path, documented):
    names = ["only_math", "only_code"]
    values, _ = trls(tmp_path, [getattr(documented, name) for name in names])
    verdicts, _ = ours([f"documented.{name}" for name in names], quick=True)
    assert [v.applies for v in verdicts] == [any(value is not None for value in row) for row in values]
    assert not all(v.applies for v in verdicts)


def test_trls_own_rewards_give_the_same_in_both(tmp_path):
    specs = {
        "trl.rewards.accuracy_reward": trl_rewards.accuracy_reward,
        "trl.rewards.reasoning_accuracy_reward": trl_rewards.reasoning_accuracy_reward,
        "trl.rewards.think_format_reward": trl_rewards.think_format_reward,
        "trl.rewards.get_soft_overlong_punishment(max_completion_len=45, soft_punish_cache=20)": (
            trl_rewards.get_soft_overlong_punishment(max_completion_len=45, soft_punish_cache=20)
        ),
        "trl.rewards.get_repetition_penalty_reward(ngram_size=2)": trl_rewards.get_repetition_penalty_reward(2),
        "trl.rewards.get_cosine_scaled_reward(max_len=100)": trl_rewards.get_cosine_scaled_reward(max_len=100),
    }
    values, sums = trls(tmp_path, specs.values())
    verdicts, parts = ours(list(specs), quick=True)
    assert [v.reward for v in verdicts] == pytest.approx(sums, abs=1e-5)
    assert parts == [[None if value is None else pytest.approx(value) for value in row] for row in values]
    assert any(None in row for row in parts)

    alone, in_worker = ours(next(iter(specs)))
    assert in_worker == [row[:1] for row in parts]
    assert [v.correct for v in alone] == [row[0] == 1.0 for row in parts]


def test_built_in_rewards_work_in_trl(tmp_path):
    specs = ["math(column='solution')", "format(tags=('think',), rest=True)", "overlong(max_tokens=45, buffer=20)"]
    functions = [rewards.get(spec) for spec in specs]
    values, sums = trls(tmp_path, functions, [1.0, 0.5, 2.0])
    verdicts, parts = ours(specs, [1.0, 0.5, 2.0])
    assert [v.reward for v in verdicts] == pytest.approx(sums, abs=1e-5)
    assert parts == [[None if value is None else pytest.approx(value) for value in row] for row in values]
    penalty = trl_rewards.get_soft_overlong_punishment(max_completion_len=45, soft_punish_cache=20)
    assert functions[2](completion_ids=IDS) == penalty(completion_ids=IDS)
    assert functions[1](completions=COMPLETIONS) == trl_rewards.think_format_reward(completions=COMPLETIONS)
