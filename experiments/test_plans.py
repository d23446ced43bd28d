"""The plans of comparisons can be run: each file is read as `poise compare` reads it."""

from pathlib import Path

import pytest

from poise.referee.compare.plan import Plan, read_plan

HERE = Path(__file__).parent
PLANS = sorted(file for file in HERE.glob("*/*.yaml") if "arms:" in file.read_text())

pytestmark = pytest.mark.studies


def plan_of(file: Path) -> Plan:
    data = f"task.file={HERE.parent / 'examples/sums/questions.jsonl'}"
    return read_plan(str(file), [data] if "file: data/" in file.read_text() else [])


@pytest.mark.parametrize("file", PLANS, ids=lambda file: file.relative_to(HERE).as_posix())
def test_a_plan_is_read(file: Path) -> None:
    plan = plan_of(file)
    for run in plan.all_runs():
        assert run.seed in plan.settings.tuning_seeds or run.config.steps % run.config.evaluation.every == 0, run.name
    assert plan.baseline is plan.arms[0]


def test_controls_have_the_rates_that_their_names_say() -> None:
    doubled = 0
    for file in PLANS:
        rates = {arm.name: arm.variants[0].config.optim.lr for arm in plan_of(file).arms}
        for name, rate in rates.items():
            if name.endswith("x2 rate"):
                assert rate == pytest.approx(2 * rates["grpo"]), file
                doubled += 1
    assert doubled >= 4
