"""Surrogates and advantages of the user's own, by ``file.py:Name``: trained, resumed, refused."""

from pathlib import Path

import pytest
import torch

import poise
from poise import advantages, surrogates
from poise._lib import user_code
from poise.objective import Settings
from poise.training.config.schema import ConfigError, load, restore
from support.command_line import SMALL, fails
from support.command_line import poise as run

pytestmark = pytest.mark.usefixtures("short_evaluation")

MINE = """
from dataclasses import dataclass
from pathlib import Path

import torch
import poise

Path("ran").touch()


@dataclass(frozen=True)
class Powered(poise.Surrogate):
    power: float = 1.0

    def value(self, logp, parts):
        return parts.log_ratio(logp).exp() ** self.power * parts.advantages


class Bare(poise.Surrogate):
    power: float = 1.0

    def value(self, logp, parts):
        raise KeyError("no value")


class Empty(poise.Surrogate):
    pass


class Raises(poise.Surrogate):
    def __init__(self):
        raise KeyError("no luck")

    def value(self, logp, parts): ...


@poise.advantage
def above(rewards, level: float = 0.0):
    return rewards - level


@poise.advantage
def compared(rewards, groups):
    return rewards - rewards.mean()


@poise.advantage
def by_token(rewards, mask, decay: float = 0.9):
    return rewards[:, None] * decay ** torch.arange(mask.shape[1])


@poise.advantage
def wrong(rewards):
    return rewards[1:]


def unmarked(rewards):
    return rewards
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(user_code, "FOLDERS", [str(tmp_path)])
    Path("mine.py").write_text(MINE)


@pytest.mark.parametrize(
    "setting",
    ["objective.surrogate=mine.py:Powered(power=2)", "advantage=mine.py:above(level=1)", "advantage=mine.py:by_token"],
)
def test_it_trains_resumes_with_consent_and_is_refused_once_edited(setting):
    small = [*SMALL, "steps=2", "optim.mini_batch=2", "optim.lr=1e-3", "run=mine"]
    assert run("train", "tiny", *small, setting).exit_code == 0
    Path("ran").unlink()
    assert "add --trust" in fails("train", "--resume", "mine", "steps=3")
    assert not Path("ran").exists()
    assert run("train", "--resume", "mine", "steps=3", "--trust").exit_code == 0
    Path("mine.py").write_text(MINE + "# edited\n")
    assert "mine.py: this code was edited since the run in" in fails("train", "--resume", "mine", "steps=4", "--trust")
    assert run("train", "--resume", "mine", "steps=4", "--trust-changed").exit_code == 0


def test_their_files_are_known_and_need_consent():
    typed = {"advantage": "mine.py:above", "objective": {"surrogate": "mine.py:Powered(power=2)"}}
    config = load("tiny", ["advantage=mine.py:above", "objective.surrogate=mine.py:Powered(power=2)"])
    assert list(config.code) == ["mine.py:above", "mine.py:Powered"]
    document = load("tiny").model_dump(mode="json")
    for changes in ({name: value} for name, value in typed.items()):
        assert user_code.asks_for_code(document | changes)
        with pytest.raises(ConfigError, match="add --trust"):
            restore(document | changes)
        restore(document | changes, typed=changes)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("objective.surrogate=mine.py:Power", "did you mean 'Powered'? (allowed: Powered, Bare, Empty, Raises)"),
        ("objective.surrogate=mine.py:above", "is not a surrogate: let a class inherit from poise.Surrogate"),
        ("objective.surrogate=mine.py:Powered(powr=2)", "unknown setting of surrogate mine.py:Powered 'powr'; did you"),
        ("objective.surrogate=mine.py:Bare(power=2)", "write @dataclass above class Bare, and its fields"),
        ("objective.surrogate=mine.py:Empty", "mine.py:Empty has no method value(self, logp, parts)"),
        ("objective.surrogate=mine.py:Raises", "mine.py:Raises: KeyError: 'no luck'"),
        (
            "objective.surrogate=gpso",
            "did you mean 'gspo'? (allowed: clip, cispo, gspo, sapo, dppo, kl-cov, lp-reg); for",
        ),
        ("advantage=mine.py:abov", "did you mean 'above'? (allowed: above, compared, by_token, wrong)"),
        ("advantage=mine.py:unmarked", "is not an advantage: write @poise.advantage above a function or class"),
        ("advantage=mine.py:above(levl=1)", "unknown setting of mine.py:above 'levl'; did you mean 'level'?"),
        ("advantage=mine.py:above(1)", "pass the settings of an advantage by name"),
        ("advantage=zscore", "did you mean 'group-zscore'?"),
        ("advantage=leave-one-out(level=1)", "unknown setting of leave-one-out 'level'"),
        ("advantage.level=1", "settings of the advantage go in brackets, advantage='NAME(level=1)'"),
    ],
)
def test_mistakes_are_answered(setting, message):
    with pytest.raises(ConfigError) as caught:
        load("tiny", [setting])
    assert message in str(caught.value)


def test_a_function_that_asks_for_groups_compares_them():
    assert load("tiny", ["group=1", "advantage=mine.py:above"]).group == 1
    with pytest.raises(ConfigError, match=r"group = 1: advantage 'mine.py:compared' compares the responses"):
        load("tiny", ["group=1", "advantage=mine.py:compared"])


def test_failures_while_training_name_their_line():
    said = fails("train", "tiny", *SMALL, "group=8", "objective.surrogate=mine.py:Bare", "run=bare")
    line = MINE.splitlines().index('        raise KeyError("no value")') + 1
    assert (
        f"objective.surrogate 'mine.py:Bare' failed: KeyError: 'no value' ({Path('mine.py').resolve()}, line {line})"
        in said
    )
    said = fails("train", "tiny", *SMALL, "advantage=mine.py:wrong", "run=wrong")
    assert "advantage 'mine.py:wrong' must return a tensor (4,), or (4, " in said


def test_settings_reach_the_function_and_its_names_are_the_batch():
    rewards, groups, mask = torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), torch.ones(2, 3)
    assert advantages.get("mine.py:above(level=1)")(rewards, groups, mask).tolist() == [0.0, 2.0]
    assert advantages.get("mine.py:by_token")(rewards, groups, mask)[1].tolist() == pytest.approx([3.0, 2.7, 2.43])
    assert advantages.get("group-zscore(eps=1)")(rewards, groups, mask)[1] == pytest.approx(1 / (2**0.5 + 1))
    mine = advantages.get(lambda rewards: -rewards)
    assert (mine(rewards, groups, mask).tolist(), advantages.get(mine)) == ([-1.0, -3.0], mine)
    assert not mine.needs_groups


def test_a_surrogate_is_built_from_its_text():
    rule = surrogates.parse("mine.py:Powered(power=2)")
    assert (rule.power, isinstance(rule, poise.Surrogate)) == (2, True)
    assert rule == Settings(surrogate="mine.py:Powered(power=2)").rule
