"""Arms beside a control that takes as many optimizer steps.

All arms of a comparison sample the same number of responses. A method of two phases takes twice the optimizer steps of
plain GRPO besides, and its gain may be that of the steps: ``grpo(passes=2)`` is the control for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from poise.comparison.results import ACCURACY, Arm
from poise.comparison.sign_flip import holm
from poise.comparison.statistics import LEVEL, difference
from poise.comparison.verdict import listed, signed

Document = dict[str, Any]
ALIKE = 0.05  # steps that differ by a smaller share are as many: a step without an active token is left out
COUNTS = ("steps", "prompts", "group", "budget", "optim.mini_batch")  # settings that change the number of steps


def controls(arms: Sequence[Arm], baseline: str, tuned: Sequence[str] = ()) -> dict[str, str | None]:
    """For each arm that takes more optimizer steps than the baseline: its control among the arms, or None.

    A control is the baseline with several passes, and all other settings as the arm has them, but for those that were
    ``tuned`` for each arm.
    """
    found: dict[str, str | None] = {}
    for arm, own in _busy(arms, baseline):
        if _passes(arm):
            continue
        alike = [
            other.name
            for other in arms
            if _passes(other)
            and _others(other, tuned) == _others(arm, tuned)
            and (theirs := _steps(other))
            and abs(theirs - own) <= ALIKE * own
        ]
        found[arm.name] = alike[0] if alike else None
    return found


def compare(arms: Sequence[Arm], baseline: str, tuned: Sequence[str] = (), level: float = LEVEL) -> list[Document]:
    """For ``comparison.json``: each such arm against its control, with p-values corrected over these pairs."""
    by_name = {arm.name: arm for arm in arms}
    pairs = controls(arms, baseline, tuned)
    known = {name: control for name, control in pairs.items() if control is not None}
    differences = {
        name: difference(by_name[name].results(ACCURACY), by_name[control].results(ACCURACY), level=level)
        for name, control in known.items()
    }
    adjusted = dict(zip(differences, holm([each.p for each in differences.values()]), strict=True))
    return [
        {
            "arm": name,
            "control": control,
            "mean": differences[name].mean if control else None,
            "interval": list(interval) if control and (interval := differences[name].interval) else None,
            "p": differences[name].p if control else None,
            "p_adjusted": adjusted.get(name),
        }
        for name, control in pairs.items()
    ]


def sentences(pairs: Sequence[Document], arms: Sequence[Arm], baseline: str, *, one_rate: bool = False) -> list[str]:
    """What the pairs show; for an arm without a control, the control to add; with ``one_rate`` for all, its flaw."""
    steps = {arm.name: _steps(arm) or 0.0 for arm in arms}
    said = []
    alone: dict[int, list[str]] = {}  # by how many times the steps of the baseline
    for pair in pairs:
        if pair["control"] is None:
            alone.setdefault(round(steps[pair["arm"]] / steps[baseline]), []).append(pair["arm"])
        elif pair["mean"] is not None:
            interval = f" [{', '.join(map(signed, pair['interval']))}]" if pair["interval"] else ""
            said.append(
                f"{pair['arm']}, against {pair['control']}, which takes as many optimizer steps: "
                f"{signed(pair['mean'])} points{interval} "
                f"(p = {pair['p_adjusted']:.2g}, corrected over such pairs)."
            )
    for times, names in alone.items():  # the verdict says already how many they take
        said.append(
            f"Without the method, no arm takes as many optimizer steps as {listed(names)}: add the arm "
            f"grpo(passes={times}) to tell the method from the steps."
        )
    busy = [arm.name for arm, _ in _busy(arms, baseline)]
    if busy and one_rate:
        take = "take" if len(busy) > 1 else "takes"
        said.append(
            f"All arms have one learning rate. {listed(busy)} {take} more steps, which can act as a higher rate: "
            "optim.lr=A,B,C tune=3, with rates around yours, tells the method from the rate."
        )
    return said


def _busy(arms: Sequence[Arm], baseline: str) -> list[tuple[Arm, float]]:
    """Arms that take about twice the baseline's optimizer steps or more by their method alone, with these steps."""
    (base,) = (arm for arm in arms if arm.name == baseline)
    counts, steps = _counts(base), _steps(base)
    own = [(arm, _steps(arm) or 0.0) for arm in arms if _counts(arm) == counts]
    return [(arm, taken) for arm, taken in own if steps and taken >= (2 - ALIKE) * steps]


def _counts(arm: Arm) -> Document:
    return {key: value for key, value in arm.settings.items() if key in COUNTS}


def _steps(arm: Arm) -> float | None:
    """Optimizer steps of a finished run."""
    found = [run.cost.optimizer_steps for run in arm.runs.values() if run.state == "finished"]
    return fmean(found) if found else None


def _passes(arm: Arm) -> bool:
    """Whether an arm is plain GRPO with several passes."""
    return str(arm.settings.get("regulator", "")).replace(" ", "").startswith("grpo(passes=")


def _others(arm: Arm, tuned: Sequence[str]) -> Document:
    return {key: value for key, value in arm.settings.items() if key not in ("regulator", *tuned)}
