"""Locate a model: in the package, a folder, a run, a checkpoint or on the hub. Does not import transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from poise._lib import live
from poise._lib.errors import UserError, how_to_install, misspelt
from poise._lib.files import MANIFEST, expand
from poise.runs.folder import RunFolder
from poise.runs.listing import is_run

_ASSETS = Path(__file__).parents[1] / "assets"
EMBEDDED = _ASSETS / "kk-tiny"
SHIPPED = {"embedded": EMBEDDED, "embedded-plain": _ASSETS / "kk-plain"}  # models that come with poise
PATIENCE = 10.0  # seconds


class ModelError(UserError, ValueError):
    """A model that cannot be loaded or used. The message says what to do."""


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def with_revision(name: str, revision: str | None) -> str:
    """The name of a model with a revision: ``Qwen/Qwen3-0.6B@main``."""
    return name if revision is None else f"{name}@{revision}"


def split_revision(name: str) -> tuple[str, str | None]:
    """Split a name into the model's name and its revision, if it has one.

    A folder's name may contain an @; a hub id does not.
    """
    hub_id, at, revision = name.partition("@")
    return (hub_id, revision) if at and revision and not expand(name).exists() else (name, None)


def locate(name: str) -> str:
    """Return the model's folder or hub id; for a run, the folder of its newest checkpoint's model."""
    if name in SHIPPED:
        return str(SHIPPED[name])
    if live.is_name(name):  # a loaded model
        if not live.known(name):
            raise ModelError(f"{name} is a model that was passed from Python: pass it again, poise.train(model=…)")
        return name
    folder = expand(name) if name.startswith("~") else Path(name)
    files = ("checkpoints", "metrics.jsonl", "before.json")
    if any((folder / file).exists() for file in files) or is_run(folder):
        return str(RunFolder.open(folder, resume=False).newest() / "model")
    if (folder / MANIFEST).exists() and (folder / "model").is_dir():  # a checkpoint
        return str(folder / "model")
    _check_place(name, folder)
    return str(folder) if name.startswith("~") else name


def _check_place(name: str, folder: Path) -> None:
    """Raise ModelError for a file, a folder without a model, or a path that does not exist.

    A missing name in a folder that has runs counts as a mistyped run, not as a hub id.
    """
    if folder.is_file():
        raise ModelError(f"{name} is a file: name the folder of a model, a run, or a hub id")
    if any((folder / file).exists() for file in ("config.json", "adapter_config.json")):
        return
    place = folder if folder.is_dir() else folder.parent
    is_path = folder.is_dir() or place != Path()
    runs = sorted(path.parent.name for path in place.glob("*/metrics.jsonl")) if is_path else []
    there = f"; runs there: {', '.join(runs)}" if runs else ""
    if folder.is_dir():
        raise ModelError(f"{name}: this folder has no config.json, so it is not a transformers model{there}")
    if meant := misspelt(name, SHIPPED):
        raise ModelError(f"{name}: there is no such folder; did you mean {meant!r}?")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or runs:
        raise ModelError(f"{name}: there is no such folder{there}")


def check_hub(name: str, revision: str | None = None) -> None:
    """Raise ModelError if a model is not in the hub's cache and the hub is unreachable.

    transformers would retry for a minute.
    """
    from huggingface_hub import constants, get_session, try_to_load_from_cache

    address = f"{constants.ENDPOINT}/{name}/resolve/{revision or 'main'}/config.json"
    try:
        if constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(name, "config.json", None, revision), str):
            return
        get_session().head(address, timeout=PATIENCE)  # any answer will do: transformers reports an error in it
    except Exception as error:  # not a hub id, no network, no such host
        raise ModelError(
            f"{name}: there is no such folder here, no such model in the hub's cache, and the hub cannot be "
            f"reached ({first_line(error)})"
        ) from error


class Repository:
    """A model repository on the hub, created if it is missing. It is private unless ``public``."""

    def __init__(self, name: str, *, public: bool = False) -> None:
        self.name, self._api = name, _api()
        self.address = str(self._try("create it", self._api.create_repo, name, private=not public, exist_ok=True))
        if not public and not self._try("look at it", self._api.repo_info, name).private:
            raise ModelError(f"{name} already exists on the hub and is public: add --public to upload the model")

    def upload(self, folder: Path, message: str) -> None:
        """Upload all files of a folder in one commit."""
        about = {"repo_id": self.name, "folder_path": folder, "commit_message": message}
        self._try("upload to it", self._api.upload_folder, **about)

    def _try(self, what: str, call: Any, *args: Any, **settings: Any) -> Any:
        try:
            return call(*args, **settings)
        except Exception as error:  # the hub's errors, its HTTP library's errors, and wrong names
            raise ModelError(
                f"{self.name}: the hub did not let poise {what} ({first_line(error)}); write REPO as NAME/MODEL, "
                "and log in with `hf auth login`, or set HF_TOKEN to a token that may write"
            ) from error


def _api() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ModelError(f"the hub needs huggingface_hub; {how_to_install('hub')}") from error
    return HfApi()
