"""A trial run of two steps, which tells how long a run takes and how many tokens it samples."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path
from statistics import fmean

from poise.comparison.forecast import update_lengths
from poise.comparison.plan import Plan
from poise.comparison.processes import Processes, last_lines
from poise.config.schema import Config
from poise.runs.folder import RunFolder
from poise.training.resume import TrainError

STEPS = 2  # the second tells more: the first also warms up


class TrialError(TrainError):
    """The trial run failed."""


def measure(plan: Plan, processes: Processes, interrupted: Callable[[], bool] = lambda: False) -> tuple[float, float]:
    """Seconds and sampled tokens of a whole run, on average over the arms, from a trial in a temporary folder.

    The trial is of the baseline. Other arms are taken to need as much time for a response and, in an update, for each
    phase. The trial has the device for itself: with many runs side by side each takes longer.
    """
    config = plan.baseline.variants[0].config
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
            lines = last_lines(log)
            if lines and lines[-1].startswith("poise: "):  # an error that explains itself
                raise TrialError(f"the trial run failed: {lines[-1].removeprefix('poise: ')}")
            raise TrialError("\n".join(["the trial run failed:", *lines]))
        steps = RunFolder.open(folder, resume=False).metrics()
    start = total - sum(step["time/step"] for step in steps)
    lengths, responses = update_lengths(plan), config.prompts * config.group
    runs = [whole(arm.variants[0].config, steps[-1], responses, start, lengths[arm.name]) for arm in plan.arms]
    return fmean(seconds for seconds, _ in runs), fmean(tokens for _, tokens in runs)


def whole(
    config: Config, step: dict[str, float], responses: int, start: float, update: float = 1.0
) -> tuple[float, float]:
    """Seconds and tokens of a whole run, from the metrics of a step with so many responses and the time of a start.

    Its updates take ``update`` times as long for a response as that of the step.
    """
    evaluation = config.evaluation
    share = evaluation.problems * (evaluation.samples + 1) / responses  # and once greedily
    size = config.prompts * config.group / responses
    tokens = size * step["tokens/sampled"]
    steps = min(config.steps, ceil(config.budget / tokens)) if config.budget and tokens else config.steps
    evaluations = 2 + (steps - 1) // evaluation.every if evaluation.every else 2
    a_step = size * (step["time/step"] + (update - 1) * step["time/update"])
    seconds = start + steps * a_step + evaluations * share * step["time/rollout"]
    return seconds, steps * tokens
