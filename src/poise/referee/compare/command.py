"""Runs ``poise compare``, from the plan to the results."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext

from poise._lib.errors import visible
from poise.models.location import locate
from poise.referee.compare import description, output, plan_file, registration
from poise.referee.compare.analysis import analyse
from poise.referee.compare.arms import RATE
from poise.referee.compare.plan import Plan, read_plan
from poise.referee.compare.processes import Processes, mps
from poise.referee.compare.results import Arm, tuning_report
from poise.referee.compare.runner import Progress, Runner
from poise.runs.listing import PLAN
from poise.runs.lock import owned
from poise.runs.subscribers.console import Console
from poise.training.config.documents import Document
from poise.training.interrupts import Stopper

INTERRUPTED = 130


def compare(
    recipe: str | None,
    overrides: Sequence[str],
    *,
    dry_run: bool = False,
    quiet: bool = False,
    trust_changed: bool = False,
    register: bool = False,
) -> int:
    """Start or continue a comparison. Returns the exit code: 0; 1 if a run failed; 130 if the user interrupted it.

    ``register`` only freezes the plan. ``trust_changed`` continues even if the user's code was edited after some runs.
    """
    plan = read_plan(recipe, overrides)
    plan_file.check(plan, trust_changed=trust_changed)
    jobs, share = _check_models(plan)
    if dry_run:
        _forecast(plan, jobs)
        return 0
    with owned(plan.folder, make=True):
        plan_file.check(plan, trust_changed=trust_changed)  # again: another process may have started the comparison
        if register:
            print(f"registered in {plan.folder / PLAN}, checksum {plan_file.register(plan)}")
            print("run the same command without --register to start it; arms and seeds added later are exploratory")
            return 0
        plan_file.write(plan)
        view = Progress(quiet=quiet)
        with Stopper(view.note) as stopper:
            for line in description.heading(plan):
                view.note(line)
            runner = Runner(plan, Processes(plan.settings.threads, share), view, jobs)
            with mps(view.note) if share else nullcontext(), closing(runner.processes):
                if runner.status().done < plan.size:
                    view.note("loading the model …")
                runner.run(lambda: stopper.requested)
        return _finish(plan, runner)


def _check_models(plan: Plan) -> tuple[int, float | None]:
    """Raise an error if a model, an engine or memory is missing, before anything is written. Skip finished runs.

    Return the number of parallel runs and each one's share of the GPU's memory, as ``parallel_jobs`` does.
    """
    configs = [run.config for run in Runner(plan, Processes(), Progress(quiet=True), jobs=1).left()]
    for model in dict.fromkeys(config.model for config in configs):
        locate(model)
    if any(config.rollout.engine == "vllm" for config in configs):
        from poise.sampling.vllm_engine import check_installed

        check_installed()
    from poise.referee.compare.jobs import parallel_jobs  # only now, because transformers takes seconds to import

    return parallel_jobs(configs, plan.settings.jobs, plan.size)


def _forecast(plan: Plan, jobs: int) -> None:
    """Print the plan, and forecast its time from a trial run. Write nothing to the comparison's folder."""
    for line in description.heading(plan):
        print(visible(line))
    print("measuring two steps of a run …", flush=True)
    with closing(Processes(plan.settings.threads)) as processes:
        done = Runner(plan, processes, Progress(quiet=True), jobs).status().done
        seconds = description.measure_trial(plan, processes)
    print(description.forecast(plan, seconds, jobs, done))
    print(description.power(plan))


def _finish(plan: Plan, runner: Runner) -> int:
    """Write the results, print them, and return the exit code."""
    arms = _collect(plan, runner)
    results = _analyse(plan, arms)
    plan_file.write(plan, results["looks"])
    document = results | _conditions(plan, runner)
    output.write(plan.folder, document, arms)
    with Console(0) as console:
        output.show(document, console)
    for line in description.tuning_lines(document["tuning"]):
        print(visible(line))
    for arm, files in plan_file.mixed_code(plan).items():
        print(visible(f"{arm}: runs were trained with different versions of {', '.join(files)}"))
    for folder, failure in runner.failures.items():
        print(visible(f"failed: {folder} ({failure['ended']}); its log: {failure['log']}"))
    print(visible(f"results: {plan.folder / 'comparison.json'}   page: {plan.folder / 'comparison.html'}"))
    if runner.failures:
        print("run the same command again to retry failed runs")
        return 1
    if runner.stopped or runner.out_of_time:
        print("stopped; run the same command again to continue")
    return INTERRUPTED if runner.stopped else 0


def _analyse(plan: Plan, arms: Sequence[Arm]) -> Document:
    """Compare the arms. A registered plan's arms and seeds come first, then the exploratory results."""

    def results(arms: Sequence[Arm], seeds: Sequence[int], looks: Sequence[int]) -> Document:
        base, margin = plan.baseline.name, plan.settings.margin
        return analyse(arms, base, seeds, looks=looks, cut=plan.cut, margin=margin, controls=plan.controls)

    everything = results(arms, plan.seeds, plan_file.read_looks(plan))
    registered = plan_file.read_registered(plan)
    if registered is None:
        return everything
    own = [arm.only(registered["seeds"]) for arm in arms if arm.name in registered["arms"]]
    document = results(own, registered["seeds"], ())  # no looks: the number of seeds was fixed in advance
    return registration.explored(document, everything, registered, registration.added(plan, registered))


def _conditions(plan: Plan, runner: Runner) -> Document:
    """The conditions of the comparison, for ``comparison.json``."""
    config = plan.baseline.variants[0].config
    return {
        "tuning": tuning_report(plan, runner.result),
        "tuning_seeds": list(plan.settings.tuning_seeds),
        "held_out": {"problems": config.evaluation.problems, "seed": config.evaluation.seed},
        "failures": list(runner.failures.values()),
        "mixed_code": plan_file.mixed_code(plan),
        "settings": plan.baseline.variants[0].identity,
    }


def _collect(plan: Plan, runner: Runner) -> list[Arm]:
    """The arms with their results so far."""
    arms = []
    for arm in plan.arms:
        variant = runner.variant_of(arm)
        settings = dict(arm.settings) | ({RATE: variant.rate} if variant and len(arm.variants) > 1 else {})
        runs = {seed: runner.result(plan.run(arm, variant, seed).folder) for seed in plan.seeds} if variant else {}
        done = {seed: run for seed, run in runs.items() if run is not None}
        arms.append(Arm(arm.name, settings, done, arm.control))
    return arms
