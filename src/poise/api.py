"""Training from Python, with objects: ``poise.train`` and its ``Result``."""

from __future__ import annotations

import io
import os
from base64 import b64encode
from collections.abc import Sequence
from functools import cached_property
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poise._lib.errors import short
from poise._lib.live import Objects
from poise.training.config.documents import DATA_TASKS, ConfigError, Document, merge
from poise.training.config.messages import unknown_arguments
from poise.training.config.schema import Config, complete, restore
from poise.training.objects import name_objects

if TYPE_CHECKING:  # torch and transformers take seconds to import
    from poise.runs.folder import RunFolder


def train(
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    reward: Any = None,
    task: Any = None,
    environment: Any = None,
    regulator: Any = None,
    algorithm: Any = None,
    steps: int | None = None,
    run: str | PathLike[str] | None = None,
    resume: str | PathLike[str] | None = None,
    callbacks: Sequence[Any] = (),
    recipe: str | PathLike[str] | Config | None = None,
    quiet: bool = False,
    renumber: bool = True,
    trust: bool = False,
    trust_changed: bool = False,
    **settings: Any,
) -> Result:
    """Train a model, show the progress and the result, and return the ``Result``.

    >>> rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(100)]
    >>> result = poise.train(data=rows, reward="number", steps=2, optim={"lr": 1e-4}, evaluation="off")

    ``model`` is a hub id, a folder or a loaded transformers model; poise trains a copy of a loaded model. ``tokenizer``
    is its tokenizer or the tokenizer's name. ``data`` is a ``datasets.Dataset``, a list of dicts, a file or a hub
    id; ``reward`` is a name, a function with TRL's signature, or a list of these. ``task``, ``environment``,
    ``regulator`` and ``algorithm`` are names or objects. ``settings`` are all other settings (docs/reference.md),
    nested or with dotted names: ``optim={"lr": 1e-5}``, ``**{"optim.lr": 1e-5}``. They change the ``recipe``, which is
    the name of a shipped recipe, a YAML file or a ``Config``.

    ``run`` is the output folder. If the folder already contains a run, the new run uses the next free folder, such as
    ``runs/mine-2``; with ``renumber=False`` this is an error. ``resume`` continues the run in a folder: pass unnamed
    objects again, and a larger ``steps`` to train longer. ``callbacks`` are objects with any of the methods
    ``on_start(state)``, ``on_step(result)`` and ``on_end(state)``. ``trust`` allows a resumed run to execute the user
    code that its settings name; ``trust_changed`` allows resuming even if code or objects have changed.
    """
    if problems := unknown_arguments(settings):
        raise ConfigError(*problems)
    if not isinstance(resume, str | PathLike | None):
        raise TypeError(f'resume: name the folder of the run, resume="runs/mine"; got {short(resume)}')
    if not isinstance(recipe, str | PathLike | Config | None):
        raise TypeError(f"recipe: expected a recipe's name, a YAML file or a poise.Config, got {short(recipe)}")
    named = {
        "model": model, "data": data, "reward": reward, "task": task, "environment": environment,
        "regulator": regulator, "algorithm": algorithm, "steps": steps, "run": run,
    }  # fmt: skip
    changes, objects = name_objects({**{k: v for k, v in named.items() if v is not None}, **settings}, tokenizer)
    with objects.available():
        config = _config(recipe, changes, resume, trust=trust)
        from poise import trainer

        summary = trainer.train(
            config,
            resume=resume is not None,
            quiet=quiet,
            renumber=renumber,
            trust_changed=trust_changed,
            callbacks=callbacks if isinstance(callbacks, list | tuple) else [callbacks],
        )
    return Result(summary, config, objects)


def _config(
    recipe: str | PathLike[str] | Config | None, changes: Document, resume: str | PathLike[str] | None, *, trust: bool
) -> Config:
    """Load the settings of a recipe or of the run to resume, and apply ``changes``."""
    if isinstance(recipe, Config):
        return recipe if not changes else restore(merge(recipe.model_dump(mode="json"), changes), trust=True)
    if resume is None:
        return complete(None if recipe is None else os.fspath(recipe), changes)
    if recipe is not None or "run" in changes:
        extra = "run" if recipe is None else "recipe"
        raise ConfigError(f"resume={os.fspath(resume)!r} continues a run with its own settings: remove {extra}")
    from poise.runs.folder import RunFolder
    from poise.training.config.run_settings import of_run

    task, saved = changes.get("task"), RunFolder.open(Path(resume), resume=False).config.get("task")
    if isinstance(task, dict) and isinstance(saved, dict) and {task.get("name"), saved.get("name")} <= {*DATA_TASKS}:
        task["name"] = saved["name"]  # data=… must not change the run's task (data or math)
    return of_run(os.fspath(resume), {**changes, "run": os.fspath(resume)}, trust=trust)


class Result:
    """The result of a run: its folder, its metrics and the trained model.

    ``summary`` is the content of ``summary.json``, ``run`` the run's folder, ``config`` the run's settings.
    """

    def __init__(self, summary: dict[str, Any], config: Config, objects: Objects) -> None:
        self.summary = summary
        self.run = Path(summary["run"])
        self.config = config.model_copy(update={"run": str(self.run)})
        self._objects = objects

    @property
    def curves(self) -> Any:
        """The metrics, one row per step: a DataFrame if pandas is installed, else a list of dicts."""
        rows = self._folder.metrics()
        try:
            from pandas import DataFrame  # type: ignore[import-untyped]
        except ImportError:
            return rows
        return DataFrame(rows)

    @property
    def model(self) -> Any:
        """The trained model: a plain transformers model in evaluation mode, with adapters merged."""
        return self._trained[0]

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the trained model."""
        return self._trained[1]

    def report(self, path: str | PathLike[str] | None = None) -> Path:
        """Write the HTML report, by default to ``report.html`` in the run's folder, and return its path."""
        from poise.referee.report.html import write_report

        return write_report([self.run], self.run / "report.html" if path is None else Path(path))

    @property
    def _folder(self) -> RunFolder:
        from poise.runs.folder import RunFolder

        return RunFolder.open(self.run, resume=False)

    @cached_property
    def _trained(self) -> tuple[Any, Any]:
        from poise.models.loading import load_model

        config = self.config
        with self._objects.available():  # the base model of an adapter may be one of these objects
            return load_model(str(self.run), device=config.device, dtype=config.dtype, remote_code=config.remote_code)

    def _line(self) -> str:
        """One line with the number of steps and, if measured, the accuracy before and after training."""
        ends = [self.summary.get(when) for when in ("before", "after")]
        accuracy = [end["accuracy"] for end in ends if end is not None]
        measured = f", held-out accuracy {accuracy[0]:.3f} → {accuracy[1]:.3f}" if len(accuracy) == 2 else ""
        return f"{self.summary['steps']} steps{measured}"

    def __repr__(self) -> str:
        return f"<poise run {str(self.run)!r}: {self._line()}>"

    def _repr_html_(self) -> str:
        """HTML for notebooks: one line with the result, and the curves."""
        from poise.runs.plots import draw  # imports matplotlib
        from poise.runs.subscribers.summary import with_ends

        summary, file = self.summary, io.BytesIO()
        lines = with_ends(self._folder.metrics(), self.config.task.name, summary["before"], summary["after"])
        draw(lines, "").savefig(file, format="png", dpi=80)
        picture = f'<img src="data:image/png;base64,{b64encode(file.getvalue()).decode("ascii")}" alt="the curve">'
        return f"<div><code>{escape(str(self.run))}</code>: {escape(self._line())}<br>{picture}</div>"
