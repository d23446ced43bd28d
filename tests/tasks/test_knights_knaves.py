"""Knights and Knaves: solver, generator, meaning, worked solutions, verifier, public rows."""

from __future__ import annotations

import gzip
import json
import os
import re
import string
import sys
from collections import Counter
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise import tasks
from poise.tasks.base import Demonstrates, Problem
from poise.tasks.knights_knaves import (
    KnightsKnaves,
    Puzzle,
    canonical,
    generate,
    meaning,
    read,
    solve,
    split_of,
    worked,
)
from poise.tasks.knights_knaves.statements import FORMS, holds, mentioned
from poise.tasks.knights_knaves.verifier import score
from poise.tasks.knights_knaves.wording import role
from poise.tasks.knights_knaves.worked import STYLES

quick = settings(max_examples=40, deadline=None)  # a loaded machine is no failure

PEOPLE = ("Ada", "Bruno", "Clara")
SOLUTION = (True, False, True)
GOLD = "(1) Ada is a knight (2) Bruno is a knave (3) Clara is a knight"


def public_rows() -> Path:
    folder = os.environ.get("POISE_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data"
    path = Path(folder) / "kk_train.jsonl.gz"
    if not path.exists():
        pytest.skip(f"the public rows are not here ({path.name}; set POISE_DATA to their folder)")
    return path


def claims(people: int, depth: int = 2) -> st.SearchStrategy[Any]:
    person = st.integers(0, people - 1)
    plain = st.tuples(st.sampled_from(["telling-truth", "lying"]), person)
    return st.recursive(
        plain,
        lambda part: st.one_of(
            st.tuples(st.just("not"), part),
            st.tuples(st.sampled_from(["and", "or", "->", "<=>"]), part, part),
        ),
        max_leaves=2**depth,
    )


@st.composite
def puzzles(draw: st.DrawFn, most: int = 5) -> tuple[Any, ...]:
    people = draw(st.integers(1, most))
    return tuple(draw(claims(people)) for _ in range(people))


def renamed(statement: Any, to: Any) -> Any:
    if statement[0] in ("telling-truth", "lying"):
        return (statement[0], to[statement[1]])
    return (statement[0], *(renamed(part, to) for part in statement[1:]))


def permuted(statements: Any, to: Any) -> tuple[Any, ...]:
    """Person i becomes person to[i]."""
    moved: list[Any] = [None] * len(statements)
    for i, statement in enumerate(statements):
        moved[to[i]] = renamed(statement, to)
    return tuple(moved)


def response(answer: str, think: str = "so it is") -> str:
    return f"<think>{think}</think>\n<answer>{answer}</answer>"


# ── solver ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@quick
@given(puzzles())
def test_solver_agrees_with_brute_force(statements: Any) -> None:
    people = len(statements)
    expected = [
        list(knights)
        for knights in product((False, True), repeat=people)
        if all(holds(statement, knights) == knights[i] for i, statement in enumerate(statements))
    ]
    assert sorted(solve(statements)) == sorted(expected)


def test_solver_by_hand() -> None:
    assert solve([("lying", 1), ("and", ("lying", 0), ("lying", 1))]) == [[True, False]]
    assert solve([("telling-truth", 0)]) == [[False], [True]]
    assert solve([("lying", 0)]) == []
    assert solve([["not", ["lying", 1]], ["<=>", ["lying", 0], ["telling-truth", 1]]]) == [[False, False]]


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        ([("telling-truht", 0)], "did you mean 'telling-truth'"),
        ([("lying", 1)], "person must be 0 to 0"),
        ([("lying", True)], "person must be"),
        ([("and", ("lying", 0))], "takes 2 argument"),
        ([()], "expected a tuple"),
        ("lying", "expected a tuple"),
        ([], "one per person"),
    ],
)
def test_malformed_statements_are_named(statements: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve(list(statements) if isinstance(statements, str) else statements)


# ── generator ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("people", range(2, 9))
@pytest.mark.parametrize("depth", [1, 3])
def test_generated_puzzles_have_one_solution(people: int, depth: int) -> None:
    for seed in range(30):
        puzzle = generate(people, seed, depth=depth)
        assert solve(puzzle.statements) == [list(puzzle.solution)]
        assert puzzle.people == people == len(set(puzzle.names))
        assert all(name in puzzle.quiz for name in puzzle.names)


def test_generated_puzzles_are_reproducible() -> None:
    assert generate(5, 7) == generate(5, 7)
    assert generate(5, 7) != generate(5, 8)
    plain = generate(5, 7, phrasing="plain", names=("A", "B", "C", "D", "E"))
    assert plain.statements == generate(5, 7).statements  # the words never change what is said
    assert set(plain.names) == set("ABCDE")


def test_a_seed_means_the_same_puzzle_everywhere() -> None:
    assert generate(3, 1).statements == (
        ("or", ("telling-truth", 2), ("telling-truth", 1)),
        ("and", ("telling-truth", 1), ("telling-truth", 2)),
        ("or", ("lying", 1), ("lying", 0)),
    )


def test_forms_come_in_the_proportions_of_the_public_set() -> None:
    forms: Counter[str] = Counter()
    for seed in range(600):
        puzzle = generate(3 + seed % 5, seed)
        for speaker, statement in enumerate(puzzle.statements):
            forms[statement[0]] += 1
            forms["self"] += speaker in mentioned(statement)
    total = sum(forms[form] for form in FORMS)
    public = {
        "telling-truth": 0.084,
        "lying": 0.077,
        "not": 0.154,
        "and": 0.170,
        "or": 0.171,
        "->": 0.178,
        "<=>": 0.167,
    }
    for form, share in (public | {"self": 0.125}).items():
        assert forms[form] / total == pytest.approx(share, abs=0.03), form


def test_quizzes_vary_and_nest_without_ambiguity() -> None:
    openings = {generate(3, seed).quiz.split(".")[0] for seed in range(40)}
    assert len(openings) > 3
    deep = [generate(4, seed, depth=3) for seed in range(40)]
    assert any("(" in puzzle.quiz for puzzle in deep)
    assert all(puzzle.quiz.count("(") == puzzle.quiz.count(")") for puzzle in deep)


@pytest.mark.parametrize(
    "wrong",
    [
        {"people": 1},
        {"people": 13},
        {"people": 2.5},
        {"depth": 0},
        {"names": ("Ada",)},
        {"names": ("Ada", "ada", "Bo")},
        {"phrasing": "plian"},
    ],
)
def test_generator_refuses_what_it_cannot_do(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=r"people|depth|names|did you mean 'plain'"):
        generate(**({"people": 3, "seed": 0} | wrong))


# ── meaning ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@quick
@given(puzzles(6), st.data())
def test_canonical_form_ignores_the_order_of_the_people(statements: Any, data: st.DataObject) -> None:
    to = data.draw(st.permutations(range(len(statements))))
    assert canonical(permuted(statements, to)) == canonical(statements)


@quick
@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(1, 3), st.randoms())
def test_canonical_form_of_generated_puzzles_ignores_order(seed: int, people: int, depth: int, rng: Any) -> None:
    statements = generate(people, seed, depth=depth).statements
    to = list(range(people))
    rng.shuffle(to)
    assert canonical(permuted(statements, to)) == canonical(statements)


def test_canonical_form_separates_exactly_what_differs() -> None:
    """Against the definition: same form if and only if some permutation makes all truth tables equal."""
    seen = [generate(3, seed).statements for seed in range(60)]

    def meaning(statements: Any) -> tuple[Any, ...]:
        worlds = list(product((False, True), repeat=3))
        return tuple(tuple(holds(s, world) for world in worlds) for s in statements)

    for a in seen:
        for b in seen:
            same = any(meaning(permuted(a, to)) == meaning(b) for to in permutations(range(3)))
            assert (canonical(a) == canonical(b)) == same


def test_canonical_form_merges_equivalent_wordings() -> None:
    base = (("telling-truth", 1), ("and", ("lying", 0), ("telling-truth", 1)))
    other = (("not", ("lying", 1)), ("and", ("telling-truth", 1), ("not", ("telling-truth", 0))))
    assert canonical(base) == canonical(other)
    assert canonical(base) != canonical((("lying", 1), base[1]))


def test_highly_symmetric_puzzles_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    search, calls = meaning._smallest, []
    monkeypatch.setattr(meaning, "_smallest", lambda *args: calls.append(1) or search(*args))
    everyone = ("telling-truth", 0)
    for i in range(1, 8):
        everyone = ("and", everyone, ("telling-truth", i))
    hard = [
        tuple(("telling-truth", i) for i in range(8)),  # everyone speaks of themselves
        tuple(("lying", (i + 1) % 8) for i in range(8)),  # a ring
        tuple(("lying", i ^ 1) for i in range(8)),  # pairs
        (everyone,) * 8,
    ]
    for statements in hard:
        calls.clear()
        assert canonical(statements) == canonical(permuted(statements, [3, 1, 4, 7, 5, 0, 2, 6]))
        assert len(calls) < 1000  # of 2 · 8! orders


def test_splits_are_disjoint_by_meaning_and_a_tenth_is_test() -> None:
    task = KnightsKnaves(people="2-6")
    train = list(islice(task.problems("train", 0), 1500))
    test = list(islice(task.problems("test", 0), 300))
    forms = [{canonical(Puzzle.of(problem).statements) for problem in part} for part in (train, test)]
    assert not forms[0] & forms[1]
    share = Counter(split_of(generate(5, seed).statements) for seed in range(1500))["test"] / 1500
    assert share == pytest.approx(0.1, abs=0.03)


def test_the_split_never_moves() -> None:
    """A golden list: were it to change, yesterday's test puzzles would be in tomorrow's training set."""
    assert [seed for seed in range(40) if split_of(generate(4, seed).statements) == "test"] == [1, 10, 19, 22, 25]


# ── worked solutions and the verifier ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("people", range(2, 9))
def test_the_verifier_accepts_gold_and_worked_solutions(people: int, style: str) -> None:
    for seed in range(12):
        puzzle = generate(people, seed, depth=1 + seed % 3)
        for text in (worked(puzzle, style=style, seed=seed), response(puzzle.answer)):
            result = score(puzzle.names, puzzle.solution, text)
            assert (result.reward, result.correct) == (3.0, True)


def test_compact_solutions_by_hand() -> None:
    statements = (("lying", 1), ("and", ("lying", 0), ("lying", 1)))
    puzzle = Puzzle(("Ada", "Bruno"), statements, (True, False), "quiz", "x")
    answer = "<answer>(1) Ada is a knight (2) Bruno is a knave</answer>"
    assert worked(puzzle, style="compact") == (
        "<think>Ada knight Bruno knight\nAda false no\nBruno knave\nAda true ok Bruno false ok</think>" + answer
    )
    assert worked(puzzle, style="values") == (
        "<think>Ada knight Bruno knight\nAda false no\nBruno knave\nAda true ok Bruno false and true false ok</think>"
        + answer
    )


def test_compact_solutions_are_short() -> None:
    def tokens(text: str) -> int:
        for mark in ("<think>", "</think>", "<answer>", "</answer>", "(", ")"):
            text = text.replace(mark, f" {mark} ")
        return len(text.split())

    longest = {n: max(tokens(worked(generate(n, seed), style="compact")) for seed in range(300)) for n in (2, 3)}
    assert longest[2] <= 60
    assert longest[3] <= 120


@pytest.mark.parametrize("style", STYLES)
def test_noise_lowers_correctness_and_is_reproducible(style: str) -> None:
    some = [generate(3, seed) for seed in range(150)]

    def share(noise: float) -> float:
        texts = [worked(puzzle, style=style, noise=noise, seed=1) for puzzle in some]
        assert texts == [worked(puzzle, style=style, noise=noise, seed=1) for puzzle in some]
        results = [score(puzzle.names, puzzle.solution, text) for puzzle, text in zip(some, texts, strict=True)]
        assert all(result.parts["format"] == 1 and result.parts["answer"] > -2 for result in results)
        return sum(result.correct for result in results) / len(some)

    shares = [share(noise) for noise in (0.0, 0.05, 0.3)]
    assert shares[0] == 1.0
    assert shares[0] > shares[1] > shares[2]
    assert worked(some[0], style=style, noise=0.5, seed=1) != worked(some[0], style=style, noise=0.5, seed=3)


@pytest.mark.parametrize("style", STYLES)
@quick
@given(seed=st.integers(0, 10**9))
def test_all_noise_still_ends_in_an_answer(style: str, seed: int) -> None:
    puzzle = generate(2 + seed % 5, seed)
    for noise in (0.5, 1.0):
        assert score(puzzle.names, puzzle.solution, worked(puzzle, style=style, noise=noise)).reward in (3.0, -0.5)


@pytest.mark.parametrize(
    ("text", "total"),
    [
        (response(GOLD), 3.0),
        (response(GOLD.upper()), 3.0),
        ("Well. " + response("It is clear: " + GOLD + ". That is all.") + " Bye.", 3.0),
        (response("Clara is a knight, Bruno is a knave, Ada is a knight"), 3.0),
        (response(GOLD.replace("Bruno is a knave", "Bruno is a knight")), -0.5),
        (response("Ada is a knight and Bruno is a knave"), -1.0),  # someone is missing
        (response(GOLD + " and not a knave"), -1.0),  # one role too many
        (response(GOLD.replace("Clara is", "Clara was")), -1.0),
        (response(GOLD.replace("Ada", "Adam")), -1.0),
        (response(GOLD.replace("Ada", "Canada")), -1.0),
        (response("Ada is a knight, Ada is a knave, Bruno is a knave"), -1.0),  # said twice of Ada
        (response("Ada and Clara are knights, Bruno is a knave"), -1.0),
        (response(""), -1.0),
        (GOLD, -3.0),
        ("", -3.0),
        (response(GOLD).replace("</answer>", ""), -3.0),
        (response(GOLD) + "<answer>", -3.0),
        (response(GOLD, think="a<think>b"), -3.0),
        (f"<answer>{GOLD}</answer><think></think>", -3.0),
        (f"<think><answer>{GOLD}</answer></think>", -3.0),
        (response(GOLD).replace("<think>", "<THINK>"), -3.0),
    ],
)
def test_golden_totals(text: str, total: float) -> None:
    result = score(PEOPLE, SOLUTION, text)
    assert result.reward == total == sum(result.parts.values())
    assert result.correct == (total == 3.0)
    assert set(result.parts) == {"format", "answer"}
    assert (result.answer is None) == (total in (-1.0, -3.0))


def lookalikes() -> list[tuple[str, str]]:
    """Pairs of a character outside ASCII and the ASCII letter that case-insensitive matching takes it for."""
    letters = re.compile("[a-z]", re.IGNORECASE)
    found = [chr(code) for code in range(128, sys.maxunicode + 1) if letters.match(chr(code))]
    return [(c, letter) for c in found for letter in string.ascii_lowercase if re.match(letter, c, re.IGNORECASE)]


def test_letters_outside_ascii_are_never_taken_for_ascii_ones() -> None:
    pairs = lookalikes()
    assert {c for c, _ in pairs} >= set("\u0130\u0131\u017f\u212a")
    names = ("Kasi", "Skip")
    for roles in product((True, False), repeat=2):
        words = [f"{name} is a {role(knight)}" for name, knight in zip(names, roles, strict=True)]
        for c, letter in pairs:
            for at, word in enumerate(words):
                for place in re.finditer(letter, word, re.IGNORECASE):
                    said = [*words]
                    said[at] = word[: place.start()] + c + word[place.end() :]
                    for solution in product((True, False), repeat=2):
                        assert score(names, solution, response(", ".join(said))).reward == -1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (response(GOLD), "knight,knave,knight"),
        (response("clara IS A KNIGHT, so: Bruno is a knave; Ada is a knight"), "knight,knave,knight"),
        (response(GOLD.replace("Ada is a knight", "Ada is a knave")), "knave,knave,knight"),
        (response("Ada is a knight"), None),
        (GOLD, None),
    ],
)
def test_equal_answers_are_equal_texts(text: str, answer: str | None) -> None:
    assert score(PEOPLE, SOLUTION, text).answer == answer


@pytest.mark.parametrize(
    "garbage",
    [
        "<think>" * 150_000,
        "\0" * 1_000_000,
        response("knight " * 150_000),
        response("Ada is a " * 110_000),
        response(" " * 1_000_000),
        response("Ada is a knight" + "Ada is a " * 100_000 + "knave knave"),
        response(GOLD, think="<" * 1_000_000),
        "<think></think><answer>" + "(" * 1_000_000 + "</answer>",
        response("\ud800\udfff Ada is a knight " + "\U0001f600" * 200_000),
    ],
)
def test_a_megabyte_of_garbage_is_scored_at_once(garbage: str) -> None:
    """In milliseconds. Were the time quadratic in the length, this test would not end within the hour."""
    assert score(PEOPLE, SOLUTION, garbage).reward in (3.0, -0.5, -1.0, -3.0)


@quick
@given(st.text())
def test_any_text_gets_one_of_the_four_totals(text: str) -> None:
    for candidate in (text, response(text)):
        assert score(PEOPLE, SOLUTION, candidate).reward in (-0.5, -1.0, -3.0)


@pytest.mark.parametrize(
    "names",
    [
        (".*", "(a+)+$", "[x"),
        ("A.B", "A+B", "A|B"),
        ("Ann", "Mary Ann", "Ann-Marie"),
        ("Zoë", "Øyvind", "李雷"),
        ("a\\", "{b}", "c?"),
    ],
)
def test_names_may_hold_any_character(names: tuple[str, ...]) -> None:
    for seed in range(10):
        puzzle = generate(3, seed, names=names)
        for style in STYLES:
            assert score(puzzle.names, puzzle.solution, worked(puzzle, style=style)).reward == 3.0
    wrong = response(" ".join(f"{name} is a knight" for name in names))
    assert score(names, (True, False, True), wrong).reward == -0.5
    assert score(("A.B", "C"), (True, True), response("AxB is a knight, C is a knight")).reward == -1.0


def test_no_one_may_be_called_knight() -> None:
    with pytest.raises(ValueError, match="called knight"):
        generate(2, 0, names=("Black Knight", "Ada"))


# ── the task ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_problems_are_reproducible_survive_json_and_take_turns() -> None:
    task = KnightsKnaves(people="2-4")
    first = list(islice(task.problems("train", 3), 6))
    assert first == list(islice(task.problems("train", 3), 6))
    assert first != list(islice(task.problems("train", 4), 6))
    assert [problem.difficulty for problem in first] == ["2", "3", "4"] * 2
    for problem in first:
        again = Problem(problem.id, problem.prompt, problem.difficulty, json.loads(json.dumps(problem.data)))
        assert Puzzle.of(again) == Puzzle.of(problem)
        assert task.score(again, task.demonstration(again)).correct
        assert problem.prompt.startswith(task.instruction)
        assert problem.prompt.endswith(problem.data["quiz"])


def test_a_prompt_that_opens_think() -> None:
    task = KnightsKnaves(people=3, open_think=True, style="compact")
    problem = next(task.problems("test", 0))
    assert problem.prompt.endswith("\n<think>")
    text = task.demonstration(problem)
    assert "<think>" not in text
    assert task.score(problem, text).reward == 3.0
    assert task.score(problem, "<think>" + text).reward == -3.0
    assert KnightsKnaves(people=3).score(problem, text).reward == -3.0


def test_noise_of_the_task_is_the_default_of_its_demonstrations() -> None:
    careless = KnightsKnaves(people=3, noise=0.5, style="compact")
    some = list(islice(careless.problems("train", 0), 40))
    assert not all(careless.score(problem, careless.demonstration(problem)).correct for problem in some)
    assert all(careless.score(problem, careless.demonstration(problem, noise=0.0)).correct for problem in some)


def test_people_come_as_number_range_or_list() -> None:
    assert KnightsKnaves(people=5).counts == (5,)
    assert KnightsKnaves(people="3-7").counts == (3, 4, 5, 6, 7)
    assert KnightsKnaves(people="4").counts == (4,)
    assert KnightsKnaves(people=[2, 8]).counts == (2, 8)
    for wrong in ("7-3", "three", "3-99", (), 1, True, (3, "4")):
        with pytest.raises((ValueError, TypeError), match="people"):
            KnightsKnaves(people=wrong)  # type: ignore[arg-type]


def test_the_table_of_tasks() -> None:
    assert "kk" in tasks.names()
    task = tasks.get("kk", people="2-3")
    assert task.name == "kk"
    assert isinstance(task, Demonstrates)
    with pytest.raises(ValueError, match="unknown task 'kkk'; did you mean 'kk'"):
        tasks.get("kkk")
    with pytest.raises(TypeError, match="unknown setting 'peple'; did you mean 'people'"):
        tasks.get("kk", peple=3)
    with pytest.raises(ValueError, match="unknown split 'tset'; did you mean 'test'"):
        next(task.problems("tset", 0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="did you mean 'compact'"):
        tasks.get("kk", style="compcat")


# ── public rows ─────────────────────────────────────────────────────────────────────────────────────────────────────


def row(**changes: Any) -> dict[str, Any]:
    return {
        "quiz": "Who?",
        "names": ["Ada", "Bruno"],
        "statements": "(('lying', 1), ('and', ('lying', 0), ('lying', 1)))",
        "solution": [True, False],
    } | changes


def test_rows_are_read_in_order(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(row(quiz=f"Who {i}?")) for i in range(3)) + "\n\n"
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(lines)
    for name in ("a.jsonl", "a.jsonl.gz"):
        found = read(tmp_path / name)
        assert [puzzle.quiz for puzzle in found] == ["Who 0?", "Who 1?", "Who 2?"]
        assert solve(found[0].statements) == [list(found[0].solution)]
        assert found[0].problem("Solve.").prompt == "Solve.\n\nWho 0?"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "row 1: expected an object"),
        (json.dumps({"quiz": ""}), "no field 'names'"),
        (json.dumps(row(statements="__import__('os')")), "row 1: "),
        (json.dumps(row(statements="(")), "row 1: "),
        (json.dumps(row(solution=[True])), "as many of each"),
        (json.dumps(row(names=["Ada", "ADA"])), "names must differ"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "bad.jsonl")


def test_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="must end in"):
        read(tmp_path / "a.csv")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match="needs pyarrow"):
        read(tmp_path / "a.parquet")


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([row(), row(quiz="And?")]), tmp_path / "a.parquet")
    assert [puzzle.quiz for puzzle in read(tmp_path / "a.parquet")] == ["Who?", "And?"]


def test_public_rows_are_solved_as_they_say() -> None:
    found = read(public_rows())
    assert len(found) == 4500
    for puzzle in found:
        assert solve(puzzle.statements) == [list(puzzle.solution)]
    for index, puzzle in enumerate(found[::9]):
        text = worked(puzzle, style=STYLES[index % len(STYLES)])
        assert score(puzzle.names, puzzle.solution, text).reward == 3.0


def test_sentences_are_those_of_the_public_rows() -> None:
    path = public_rows()
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        steps = [json.loads(line)["cot_repeat_steps"] for line in lines]
    for puzzle, expected in zip(read(path), steps, strict=True):
        told = worked(puzzle).split("</think>")[0].split("\n")[1:-1]  # without head and foot
        assert [line.replace(" that if ", " that If ") for line in told] == expected
