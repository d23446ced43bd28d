"""docs/reference.md is what the code says, says something about every setting, and knows every metric of runs."""

import inspect
import json
import sys
from pathlib import Path

import pytest

from poise import trainer
from poise.runs.folder import RunFolder
from poise.training import config as configs
from support.pages import ROOT
from support.small_runs import SMALL

sys.path.append(str(ROOT / "scripts"))
import reference
from metric_names import METRICS, find

PARTS = {"answer", "format", "transfer", "number", "brief", "math"}  # parts of the reward in the runs below
KK, MATH, SUMS = (
    "{name: kk, people: 2}",
    "{name: math, file: sums.jsonl}",
    "{name: data, file: sums.jsonl, reward: [number, rewards.py:brief]}",
)
RUNS = [  # task, changes
    (
        KK,
        [
            "regulator=nthr | clip-cov(share=0.1, low=-9, high=9)",
            "evaluation.every=1",
            "steps=2",
            "objective.kl_coef=0.01",
        ],
    ),
    (KK, ["regulator=stapo(max_prob=1) | stare | lopti", "drop_equal_groups=true", "objective.entropy_coef=0.01"]),
    (KK, ["objective.surrogate=kl-cov(share=0.1)"]),
    (KK, ["algorithm=rltr"]),
    (KK, ["algorithm=erl(reflection_tokens=12)", "rollout.max_prompt=900"]),
    ("{name: frozenlake}", ["rollout.max_prompt=900", "rollout.max_tokens=12"]),
    (SUMS, ["rollout.max_tokens=12"]),
    (MATH, ["rollout.max_tokens=12"]),
]
# Written only where a reward function hangs, problems are too long, vLLM samples, or no continuation gets a score
RARE = {
    "reward/failed", "rollout/too_long", "transfer/failed", "rollout/importance", "rollout/truncated",
    "rollout/mismatch", "rollout/mismatch_p999", "rollout/mismatch_max", "rollout/mismatch_kl",
}  # fmt: skip


def test_the_page_is_what_the_code_says():
    """If not: python scripts/reference.py"""
    assert (ROOT / "docs/reference.md").read_text() == reference.page()


def test_every_setting_is_explained():
    assert [name for name, _, _, meaning in reference.settings() if not meaning] == []
    for _, table in reference.METHODS.values():
        for kind in table.values():
            settings = {
                name for name, each in inspect.signature(kind).parameters.items() if each.kind is not each.VAR_KEYWORD
            }
            told = reference.about(inspect.getmro(kind)[:-1], settings)
            assert settings - {*reference.INNER} <= reference.words_in_code(told), kind


def test_rows_are_found_by_names_of_the_run():
    assert find("eval/rg/chain_sum/avg@4/3") == "eval/TASK/avg@K/DIFFICULTY"
    assert find("reg/pull_p0.25-0.50") == "reg/pull_pINTERVAL"
    assert find("reward/accuracy/3") == "reward/accuracy/DIFFICULTY"
    assert find("reward/math/cut_off") == "reward/math/cut_off"
    assert find("reg/pull") is None


@pytest.mark.long
@pytest.mark.usefixtures("short_evaluation")
@pytest.mark.docs
def test_every_metric_that_runs_write_is_in_the_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What is 2 + {i}?", "answer": str(2 + i)} for i in range(20)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rewards.py").write_text("def brief(completions, **_):\n    return [1.0 / len(c) for c in completions]\n")
    small = [item for item in SMALL if not item.startswith(("task.", "steps="))]
    written = set()
    for number, (task, changes) in enumerate(RUNS):
        Path("recipe.yaml").write_text(f"model: embedded\noptim: {{lr: 2e-4}}\nsteps: 1\ntask: {task}\n")
        trainer.train(configs.load("recipe.yaml", [*small, f"run=run{number}", *changes]), quiet=True)
        lines = RunFolder.open(f"run{number}", resume=False).metrics()
        written |= {key for line in lines for key in line if key != "step"}
    assert {key for key in written if find(key) is None} == set()
    assert {key.removeprefix("reward/") for key in written if find(key) == "reward/PART"} == PARTS
    assert {row for row in METRICS if row not in {find(key) for key in written}} <= RARE
