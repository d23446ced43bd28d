"""``poise chat``: what is piped in, what is typed, and what is in the way."""

import builtins
import sys

import pytest
import typer
from typer.testing import CliRunner

from poise.cli import chat
from poise.cli.app import app
from poise.config.run_settings import only_task
from support.command_line import fails

FEW = ["max_tokens=12", "device=cpu"]


def piped(text, *args):
    done = CliRunner().invoke(app, ["chat", *map(str, args)], input=text)
    assert done.exit_code == 0, done.output
    return done.stdout


def at_a_terminal(monkeypatch, texts):
    """These are typed, and then Ctrl-D."""
    typed = iter(texts)

    def answer(_):
        for text in typed:
            return text
        raise EOFError

    monkeypatch.setattr(builtins, "input", answer)
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda _: True})())


def test_what_is_piped_in_is_one_message():
    greedy = piped("Ada is a knave.\nWho is a knight?", "embedded", "temperature=0", *FEW)
    assert "cut off at 12 tokens" in greedy
    assert piped("Ada is a knave.\nWho is a knight?", "embedded", "temperature=0", *FEW) == greedy
    assert len({piped("Who is a knight?", "embedded", f"seed={seed}", *FEW) for seed in range(4)}) > 1


def test_a_dialogue_is_read_whole(monkeypatch):
    from poise.models.policy import Policy

    seen, encode = [], Policy.encode
    monkeypatch.setattr(
        Policy, "encode", lambda self, said, *rest: seen.append(list(said)) or encode(self, said, *rest)
    )
    at_a_terminal(monkeypatch, ["Who is a knight?", "", "Are you sure?"])
    chat.chat("embedded", FEW, instruction=True)
    first, second = seen[-2:]
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert first[0]["content"].endswith("\n\nWho is a knight?")
    assert len(first[0]["content"]) > 40
    assert second[2]["content"] == "Are you sure?"


def test_a_model_of_one_task_says_so_and_offers_a_problem(monkeypatch, capsys):
    at_a_terminal(monkeypatch, ["", ""])
    chat.chat("embedded", ["temperature=0", "max_tokens=128", "device=cpu"], instruction=True)
    said, noted = capsys.readouterr()
    assert noted.count("has learned the language of one task only (kk)") == 1
    assert "Press Enter" in noted
    assert said.count("Think first, then say who is what") == 1  # the problem has the instruction
    assert said.count("\nmodel: ") == 1  # a second empty line is no message
    assert "<answer>" in said


def test_the_note_does_not_stand_among_what_is_piped_out(tmp_path):
    done = CliRunner().invoke(app, ["chat", "embedded", *FEW], input="What is 2 + 2?")
    assert "one task only" in done.stderr
    assert "one task only" not in done.stdout
    assert only_task(str(tmp_path)) is None  # a model that poise did not teach
    assert only_task("some/model") is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["embedded"], "there is no message: pipe one in"),
        (["/nonexistent/model"], "there is no such folder"),
        (["embedded", "steps=3"], "unknown key 'steps'"),
        (["embedded", "temperature=-1"], "temperature = -1: must be at least 0"),
        (["embedded", "--instruction", "task.name=frozenlake"], "task 'frozenlake' has no instruction"),
    ],
)
def test_mistakes(args, message):
    assert message in " ".join(fails("chat", *args).split())


def test_bytes_that_are_no_text():
    done = CliRunner().invoke(app, ["chat", "embedded", *FEW], input=b"\xff\xfe knight")
    assert done.exit_code == 0, done.output


def test_a_closed_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(typer.Exit):
        chat.chat("embedded", FEW)


def test_a_dialogue_that_is_too_long():
    done = CliRunner().invoke(app, ["chat", "embedded", *FEW], input="knight " * 9000)
    assert done.exit_code == 1
    assert "and the model reads no more: begin anew" in " ".join(done.output.split())
