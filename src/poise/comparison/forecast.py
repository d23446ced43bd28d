"""How long a run takes and how many tokens it samples: measured by runs that have finished, or by a trial run."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from poise.comparison.plan import Plan


@dataclass
class Forecast:
    """A trial run, and the times of the runs that were begun and finished since."""

    trial: tuple[float, float] | None = None  # seconds and sampled tokens of a whole run
    measured: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float | None:
        """Of a run; None if nothing is known."""
        if self.measured:
            return fmean(self.measured)
        return self.trial[0] if self.trial else None

    @property
    def tokens(self) -> float | None:
        """That a run samples for training; None if nothing is known."""
        return self.trial[1] if self.trial else None


def update_lengths(plan: Plan) -> dict[str, float]:
    """How long each arm's update takes, in units of the baseline's: each phase is a pass over the batch."""
    phases = {arm.name: arm.variants[0].config.build_regulator().phase_count for arm in plan.arms}
    return {name: count / phases[plan.baseline.name] for name, count in phases.items()}
