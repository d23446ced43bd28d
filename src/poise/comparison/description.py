"""A comparison in words before it runs: what it does, how long it takes, what it can find. And the rates it chose."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from poise.comparison import analysis
from poise.comparison.arms import shown_rate
from poise.comparison.plan import Plan
from poise.comparison.processes import Processes, last_lines
from poise.comparison.statistics import detectable
from poise.config.groups import HELD_OUT
from poise.config.schema import Config
from poise.runs.console import duration
from poise.runs.folder import RunFolder
from poise.training.resume import TrainError

SPREAD = 0.05  # of differences over seeds, where none is measured: five points are usual
STEPS = 2  # of the trial run; the second tells more: the first also warms up


def heading(plan: Plan) -> list[str]:
    """The arms, the seeds and the held-out problems."""
    evaluation = plan.baseline.variants[0].config.evaluation
    lines = [f"{len(plan.arms)} arms × {len(plan.seeds)} seeds ({_span(plan.seeds)}) in {plan.folder}:"]
    lines += [f"  {arm.name}" + (" (baseline)" if arm is plan.baseline else "") for arm in plan.arms]
    if runs := plan.tuning_runs():
        rates = ", ".join(shown_rate(variant.rate) for variant in runs[0].arm.variants)
        lines.append(
            f"each arm's learning rate is chosen among {rates} with seeds {_span(plan.tuning_seeds)} on other held-out "
            f"problems: {len(runs)} runs"
        )
    few = "" if evaluation.problems >= HELD_OUT else f", fewer than the {HELD_OUT:,} that a fair comparison needs"
    lines.append(f"{evaluation.problems:,} held-out problems × {evaluation.samples} samples, and greedily{few}")
    return lines


def forecast(plan: Plan, seconds: float, jobs: int, done: int) -> str:
    """How long the runs that are left take, if each takes ``seconds``."""
    left = plan.size - done
    total = seconds * max(left / jobs, min(left, 1))
    begun = f" ({done} done)" if done else ""
    return (
        f"{plan.size} runs{begun}, {jobs} side by side: about {duration(total)} ({duration(seconds)} for a run alone)"
    )


def power(plan: Plan) -> str:
    """The smallest difference that the seeds can find, at a usual spread."""
    seeds, comparisons = len(plan.seeds), len(plan.arms) - 1
    return analysis.power(seeds, comparisons, detectable(seeds, SPREAD, comparisons), SPREAD)


def tuned(report: Sequence[dict[str, Any]]) -> list[str]:
    """What was chosen for each arm."""
    lines = []
    for arm in report:
        if arm["chosen"] is None:
            lines.append(f"{arm['arm']}: no learning rate is chosen yet")
            continue
        scores = ", ".join(f"{shown_rate(rate['rate'])}: {analysis.points(rate['mean'])}" for rate in arm["rates"])
        edge = len(arm["rates"]) > 2 and arm["chosen"] in (arm["rates"][0]["rate"], arm["rates"][-1]["rate"])
        hint = "; it is at the end of the rates, so another one may be better" if edge else ""
        lines.append(f"{arm['arm']}: learning rate {shown_rate(arm['chosen'])} (points by rate: {scores}){hint}")
    return lines


def _span(seeds: Sequence[int]) -> str:
    return f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"


class TrialError(TrainError):
    """The trial run failed."""


def measure_trial(plan: Plan, processes: Processes) -> float:
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
