"""``poise eval`` and ``poise diagnose``: measure a model without training it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poise._lib.errors import complain, visible
from poise._lib.imports import quick_imports
from poise.cli.common import Model, Settings, Trust, fail, home, progress, user_errors

if TYPE_CHECKING:
    from poise.diagnostics import Intervals
    from poise.training.config.schema import Config


def evaluate(
    model: Model,
    args: Settings = None,
    json_to: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", callback=home, help="Also write the figures to a file.")
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Samples to show, from the lowest reward to the highest.")] = 0,
    trust: Trust = False,
) -> None:
    """Measure a model on held-out problems: avg@k, pass@k, maj@k, by difficulty, with 95 % intervals.

    A run is measured on its own task with its own settings, as at the end of training. The embedded model, or a model
    with a `warmstart.yaml`, is measured on the task that it learned. For any other model, name the task.

    All settings of `poise train` work here. The following need no group name; brackets show the default if the model is
    not a run: `samples` (8; the k), `problems` (200), `seed` (0; of the problems), `temperature` (1; 0 is greedy, as in
    the demo), `max_tokens` (512), `max_prompt` (512), `top_p`, `top_k`, `batch` (256 responses decoded at once; 0: all)
    and `engine`.

    Examples:

    - `poise eval runs/demo`
    - `poise eval runs/demo task.people=4-5 samples=8 temperature=1`
    - `poise eval runs/lake --show 3`
    - `poise eval embedded samples=4 problems=50`
    - `poise eval Qwen/Qwen2.5-0.5B-Instruct task.name=kk task.people=3-7 max_tokens=2048 temperature=0.7`
    """
    from poise._lib.files import check_output, replacing

    with quick_imports():
        from poise.training.config.run_settings import to_evaluate

    with user_errors():
        if json_to:
            check_output(json_to)
        config = to_evaluate(model, args or [], trust=trust)
        summary = _evaluate(config, show)
        if json_to:
            with replacing(json_to) as file:
                file.write(json.dumps({**_conditions(model, config), **summary}, indent=1).encode())


def _conditions(model: str, config: Config) -> dict[str, Any]:
    """The model, the task and the sampling settings, for the JSON file."""
    rollout = config.rollout
    task = {"task": config.task.name, "settings": config.task.settings, "split": "test", "seed": config.evaluation.seed}
    sampling = {"max_tokens": rollout.max_tokens, "top_p": rollout.top_p, "top_k": rollout.top_k}
    return {"model": model, **task, **sampling}


def _evaluate(config: Config, show: int) -> dict[str, Any]:
    """Evaluate with these settings; print the conditions, some samples and the results."""
    with quick_imports():
        from poise.models.loading import load_policy
        from poise.runs.subscribers.console import Console, shown
        from poise.training.accuracy import without_repeats
        from poise.training.building import build_sampler, steps_taken
        from poise.training.config.run_settings import describe_sampling, describe_task
        from poise.training.evaluation import held_out
        from poise.training.interrupts import Stopper
        from poise.training.steps import State

    evaluation, rollout = config.evaluation, config.rollout
    policy = load_policy(config.model_name, **config.loading)
    note = partial(print, file=sys.stderr)
    sampler = build_sampler(config, policy, note)
    sampler = sampler.at(State(steps_taken(config.model)).progress(config, sampler.task))
    print(visible(f"{config.model} on task {describe_task(config)}, split test, seed {evaluation.seed}:"))
    sampling = describe_sampling(config, config.test_temperature)
    greedily = "; and once greedily" if config.test_temperature else ""  # at temperature 0 all samples are greedy
    print(f"{evaluation.problems} problems × {evaluation.samples} samples at {sampling}{greedily}", flush=True)
    try:
        with Stopper(note) as stopper, stopper.at_once():
            result = held_out(sampler, config, _report_progress)
    except KeyboardInterrupt:
        note("stopped before the last problem: there is no result; run the command again to start over")
        raise
    summary = result.summary()
    with Console(0) as console:
        console.samples_table([shown(sample, policy.read) for sample in result.attempts], show, whole=True)
        rows = without_repeats(summary["table"], config.test_temperature).items()
        console.table([{"measure": name, **{k: f"{v:.3f}" for k, v in row.items()}} for name, row in rows])
    samples = summary["n"] * summary["samples"]
    print(
        f"cut off at {rollout.max_tokens} tokens: {summary['cut_off']} of {samples} samples, "
        f"{summary['greedy_cut_off']} of {summary['n']} greedy responses"
        + ("; raise rollout.max_tokens=" if summary["cut_off"] > samples / 10 else "")
    )
    if unreadable := summary.get("unreadable"):
        print(f"without a readable answer: {unreadable} of {samples} samples")
    if failed := summary.get("failed"):
        why = "the reward or the environment failed, or no reward applies"
        print(f"{failed} samples got no score ({why}); they count as wrong")
    return summary


def _report_progress(done: int, total: int) -> None:
    print(f"{done}/{total} problems", file=sys.stderr, flush=True)


def diagnose(
    model: Model,
    args: Settings = None,
    regulator: Annotated[
        list[str] | None,
        typer.Option(help="A method to measure; may be repeated. The first one is the reference."),
    ] = None,
    intervals: Annotated[str, typer.Option(help="Edges of the probability intervals.")] = "0.25,0.5,0.75",
    batches: Annotated[int, typer.Option(min=1, help="Batches to measure; error bars are over batches.")] = 8,
    warmup: Annotated[int, typer.Option(min=1, help="Batches that only feed the optimizer's second moments.")] = 1,
    out: Annotated[
        Path | None, typer.Option(callback=home, help="A new folder for figures, responses and report.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Measure which tokens drive a model's update, and what each method would change, without training.

    For another trainer's token file, or a folder of token files, print the figures that need no model.

    All settings of `poise train` work here. A run is measured with its own settings. The embedded model, or a model
    with a `warmstart.yaml`, is measured on the task that it learned. For any other model, name the task.

    Examples:

    - `poise diagnose embedded`
    - `poise diagnose runs/demo --batches 4`
    - `poise diagnose Qwen/Qwen2.5-0.5B-Instruct task.name=kk task.people=2-3 prompts=16 rollout.max_tokens=512`
    - `poise diagnose embedded --regulator grpo --regulator "ar(alpha=0.3)" --intervals 0.1,0.9`
    - `poise diagnose tokens.jsonl`
    """
    with quick_imports():
        from poise.referee.diagnose import METHODS, table
        from poise.referee.report.html import write_report
        from poise.referee.report.token_files import token_files
        from poise.runs.listing import is_run
        from poise.runs.lock import check_free, free_folder
        from poise.runs.subscribers.console import Console
        from poise.training.config.run_settings import to_diagnose

    with user_errors():
        cuts = _intervals(intervals)
        if token_files(Path(model)):
            if args or out:
                fail(f"{model} holds recorded tokens: settings and --out need a model, from which poise can sample")
            _weigh(Path(model), regulator or METHODS, cuts)
            return
        config = to_diagnose(model, args or [], trust=trust)
        usual = Path(model) / "diagnose" if is_run(model) else Path("runs") / f"diagnose-{Path(model).name}"
        place = out or Path(free_folder(str(usual), complain, "diagnosis"))
        check_free(place, "choose another folder with --out")
        figures = _diagnose(config, model, place, regulator or METHODS, cuts, batches, warmup)
        page = write_report([place], place / "report.html")
    with Console(0) as console:
        console.table(table(figures["mean"], figures["intervals"]))
    print("\n".join(f"- {sentence}" for sentence in figures["verdict"]))
    print(f"cut off at {config.rollout.max_tokens} tokens: {figures['cut_off']} of {figures['responses']} responses")
    print(visible(f"\nfigures: {place / 'diagnose.json'}   report: {page}"))


def _weigh(path: Path, methods: Sequence[str], cuts: Intervals) -> None:
    """Analyse a token file without its model, and print the results."""
    from poise.referee.report.token_files import TokenFiles
    from poise.referee.report.weighing import interval_table, method_table, weigh
    from poise.regulators import parse
    from poise.runs.subscribers.console import Console

    try:
        recording = TokenFiles(path)
        weighed = weigh(recording, {name: parse(name) for name in methods}, cuts)
    except (ValueError, TypeError) as error:
        fail(error)
    for line in recording.skipped():
        complain(line)
    print(visible(f"{path}: {weighed.steps} steps, {weighed.responses} responses, {weighed.tokens} tokens"))
    with Console(0) as console:
        print("\nshares of the tokens, and of Σ w·|A|·(1 − p), the gradient at the sampled tokens' logits:")
        console.table(interval_table(weighed, cuts.names))
        print("\nweights of each method (reg/PHASE/…), means over the steps:")
        console.table(method_table(weighed))
    for name, pull in weighed.pull.items():
        if pull is None:
            print(visible(f"- {name} leaves nothing to learn: all its weights or all advantages are 0"))
    for name, fields in weighed.missing.items():
        print(visible(f"- {name} was skipped: it needs {', '.join(fields)}, which the file does not have"))
    print("- not available without the model: gradients over all parameters, influence between intervals, displacement")
    print("  poise diagnose MODEL task.name=… measures them on fresh responses")


def _intervals(edges: str) -> Intervals:
    from poise.diagnostics import Intervals

    try:
        return Intervals.cut([float(edge) for edge in edges.split(",")])
    except ValueError as error:
        fail(f"--intervals {edges}: {error}")


def _diagnose(
    config: Config, model: str, place: Path, methods: Sequence[str], cuts: Intervals, batches: int, warmup: int
) -> dict[str, Any]:
    """Print the settings, then measure. On an error, remove the folder."""
    from poise.referee.diagnose import diagnose as measure
    from poise.runs.folder import RunFolder
    from poise.training.config.run_settings import describe_sampling, describe_task
    from poise.training.update import NotFiniteError

    folder = RunFolder.create(place, config.model_dump(mode="json"))
    print(visible(f"{model} on task {describe_task(config)}, split train:"))
    sampling = describe_sampling(config, config.rollout.temperature)
    print(f"{batches} batches of {config.prompts} problems × {config.group} responses at {sampling}", flush=True)
    try:
        with progress() as say:
            return measure(config, folder, methods=methods, intervals=cuts, batches=batches, warmup=warmup, say=say)
    except BaseException as error:
        folder.discard()
        if isinstance(error, ValueError | TypeError | NotFiniteError):
            fail(error)
        raise
