"""The reward for mathematics: what it takes for equal, and that nothing a model writes hangs, breaks or outlives it."""

import gzip
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from poise import rewards
from poise._lib.errors import how_to_install
from poise.tasks.rewards import equality, maths
from support.process_table import session, wait_until

GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k_train.jsonl.gz"
if not GSM8K.exists():
    GSM8K = Path(__file__).parents[2] / "shared/data/gsm8k_train.jsonl.gz"


def value(answer, gold, spec="math"):
    return rewards.get(spec)(completions=[f"So it is $\\boxed{{{answer}}}$."], answer=[gold])[0]


# gold, answer, equal; None where math-verify decides, with what it must say
CHEAP = [
    ("42", "42", True),
    ("A", "A^T", False),
    ("A", r"A^{\top}", False),
    ("42", "43", False),
    ("1234", "1,234", True),
    ("1{,}234", "1234", True),
    (r"\$32,\!450.50", "32450.5", True),
    (r"\frac{1}{2}", "0.5", True),
    (r"\frac{1}{2}", r"\dfrac12", True),
    (r"\frac{1}{3}", "0.333333", False),  # exact, or wrong
    ("1.5", r"1\frac{1}{2}", True),
    (r"-\frac{3}{4}", r"\frac{-3}{4}", True),
    ("10", r"10\%", True),  # the percent sign is a unit
    (r"10\%", "10", True),
    (r"10\%", "0.1", False),
    ("0.1", "10%", False),
    (r"5\text{ cm}", "5", True),
    ("5", r"5\text{ cm}^2", True),
    ("5", "5 dollars", True),
    (r"50\text{ km}/\text{h}", "50", True),
    ("5", "5 million", False),
    ("5", "5ab", False),  # a product is no unit
    ("5", "5k", False),
    ("5", "5 m n", False),
    (r"\frac13", r"\frac13bh", False),
    ("5", r"5\mathrm{i}", False),
    ("2", r"2\operatorname{i}", False),
    (r"\frac12", r"\frac12\mathbf{v}", False),
    ("5", r"5\text{ million dollars}", False),  # each word counts
    ("7", r"7\text{ and a half}", False),
    ("5", r"5\text{ or more}", False),
    ("5", "5 dozens", False),
    ("5", "5 hundreds", False),
    ("5", "5 trillions", False),
    ("3", "3 tenths", False),
    ("3", "3 quarters", False),
    ("2", r"2\text{ thirds}", False),
    ("5", r"5\text{ red apples}", True),
    ("5", "5 apples", True),
    ("2 x y", "2xy", True),
    ("5", "5cm", True),
    ("5", "5 km/h", True),
    ("5", r"5\,\mathrm{km}", True),
    ("5", r"\text{5 cm}", True),
    ("5", "5 square feet", True),
    ("5", r"5\text{ sq. ft}", True),
    ("5", r"5\text{ in}^2", True),
    ("12", r"12\text{ m/s}^2", True),
    (r"3\sqrt{2}\text{ cm}", r"3\sqrt{2}", True),
    (r"9 \pi", r"9\pi\text{ square inches}", True),
    ("5, 6", r"5\text{ cm}, 6\text{ cm}", True),
    (r"90^\circ", "90", True),
    ("90", "90 degrees", True),
    ("5", "x = 5", True),
    ("x=5", "5", True),
    ("5", "2 + 3 = 5", True),
    ("3", "x = 5, y = 3", False),
    ("1234", "x = 1,234", True),
    ("f(2) = 5", "5", True),
    ("56088", r"123 \cdot 456", False),  # not worked out
    ("1024", "2^{10}", False),
    ("120", "5!", False),
    ("5", "5, 6", False),
    ("5", "5 or 6", False),
    ("1,2", "2, 1", True),  # a list without brackets is a set
    ("1,2", r"\{2,1\}", True),
    ("1,2", r"x=1 \text{ or } x=2", True),
    ("1,2", "1,2,3", False),
    ("x=1, y=2", "y=2, x=1", True),
    ("x=1, y=2", "x=2, y=1", False),
    ("x=1, y=2", "1, 2", True),
    ("x=1, y=2", "2, 1", False),
    ("x=1 or x=2", "x = 2 or 1", True),
    ("(1,2)", "(1, 2)", True),
    ("(1,2)", "(2,1)", False),
    ("(1,2)", "[1,2]", False),
    ("[1,2)", "[1,2]", False),
    ("(1,2)", "1,2", False),  # brackets count
    (r"\left(1,2\right)", "(1,2)", True),
    (r"(\frac{1}{2},3)", "(0.5,3)", True),
    (r"\text{Monday}", "monday", True),
    ("even", r"\text{odd}", False),
    ("no", "No", True),
    ("right-angled", "Right-angled", True),
    ("A", "(A)", True),
    (r"\text{(B)}", "B", True),
    (r"6\pi", r"6 \pi", True),
    (r"(-\infty, 2) \cup (3, \infty)", r"(-\infty,2)\cup(3,\infty)", True),
    (r"\sqrt2", r"\sqrt{2}", True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", True),
    ("AB", "ab", False),
    ("32_7", "32_5", False),  # digits with a base
    ("32_5", "32", False),
    ("32", "32_5", False),
    ("32_5", "x = 32_{5}", True),
    ("32_5", "(32)_5", True),
    ("12_3, 11_3", "11_{3}, 12_3", True),
    ("12_3, 11_3", "11_3, 12_4", False),
    ("f(x)", "f'(x)", False),
    ("f'(x)", r"f^{\prime}(x)", True),
    ("5", "f'(2) = 5", True),
    ("5", "x =/= 5", False),
    ("5", r"x \not= 5", False),
    ("5", "x != 5", False),
    ("5", "0 = 5", False),  # equations that are false, or of something else
    ("5", "2 + 2 = 5", False),
    ("5", "not x = 5", False),
    ("5", "-x = 5", False),
    ("5", "2x = 5", False),
    ("5", "a + b = 5", True),
    ("5", "5 = 5", True),
    ("5", "-(5)", False),
    ("-5", "-(-5)", False),
    ("5", "5'", False),
    ("f'(2) = 5", "5", True),
    ("f", "f'", False),
    ("f", "f''", False),
    ("2x", "2x'", False),
    ("1000", r"1\,000", True),
    ("12345", "12 345", True),
    ("x+1", "", False),
    ("42", "", False),
    ("42", "4\u200b2", True),  # marks that nobody sees are dropped
    ("42", "\u202e24", False),  # text that is shown from right to left is read as it is written
    ("42", "4\x002", True),
    ("−7", "-7", True),
    ("42", "42" + " " * 10_000 + "!", False),
]
ALGEBRA = [
    ("x^2+2x+1", "(x+1)^2", 1.0),
    (r"2\sqrt{3}", r"\sqrt{12}", 1.0),
    (r"2\sqrt{3}", r"\sqrt{13}", 0.0),
    ("y=2x+1", "y-2x=1", 1.0),
    ("y=5", "x=5", 0.0),
    ("5x-7y+11z+4=0", "0", 0.0),
    ("p - q", "-q+p", 1.0),
    ("abc", "cba", 1.0),
    (r"x \in [-2,7]", "[-2,7]", 1.0),
    ("a+b", "b+a", 1.0),
    (r"\frac{3\sqrt{2}}{2}", r"\frac{3}{\sqrt{2}}", 1.0),
    (r"\{1,\sqrt{2}\}", r"\{2^{1/2}, 1\}", 1.0),
    (r"(\sqrt{2},3)", r"(2^{1/2},3)", 1.0),
    ("x>2", "2<x", 1.0),
    (r"\sum_{n=1}^{3} x^n", "x^3+x^2+x", 1.0),
    (r"\begin{pmatrix}1\\x+1\end{pmatrix}", r"\begin{pmatrix}1\\1+x\end{pmatrix}", 1.0),
    ("6xy", "6", 0.0),
    ("6xy", "6ab", 0.0),
    ("-2cd", "-2ab", 0.0),
    ("2yx^2", "2xy", 0.0),
    (r"\frac{1}{2}mv^2", r"\frac12", 0.0),
    ("2 x y", "2yx", 1.0),
    ("6yx^2", "6x^2y", 1.0),
    (r"2\mathbf{j}", r"2\mathbf{i}", 0.0),
    (r"3\mathrm{y}", r"3\mathrm{x}", 0.0),
    (r"5\text{ million people}", r"5\text{ billion people}", 0.0),
    (r"8\text{ p.m.}", r"8\text{ a.m.}", 0.0),
    (r"3\sqrt2", r"3\sqrt2ab", 0.0),
    (r"\pi", "3.141593", 0.0),  # exact, or wrong
    (r"\pi", "3.14159265358979", 0.0),
    (r"\sqrt2", "1.414214", 0.0),
    (r"\{1,\sqrt{2}\}", r"\{1, 1.414214\}", 0.0),
    (r"\frac{x}{3}", "0.333333x", 0.0),
    (r"\frac{5}{2}+x", "x+2.5", 1.0),
    (r"\sqrt{x}", "x^{0.5}", 1.0),
    ("2^{10}", "1024", 1.0),
    ("x_1+1", "1+x_{1}", 1.0),
    ("2x", r"f'(x) = x \cdot 2", 1.0),
    ("x+1", "nonsense", 0.0),
    ("x+1", r"\frac{", 0.0),
]


@pytest.mark.parametrize(("gold", "answer", "right"), CHEAP)
def test_what_is_decided_without_algebra(gold, answer, right, monkeypatch):
    monkeypatch.setattr(maths, "checks", lambda: pytest.fail("asked math-verify"))
    assert value(answer, gold) == float(right)


@pytest.mark.parametrize(("gold", "answer", "right"), ALGEBRA)
def test_what_algebra_decides(gold, answer, right):
    assert equality.equal(answer, gold) is None
    assert value(answer, gold) == right


@pytest.mark.parametrize(
    ("gold", "answer", "lenient"),
    [
        ("1024", "2^{10}", True),
        ("4", r"\sqrt{16}", True),
        ("0.5", r"50\%", True),
        (r"\frac{1}{3}", "0.333333", True),
        ("5", "0 = 5", True),
        (r"\pi", r"0=\pi", True),
        (r"\sqrt{2}", r"1+1 = \sqrt{2}", True),
        ("2x", "1=2x", True),
        ("(1,2)", "1,2", True),
        ("5", r"5\mathrm{i}", True),
        ("5", "6", False),
    ],
)
def test_where_it_is_stricter_than_math_verify_and_the_switch_that_follows_it(gold, answer, lenient):
    assert value(answer, gold) == 0.0
    assert value(answer, gold, "math(lenient=True)") == lenient


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        (r"\boxed{1} or \boxed{42}", 1.0),  # the last box
        (r"\boxed{42}, no: \boxed{1}", 0.0),
        ("It must be 42", 0.0),  # states no answer
        ("The answer is 42.", 1.0),
        ("#### 42", 1.0),
        ("<answer>42</answer>", 1.0),
        (r"<think>\boxed{42}", 0.0),
        ("", 0.0),
    ],
)
def test_where_the_answer_stands(reply, right):
    assert rewards.get("math")(completions=[reply], answer=["42"]) == [right]


def test_trailing_numbers_count_only_if_asked_for():
    assert rewards.get("math(last_number=True)")(completions=["It must be 42"], answer=["42"]) == [1.0]


@pytest.mark.parametrize(
    ("column", "gold", "answer"),
    [
        ("answer", "48/2 = <<48/2=24>>24\n#### 1,234", "1234"),  # GSM8K
        ("solution", r"We have $x=\frac12$, so the answer is $\boxed{\frac{1}{2}}$.", "0.5"),  # MATH
        ("answer", 204, "204"),  # AIME
        ("answer", "204", "204.0"),
        ("answer", r"-\frac{2}{3}", r"-\dfrac{2}{3}"),  # DeepScaleR
        ("ground_truth", ["7", "x+1"], "1+x"),  # any of them
    ],
)
def test_golds_of_public_sets(column, gold, answer):
    math = rewards.get("math")
    assert math(completions=[rf"\boxed{{{answer}}}", r"\boxed{99}"], **{column: [gold, gold]}) == [1.0, 0.0]
    assert math(completions=["a"], **{column: [None]}) == [None]


@pytest.mark.skipif(not GSM8K.exists(), reason="the public file is not here")
def test_every_gold_of_gsm8k_scores_right_and_shuffled_ones_do_not():
    with gzip.open(GSM8K, "rt") as lines:
        golds = [json.loads(line)["answer"] for line in lines]
    bare = [gold.rpartition("####")[2].strip().replace(",", "") for gold in golds]
    order = random.Random(0).sample(range(len(golds)), len(golds))
    for name in ("math", "number"):
        reward = rewards.get(name)
        assert set(reward(completions=golds, answer=golds)) == {1.0}
        assert set(reward(completions=[f"\\boxed{{{text}}}" for text in bare], answer=golds)) == {1.0}
        shuffled = reward(completions=[golds[i] for i in order], answer=golds)
        assert shuffled == [float(bare[i] == own) for i, own in zip(order, bare, strict=True)]


def test_votes_are_counted_by_value():
    math = rewards.get("math")
    for texts, said in {
        ("0.5", r"\frac{1}{2}", "x = 1/2", r"\frac12\text{ cm}"): "1/2",
        (r"\text{Monday}", "monday"): "monday",
        ("x + 1", "x+1"): "x+1",
    }.items():
        assert {math.answer(f"\\boxed{{{text}}}") for text in texts} == {said}
    assert math.answer("no answer") is None


def hostile(count):
    """Answers that were written to hang, break or fool a verifier; most are against a formula as the right answer."""
    rng = random.Random(0)
    kinds = [
        lambda n: "9^{9^{9^9}}" + "9" * n,
        lambda n: "{" * (5 * n) + "}" * (5 * n),
        lambda n: "(" * (5 * n) + "x" + ")" * (5 * n),
        lambda n: rf"10^{{{10 ** (n % 40)}}}",
        lambda n: rf"{n}{'!' * (n % 5 + 1)}",
        lambda n: "x\x00\x1b[2J\r\n" * n,
        lambda n: "\u202e\u200f42\u202c" * n,
        lambda n: "\ud800" * n,
        lambda n: r"\frac{" * n,
        lambda n: r"\frac{1}{" * n + "2" + "}" * n,
        lambda n: r"\sqrt{" * n + "2" + "}" * n,
        lambda n: "__import__('os').system('touch owned')" * (n % 3 + 1),
        lambda n: r"\input{/etc/passwd}" + r"\write18{touch owned}" * (n % 3),
        lambda n: "1" * (50 * n),
        lambda n: "1," * (10 * n),
        lambda n: "\\" * n,
        lambda n: r"\text{" + "a" * n + "}",
        lambda n: "+".join(f"x_{{{i}}}" for i in range(n)),
        lambda n: "1/" * n + "0",
        lambda n: "\U0001f600" * n,
    ]
    return [kinds[i % len(kinds)](rng.randrange(1, 100)) for i in range(count)]


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_hostile_answers(tmp_path, monkeypatch, count):
    monkeypatch.chdir(tmp_path)
    answers = hostile(count)
    random.Random(1).shuffle(answers)
    golds = [("42", "x+1", r"\sqrt{2}", r"\{1,x\}")[i % 4] for i in range(count)]
    counted = {}
    values = rewards.get("math(seconds=0.2)")(
        completions=[f"\\boxed{{{answer}}}" for answer in answers], answer=golds, log_metric=counted.__setitem__
    )
    assert {answer for answer, right in zip(answers, values, strict=True) if right} <= {
        answer for answer in answers if "42" in answer
    }
    assert counted["math/cut_off"] >= 0
    assert not Path("owned").exists()


SLOW = [r"\sqrt{2}^{\sqrt{3}^{\sqrt{5}^{99}}}", "(x+y+z)^{9999}", r"\int_0^\infty x^{x^x} dx"]


def test_what_takes_too_long_is_wrong_and_counted_and_its_neighbours_are_not_harmed():
    counted = {}
    answers = [*SLOW, r"\frac{2}{\sqrt{2}}"]
    pids = [process.pid for process in maths.checks()._idle]
    values = rewards.get("math(seconds=0.6)")(
        completions=[f"\\boxed{{{answer}}}" for answer in answers],
        answer=[r"\sqrt{2}"] * len(answers),
        log_metric=counted.__setitem__,
    )
    assert values == [0.0, 0.0, 0.0, 1.0]
    assert counted["math/cut_off"] >= 2
    if pids:  # loaded once: only the fork was killed
        assert set(pids) & {process.pid for process in maths.checks()._idle}


def test_in_a_thread_too():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(value, ["(x+2)^2", "(x+3)^2"], ["x^2+4x+4", "x^2+6x+10"]))
    assert found == [1.0, 0.0]


PARENT = """
import sys
from poise import rewards
from poise.tasks.rewards import maths
math = rewards.get("math(seconds=50)")
math(completions=["\\\\boxed{(x+1)^2}"], answer=["x^2+2x+1"])
print(*[process.pid for process in maths.checks()._idle], flush=True)
if sys.argv[1:]:
    math(completions=["\\\\boxed{(x+y+z)^{9999}}"], answer=["x^2+2x+1"])
"""


@pytest.mark.parametrize("busy", [False, True])
def test_no_process_is_left(busy):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *(["busy"] if busy else [])], stdout=subprocess.PIPE, text=True
    )
    with parent.stdout:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 1
        if busy:
            wait_until(lambda: len(session(pids[0])) == 3)  # its supervisor, math-verify, and the fork that checks
            parent.kill()
        parent.wait(60)
    wait_until(lambda: not any(session(pid) for pid in pids))


def test_without_math_verify(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=re.escape(how_to_install("math"))):
        rewards.get("math")


def test_a_worker_that_was_killed_by_somebody_is_replaced():
    value("(x+5)^2", "x^2+10x+25")
    for process in maths.checks()._idle:
        os.killpg(process.pid, 9)
    assert value("(x+6)^2", "x^2+12x+36") == 1.0
