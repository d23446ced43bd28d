"""Search QA: worlds, questions that can be answered, a search that finds, and tools that run nothing."""

import json
from dataclasses import replace
from itertools import islice

import pytest

from poise import tasks
from poise.tasks.search_qa import Index, SearchQA, World, normal


def questions(task, split="train", seed=0, count=60):
    return list(islice(task.problems(split, seed), count))


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("settings", [{}, {"sums": 1.0, "size": 3}, {"hops": 3, "results": 1, "size": 30}])
def test_a_solver_that_only_reads_what_it_is_shown_answers_every_question(settings):
    task = SearchQA(**settings)
    for problem in [*questions(task), *questions(task, "test")]:
        problem = replace(problem, data=json.loads(json.dumps(dict(problem.data))))
        episode = task.episode(problem)
        said = episode.start()
        while said:
            said = episode.step(episode.expert())
        assert episode.score() == tasks.Score(1.0, True, answer=normal(problem.data["answer"]))
        assert len(episode.replies) == problem.data["hops"] + 1 + (problem.data["sum"] is not None)
        assert "right" in episode.feedback()


def test_no_world_is_in_both_splits_and_the_seed_decides():
    task = SearchQA()
    train, test = ({p.data["world"] for p in questions(task, split, count=300)} for split in tasks.SPLITS)
    assert not train & test
    assert questions(task) == questions(SearchQA(hops=[1, 2, 3]))
    assert questions(task) != questions(task, seed=1)


def test_names_are_unique_and_another_worlds_answers_do_not_help():
    one, other = World(1, 20), World(2, 20)
    things = [thing for kind in one.things.values() for thing in kind]
    assert len(set(things)) == len(things) == 80
    assert not {thing for kind in other.things.values() for thing in kind} & set(things)
    assert World(1, 20).passages == one.passages


def test_search_ranks_by_rare_words_and_finds_nothing_for_nothing():
    index = Index(["the cat sat", "the dog sat on the mat", "the bird flew"])
    assert index.search("a dog", 1) == ["the dog sat on the mat"]
    assert index.search("the sat cat")[0] == "the cat sat"
    assert index.search("fish") == []
    assert index.search("") == []
    assert index.search("dog " * 10**6) == ["the dog sat on the mat"]


def test_tools_answer_mistakes_with_what_is_wrong():
    task = SearchQA(turns=9)
    episode = task.episode(questions(task)[0])
    for reply, said in [
        (call("search", query="zzz"), "nothing found"),
        (call("search", q="zzz"), "'query' is missing"),
        (call("search", query=["zzz"]), "'query' must be string"),
        (call("calculator", expression="12 * (3 + 4)"), "84"),
        (call("calculator", expression="__import__('os').system('true')"), "cannot read"),
        (call("calculator", expression="1/0"), "division by zero"),
        (call("shell", command="ls"), "unknown tool 'shell'"),
        ('{"name": "calculator", "parameters": {"expression": "1/8"}}', "0.125"),
    ]:
        (message,) = episode.step(reply)
        assert message["role"] == "tool"
        assert said in message["content"]


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("<answer>Posteld Valley</answer>", True),
        ("I looked. <answer> the posteld valley. </answer>", True),
        ("Posteld Valley", True),
        ("<think>Oslo</think> Posteld Valley.", True),
        ("It is Posteld Valley", False),
        ("<answer>Oslo</answer>", False),
        ("", False),
        ("<answer></answer>", False),
        (call("search", query="Posteld Valley"), False),
        ("<answer>" * 10**5, False),
    ],
)
def test_answers(reply, right):
    task = SearchQA(turns=1)
    problem = questions(task)[0]
    episode = task.episode(replace(problem, data={**problem.data, "answer": "Posteld Valley"}))
    assert episode.step(reply) == []
    assert episode.score().correct == right
    assert episode.score().reward == right


def test_both_tools_have_schemas():
    task = SearchQA()
    schemas = task.episode(questions(task)[0]).tools()
    assert [schema["function"]["name"] for schema in schemas] == ["search", "calculator"]
    assert json.loads(json.dumps(schemas)) == schemas


def test_feedback_says_what_went_wrong_and_not_the_answer():
    task = SearchQA(turns=3)
    for problem in questions(task):
        episode = task.episode(problem)
        episode.step(call("search", q="x"))
        episode.step("<tool_call>{</tool_call>")
        episode.step("<answer>Nowhere</answer>")
        said = episode.feedback()
        assert said.startswith('The answer "nowhere" is wrong. Calls that could not be made: 2, the last because: ')
        assert "not JSON" in said
        assert "No search was made." not in said  # it was tried
        assert problem.data["answer"] not in said
        idle = task.episode(problem)
        idle.step(call("calculator", expression="1"))
        assert idle.feedback() == (
            "No answer was given in 1 turn: end with a reply without a tool call. No search was made."
        )
