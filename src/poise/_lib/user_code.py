"""Code of the user's own by its dotted path: the one place where a name in the settings is imported.

Importing a module runs it. So a name is imported only with the user's consent: he typed it, wrote it in Python, or
named the recipe that has it. Settings that come with a run folder may be anybody's; they are read within ``untrusted``,
where nothing but the package's own code is loaded. docs/security.md has the rule for users.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from poise._lib.errors import unknown

FOLDERS: list[str] = []  # where modules are looked for when nothing installed has their name; the command line adds one
_SOURCE: ContextVar[str | None] = ContextVar("source", default=None)
_MARK = "_poise_kind"

F = TypeVar("F", bound=Callable[..., Any])


class UntrustedError(ValueError):
    """Settings that nobody vouched for name code to run."""


class UserCodeError(RuntimeError):
    """Code of the user's own that raised while it ran, or whose result cannot be used."""


@contextmanager
def blamed(regulator: str) -> Iterator[None]:
    """Within, an error of a regulator of the user's own says where in his code it is; poise's own stay as they are."""
    try:
        yield
    except Exception as error:
        if not asks_for_code({"regulator": regulator}):
            raise
        import torch

        libraries = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), "<frozen")
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(libraries)]
        at = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raise UserCodeError(f"regulator {regulator!r} failed: {type(error).__name__}: {error}{at}") from error


@contextmanager
def untrusted(source: str) -> Iterator[None]:
    """Within, ``load`` refuses all code but the package's own. ``source`` is where the settings come from."""
    token = _SOURCE.set(source)
    try:
        yield
    finally:
        _SOURCE.reset(token)


def check_trusted(what: str) -> None:
    """Raise within ``untrusted``; ``what`` is the setting that asks for code."""
    if (source := _SOURCE.get()) is not None:
        raise UntrustedError(
            f"{what}: {source} asks to run code that is not part of poise, and it was not loaded; "
            "if you trust whoever wrote it, add --trust (in Python: trust=True)"
        )


def asks_for_code(settings: Mapping[str, Any]) -> bool:
    """Whether settings, as ``untrusted`` sees them, would be refused: then ``--resume`` needs ``--trust``."""
    named = f"{settings.get('regulator', '')}|{settings.get('algorithm', '')}"
    names = re.sub(r"\(.*?\)", "", named, flags=re.DOTALL).split("|")
    foreign = [name for name in names if re.search("[.:]", name) and not name.strip().startswith("poise.")]
    return bool(foreign or settings.get("remote_code"))


def mark(kind: str, thing: F) -> F:
    """Say that ``thing`` is meant to be named in settings, as a ``kind`` ("regulator", …)."""
    setattr(thing, _MARK, kind)
    return thing


def load(kind: str, path: str, base: type | None = None) -> Any:
    """The object behind ``package.module.Name`` or ``package.module:Name``, which is not called here.

    It must be a subclass or an instance of ``base``, or marked as a ``kind``: a name in the settings must not reach
    just any function there is. What goes wrong is a ``ValueError`` or a ``TypeError``.
    """
    module_name, _, names = path.partition(":") if ":" in path else path.rpartition(".")
    if module_name.partition(".")[0] != "poise":
        check_trusted(f"{kind} {path!r}")
        sys.path += [folder for folder in FOLDERS if folder not in sys.path]
    found: Any = _import(kind, path, module_name)
    place = getattr(found, "__file__", None)
    for name in names.split("."):
        if not hasattr(found, name):
            known = [each for each in dir(found) if not each.startswith("_") and callable(getattr(found, each, None))]
            where = f" ({place})" if place else ""
            raise ValueError(f"{kind} {path!r}{where}: " + unknown(f"name in {module_name}", name, known))
        found = getattr(found, name)
    if not callable(found):
        raise TypeError(f"{kind} {path!r} is not callable")
    if not _is_one(kind, found, base):
        inherit = f"let a class inherit from poise.{base.__name__}, " if base else ""
        article = "an" if kind[0] in "aeiou" else "a"
        raise TypeError(f"{path!r} is not {article} {kind}: {inherit}or write @poise.{kind} above a function or class")
    return found


def _import(kind: str, path: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (module_name + ".").startswith(missing + "."):
            raise ValueError(f"{kind} {path!r}: there is no module {module_name!r} to import") from None
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
        at = f"{frames[-1].filename}, line {frames[-1].lineno}: " if len(frames) > 2 else ""
        raise ValueError(
            f"{kind} {path!r}: importing {module_name} failed: {at}{type(error).__name__}: {error}"
        ) from error


def _is_one(kind: str, found: Any, base: type | None) -> bool:
    if base is not None and (isinstance(found, base) or (inspect.isclass(found) and issubclass(found, base))):
        return True
    return getattr(found, _MARK, None) == kind
