"""A trial run of two steps, which tells how long a run takes and how many tokens it samples."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path

from poise.comparison.processes import Processes, last_lines
from poise.config.schema import Config
from poise.runs.folder import RunFolder
from poise.training.resume import TrainError

STEPS = 2  # the second tells more: the first also warms up


class TrialError(TrainError):
    """The trial run failed."""


def measure(
    config: Config, processes: Processes, interrupted: Callable[[], bool] = lambda: False
) -> tuple[float, float]:
    """Seconds and sampled tokens of a whole run with these settings, from a trial in a temporary folder.

    The trial has the device for itself: with many runs side by side each takes longer.
    """
    with tempfile.TemporaryDirectory() as place:
        evaluation = config.evaluation.model_copy(update={"problems": 1, "samples": 1, "every": 0})
        changes = {"steps": STEPS, "evaluation": evaluation, "stop_at": None, "tracking": (), "rollouts_every": 0}
        folder, log = Path(place) / "run", Path(place) / "log"
        processes.start(0, config.model_copy(update={**changes, "run": str(folder)}), log)
        begin = time.monotonic()
        while not (ended := processes.wait(0.25)):
            if interrupted():
                raise KeyboardInterrupt
        total = time.monotonic() - begin
        if ended[0].status:
            raise TrialError("\n".join(["the trial run failed:", *last_lines(log)]))
        lines = RunFolder.open(folder, resume=False).metrics()
    return whole(config, lines[-1], total - sum(line["time/step"] for line in lines))


def whole(config: Config, step: dict[str, float], start: float) -> tuple[float, float]:
    """Seconds and tokens of a whole run, from the metrics of one step and the time that a run takes to start."""
    responses = config.prompts * config.group
    evaluation = config.evaluation
    share = evaluation.problems * (evaluation.samples + 1) / responses  # and once greedily
    tokens = step["tokens/sampled"]
    steps = min(config.steps, ceil(config.budget / tokens)) if config.budget and tokens else config.steps
    evaluations = 2 + (steps - 1) // evaluation.every if evaluation.every else 2
    seconds = start + steps * step["time/step"] + evaluations * share * step["time/rollout"]
    return seconds, steps * tokens
