"""docs/rewards.md says what is there, and its Python runs."""

import re
import sys
from dataclasses import fields

import pytest

from poise import rewards
from support.pages import ROOT, snippets

PAGE = ROOT / "docs/rewards.md"


def test_the_table_has_every_built_in_reward_and_its_settings():
    rows = re.findall(r"(?m)^\| `(\w+)` \| .* \| (.*) \|$", PAGE.read_text())
    assert [name for name, _ in rows] == list(rewards.TABLE)
    for name, settings in rows:
        named = set(re.findall(r"`(\w+)", settings))
        assert named == {field.name for field in fields(rewards.TABLE[name])}


@pytest.mark.parametrize("quick", [True, False])
def test_the_python_of_the_page_runs(tmp_path, monkeypatch, quick):
    file, changing = snippets(PAGE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(file)
    with rewards.Rewards(["my_rewards.py:concise", "my_rewards.py:polite"], quick=quick) as scorer:
        verdicts = scorer.score(
            ["?"] * 3, ["yes please", "no", [{"role": "assistant", "content": "nein"}]], [[0] * 100] * 3,
            {"language": ["en", "en", "de"]}, ["1", "2", "3"],
        )  # fmt: skip
    assert [v.reward for v in verdicts] == [1.5, 0.5, 0.5]

    (tmp_path / "changing.py").write_text(changing)
    for step, expected in ((0, 0.0), (3, -0.3), (10, -1.0)):
        state = rewards.TrainerState(step, max_steps=10)
        with rewards.Rewards("changing.py:brief", quick=True) as scorer:
            (verdict,) = scorer.score(["?"], ["a" * 1000], [[0]], {}, ["1"], state)
        assert verdict.reward == pytest.approx(expected)
