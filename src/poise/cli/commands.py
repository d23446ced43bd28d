"""The command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Optional

import typer

from poise import __version__, tasks
from poise._lib.errors import unknown

if TYPE_CHECKING:
    from poise.config.schema import Config

app = typer.Typer(
    help="Reinforcement learning with verifiable rewards, token by token.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
tasks_app = typer.Typer(help="List the tasks, or look at a problem of one.", invoke_without_command=True)
app.add_typer(tasks_app, name="tasks")
doctor_app = typer.Typer(help="Is poise alive inside another framework?", no_args_is_help=True)
app.add_typer(doctor_app, name="doctor")


Trust = Annotated[
    bool, typer.Option("--trust", help="Load code of your own that the run folder names: read docs/security.md.")
]


def fail(message: object) -> NoReturn:
    """Say what is wrong, without a traceback, and leave."""
    from poise.runs.console import visible

    print(f"poise: {visible(str(message))}", file=sys.stderr)
    raise typer.Exit(1)


def home(path: Any) -> Any:
    """Typed paths with ``~`` expanded, for ``callback=`` of an option: shells leave ``--out=~/x`` as it is."""
    from poise._lib.files import expand

    try:
        if isinstance(path, list):
            return [str(expand(each)) if each.startswith("~") else each for each in path]
        return type(path)(expand(path)) if str(path).startswith("~") else path
    except OSError as error:
        fail(error)


@contextmanager
def explained() -> Iterator[None]:
    """Errors that say what to do are shown as they are; any other is a bug and keeps its traceback."""
    from poise._lib.user_code import UserCodeError
    from poise.config.schema import ConfigError
    from poise.models.policy import ModelError
    from poise.runs.folder import CheckpointError, DamagedError
    from poise.runs.trackers import TrackerError
    from poise.tasks import TaskError
    from poise.trainer import TrainError

    try:
        yield
    except (ConfigError, ModelError, CheckpointError, DamagedError, OSError) as error:
        fail(error)
    except (TaskError, TrainError, TrackerError, UserCodeError) as error:
        fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _main(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    """Reinforcement learning with verifiable rewards, token by token."""


@app.command()
def train(
    args: Annotated[Optional[list[str]], typer.Argument(metavar="[RECIPE] [KEY=VALUE]...")] = None,  # noqa: UP045
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in run=DIR; steps=N may raise its end.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print every setting there is, resolved, and stop.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only the result, no progress.")] = False,
    trust: Trust = False,
) -> None:
    """Train a model. Without a recipe: the demo, with the embedded model, on any laptop.

    Examples:

    - `poise train`
    - `poise train ar model=Qwen/Qwen2.5-0.5B-Instruct task.people=3-5 run=runs/ar`
    - `poise train demo regulator="ar(alpha=0.3) | lopti(threshold=0.5)" seed=1 run=runs/both`
    - `poise train --resume run=runs/ar`
    """
    from poise import config as configs
    from poise.config.documents import split_overrides
    from poise.config.run_settings import of_run
    from poise.runs.console import visible

    recipe, overrides = _split(args or [])
    with explained():
        if resume:
            if recipe is not None:
                fail("--resume takes its settings from the run folder: leave the recipe out")
            if extra := sorted({item.partition("=")[0] for item in overrides} - {"run", "steps"}):
                fail(f"--resume goes on with the run's own settings; {extra[0]}= cannot be changed (steps= can)")
            given, _ = split_overrides(overrides)
            if "run" not in given:
                fail("--resume needs to know which run: poise train --resume run=DIR")
            config = of_run(str(given["run"]), given, trust=trust)
        else:
            config = configs.load(recipe, overrides)
        if dry_run:
            settings = configs.dump(config)
            print(visible(settings) if resume else settings)  # a run folder's may be anybody's
            return
        from poise import trainer

        summary = trainer.train(config, resume=resume, quiet=quiet)
        _report(config.run, summary)


def _split(args: list[str]) -> tuple[str | None, list[str]]:
    recipes = [arg for arg in args if "=" not in arg]
    if len(recipes) > 1:
        fail(f"one recipe at a time, got {' and '.join(recipes)}; settings are written key=value")
    return (recipes[0] if recipes else None), [arg for arg in args if "=" in arg]


def _report(run: str, summary: dict[str, Any]) -> None:
    from poise.runs.console import Console
    from poise.runs.folder import RunFolder
    from poise.runs.plots import curve

    folder = RunFolder.open(run, resume=False)
    with Console(0) as console:
        console.before_after_table(_rows(summary))
    for when in ("before", "after"):
        if cut := summary[when].get("cut_off"):
            limit = folder.config["rollout"]["max_tokens"]
            total = summary[when]["n"] * summary[when]["samples"]
            print(f"{when} training, {cut} of {total} samples were cut off at rollout.max_tokens={limit}")
    name = f"eval/{folder.config['task']['name']}/avg@{summary['before']['samples']}"
    ends = [
        {"step": 0, name: summary["before"]["accuracy"]},
        {"step": summary["steps"], name: summary["after"]["accuracy"]},
    ]
    curve(folder.path / "curve.png", [ends[0], *folder.metrics(), ends[1]], f"{run}: {folder.config['regulator']}")
    print(
        f"curve: {folder.path / 'curve.png'}   summary: {folder.path / 'summary.json'}   model: {folder.newest()}/model"
    )


def _rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    before, after = summary["before"], summary["after"]
    rows = []
    for name in (name for name in before["table"] if name in after["table"]):
        old, new = before["table"][name], after["table"][name]
        rows.append(
            {
                "name": name,
                "before": old["value"],
                "before_ci": (old["low"], old["high"]),
                "after": new["value"],
                "after_ci": (new["low"], new["high"]),
                "change": new["value"] - old["value"],
            }
        )
    return rows


@app.command("eval")
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


def _task(name: str, people: str | None, args: list[str]) -> tasks.Task:
    from poise.config.documents import split_overrides

    try:
        settings, _ = split_overrides(args)
        if people is not None:
            settings["people"] = people
        return tasks.get(name, **settings)
    except (ValueError, TypeError) as error:
        fail(error)


@app.command()
def warmstart(
    out: Annotated[Path, typer.Argument(callback=home, help="Where the model goes.")],
    args: Annotated[Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...")] = None,  # noqa: UP045
    device: Annotated[str, typer.Option()] = "auto",
) -> None:
    """Train a tiny model on noisy worked solutions: how the embedded model was made.

    Examples:

    - `poise warmstart my-model steps=2000 batch=128`
    - `poise warmstart my-model noise=0.1 people=2-4 layers=6 workers=8`
    """
    from poise.config.documents import split_overrides
    from poise.runs.console import Console
    from poise.training.warm_start import Warmstart
    from poise.training.warm_start import train as run

    settings = Warmstart()
    own = {f.name for f in fields(settings)} - {"task_settings"}
    with explained():
        given, _ = split_overrides(args or [])
    own_changes = {key: value for key, value in given.items() if key in own}
    for key, parsed in given.items():
        if key in own:
            continue
        if key in settings.task_settings or key in ("depth", "phrasing", "instruction"):
            settings = replace(settings, task_settings={**settings.task_settings, key: parsed})
        else:
            fail(unknown("setting of warmstart", key, [*own, *settings.task_settings]))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        fail(f"{out} {'is not empty' if out.is_dir() else 'is a file'}: choose another folder")
    try:
        settings = replace(settings, **own_changes)
        settings.build_task()
    except (ValueError, TypeError) as error:
        fail(error)
    with explained(), Console(settings.steps) as console:
        run(settings, out, device=device, say=console.step)
    print(f"saved to {out}; measure it with: poise eval {out} --people {settings.task_settings.get('people', '3-7')}")


@doctor_app.command("trl")
def doctor_trl(
    args: Annotated[Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...")] = None,  # noqa: UP045
    config: Annotated[
        Path | None, typer.Option(callback=home, help="Settings as TRL's parser reads them, YAML.")
    ] = None,
) -> None:
    """Tell which TRL is here and which regulators it can train; with a regulator, try it with settings of GRPOConfig.

    Examples:

    - `poise doctor trl`
    - `poise doctor trl beta=0.04 loss_type=grpo`
    - `poise doctor trl regulator="ar | lopti" num_iterations=2`
    - `poise doctor trl --config examples/scale/trl-8gpu.yaml use_vllm=false`
    """
    from poise.integrations import doctor

    if not doctor.trl(print, args or [], config):
        raise typer.Exit(1)


@doctor_app.command("verl")
def doctor_verl(
    args: Annotated[Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...")] = None,  # noqa: UP045
    config_path: Annotated[
        Path | None, typer.Option(callback=home, help="A folder with configurations of yours.")
    ] = None,
    config_name: Annotated[str, typer.Option(help="Which one.")] = "ppo_trainer",
) -> None:
    """Tell whether verl has loaded poise, which it does not say itself; with settings, whether they can be trained.

    Examples:

    - `poise doctor verl`
    - `poise doctor verl trainer.v1.trainer_mode=poise_sync +trainer.v1.poise_sync.regulator=lopti ...`
    - `poise doctor verl --config-path examples/scale --config-name verl-8gpu`
    """
    from poise.integrations import doctor

    if not doctor.verl(print, args or [], config_path, config_name):
        raise typer.Exit(1)


@tasks_app.callback()
def _list_tasks(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        for name in tasks.names():
            doc = (tasks.TASKS[name].__doc__ or "").strip().splitlines()
            print(f"{name:6s} {doc[0] if doc else ''}\n       settings: {', '.join(tasks.settings_of(name))}")


@tasks_app.command()
def show(
    name: Annotated[str, typer.Argument()],
    args: Annotated[Optional[list[str]], typer.Argument(metavar="[SETTING=VALUE]...")] = None,  # noqa: UP045
    people: Annotated[Optional[str], typer.Option(help="For kk: how many people.")] = None,  # noqa: UP045
    seed: Annotated[int, typer.Option()] = 0,
    split: Annotated[str, typer.Option(help="train or test")] = "train",
) -> None:
    """Look at a problem: its prompt, a worked solution where the task has one, and its score.

    Examples:

    - `poise tasks show kk --people 4 --seed 0`
    - `poise tasks show kk --people 3 style=compact phrasing=plain`
    """
    task = _task(name, people, args or [])
    try:
        problem = next(islice(task.problems(split, seed), 1))  # type: ignore[arg-type]
    except ValueError as error:
        fail(error)
    print(f"{problem.id} (difficulty {problem.difficulty}, {split})\n\n{problem.prompt}")
    if isinstance(task, tasks.Demonstrates):
        text = task.demonstration(problem, seed=seed)
        print(f"\n--- a worked solution\n{text}\n\n--- its score\n{task.score(problem, text)}")
