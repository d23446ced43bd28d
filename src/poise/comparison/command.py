"""What ``poise compare`` does, from the plan to the results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from math import isfinite
from typing import Any

import torch

from poise._lib.files import dumps, replacing
from poise.comparison import mps, record, tuning
from poise.comparison.plan import Plan, read_plan
from poise.comparison.processes import Nursery
from poise.comparison.results import ACCURACY, Arm
from poise.comparison.runner import Runner
from poise.comparison.view import Progress
from poise.runs.console import Console, visible
from poise.runs.lock import owned
from poise.training.interrupts import Stopper

ON_A_GPU = 16  # runs side by side
INTERRUPTED = 130


def compare(recipe: str | None, overrides: Sequence[str], *, dry_run: bool = False, quiet: bool = False) -> int:
    """Carry out a comparison, or what is left of it; the exit code: 0, 1 if a run failed, 130 if it was interrupted."""
    plan = read_plan(recipe, overrides)
    record.check(plan)
    if dry_run:
        describe(plan)
        return 0
    with owned(plan.folder, make=True):
        record.check(plan)  # again: another process may have begun one meanwhile
        record.write(plan)
        with Progress(quiet=quiet) as view:
            gpu = _on_gpu(plan)
            jobs = min(plan.limits.jobs or default_jobs(gpu), plan.size)
            with mps.served(plan.folder, view.note) if gpu and jobs > 1 else nullcontext():
                runner = Runner(plan, Nursery(plan.limits.threads), view, jobs)
                with Stopper(view.note) as stopper:
                    runner.run(lambda: stopper.requested)
        return finish(plan, runner)


def _on_gpu(plan: Plan) -> bool:
    device = plan.baseline.variants[0].config.device
    return torch.cuda.is_available() if device == "auto" else device.startswith("cuda")


def default_jobs(gpu: bool) -> int:
    """How many runs go side by side: on a GPU 16, on a CPU one for each core that this process may use."""
    if gpu:
        return ON_A_GPU
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(plan: Plan) -> None:
    """Print what the plan does."""
    config = plan.baseline.variants[0].config
    print(visible(f"comparison in {plan.folder}: {plan.size} runs"))
    for arm in plan.arms:
        print(visible(f"  {arm.name}" + (" (baseline)" if arm is plan.baseline else "")))
    print(f"seeds {plan.seeds[0]} to {plan.seeds[-1]}, the same problems in the same order for all arms")
    print(f"{config.evaluation.problems:,} held-out problems × {config.evaluation.samples} samples and greedily")


def finish(plan: Plan, runner: Runner) -> int:
    """Write the results, print them, and return the exit code."""
    arms = collected(plan, runner)
    document = {
        "baseline": plan.baseline.name,
        "arms": [
            {"name": arm.name, "settings": dict(arm.settings), "seeds": sorted(arm.runs), "accuracy": _mean(arm)}
            for arm in arms
        ],
        "tuning": tuning.report(plan, runner.result),
        "failures": list(runner.failures.values()),
    }
    with replacing(plan.folder / "comparison.json") as file:
        file.write(dumps(document, indent=1))
    with Console(0) as console:
        console.table([{"arm": arm.name, "seeds": len(arm.results()), "accuracy": _mean(arm)} for arm in arms])
    print(visible(f"results: {plan.folder / 'comparison.json'}"))
    for folder, failure in runner.failures.items():
        print(visible(f"failed: {folder} ({failure['ended']}); its log: {failure['log']}"))
    if runner.stopped and not runner.failures:
        print("stopped; the same command goes on")
        return INTERRUPTED
    return 1 if runner.failures else 0


def _mean(arm: Arm) -> float | None:
    scores = [score for score in arm.results(ACCURACY).values() if isfinite(score)]
    return sum(scores) / len(scores) if scores else None


def collected(plan: Plan, runner: Runner) -> list[Arm]:
    """The arms with the results that they have."""
    found = []
    for arm in plan.arms:
        variant = runner.chosen(arm)
        runs: dict[int, Any] = {}
        for seed in plan.seeds:
            result = runner.result(plan.run(arm, variant, seed).folder) if variant else None
            if result is not None:
                runs[seed] = result
        found.append(Arm(arm.name, arm.settings, runs))
    return found
