"""docs/python.md: its snippets run, and its table of TRL's names agrees with the messages about unknown settings."""

import re
from dataclasses import fields

import pytest

import poise
from poise.training.config import messages
from poise.training.config.schema import keys
from support.pages import ROOT, snippets

PAGE = ROOT / "docs/python.md"


@pytest.mark.docs  # it trains a model
def test_the_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    left = {"__name__": "snippets"}
    for code in snippets(PAGE):
        exec(compile(code, str(PAGE), "exec"), left)
    assert left["result"].summary["steps"] == 2
    assert len(left["table"]) == 2
    assert left["more"].summary["steps"] == 5
    assert left["more"].run == left["result"].run
    assert (left["result"].run / "report.html").exists()


def rows(title):
    """The first two columns of the table with this heading."""
    (table,) = re.findall(rf"(?ms)^\| `{re.escape(title)}` \|.*?\n\n", PAGE.read_text() + "\n\n")
    return dict(re.findall(r"(?m)^\| `(\w+)` \| `([\w.]+)`", table))


def test_the_table_of_settings_is_what_the_messages_say():
    trl = pytest.importorskip("trl")
    table = rows("GRPOConfig")
    known, theirs = set(keys({})) | {"reward_weights"}, {field.name for field in fields(trl.GRPOConfig)}
    assert {*table, *messages._NOT_HERE} <= theirs
    assert set(table.values()) <= known
    for name, ours in table.items():
        assert messages._ELSEWHERE.get(name, ours) == ours
        assert name in messages._ELSEWHERE or ours.rpartition(".")[2] == name  # the message finds a name that is alike
    assert {name for name in messages._ELSEWHERE if name in theirs} <= table.keys()


def test_the_table_of_arguments_is_what_the_messages_say():
    table = rows("GRPOTrainer(…)")
    arguments = {*poise.train.__kwdefaults__, "lora", "task.test_file"}
    assert messages._ARGUMENTS_ELSEWHERE.items() <= table.items()
    assert set(table.values()) <= arguments
