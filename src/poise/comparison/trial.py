"""A trial run of two steps, which tells about how long a run takes."""

from __future__ import annotations

import tempfile
import time
from math import ceil
from pathlib import Path
from statistics import fmean

from poise.comparison.plan import Plan
from poise.comparison.processes import Processes, last_lines
from poise.config.schema import Config
from poise.runs.folder import RunFolder
from poise.training.resume import TrainError

STEPS = 2  # the second tells more: the first also warms up


class TrialError(TrainError):
    """The trial run failed."""


def measure(plan: Plan, processes: Processes) -> float:
    """Seconds of a whole run, on average over the arms, from a trial of the baseline in a temporary folder.

    Other arms are taken to need as much time for a response and for each phase of an update. The trial has the device
    for itself: with many runs side by side each takes longer.
    """
    config = plan.baseline.variants[0].config
    with tempfile.TemporaryDirectory() as place:
        evaluation = config.evaluation.model_copy(update={"problems": 1, "samples": 1, "every": 0})
        changes = {"steps": STEPS, "evaluation": evaluation, "stop_at": None, "tracking": (), "rollouts_every": 0}
        folder, log = Path(place) / "run", Path(place) / "log"
        processes.start(0, config.model_copy(update={**changes, "run": str(folder)}), log)
        begin = time.monotonic()
        while not (ended := processes.wait(60)):
            pass
        total = time.monotonic() - begin
        if ended[0].status:
            lines = last_lines(log)
            if lines and lines[-1].startswith("poise: "):  # an error that explains itself
                raise TrialError(f"the trial run failed: {lines[-1].removeprefix('poise: ')}")
            raise TrialError("\n".join(["the trial run failed:", *lines]))
        steps = RunFolder.open(folder, resume=False).metrics()
    start = total - sum(step["time/step"] for step in steps)
    return fmean(whole(arm.variants[0].config, config, steps[-1], start) for arm in plan.arms)


def whole(config: Config, tried: Config, step: dict[str, float], start: float) -> float:
    """Seconds of a whole run, from the time of a start and the metrics of a step with the settings ``tried``."""
    responses = tried.prompts * tried.group
    size = config.prompts * config.group / responses
    phases = config.build_regulator().phase_count / tried.build_regulator().phase_count
    a_step = size * (step["time/step"] + (phases - 1) * step["time/update"])
    tokens = size * step["tokens/sampled"]
    steps = min(config.steps, ceil(config.budget / tokens)) if config.budget and tokens else config.steps
    evaluation = config.evaluation
    evaluations = 2 + (steps - 1) // evaluation.every if evaluation.every else 2
    share = evaluation.problems * (evaluation.samples + 1) / responses  # and once greedily
    return start + steps * a_step + evaluations * share * step["time/rollout"]
