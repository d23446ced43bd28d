"""What a run is measured with, and run folders whose settings nobody can use."""

import json
from dataclasses import dataclass

import pytest

from poise import tasks
from poise.tasks.knights_knaves import KnightsKnaves
from support.command_line import SMALL, fails, poise


@dataclass
class Short(KnightsKnaves):
    """A task of a user's own."""

    name = "short"


def test_a_run_is_measured_on_its_own_task_with_its_own_settings(tmp_path, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "short", Short)
    run, out = tmp_path / "run", tmp_path / "eval.json"
    own = ["task.name=short", "task.phrasing=plain", "rollout.temperature=0.6", "rollout.top_k=7",
           "rollout.max_tokens=24", "evaluation.problems=3", "evaluation.seed=4"]  # fmt: skip
    poise("train", "tiny", *SMALL, f"run={run}", *own)
    after = json.loads((run / "summary.json").read_text())["after"]
    shown = poise("eval", run, "--json", out).output
    found = json.loads(out.read_text())
    assert found == {
        "model": str(run), "task": "short", "settings": {"people": 2, "phrasing": "plain"}, "split": "test", "seed": 4,
        "max_tokens": 24, "top_p": 1.0, "top_k": 7, **after,
    }  # fmt: skip
    assert "on task short (people=(2,), depth=1," in shown
    assert "phrasing='plain'" in shown
    assert "=None" not in shown
    assert "split test, seed 4:" in shown
    assert "3 problems × 1 samples at temperature 0.6, top_p 1, top_k 7, up to 24 tokens; and once greedily" in shown
    cut = after["cut_off"], after["greedy_cut_off"]
    assert "cut off at 24 tokens: {} of 3 samples, {} of 3 greedy responses".format(*cut) in shown
    for checkpoint in ("checkpoints/step-000001", "checkpoints/step-000001/model"):
        assert "on task short (people=(2,)" in poise("eval", run / checkpoint, "problems=1").output
    changed = ["task.people=3", "task.phrasing=varied", "samples=2", "problems=2", "temperature=1", "seed=0", "top_k=0",
               "max_tokens=4", "--json", out]  # fmt: skip
    shown = poise("eval", run, *changed).output
    assert "on task short (people=(3,)" in shown
    assert "cut off at 4 tokens: 4 of 4 samples, 2 of 2 greedy responses" in shown
    assert json.loads(out.read_text())["settings"] == {"people": 3, "phrasing": "varied"}
    assert "on task kk (people=(3, 4, 5, 6, 7)" in poise("eval", run, "task.name=kk", *changed[2:]).output
    shown = poise("eval", run, "temperature=0", "problems=1").output
    assert "1 problems × 1 samples at temperature 0, top_p 1, top_k 7, up to 24 tokens\n" in shown
    assert "\ngreedy " in shown
    assert "avg@1" not in shown  # it would repeat greedy
    assert "greedy samples are all the same" in fails("eval", run, "temperature=0", "samples=2")
    monkeypatch.delitem(tasks.TASKS, "short")
    assert "unknown task 'short'" in fails("eval", run)
    assert "unknown task 'short'" in fails("diagnose", run, "--out", tmp_path / "diagnose")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "config.json"),
        ('{"rollout": ', "config.json"),
        ('{"steps": ' + "9" * 5000 + "}", "config.json"),
        ('["rollout"]', "config.json"),
        ('{"rollout": {}, "task": ' + "[" * 500 + "]" * 500 + "}", "the settings have more than 20 levels"),
        ('{"rollout": 5, "stpes": 1}', "rollout = 5: must be a group of settings"),
    ],
)
def test_a_run_with_damaged_settings(text, message, tmp_path):
    (tmp_path / "checkpoints" / "step-000001" / "model").mkdir(parents=True)
    (tmp_path / "config.json").write_text(text)
    assert message in " ".join(fails("train", "--resume", f"run={tmp_path}").split())
    for command in ("eval", "diagnose"):
        fails(command, tmp_path)
