"""Search QA: questions about a small made-up world, to be answered with a search tool and a calculator.

A world has towns, people, firms and products, a passage about each of them, and questions that combine facts from
several passages. Every world has its own names and numbers, so no other world reveals an answer. The chat template
describes the tools to the model. Tool arguments are checked, and nothing is executed as code.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from random import Random
from typing import Any, ClassVar

from poise._lib.errors import check_range, check_whole, counted, quote
from poise.tasks.base import Message, Problem, Score, Split, sizes
from poise.tasks.rewards.answers import conclusion, last_answer
from poise.tasks.rewards.arithmetic import evaluate, number_text
from poise.tasks.streams import check_split, draw_of_split
from poise.tasks.tools import Schema, answer_all, calls_in, problem_with

LONGEST_QUERY = 400  # characters of a query that are read
_WORD = re.compile(r"[a-z0-9]+")
_K1, _B = 1.2, 0.75


class Index:
    """A BM25 index over passages."""

    def __init__(self, passages: Sequence[str]) -> None:
        self.passages = list(passages)
        self.counts = [Counter(_words(passage)) for passage in passages]
        lengths = [counts.total() for counts in self.counts]
        mean = sum(lengths) / len(lengths)
        self.norms = [_K1 * (1 - _B + _B * length / mean) for length in lengths]
        self.passages_with = Counter(word for counts in self.counts for word in counts)

    def search(self, query: str, count: int = 3) -> list[str]:
        """Return the ``count`` best passages that share a word with the query, best first."""
        words = set(_words(query[:LONGEST_QUERY]))
        scored = [(-self._score(words, at), at) for at in range(len(self.passages))]
        return [self.passages[at] for score, at in sorted(scored)[:count] if score < 0]

    def _score(self, words: set[str], at: int) -> float:
        counts, total = self.counts[at], len(self.passages)
        score = 0.0
        for word in sorted(words & counts.keys()):  # sorted: sums of floats depend on their order
            rarity = math.log(1 + (total - self.passages_with[word] + 0.5) / (self.passages_with[word] + 0.5))
            score += rarity * counts[word] * (_K1 + 1) / (counts[word] + self.norms[at])
        return score


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


# A relation maps a thing to a value: another thing, a region or a number. It has a sentence and a question phrase.
RELATIONS = {
    "founded": ("town", "{0} was founded in {1}.", "the year in which {} was founded"),
    "region": ("town", "{0} lies in {1}.", "the region in which {} lies"),
    "born": ("person", "{0} was born in the year {1}.", "the year in which {} was born"),
    "birthplace": ("person", "{0} was born in the town of {1}.", "the town in which {} was born"),
    "founder": ("firm", "{0} was started by {1}.", "the person who started {}"),
    "product": ("firm", "{0} makes the {1}.", "the product that {} makes"),
    "price": ("product", "The {0} costs {1} crowns.", "the price of {}"),
}
CHAINS: dict[int, tuple[tuple[str, ...], ...]] = {  # by the number of passages to find
    1: (("founded",), ("region",), ("born",), ("birthplace",), ("price",)),
    2: (("birthplace", "founded"), ("birthplace", "region"), ("founder", "born"), ("product", "price")),
    3: (("founder", "birthplace", "founded"), ("founder", "birthplace", "region")),
}
NUMBERS = ("founded", "born", "price")  # relations whose value is a number
_STARTS = [*"bdfghklmnprstvz", "br", "dr", "gr", "kl", "st", "tr"]
_VOWELS = "aeiou"
_ENDS = [*"lnrsmk", "ld", "nd", "rt", "sk"]


class World:
    """A made-up world: its things by kind, and their facts."""

    def __init__(self, number: int, size: int) -> None:
        rng = Random(f"world {number} {size}")
        self.names: set[str] = set()
        self.things: dict[str, list[str]] = {
            "town": [self._name(rng) for _ in range(size)],
            "person": [f"{self._name(rng)} {self._name(rng)}" for _ in range(size)],
            "firm": [f"{self._name(rng)} Works" for _ in range(size)],
            "product": [f"{self._name(rng).lower()} {rng.choice(['lamp', 'clock', 'kettle'])}" for _ in range(size)],
        }
        regions = [f"{self._name(rng)} Valley" for _ in range(max(2, size // 2))]
        self.facts: dict[tuple[str, str], str] = {}
        for town in self.things["town"]:
            self.facts[town, "founded"] = str(rng.randint(900, 1700))
            self.facts[town, "region"] = rng.choice(regions)
        for person in self.things["person"]:
            self.facts[person, "born"] = str(rng.randint(1800, 1990))
            self.facts[person, "birthplace"] = rng.choice(self.things["town"])
        for firm, person, product in zip(*(self.things[kind] for kind in ("firm", "person", "product")), strict=True):
            self.facts[firm, "founder"] = person
            self.facts[firm, "product"] = product
            self.facts[product, "price"] = str(rng.randint(2, 99))
        self.passages = [self._passage(thing) for things in self.things.values() for thing in things]
        rng.shuffle(self.passages)
        self.index = Index(self.passages)

    def _name(self, rng: Random) -> str:
        while True:
            parts = [rng.choice(_STARTS) + rng.choice(_VOWELS) for _ in range(2)]
            name: str = ("".join(parts) + rng.choice(_ENDS)).capitalize()
            if name not in self.names:
                self.names.add(name)
                return name

    def _passage(self, thing: str) -> str:
        facts = [(relation, value) for (of, relation), value in self.facts.items() if of == thing]
        return " ".join(RELATIONS[relation][1].format(thing, value) for relation, value in facts)

    def question(self, rng: Random, hops: int, sums: float) -> dict[str, Any]:
        """Draw a question that needs ``hops`` passages. If the chain ends in a number, add a calculation with
        probability ``sums``.

        The question has a text, an answer, and the path to the answer: a start, a chain of relations, and ``sum``.
        ``sum`` is a calculation, with {} for the value at the end of the chain, or None.
        """
        chain = rng.choice(CHAINS[hops])
        start = rng.choice(self.things[RELATIONS[chain[0]][0]])
        phrase, value, formula = start, start, None
        for relation in chain:
            phrase, value = RELATIONS[relation][2].format(phrase), self.facts[value, relation]
        if chain[-1] in NUMBERS and rng.random() < sums:
            factor = rng.randint(12, 99)
            phrase, formula, value = f"{factor} times {phrase}", f"{factor} * {{}}", str(factor * int(value))
        way = {"hops": hops, "start": start, "chain": chain, "sum": formula}
        return {"text": f"What is {phrase}?", "answer": value, **way}


@lru_cache(maxsize=64)
def world(number: int, size: int) -> World:
    """Return the world with this number and size, from a cache."""
    return World(number, size)


def follow(passages: str, thing: str, relation: str) -> str | None:
    """Look up the ``relation`` of ``thing`` in the passages; None if the passages do not contain it."""
    before, behind = RELATIONS[relation][1].format(thing, "\0").split("\0")
    match = re.search(re.escape(before) + r"([^.]{1,60})" + re.escape(behind), passages)
    return match[1] if match else None


INSTRUCTION = (
    "Find the answer with the tools: search finds passages about towns, people, firms and products of a made-up world, "
    "calculator computes. Then reply without a tool call, in this form: <answer>your answer</answer>"
)
LONGEST_ANSWER = 200  # characters that are compared


def _tool(name: str, what: str, argument: str, meaning: str) -> Schema:
    properties = {argument: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": what, "parameters": parameters}}


SCHEMAS = [
    _tool("search", "Find passages that hold the words of a query.", "query", "Words to look for, such as a name."),
    _tool("calculator", "Compute an expression.", "expression", "Numbers with + - * / and parentheses."),
]


@dataclass
class SearchQA:
    """Search QA: multi-hop questions about a made-up world, with a search tool and a calculator; no download needed.

    ``hops`` is the number of passages that a question needs: a number, several numbers or a range. If the value asked
    for is a number, the question asks for a multiple of this number with probability ``sums``. Every question has its
    own world with ``size`` things of each of four kinds. A search returns up to ``results`` passages. ``turns`` is the
    maximum number of replies per episode, ``instruction`` the text after a question.
    """

    hops: int | str | Sequence[int] = "1-3"
    sums: float = 0.5
    size: int = 8
    results: int = 3
    turns: int = 8
    instruction: str = INSTRUCTION

    name: ClassVar[str] = "search-qa"
    concurrent: ClassVar[bool] = True
    pure_start: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.hops = self.hop_counts = sizes("SearchQA", "hops", self.hops, 1, 3)
        check_range("SearchQA", "sums", self.sums, 0.0, 1.0)
        check_whole("SearchQA", "size", self.size, 2, 200)
        check_whole("SearchQA", "results", self.results, 1, 20)
        check_whole("SearchQA", "turns", self.turns, 1, 64)

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Yield the questions of one split; no world is in both splits."""
        check_split(split)
        rng = Random(f"search-qa {seed}")

        def draw() -> tuple[str, int]:
            number = rng.getrandbits(40)
            return f"search-qa {number}", number

        for hops in cycle(self.hop_counts):
            number = draw_of_split("SearchQA", split, draw)
            question = world(number, self.size).question(rng, hops, self.sums)
            prompt = f"{question['text']} {self.instruction}".strip()
            data = {"world": number, "size": self.size, **question}
            name = f"search-qa/{number}/{'-'.join(question['chain'])}/{question['start']}"
            yield Problem(name, prompt, counted(question["hops"], "hop"), data)

    def episode(self, problem: Problem) -> SearchEpisode:
        """Start a dialogue about the problem's question."""
        return SearchEpisode(problem, self)


class SearchEpisode:
    """A dialogue: tool calls and their results, until a reply without a tool call."""

    def __init__(self, problem: Problem, task: SearchQA) -> None:
        self.problem, self.task = problem, task
        self.world = world(problem.data["world"], problem.data["size"])
        self.replies: list[str] = []
        self.results: list[str] = []  # the tools' results

    def tools(self) -> list[Schema]:
        """Return the schemas of both tools."""
        return SCHEMAS

    def start(self) -> list[Message]:
        """Return the message with the question."""
        return [{"role": "user", "content": self.problem.prompt}]

    def step(self, reply: str) -> list[Message]:
        """Answer the reply's tool calls. A reply without a tool call ends the dialogue."""
        self.replies.append(reply)
        tools = {"search": self._search, "calculator": lambda expression: number_text(evaluate(expression)[0])}
        messages = answer_all(reply, tools, SCHEMAS)
        self.results += [message["content"] for message in messages]
        return messages if len(self.replies) < self.task.turns else []

    def _search(self, query: str) -> str:
        return "\n".join(self.world.index.search(query, self.task.results)) or "nothing found"

    def score(self) -> Score:
        """Score 1 for the right answer, else 0."""
        answer = self._answer()
        correct = answer is not None and answer == normal(self.problem.data["answer"])
        return Score(float(correct), correct, answer=answer)

    def _answer(self) -> str | None:
        """Return the answer in the last reply; None if the reply has a tool call or the answer is empty."""
        last = self.replies[-1] if self.replies else ""
        if calls_in(last):
            return None
        answer = last_answer(last)
        return normal(conclusion(last) if answer is None else answer) or None

    def feedback(self) -> str:
        """Describe how the episode ended, without revealing the right answer."""
        answer = self._answer()
        if answer is not None:
            sentences = [f"The answer {quote(answer)} is {'right' if self.score().correct else 'wrong'}."]
        else:
            turns = counted(len(self.replies), "turn")
            sentences = [f"No answer was given in {turns}: end with a reply without a tool call."]
        calls = [call for reply in self.replies for call in calls_in(reply)]
        wrong = [error for call in calls if (error := problem_with(call, SCHEMAS))]
        if wrong:
            sentences.append(f"Calls that could not be made: {len(wrong)}, the last because: {quote(wrong[-1], 120)}.")
        if not any(call.name == "search" for call in calls):
            sentences.append("No search was made.")
        return " ".join(sentences)

    def expert(self) -> str:
        """Return the reply of a solver that knows the question's chain of relations but no fact of the world."""
        question: dict[str, Any] = dict(self.problem.data)
        passages, value = "\n".join(self.results), question["start"]
        for relation in question["chain"]:
            following = follow(passages, value, relation)
            if following is None:
                return _call("search", query=value)
            value = following
        if question["sum"] is None:
            return f"<answer>{value}</answer>"
        expression = question["sum"].format(value)
        result = self.results[-1] if f'"{expression}"' in self.replies[-1] else None
        return f"<answer>{result}</answer>" if result else _call("calculator", expression=expression)


def normal(text: str) -> str:
    """Normalize an answer: lower-case words of letters and digits, without articles."""
    words = re.findall(r"[^\W_]+", text[:LONGEST_ANSWER].casefold())
    return " ".join(word for word in words if word not in ("the", "a", "an"))


def _call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
