"""What ``poise compare`` does, from the plan to the results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing, nullcontext

import torch

from poise.comparison import description, output, record
from poise.comparison.analysis import Document, analyse
from poise.comparison.arms import RATE
from poise.comparison.plan import Plan, read_plan
from poise.comparison.processes import Processes, mps
from poise.comparison.results import Arm, tuning_report
from poise.comparison.runner import Progress, Runner
from poise.config.schema import Config
from poise.models.places import ModelError, locate
from poise.runs.console import Console, visible
from poise.runs.lock import owned
from poise.training.interrupts import Stopper

ON_A_GPU = 16  # runs side by side
INTERRUPTED = 130


def compare(
    recipe: str | None, overrides: Sequence[str], *, dry_run: bool = False, quiet: bool = False,
    trust_changed: bool = False,
) -> int:  # fmt: skip
    """Carry out a comparison, or what is left of it; the exit code: 0, 1 if a run failed, 130 if it was interrupted.

    ``trust_changed`` goes on although code of the user's own was edited since some of its runs.
    """
    plan = read_plan(recipe, overrides)
    record.check(plan, trust_changed=trust_changed)
    _check_models(plan)
    if dry_run:
        _foretell(plan)
        return 0
    with owned(plan.folder, make=True):
        record.check(plan, trust_changed=trust_changed)  # again: another process may have begun one meanwhile
        record.write(plan)
        view = Progress(quiet=quiet)
        with Stopper(view.note) as stopper:
            for line in description.heading(plan):
                view.note(line)
            jobs, parallel = _side_by_side(plan)
            runner = Runner(plan, Processes(plan.limits.threads), view, jobs)
            with mps(view.note) if parallel else nullcontext(), closing(runner.processes):
                if runner.status().done < plan.size:
                    first = ", and measuring its accuracy before training" if runner.unmeasured() else ""
                    view.note(f"loading the model{first} …")
                runner.run(lambda: stopper.requested)
        return _finish(plan, runner)


def _check_models(plan: Plan) -> None:
    """Refuse a model or an engine that is not there before anything is written, if a run that is left needs it."""

    def check(configs: Sequence[Config]) -> None:
        for model in {config.model: None for config in configs}:
            locate(model)
        if any(config.rollout.engine == "vllm" for config in configs):
            from poise.engines.vllm import check_installed

            check_installed()

    try:
        check([variant.config for arm in plan.arms for variant in arm.variants])
    except ModelError:  # only then look which runs are done
        check([run.config for run in Runner(plan, Processes(), Progress(quiet=True), jobs=1).left()])


def default_jobs(gpu: bool) -> int:
    """How many runs go side by side: on a GPU 16, on a CPU one for each core that this process may use."""
    if gpu:
        return ON_A_GPU
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _side_by_side(plan: Plan) -> tuple[int, bool]:
    """How many runs go side by side, and whether they share a GPU."""
    device = plan.baseline.variants[0].config.device
    gpu = torch.cuda.is_available() if device == "auto" else device.startswith("cuda")
    jobs = min(plan.limits.jobs or default_jobs(gpu), plan.size)
    return jobs, gpu and jobs > 1


def _foretell(plan: Plan) -> None:
    """Print what the plan does, and how long it takes by a trial run. Nothing is written."""
    for line in description.heading(plan):
        print(visible(line))
    print("measuring two steps of a run …", flush=True)
    jobs = _side_by_side(plan)[0]
    with closing(Processes(plan.limits.threads)) as processes:
        done = Runner(plan, processes, Progress(quiet=True), jobs).status().done
        seconds = description.measure_trial(plan, processes)
    print(description.forecast(plan, seconds, jobs, done))
    print(description.power(plan))


def _finish(plan: Plan, runner: Runner) -> int:
    """Write the results, print them, and return the exit code."""
    arms = _collect(plan, runner)
    found = analyse(arms, plan.baseline.name, plan.seeds, looks=record.read_looks(plan))
    record.write(plan, found["looks"])
    document = found | _conditions(plan, runner)
    output.write(plan.folder, document, arms)
    with Console(0) as console:
        output.show(document, console)
    for line in description.tuned(document["tuning"]):
        print(visible(line))
    for arm, files in record.mixed_code(plan).items():
        print(visible(f"{arm}: its runs were trained with different versions of {', '.join(files)}"))
    for folder, failure in runner.failures.items():
        print(visible(f"failed: {folder} ({failure['ended']}); its log: {failure['log']}"))
    print(visible(f"results: {plan.folder / 'comparison.json'}   page: {plan.folder / 'comparison.html'}"))
    if runner.failures:
        print("the same command tries failed runs again")
        return 1
    if runner.stopped or runner.out_of_time:
        print("stopped; the same command goes on")
    return INTERRUPTED if runner.stopped else 0


def _conditions(plan: Plan, runner: Runner) -> Document:
    """How the comparison was made, for ``comparison.json``."""
    config = plan.baseline.variants[0].config
    return {
        "tuning": tuning_report(plan, runner.result),
        "tuning_seeds": list(plan.tuning_seeds),
        "held_out": {"problems": config.evaluation.problems, "seed": config.evaluation.seed},
        "failures": list(runner.failures.values()),
        "mixed_code": record.mixed_code(plan),
        "settings": plan.baseline.variants[0].identity,
    }


def _collect(plan: Plan, runner: Runner) -> list[Arm]:
    """The arms with the results that they have."""
    found = []
    for arm in plan.arms:
        variant = runner.chosen(arm)
        settings = dict(arm.settings) | ({RATE: variant.rate} if variant and len(arm.variants) > 1 else {})
        runs = {seed: runner.result(plan.run(arm, variant, seed).folder) for seed in plan.seeds} if variant else {}
        found.append(Arm(arm.name, settings, {seed: run for seed, run in runs.items() if run is not None}))
    return found
