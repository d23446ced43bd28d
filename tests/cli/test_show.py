"""The exact text that a model reads, decoded from the very ids that the sampler sends."""

import json
import re
import shutil
from pathlib import Path

import pytest

from poise.models.loading import load_policy, load_tokenizer
from poise.models.policy import EMBEDDED
from poise.referee.report.html.data import Source
from poise.runs.folder import RunFolder
from poise.sampling.sampler import Sampler
from poise.tasks import draw
from poise.training.config.run_settings import task_to_show
from support.command_line import poise

TOOLS = """
class Echo:
    def reset(self, **row):
        return "Say hello."

    def say(self, word: str) -> str:
        \"\"\"Say a word.

        Args:
            word: the word to say
        \"\"\"
        return word

    def get_reward(self):
        return 1.0
"""
MARK = "▶ the model writes from here"


def sent(words, model="embedded", template=None):
    """The text of the prompt that a sampler makes of the same settings."""
    config, split = task_to_show(words)
    policy = load_policy(model, device="cpu", template=template)
    task = config.task.build()
    sampler = Sampler(policy, None, task, max_tokens=8, prefill=config.task.prefill)
    (game,) = sampler._start(draw(task, split, config.seed, 1))
    return policy.tokenizer.decode(list(game.prompt.tokens), skip_special_tokens=False), len(game.prompt.tokens)


@pytest.mark.parametrize(
    "words",
    [
        ["kk", "task.people=3"],
        ["kk", "task.people=2", "task.prefill=<think>", "seed=3", "split=test"],
        ["data", "task.file=rows.jsonl", "task.reward=exact", "task.system=Be brief.", "task.held_out=0"],
        ["environment", "task.factory=env.py:Echo", "task.prefill=Well,"],
        ["frozenlake"],
    ],
    ids=["plain", "prefill", "system", "tools", "game"],
)
def test_the_prompt_is_the_one_that_is_sent(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(TOOLS)
    row = {"question": "Who wrote <|end|> and <|assistant|> here?", "answer": "I"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    text, length = sent(words)
    shown = poise("tasks", "show", *words, "model=embedded").output
    assert text + MARK in shown
    users = 1 + ("task.system=Be brief." in words)  # the template shows a system message as a user's
    controls = f"<|user|> × {users}, <|assistant|> × 1"  # what the question holds is plain text
    assert f"({length} tokens; control tokens: {controls})" in shown
    prefill = next((word.partition("=")[2] for word in words if word.startswith("task.prefill")), "")
    assert text.endswith("<|assistant|>" + prefill)
    assert (f"{MARK}; the scored reply begins with {prefill}" in shown) == bool(prefill)
    assert ("task.system=Be brief." in words) == ("Be brief." in shown)
    assert ("environment" in words) == ('"name": "say"' in shown)


def test_arguments_of_the_template_are_shown(tmp_path):
    shutil.copytree(EMBEDDED, tmp_path / "model")
    template = (EMBEDDED / "chat_template.jinja").read_text() + "{{ '<think>\n' if think else '' }}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    words = ["kk", "task.people=2"]
    for think in (True, False):
        shown = poise(
            "tasks", "show", *words, f"model={tmp_path / 'model'}", f"template.think={str(think).lower()}"
        ).output
        assert sent(words, str(tmp_path / "model"), {"think": think})[0] + MARK in shown
        assert (f"<|assistant|><think>\n{MARK}; the scored reply begins with <think>" in shown) == think


def test_without_a_model_the_messages_are_shown():
    shown = poise("tasks", "show", "kk", "task.people=2").output
    assert "<|user|>" not in shown
    assert MARK not in shown


@pytest.mark.parametrize("file", ["generation_config.json", None])
def test_the_ends_of_a_response_are_known_without_the_weights(file, tmp_path):
    shutil.copytree(EMBEDDED, tmp_path / "model")
    if file:
        (tmp_path / "model" / file).unlink()
    name = str(tmp_path / "model")
    assert load_tokenizer(name)[1] == load_policy(name, device="cpu").end_tokens


def test_samples_and_the_report_show_the_exact_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"Who wrote the book {i}?", "answer": "I"} for i in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["data=rows.jsonl", "reward=exact", "task.system=Be brief.", "task.prefill=<think>"]
    small = ["prompts=1", "group=2", "steps=1", "rollout.max_tokens=4", "evaluation=off", "device=cpu"]
    printed = poise("train", "tiny", *words, *small, "run=run").output
    exact = r"<\|user\|>Be brief\.<\|user\|>Who wrote the book \d+\?<\|assistant\|><think>"
    assert re.search(rf"prompt:\n    {exact}\n", printed)
    record = RunFolder.open("run", resume=False).rollouts(1)[0]
    assert re.fullmatch(exact, record["read"])
    assert record["prompt"] in record["read"]
    index = Source([Path("run")]).index()
    assert index["texts"][index["rows"][0][index["columns"].index("read")]] == record["read"]
    shown = poise("eval", "run", "evaluation.problems=2", "evaluation.samples=1", "--show", "1").output
    assert re.search(rf"prompt:\n    {exact}\n", shown)
