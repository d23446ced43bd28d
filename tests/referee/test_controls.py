"""``controls=auto``: which arms it adds, and what the verdict says of them."""

import json

import pytest

from poise.referee.compare import description
from poise.referee.compare.analysis import analyse
from poise.referee.compare.results import Arm
from poise.training.config.documents import ConfigError
from support.arms import made_arm
from support.command_line import poise
from support.comparisons import SMALL, make

LIKE_LOPTI, LIKE_AR = "random-split(like='lopti')", "constant(like='ar')"
RATES = ("grpo, 1.5 × rate", "grpo, 2 × rate")


def names(plan):
    return [arm.name for arm in plan.arms]


def config(plan, name):
    (arm,) = (arm for arm in plan.arms if arm.name == name)
    return arm.variants[0].config


def test_each_method_gets_its_controls_once(tmp_path):
    plan = make(tmp_path, "controls=auto", "optim.lr=1e-4", regulator="grpo; lopti; ar; nthr")
    like_nthr = "constant(like='nthr')"
    assert names(plan) == ["grpo", "lopti", "ar", "nthr", *RATES, "grpo(passes=2)", LIKE_LOPTI, LIKE_AR, like_nthr]
    assert plan.controls == {
        "lopti": (*RATES, "grpo(passes=2)", LIKE_LOPTI),
        "ar": (*RATES, LIKE_AR),
        "nthr": (*RATES, like_nthr),
    }
    assert [config(plan, name).optim.lr for name in RATES] == pytest.approx([1.5e-4, 2e-4])
    assert config(plan, LIKE_LOPTI).build_regulator().like == "lopti"
    assert config(plan, LIKE_LOPTI).optim.lr == 1e-4
    assert [bool(arm.control) for arm in plan.arms] == [False] * 4 + [True] * 6
    assert names(make(tmp_path, regulator="grpo; lopti")) == ["grpo", "lopti"]


def test_an_arm_that_is_there_already_is_not_added_and_needs_no_control(tmp_path):
    plan = make(tmp_path, "controls=auto", regulator="grpo; lopti; grpo(passes=2); constant(weight=0.8)")
    assert names(plan) == ["grpo", "lopti", "grpo(passes=2)", "constant(weight=0.8)", *RATES, LIKE_LOPTI]
    assert plan.controls == {"lopti": (*RATES, "grpo(passes=2)", LIKE_LOPTI)}
    assert not plan.arms[2].control  # the user asked for it: it makes a claim


def test_methods_by_other_settings(tmp_path):
    plan = make(tmp_path, "controls=auto", "objective.clip_high=0.2,0.28", regulator="grpo")
    base, other = "grpo, objective.clip_high=0.2", "grpo, objective.clip_high=0.28"
    base, other = (name.removeprefix("grpo, ") for name in (base, other))
    assert names(plan) == [base, other, f"{base}, 1.5 × rate", f"{base}, 2 × rate"]
    assert config(plan, f"{base}, 2 × rate").objective.clip_high == 0.2
    both = make(tmp_path, "controls=auto", "objective.clip_high=0.2,0.28", regulator="grpo; lopti")
    again = "grpo(passes=2) (lopti, objective.clip_high=0.28)"
    assert config(both, "grpo(passes=2)").objective.clip_high == 0.2
    assert config(both, again).objective.clip_high == 0.28
    assert again in both.controls["lopti, objective.clip_high=0.28"]


def test_tuned_rates_need_no_control(tmp_path):
    plan = make(tmp_path, "controls=auto", "optim.lr=1e-4,2e-4", "tune=2", regulator="grpo; lopti")
    assert names(plan) == ["grpo", "lopti", "grpo(passes=2)", LIKE_LOPTI]
    assert [variant.rate for variant in plan.arms[3].variants] == [1e-4, 2e-4]


def test_the_plan_names_each_control_with_its_reason(tmp_path):
    said = description.heading(make(tmp_path, "controls=auto", regulator="grpo; lopti; ar"))
    for line in (
        "  grpo, 2 × rate (control for lopti; ar: a larger step)",
        "  grpo(passes=2) (control for lopti: as many plain passes as phases)",
        f"  {LIKE_LOPTI} (control for lopti: the same split, at random)",
        f"  {LIKE_AR} (control for ar: the same mean weight for all tokens)",
    ):
        assert line in said
    with pytest.raises(ConfigError, match="controls = 'all': must be 'none' or 'auto'"):
        make(tmp_path, "controls=all")


def explained(gains, control_gain, **changes):
    """The verdict on a method with a gain, and a control with another."""
    control = made_arm("control", control_gain, **changes)
    arms = [made_arm("grpo", 0.0), made_arm("method", gains), Arm("control", {}, control.runs, "why")]
    return analyse(arms, "grpo", range(10), controls={"method": ["control"]})


def test_a_control_that_is_as_good_explains_a_gain():
    document = explained(0.06, 0.06)
    (said,) = (sentence for sentence in document["verdict"] if "control" in sentence)
    assert said.startswith("method: better, but a control explains it; method against control (")
    assert explained(0.06, 0.09)["arms"][1]["controls"]["better"][0]["explains"]
    said = " ".join(explained(0.06, 0.02)["verdict"])
    assert "method: better, and none of its 1 controls explains it." in said
    assert "control" not in " ".join(explained(0.0, 0.0)["verdict"])  # no gain, nothing to explain
    said = " ".join(explained(0.06, 0.02, seeds=0)["verdict"])
    assert "none of the 0 finished of its 1 controls explains it" in said


def test_controls_make_no_claim():
    document = explained(0.06, 0.06)
    claim, control = document["arms"][1:]
    assert claim["difference"]["p_adjusted"] == 2 / 2**10  # the only one
    assert control["difference"]["p_adjusted"] is None
    assert control["difference"]["interval"] is not None
    assert not any(sentence.startswith("control:") for sentence in document["verdict"])


@pytest.mark.long
@pytest.mark.slow
def test_registered_with_controls_and_speed_from_the_command_line(tmp_path):
    folder = tmp_path / "cmp"
    settings = ["compare", "tiny", *SMALL, "regulator=grpo; ar", "controls=auto", "measure=speed", "margin=0.07"]
    settings += ["seeds=2", "jobs=2", f"run={folder}"]
    said = poise(*settings, "--register")
    assert said.exit_code == 0, said.output
    assert not (folder / "arms").exists()
    said = poise(*settings)
    assert said.exit_code == 0, said.output
    found = json.loads((folder / "comparison.json").read_text())
    assert [arm["name"] for arm in found["arms"]] == ["grpo", "ar", *RATES, LIKE_AR]
    assert found["verdict"][0] == f"Registered before the first run (checksum {found['registered'][:12]})."
    assert (found["cut"], found["end"]) == (2, 4)
    curves = [arm["curves"]["1"]["steps"] for arm in found["arms"]]
    assert curves == [[0, 1, 2, 3, 4]] + [[0, 1, 2]] * 4
    assert "ar" in [row["name"] for row in found["arms"] if row["controls"]["faster"]]
