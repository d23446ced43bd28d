"""The x axes of a run's curves: steps, sampled tokens or seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeGuard

AXES = {"step": "step", "tokens": "sampled tokens", "seconds": "seconds"}  # name: label
LARGEST = 1e300  # larger values are not drawn


def x_values(metrics: Sequence[Mapping[str, Any]], axis: str) -> list[float] | None:
    """The x value of each record of ``RunFolder.metrics()``; None if the run has not recorded that axis.

    Seconds count only steps, not evaluations or pauses. A record that is not a step, such as an evaluation, has the x
    value of the step before it.
    """
    if axis == "step":
        return [record["step"] for record in metrics]
    key = {"tokens": "tokens/total", "seconds": "time/step"}[axis]
    if not any(drawable(record.get(key)) for record in metrics):
        return None
    values = (float(value) if drawable(value := record.get(key)) else 0.0 for record in metrics)
    return [*accumulate(values, max if axis == "tokens" else None)]


def drawable(value: Any) -> TypeGuard[float]:
    """Whether a value from an untrusted metrics file is a number that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
