"""What follows a run: each subscriber is told of its start, of every step and of its end, in one order.

1. ``records.Recorder`` writes the step's responses and tokens, and logs its line of metrics: the step is finished.
2. ``evaluations.Evaluations`` measures on held-out problems when it is time, adds to that line, and writes
   ``summary.json`` at the end.
3. ``reporter.Reporter`` shows samples and the step on the console, tells the trackers, and warns.
4. The user's ``callbacks``, in their order.

Then the trainer saves a checkpoint if one is due or the run ends here. A subscriber has any of ``on_start(state)``,
``on_step(result)`` and ``on_end(state)``. One that returns False from the first two ends the run there: a step is saved
first, the last evaluation is done, and the run can be resumed. All others are still told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poise._lib.errors import short

EVENTS = ("on_start", "on_step", "on_end")


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise TypeError unless each of the user's callbacks can be told of something."""
    for each in callbacks:
        if isinstance(each, type) or not any(callable(getattr(each, event, None)) for event in EVENTS):
            raise TypeError(
                f"callbacks: expected objects with on_start(state), on_step(result) or on_end(state), got {short(each)}"
            )


def tell(subscribers: Sequence[Any], event: str, what: Any) -> bool:
    """Tell all subscribers of an event, in their order; whether the run goes on, as far as they are concerned."""
    answers = [getattr(each, event)(what) for each in subscribers if hasattr(each, event)]
    return not any(answer is False for answer in answers)
