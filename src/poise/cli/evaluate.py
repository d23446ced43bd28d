"""``poise eval``."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poise.cli.common import Trust, explained, home

if TYPE_CHECKING:
    from poise.config.schema import Config


def evaluate(
    model: Annotated[str, typer.Argument(callback=home, help="A hub id, a model folder, a run folder, or 'embedded'.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[SETTING=VALUE]...", help="More task settings.")] = None,
    task: Annotated[str | None, typer.Option(help="The task; default: kk.")] = None,
    people: Annotated[str | None, typer.Option(help="For kk: how many people, such as 3-7.")] = None,
    n: Annotated[
        int | None, typer.Option("--n", min=1, help="Samples per problem, the k of avg@k, pass@k, maj@k; default: 8.")
    ] = None,
    problems: Annotated[int | None, typer.Option(min=1, help="How many held-out problems; default: 200.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy; default: 1.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=1e-6, max=1.0, help="Draw from the likeliest tokens that reach it; default: 1.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Draw from so many of them; default: 0, all.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest response; default: 512.")] = None,
    max_prompt: Annotated[int | None, typer.Option(min=1, help="Longest prompt, in tokens; default: 512.")] = None,
    batch: Annotated[int | None, typer.Option(min=0, help="Responses decoded together; 0: all; default: 256.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the problems; default: 0.")] = None,
    device: Annotated[str | None, typer.Option()] = None,
    json_to: Annotated[Path | None, typer.Option("--json", callback=home, help="Write the figures here too.")] = None,
    remote_code: Annotated[
        bool, typer.Option("--remote-code", help="Run code that the model's repository brings.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Measure a model on held-out problems: avg@k, pass@k, maj@k, by difficulty, with 95 % intervals.

    A run is measured on its own task with its own settings, as after training; options change them one by one.

    Examples:

    - `poise eval runs/demo`
    - `poise eval runs/demo --people 4-5 --n 8`
    - `poise eval embedded --people 2-3 --n 4`
    - `poise eval Qwen/Qwen2.5-0.5B-Instruct --task kk --people 3-7 --n 8 --max-tokens 2048 --temperature 0.7`
    """
    from poise._lib.files import check_output, replacing
    from poise.config.documents import ConfigError, split_overrides
    from poise.config.run_settings import to_evaluate

    with explained():
        if json_to:
            check_output(json_to)
        if temperature == 0 and n is None:
            n = 1  # greedy samples are all the same
        changes = {
            "task": {**split_overrides(args or [])[0], **_given(name=task, people=people)},
            "rollout": _given(max_tokens=max_tokens, max_prompt=max_prompt, top_p=top_p, top_k=top_k, batch=batch),
            "evaluation": _given(samples=n, problems=problems, temperature=temperature, seed=seed),
            **_given(device=device, remote_code=remote_code or None),
        }
        try:
            config = to_evaluate(model, changes, trust=trust)
        except ConfigError as error:  # here the settings of the task are written without its name
            raise ConfigError(line.replace("'task.", "'") for line in error.problems) from None
        summary = _evaluated(config)
        if json_to:
            rollout = config.rollout
            about = {
                "model": model, "task": config.task.name, "settings": config.task.settings, "split": "test",
                "seed": config.evaluation.seed, "max_tokens": rollout.max_tokens, "top_p": rollout.top_p,
                "top_k": rollout.top_k,
            }  # fmt: skip
            with replacing(json_to) as file:
                file.write(json.dumps({**about, **summary}, indent=1).encode())


def _given(**options: Any) -> dict[str, Any]:
    """The options that were typed."""
    return {name: value for name, value in options.items() if value is not None}


def _evaluated(config: Config) -> dict[str, Any]:
    """Measure as the settings say; print what is measured, and the figures."""
    from poise.config.run_settings import describe_sampling, describe_task
    from poise.models.policy import load_policy
    from poise.runs.console import Console, visible
    from poise.training.evaluate import at_once, held_out
    from poise.training.setup import build_sampler

    asked, rollout = config.evaluation, config.rollout
    policy = load_policy(
        config.model, device=config.device, dtype=config.dtype, remote_code=config.remote_code, longest=rollout.longest
    )
    note = partial(print, file=sys.stderr)
    sampler = build_sampler(config, policy, note, responses=at_once(asked.problems, asked.samples))
    print(visible(f"{config.model} on task {describe_task(config)}, split test, seed {asked.seed}:"))
    sampling = describe_sampling(config, config.test_temperature)
    print(f"{asked.problems} problems × {asked.samples} samples at {sampling}; and once greedily", flush=True)
    summary = held_out(sampler, config, _progress).summary()
    with Console(0) as console:
        rows = summary["table"].items()
        console.table([{"measure": name, **{k: f"{v:.3f}" for k, v in row.items()}} for name, row in rows])
    print(
        f"cut off at {rollout.max_tokens} tokens: {summary['cut_off']} of {summary['n'] * summary['samples']} samples, "
        f"{summary['greedy_cut_off']} of {summary['n']} greedy responses"
    )
    return summary


def _progress(done: int, total: int) -> None:
    print(f"{done}/{total} problems", file=sys.stderr, flush=True)
