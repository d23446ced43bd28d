"""Texts about a comparison: arms and runs, expected time, detectable difference, and the chosen learning rates."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from poise.referee.compare.arms import PlannedArm, rate_text
from poise.referee.compare.plan import Plan
from poise.referee.compare.processes import Processes, last_lines
from poise.referee.compare.statistics import detectable
from poise.referee.compare.verdict import points, power_sentence, span
from poise.runs.folder import RunFolder
from poise.runs.subscribers.console import duration
from poise.training.config.groups import HELD_OUT
from poise.training.config.schema import Config
from poise.training.resume import TrainError

SPREAD = 0.05  # the assumed standard deviation of differences over seeds, before it is measured
STEPS = 2  # steps of the trial run; only the second is timed, because the first includes warm-up


def heading(plan: Plan) -> list[str]:
    """Lines that describe the arms, the seeds and the held-out problems."""
    config = plan.baseline.variants[0].config
    evaluation = config.evaluation
    lines = [f"{len(plan.arms)} arms × {len(plan.seeds)} seeds ({span(plan.seeds)}) in {plan.folder}:"]
    lines += [f"  {arm.name}{_role(plan, arm)}" for arm in plan.arms]
    if plan.cut is not None:
        longest = plan.run(plan.baseline, plan.baseline.variants[0], plan.seeds[0]).config.steps
        longer = f"{plan.baseline.name} runs {longest}, to show when it catches up"
        lines.append(f"accuracy and speed after {plan.cut} steps; {longer}")
    if runs := plan.tuning_runs():
        rates = ", ".join(rate_text(variant.rate) for variant in runs[0].arm.variants)
        lines.append(
            f"{len(runs)} tuning runs choose each arm's learning rate among {rates}, with seeds "
            f"{span(plan.settings.tuning_seeds)} and other held-out problems"
        )
    few = "" if evaluation.problems >= HELD_OUT else f"; a fair comparison needs at least {HELD_OUT:,} problems"
    sampled = f" × {evaluation.samples} samples, and greedily" if config.test_temperature else ", greedily"
    lines.append(f"{evaluation.problems:,} held-out problems{sampled}{few}")
    return lines


def _role(plan: Plan, arm: PlannedArm) -> str:
    if arm is plan.baseline:
        return " (baseline)"
    methods = [method for method, controls in plan.controls.items() if arm.name in controls]
    return f" (control for {'; '.join(methods)}{arm.control and f': {arm.control}'})" if methods else ""


def forecast(plan: Plan, seconds: float, jobs: int, done: int) -> str:
    """A line with the expected time of the remaining runs, if each takes ``seconds``."""
    left = plan.size - done
    total = seconds * max(left / jobs, min(left, 1))
    finished = f" ({done} done)" if done else ""
    alone = f"{duration(seconds)} for a run alone"
    return f"{plan.size} runs{finished}, {jobs} in parallel: about {duration(total)} ({alone})"


def power(plan: Plan) -> str:
    """A sentence: the smallest difference that the seeds can detect, at the assumed spread."""
    seeds, comparisons = len(plan.seeds), sum(not arm.control for arm in plan.arms) - 1
    return power_sentence(seeds, comparisons, detectable(seeds, SPREAD, comparisons), SPREAD)


def tuning_lines(report: Sequence[dict[str, Any]]) -> list[str]:
    """Lines with the learning rate of each arm and the scores of all rates."""
    lines = []
    for arm in report:
        if arm["chosen"] is None:
            lines.append(f"{arm['arm']}: no learning rate yet")
            continue
        scores = ", ".join(f"{rate_text(rate['rate'])}: {points(rate['mean'])}" for rate in arm["rates"])
        edge = len(arm["rates"]) > 2 and arm["chosen"] in (arm["rates"][0]["rate"], arm["rates"][-1]["rate"])
        hint = "; it is the first or last rate, so a rate beyond it may be better" if edge else ""
        lines.append(f"{arm['arm']}: learning rate {rate_text(arm['chosen'])} (points by rate: {scores}){hint}")
    return lines


def measure_trial(plan: Plan, processes: Processes) -> float:
    """Estimate a run's seconds, averaged over the arms, from a trial run of the baseline in a temporary folder.

    This assumes that all arms take the same time per response and per phase of an update. The trial runs alone on the
    device; parallel runs take longer.
    """
    config = plan.baseline.variants[0].config
    with tempfile.TemporaryDirectory() as place:
        evaluation = config.evaluation.model_copy(update={"problems": 1, "samples": 1, "every": 0})
        changes = {"steps": STEPS, "evaluation": evaluation, "stop_at": None, "tracking": (), "rollouts_every": 0}
        folder, log = Path(place) / "run", Path(place) / "log"
        processes.start(config.model_copy(update={**changes, "run": str(folder)}), log)
        begin = time.monotonic()
        while not (exits := processes.wait(60)):
            pass
        total = time.monotonic() - begin
        if exits[0].status:
            lines = last_lines(log)
            if lines and lines[-1].startswith("poise: "):  # an error message for the user
                raise TrainError(f"the trial run failed: {lines[-1].removeprefix('poise: ')}")
            raise TrainError("\n".join(["the trial run failed:", *lines]))
        steps = RunFolder.open(folder, resume=False).metrics()
    start = total - sum(step["time/step"] for step in steps)
    configs = [plan.run(arm, arm.variants[0], plan.seeds[0]).config for arm in plan.arms]
    return fmean(run_seconds(each, config, steps[-1], start) for each in configs)


def run_seconds(config: Config, trial: Config, step: dict[str, float], start: float) -> float:
    """Estimate a run's seconds from a trial run: its settings, the metrics of one step, and its start-up time."""
    responses = trial.prompts * trial.group
    size = config.prompts * config.group / responses
    phases = config.build_regulator().phase_count / trial.build_regulator().phase_count
    step_seconds = size * (step["time/step"] + (phases - 1) * step["time/update"])
    tokens = size * step["tokens/sampled"]
    steps = min(config.steps, ceil(config.budget / tokens)) if config.budget and tokens else config.steps
    evaluation = config.evaluation
    evaluations = 2 + (steps - 1) // evaluation.every if evaluation.every else 2
    answers = evaluation.samples + (config.test_temperature > 0)  # and a greedy one, if the samples are not greedy
    share = evaluation.problems * answers / responses
    return start + steps * step_seconds + evaluations * share * step["time/rollout"]
