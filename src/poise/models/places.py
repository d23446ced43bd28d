"""Where a model is: the embedded one, a folder, a run, a checkpoint or a hub id. Apart, so that asking is quick."""

from __future__ import annotations

from pathlib import Path

from poise._lib.files import MANIFEST, expand
from poise.models.errors import ModelError
from poise.runs.folder import RunFolder
from poise.runs.listing import is_run

EMBEDDED = Path(__file__).parents[1] / "assets" / "kk-tiny"


def locate(name: str) -> str:
    """The model's folder or hub id. A run stands for the model of its newest checkpoint."""
    if name == "embedded":
        return str(EMBEDDED)
    folder = expand(name) if name.startswith("~") else Path(name)
    files = ("checkpoints", "metrics.jsonl", "before.json")
    if any((folder / file).exists() for file in files) or is_run(folder):
        return str(RunFolder.open(folder, resume=False).newest() / "model")
    if (folder / MANIFEST).exists() and (folder / "model").is_dir():  # a checkpoint
        return str(folder / "model")
    _check_exists(name, folder)
    _check_folder(name, folder)
    return str(folder) if name.startswith("~") else name


def _check_exists(name: str, folder: Path) -> None:
    """Refuse a path that leads nowhere. Beside other runs, ``name`` is a mistyped run and not a hub id."""
    runs = []
    if not folder.exists() and folder.parent != Path():
        runs = sorted(metrics.parent.name for metrics in folder.parent.glob("*/metrics.jsonl"))
    if not folder.exists() and (name.startswith(("/", ".", "~")) or name.count("/") > 1 or runs):
        beside = f"; runs there: {', '.join(runs)}" if runs else ""
        raise ModelError(f"{name}: there is no such folder{beside}")


def _check_folder(name: str, folder: Path) -> None:
    """Refuse a file, and a folder that holds no model."""
    if folder.is_file():
        raise ModelError(f"{name} is a file: name the folder of a model, a run, or a hub id")
    if folder.is_dir() and not any((folder / file).exists() for file in ("config.json", "adapter_config.json")):
        runs = sorted(path.name for path in folder.iterdir() if is_run(path))
        inside = f"; runs in it: {', '.join(runs)}" if runs else ""
        raise ModelError(f"{name}: this folder has no config.json, so it is not a transformers model{inside}")
