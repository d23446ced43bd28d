"""``poise eval``."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poise._lib.imports import quick_imports
from poise.cli.common import Model, Settings, Trust, explained, home

if TYPE_CHECKING:
    from poise.config.schema import Config


def evaluate(
    model: Model,
    args: Settings = None,
    json_to: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", callback=home, help="Write the figures to a file too.")
    ] = None,
    show: Annotated[
        int, typer.Option(min=0, help="How many of the samples to show, from the lowest reward to the highest.")
    ] = 0,
    trust: Trust = False,
) -> None:
    """Measure a model on held-out problems: avg@k, pass@k, maj@k, by difficulty, with 95 % intervals.

    A run is measured on its own task with its own settings, as after training; a model with a `warmstart.yaml`, and
    the embedded one, on the task it learned. For any other model, name the task.

    Settings are those of `poise train`. These need no group: `samples` (the k, default 8), `problems` (200), `seed`
    (of the problems, 0), `temperature` (1; 0 is greedy), `max_tokens` (512), `max_prompt` (512), `top_p`, `top_k`,
    `batch` (256 responses decoded together; 0: all), `engine`.

    Examples:

    - `poise eval runs/demo`
    - `poise eval runs/demo task.people=4-5 samples=8`
    - `poise eval runs/lake --show 3`
    - `poise eval embedded samples=4 problems=50`
    - `poise eval Qwen/Qwen2.5-0.5B-Instruct task.name=kk task.people=3-7 max_tokens=2048 temperature=0.7`
    """
    from poise._lib.files import check_output, replacing

    with quick_imports():
        from poise.config.run_settings import to_evaluate

    with explained():
        if json_to:
            check_output(json_to)
        config = to_evaluate(model, args or [], trust=trust)
        summary = _measure(config, show)
        if json_to:
            with replacing(json_to) as file:
                file.write(json.dumps({**_conditions(model, config), **summary}, indent=1).encode())


def _conditions(model: str, config: Config) -> dict[str, Any]:
    """What was measured, for the file of figures."""
    rollout = config.rollout
    return {
        "model": model, "task": config.task.name, "settings": config.task.settings, "split": "test",
        "seed": config.evaluation.seed, "max_tokens": rollout.max_tokens, "top_p": rollout.top_p,
        "top_k": rollout.top_k,
    }  # fmt: skip


def _measure(config: Config, show: int) -> dict[str, Any]:
    """Evaluate as the settings say; print the conditions, some samples and the figures."""
    with quick_imports():
        from poise.config.run_settings import describe_sampling, describe_task
        from poise.models.policy import load_policy
        from poise.runs.console import Console, visible
        from poise.runs.subscribers.reporter import shown
        from poise.training.accuracy import without_repeats
        from poise.training.evaluate import held_out
        from poise.training.interrupts import Stopper
        from poise.training.setup import build_sampler, steps_taken
        from poise.training.steps import State

    asked, rollout = config.evaluation, config.rollout
    policy = load_policy(
        config.model, device=config.device, dtype=config.dtype, remote_code=config.remote_code, longest=rollout.longest
    )
    note = partial(print, file=sys.stderr)
    sampler = build_sampler(config, policy, note)
    sampler = sampler.at(State(steps_taken(config.model)).progress(config, sampler.task))
    print(visible(f"{config.model} on task {describe_task(config)}, split test, seed {asked.seed}:"))
    sampling = describe_sampling(config, config.test_temperature)
    greedily = "; and once greedily" if config.test_temperature else ""  # at temperature 0 the samples are
    print(f"{asked.problems} problems × {asked.samples} samples at {sampling}{greedily}", flush=True)
    try:
        with Stopper(note) as stopper, stopper.at_once():
            found = held_out(sampler, config, _report_progress)
    except KeyboardInterrupt:
        note("stopped before the last problem: nothing is measured, and the same command begins again")
        raise
    summary = found.summary()
    with Console(0) as console:
        console.samples_table([shown(sample) for sample in found.attempts], show, whole=True)
        rows = without_repeats(summary["table"]).items()
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
        print(f"{failed} samples got no verdict ({why}); they count as wrong")
    return summary


def _report_progress(done: int, total: int) -> None:
    print(f"{done}/{total} problems", file=sys.stderr, flush=True)
