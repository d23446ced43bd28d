"""The words of worked solutions: one template at 0, at least six forms of every step at 1, the same said in all."""

from __future__ import annotations

import hashlib
import re
from random import Random
from typing import Any

import paraphrases as words
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worked import STYLES, WorkedKnights, worked

from poise.tasks.knights_knaves import Puzzle, generate
from poise.tasks.knights_knaves.task import score_reply as score

pytestmark = pytest.mark.studies

SENTENCES = {name: getattr(words, name) for name in ("HEAD", "POSSIBLE", "IMPOSSIBLE", "BACK", "FOUND", "GIVE_UP")}
COMPACT = {name: getattr(words, name) for name in ("TRY", "TRUE", "FALSE", "FITS", "CLASH")}


def pattern(form: str) -> re.Pattern[str]:
    """What a form looks like once it is filled in."""
    groups = {"role": "(knight|knave)", "false": "(|false )"}
    return re.compile(re.sub(r"\\\{(\w+)\\\}", lambda field: groups.get(field[1], "(.+)"), re.escape(form)))


def kinds_and_forms(line: str) -> set[tuple[str, int]]:
    """Which kinds of step a line of a solution in sentences may be, and in which form."""
    return {
        (kind, number)
        for kind, forms in SENTENCES.items()
        for number, form in enumerate(forms)
        if pattern(form).fullmatch(line)
    }


def steps(text: str) -> list[str]:
    return text.partition("<think>")[2].partition("</think>")[0].split("\n")


def plain_sentences(text: str) -> str:
    """A solution in sentences with every step in its first form."""
    lines = []
    for line in steps(text):
        ((kind, number),) = kinds_and_forms(line)
        fields = re.findall(r"\{(\w+)\}", SENTENCES[kind][number])
        values: Any = pattern(SENTENCES[kind][number]).fullmatch(line)
        lines.append(SENTENCES[kind][0].format(**dict(zip(fields, values.groups(), strict=True))))
    return "\n".join(lines)


def plain_compact(text: str) -> str:
    """A compact solution with every word in its first form."""
    first = {word: forms[0] for name, forms in COMPACT.items() if name != "TRY" for word in forms}
    begins = [form.partition("{")[0].strip() for form in words.TRY[1:]]
    lines = [line.split(" ") for line in steps(text)]
    return "\n".join(" ".join(first.get(word, word) for word in line if word not in begins) for line in lines)


def test_at_0_every_text_is_what_it_was_before_there_was_a_wording() -> None:
    digest = hashlib.sha256()
    for style in STYLES:
        for seed in range(60):
            for noise in (0.0, 0.2):
                puzzle = generate(2 + seed % 5, seed, depth=1 + seed % 2)
                digest.update(worked(puzzle, style=style, noise=noise, seed=seed, wording=0.0).encode())
    assert digest.hexdigest() == "4b14389b6cdd0ebfa66c4a794f1199abb231b47915be7f8dc33b8ec6fc04efaa"


def test_at_1_every_kind_of_sentence_is_seen_in_at_least_six_forms() -> None:
    seen: dict[str, set[int]] = {kind: set() for kind in SENTENCES}
    for seed in range(400):
        text = worked(generate(2 + seed % 4, seed), noise=0.4, seed=seed, wording=1.0)
        for line in steps(text):
            ((kind, number),) = kinds_and_forms(line)  # every line is one kind of step, and can be told from the others
            seen[kind].add(number)
    assert all(len(forms) >= 6 for forms in seen.values()), seen


@pytest.mark.parametrize("style", ["compact", "values"])
def test_at_1_every_word_of_the_compact_style_is_seen_in_at_least_six_forms(style: str) -> None:
    texts = [worked(generate(2 + seed % 3, seed), style=style, noise=0.2, seed=seed, wording=1.0) for seed in range(80)]
    found = {word for text in texts for line in steps(text) for word in line.split(" ")}
    begins = [form.partition("{")[0].strip() for form in words.TRY[1:]]
    plain = any(line.split(" ")[0] not in begins and "kn" in line for text in texts for line in steps(text))
    assert len(found & set(begins)) + plain >= 6
    for name, forms in COMPACT.items():
        assert name == "TRY" or len(found & set(forms)) >= 6, name


def test_no_word_of_the_compact_style_means_two_things() -> None:
    every = [word for name, forms in COMPACT.items() if name != "TRY" for word in forms]
    every += [form.partition("{")[0].strip() for form in words.TRY[1:]]
    every += ["knight", "knave", "and", "or", "then", "iff"]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9), share=st.floats(0.0, 1.0))
def test_other_words_say_the_same(style: str, seed: int, share: float) -> None:
    puzzle = generate(2 + seed % 5, seed, depth=1 + seed % 2)
    for noise in (0.0, 0.3):
        plain = worked(puzzle, style=style, noise=noise, seed=seed)
        varied = worked(puzzle, style=style, noise=noise, seed=seed, wording=share)
        back = plain_sentences(varied) if style == "sentences" else plain_compact(varied)
        assert back == "\n".join(steps(plain))
        assert varied.partition("</think>")[2] == plain.partition("</think>")[2]
        if not noise:
            assert score(puzzle.names, puzzle.solution, varied).reward == 3.0


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), style=st.sampled_from(STYLES))
def test_the_task_scores_its_own_demonstrations_right(seed: int, style: str) -> None:
    task = WorkedKnights(people="2-4", style=style, wording=1.0)
    problem = next(iter(task.problems("train", seed)))
    assert task.score(problem, task.demonstration(problem, seed=seed)).correct


def test_in_between_that_share_of_the_steps_varies() -> None:
    changed = total = 0
    for seed in range(300):
        puzzle = generate(3, seed)
        plain, varied = (steps(worked(puzzle, seed=seed, wording=share)) for share in (0.0, 0.5))
        changed += sum(a != b for a, b in zip(plain, varied, strict=True))
        total += len(plain)
    assert changed / total == pytest.approx(0.5 * 6 / 7, abs=0.05)  # one form in seven is the plain one


def test_it_is_reproducible_and_refuses_what_it_cannot_do() -> None:
    puzzle = generate(3, 5)
    assert worked(puzzle, seed=2, wording=0.7) == worked(puzzle, seed=2, wording=0.7)
    assert worked(puzzle, seed=2, wording=1.0) != worked(puzzle, seed=3, wording=1.0)
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="wording"):
            WorkedKnights(wording=wrong)


def test_names_with_braces_stay_as_they_are() -> None:
    puzzle = Puzzle(("{name}", "B{0}"), (("lying", 1), ("telling-truth", 1)), (True, False), "q", "x")
    assert "{name}" in worked(puzzle, wording=1.0)
    assert words.Wording(1.0, Random(0)).step()(("a",)) == "a"
