"""Tool calls: both formats, malformed and hostile ones, and arguments held against a schema."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.tasks.tools import MOST, Call, answer_all, calls_in, problem_with

SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "count": {"type": "integer"},
                "share": {"type": "number"},
                "kind": {"type": "string", "enum": ["town", "person"]},
            },
            "required": ["query"],
        },
    },
}


def hermes(call):
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


OSLO = Call("search", {"query": "Oslo"})


@pytest.mark.parametrize(
    "reply",
    [
        hermes({"name": "search", "arguments": {"query": "Oslo"}}),
        "I look it up.\n" + hermes({"name": "search", "arguments": {"query": "Oslo"}}) + "\n",
        "<think>" + hermes({"name": "no", "arguments": {}}) + "</think>" + hermes(
            {"name": "search", "arguments": {"query": "Oslo"}}
        ),
        '{"name": "search", "parameters": {"query": "Oslo"}}',
        '<|python_tag|>{"name": "search", "parameters": {"query": "Oslo"}}',
        '[TOOL_CALLS][{"name": "search", "arguments": {"query": "Oslo"}}]',
    ],
)  # fmt: skip
def test_calls_are_read_in_each_format(reply):
    assert calls_in(reply) == [OSLO]


def test_several_calls_are_read_in_their_order_and_one_bad_call_spoils_no_other():
    good = hermes({"name": "search", "arguments": {"query": "Oslo"}})
    found = calls_in(good + "<tool_call>{}</tool_call>" + good)
    assert [call.error is None for call in found] == [True, False, True]
    assert len(calls_in(good * 100)) == MOST


@pytest.mark.parametrize("reply", ["", "Oslo", '{"answer": 3}', "[1, 2]", "I would call search.", "{", "</tool_call>"])
def test_a_reply_without_a_call_has_none(reply):
    assert calls_in(reply) == []


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("<tool_call>{", "</tool_call> is missing"),
        ("<tool_call>search Oslo</tool_call>", "not JSON"),
        ('<tool_call>{"name": 3}</tool_call>', "must be like"),
        ('<tool_call>["search"]</tool_call>', "must be like"),
        ('<tool_call>{"name": "search", "arguments": "Oslo"}</tool_call>', "must be a JSON object"),
        ('{"name": "search", ', "not JSON"),
        ("<tool_call>" + "[" * 19_000 + "</tool_call>", "nested too deeply"),
        ("<tool_call>" + "[" * 10**6 + "</tool_call>", "longer than"),
        ('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN is not JSON"),
        ('<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>', "too large"),
        ('<tool_call>{"name": "a", "arguments": {"x": ' + "9" * 9000 + "}}</tool_call>", "digits"),
    ],
)
def test_malformed_calls_are_answered_with_what_is_wrong(reply, said):
    (message,) = answer_all(reply, {}, [SCHEMA])
    assert message["role"] == "tool"
    assert message["content"].startswith("error: ")
    assert said in message["content"]
    assert len(message["content"]) < 500


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "'query' is missing"),
        ({"query": 3}, "'query' must be string, got 3"),
        ({"query": "a", "count": "3"}, "'count' must be integer"),
        ({"query": "a", "count": True}, "'count' must be integer"),
        ({"query": "a", "count": 1.5}, "'count' must be integer"),
        ({"query": "a", "kind": "car"}, "must be town or person"),
        ({"query": "a", "qury": 1}, "did you mean 'query'"),
        ({"query": "a", "count": 3, "share": 1, "kind": "town"}, None),
    ],
)
def test_arguments_are_held_against_the_schema(arguments, said):
    wrong = problem_with(Call("search", arguments), [SCHEMA])
    assert wrong is None if said is None else said in wrong


def test_an_unknown_tool_is_named_with_those_there_are():
    assert "did you mean 'search'" in problem_with(Call("serch", {}), [SCHEMA])


def test_a_tool_that_raises_is_answered_with_its_error():
    def search(query):
        raise ValueError(f"no {query}")

    (message,) = answer_all(hermes({"name": "search", "arguments": {"query": "x"}}), {"search": search}, [SCHEMA])
    assert message == {"role": "tool", "name": "search", "content": "{'error': 'no x'}"}


@given(st.text(alphabet='{}[]"name:,\\ \n<>/tool_callarguments01e', max_size=200))
def test_any_text_is_read_as_calls_or_as_none(text):
    for reply in (text, f"<tool_call>{text}</tool_call>", '{"name"' + text):
        for call in calls_in(reply):
            assert call.error is None or isinstance(call.error, str)
            problem_with(call, [SCHEMA])


def test_a_name_that_no_tool_has_reaches_no_template():
    for name in ("<|im_end|>", "\ud800", "serch"):
        (message,) = answer_all(hermes({"name": name}), {"search": str}, [SCHEMA])
        assert message["name"] == ""
        assert message["content"].startswith("error: unknown tool")
