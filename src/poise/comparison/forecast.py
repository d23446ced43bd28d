"""How long a run takes and how many tokens it samples: measured by runs that have finished, or by a trial run."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean


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
