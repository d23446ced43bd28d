"""Several rewards together: weights, None, verdicts, and what is said when one does the wrong thing."""

import functools
import subprocess
import sys

import pytest

from poise.tasks.rewards import RewardError, Rewards, TrainerState

TEXTS = ["\\boxed{1}", "\\boxed{2}", "hm", "The answer is 1"]


def score(specs, texts=TEXTS, weights=None, quick=False, **columns):
    with Rewards(specs, weights, quick=quick) as scorer:
        return scorer.score(
            ["?"] * len(texts),
            texts,
            [[0] * len(text) for text in texts],
            columns,
            [f"q{i}" for i in range(len(texts))],
        )


def length(completions, **_):
    return [len(text) for text in completions]


def sometimes(completions, **_):
    return [0.5 if "box" in text else None for text in completions]


async def later(completions, **_):
    return [float("box" in text) for text in completions]


class Counter:
    correct_at = 0.5

    def __call__(self, completions, **_):
        return [0.5] * len(completions)


def test_weights_parts_and_verdicts():
    verdicts = score(["number(last_number=False)", length, sometimes], weights=[1, 0.1, 2], answer=["1"] * 4)
    assert [v.reward for v in verdicts] == pytest.approx([1 + 0.9 + 1, 0.9 + 1, 0.2, 1 + 1.5])
    assert verdicts[0].parts == {"number": 1.0, "length": 9.0, "sometimes": 0.5}
    assert verdicts[2].parts == {"number": 0.0, "length": 2.0}
    assert [v.correct for v in verdicts] == [True, False, False, True]
    assert [v.answer for v in verdicts] == ["1", "2", None, "1"]
    assert all(v.failed is None and v.applies for v in verdicts)


def test_rows_to_which_no_reward_applies():
    verdicts = score(sometimes)
    assert [v.applies for v in verdicts] == [True, True, False, False]
    assert verdicts[2].reward == 0.0
    assert not verdicts[2].correct
    assert verdicts[2].failed is None


def test_the_first_reward_that_applies_says_whether_it_is_correct():
    assert [v.correct for v in score([sometimes, "number"], answer=["1"] * 4)] == [False, False, False, True]
    assert all(v.correct for v in score(Counter()))


def test_async_rewards_and_names():
    verdicts = score([later, functools.partial(later), Counter(), Counter])
    assert list(verdicts[0].parts) == ["later", "later_2", "Counter", "Counter_2"]


def test_a_loop_that_runs_already():
    import asyncio

    async def notebook():
        return score(later)

    assert [v.reward for v in asyncio.run(notebook())] == [1.0, 1.0, 0.0, 0.0]


def test_what_trl_hands_over():
    seen = {}

    def curious(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, level, **kwargs):
        seen.update(kwargs, step=trainer_state.global_step, prompts=prompts, ids=completion_ids, level=level)
        log_extra("seen", [text.upper() for text in completions])
        log_metric("curiosity", 3)
        return [0.0] * len(completions)

    scorer = Rewards(curious)
    state, reported = TrainerState(global_step=7, max_steps=10), {}
    verdict = scorer.score(["p"], ["c"], [[1]], {"level": ["hard"]}, ["q"], state, ["env"], reported)[0]
    assert seen == {"environments": ["env"], "step": 7, "prompts": ["p"], "ids": [[1]], "level": ["hard"]}
    assert verdict.extra == {"seen": "C"}
    assert reported == {"curiosity": [3.0]}


def raises(completions, **_):
    if any("hm" in text for text in completions):
        raise ValueError("no idea")
    return [0.0] * len(completions)


def nan(completions, **_):
    return [float("nan") if "hm" in text else 0.0 for text in completions]


def returns(values):
    return lambda **_: values


WRONG = [
    (raises, r"reward 'raises' raised ValueError: no idea \(.*test_rewards.py, line \d+\) \(row q2\)"),
    (nan, r"reward 'nan' returned nan, not a finite number.*\(row q2\)"),
    (returns([float("inf")] * 4), r"returned inf.*\(row q0\)"),
    (returns([0.0]), r"returned 1 values instead of 4, one per completion"),
    (returns(0.0), r"returned float, not a list with one number"),
    (returns("0000"), r"returned str, not a list"),
    (returns({1: 0, 2: 0, 3: 0, 4: 0}), r"returned dict, not a list"),
    (returns(None), r"returned NoneType, not a list"),
    (returns([0, 0, "1", 0]), r"returned '1', not a finite number.*\(row q2\)"),
    (returns([0, 0, 0, [1]]), r"returned \[1\], not a finite.*\(row q3\)"),
    (lambda gold, **_: gold, r"argument: 'gold'\): it gets prompts, completions, completion_ids, answer, and"),
    (lambda completions: completions, r"unexpected keyword argument 'prompts'.*add \*\*kwargs"),
    (lambda log_extra, **_: log_extra("a", [1] * 7), r"log_extra\('a'\) got 7 values instead of 1"),
]


@pytest.mark.parametrize("i", range(len(WRONG)))
def test_a_reward_that_does_the_wrong_thing(i):
    reward, message = WRONG[i]
    with pytest.raises(RewardError, match=message):
        score(reward, answer=["1"] * 4)


def test_numbers_of_other_libraries():
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")

    def foreign(**_):
        return [numpy.float32(0.5), torch.tensor(1.0), True, 2]

    assert [v.reward for v in score(foreign)] == [0.5, 1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"specs": []}, "at least one"),
        ({"specs": ["exact"], "weights": [1, 2]}, "give one weight per reward: 1 reward, 2 weights"),
        ({"specs": ["exact"], "weights": [float("nan")]}, "a weight must be between"),
        ({"specs": ["exact"], "weights": ["1"]}, "must be a number"),
        ({"specs": ["exact"], "timeout": 0}, "timeout must be between"),
        ({"specs": [3]}, "a name or a callable"),
        ({"specs": 3}, "a name, a callable or a list of these, got 3"),
        ({"specs": {"exact": 1}}, "set weights in reward_weights"),
    ],
)
def test_settings_are_checked(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Rewards(**arguments)


def test_rows_of_uneven_length():
    with pytest.raises(ValueError, match="level has 1 rows for 2 completions"):
        Rewards("exact").score(["a", "b"], ["a", "b"], [[], []], {"level": [1]}, ["1", "2"])
    assert Rewards("exact").score([], [], [], {}, []) == []


def test_no_torch_and_nothing_heavy():
    code = "import sys, poise.rewards; print([m for m in ('torch', 'numpy', 'sympy', 'asyncio') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("spec", ["exact", "choice", "number", "math", "format", "regex(pattern='B')"])
def test_columns_that_bear_names_of_python(spec):
    columns = {key: ["B"] for key in ("self", "args", "text", "name", "reward", "answer")}
    with Rewards(spec, quick=True) as several:
        assert several.score(["?"], ["B"], [[]], columns, ["1"])[0].failed is None
