"""Atomic files: a file is complete or absent, even if the process is killed while it writes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY = ".tmp-"  # prefix of a file that is being written
OLD = ".old-"  # prefix of a folder that is being replaced
MANIFEST = "manifest.json"
SEAL = "checksum"  # the key of a document's checksum


def dumps(data: Any, indent: int | None = None) -> bytes:
    """Encode as strict JSON: NaN and infinities become null. ASCII only, so that lone surrogates survive."""
    try:
        text = json.dumps(data, allow_nan=False, indent=indent)
    except ValueError:
        text = json.dumps(_finite(data), allow_nan=False, indent=indent)
    return text.encode("ascii") + b"\n"


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data


def loads(text: bytes | str) -> Any:
    """Parse JSON. Raises ValueError for invalid text and for text that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``data`` with a checksum of its contents.

    The checksum does not cover ``run``, because the run's folder may be moved.
    """
    contents = {key: value for key, value in data.items() if key not in (SEAL, "run")}
    return {**data, SEAL: hashlib.sha256(dumps(contents)).hexdigest()}


def was_changed(data: Any) -> bool:
    """Whether ``data``, read from a file, differs from what ``sealed`` returned. False if it has no checksum."""
    return isinstance(data, dict) and SEAL in data and sealed(data)[SEAL] != data[SEAL]


def read_json(path: Path) -> Any:
    """Parse a JSON file. Raises OSError unless it is a regular file: a pipe or a device may never end."""
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is not a file")
    return loads(path.read_bytes())


def expand(path: str | Path) -> Path:
    """Expand ``~`` and ``~user``: a shell does not expand ``run=~/x``."""
    expanded = Path(os.path.expanduser(path))
    if str(expanded).startswith("~"):
        raise FileNotFoundError(
            f"{path}: there is no user {expanded.parts[0][1:]!r}; write ./~… for a folder of that name"
        )
    return expanded


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk: without this a power cut may undo a rename."""
    if os.name != "posix":  # Windows cannot open a folder, and need not flush it
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_output(path: Path) -> None:
    """Raise OSError if ``path`` cannot become a regular file. Call this before the work for the file begins."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a device, a pipe or a socket"
        raise FileExistsError(f"{path} is {what}: name a file to write to")
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir():
        raise NotADirectoryError(f"{path}: {parent} is not a folder")


def check_own(paths: Iterable[Path]) -> None:
    """Raise FileExistsError if one of a run's files or folders is a link, a pipe or a device.

    A change through a link would change files elsewhere.
    """
    for path in paths:
        if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
            raise FileExistsError(
                f"{path} is a link, a pipe or a device, and a run changes only its own files: replace it by the file "
                "or folder itself; to keep a run on another disk, link its whole folder"
            )


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file for writing. On success it replaces ``path``; on an error ``path`` stays unchanged.

    If ``path`` is a link, the file that it points to is replaced. Raises OSError if ``path`` is a device, a pipe or a
    folder.
    """
    check_output(path)
    path = path.resolve() if path.is_symlink() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(TEMPORARY + path.name)
    try:
        remove(temporary)  # a leftover, or a planted link that would let us overwrite another file
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove the files that a killed process left incomplete in ``folder``, and finish its interrupted replacements."""
    for path in folder.glob(TEMPORARY + "*"):
        remove(path)
    for path in folder.glob(OLD + "*"):  # killed between two renames: restore it unless the new folder is in place
        original = path.with_name(path.name.removeprefix(OLD))
        if original.exists():
            remove(path)
        else:
            with suppress(OSError):
                os.replace(path, original)


def remove(path: Path) -> None:
    """Remove a file or a folder. Failures are ignored: they must not stop a run.

    A folder is renamed first. A kill then leaves a temporary folder, not half a folder under the old name.
    """
    if path.is_dir() and not path.is_symlink():
        aside = path if path.name.startswith(TEMPORARY) else path.with_name(f"{TEMPORARY}removed-{path.name}")
        with suppress(OSError):
            if aside != path:
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(path, aside)
            shutil.rmtree(aside, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def seal(folder: Path, about: Mapping[str, Any] | None = None) -> None:
    """Flush every file of ``folder`` to disk, then write the manifest: ``about``, and each file's size and hash."""
    if (folder / MANIFEST).exists():
        raise ValueError(f"poise writes {MANIFEST} here: choose another name for your file")
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
            continue
        with path.open("r+b") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": digest}
    with replacing(folder / MANIFEST) as file:
        file.write(dumps(sealed({**(about or {}), "files": files}), indent=2))


def verify(folder: Path, within: str = "") -> dict[str, Any]:
    """Check every file against the manifest, and return ``about``. Raises ValueError or OSError on any difference.

    With ``within``, check only the files in this subfolder.
    """
    try:
        about = dict(read_json(folder / MANIFEST))
        if was_changed(about):  # older versions wrote no checksum
            raise ValueError
        about.pop(SEAL, None)
        files = about.pop("files").items()
        expected = [(str(name), int(entry["size"]), str(entry["sha256"])) for name, entry in files]
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise ValueError(f"{MANIFEST} is damaged") from None
    listed = {name for name, _, _ in expected}
    for path in (folder / within).rglob("*.safetensors"):
        if (name := path.relative_to(folder).as_posix()) not in listed:
            raise ValueError(f"{MANIFEST} does not name {name}, so it cannot be verified")
    for name, size, digest in expected:
        path = folder / name
        if within and not name.startswith(f"{within}/"):
            continue
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if path.stat().st_size != size:
            raise ValueError(f"{name} has {path.stat().st_size} bytes instead of {size}")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise ValueError(f"{name} is damaged: its SHA-256 differs from the manifest's")
    return about
