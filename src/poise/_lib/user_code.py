"""The one loader of the user's own code: settings name it as ``file.py:Name`` or ``package.module.Name``.

Importing a module runs it. So a name is imported only with the user's consent: the user typed it, wrote it in Python,
or chose the recipe that has it. Settings that come with a run folder may be anybody's; they are read within
``untrusted``, where ``load`` refuses everything but poise's own code. docs/security.md has the rule for users.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from poise._lib.calls import split_bars
from poise._lib.errors import unknown
from poise._lib.files import remove
from poise._lib.fingerprint import files, fingerprint, hashes, module_files

FOLDERS: list[str] = []  # searched for modules after everything that is installed; the command line adds one
TASK_CODE = ("name", "reward", "factory")  # the settings of a task that may name code
_MARK = "_poise_kind"
_FILES: dict[str, str] = {}  # modules loaded from a file: their name, and the file as the user wrote it
_LOADED: dict[Path, bytes] = {}  # files as they were when they were imported last

F = TypeVar("F", bound=Callable[..., Any])
Code = dict[str, dict[str, str]]  # what code is made of: see ``code_of``


class UntrustedError(ValueError):
    """Settings that the user did not write name code to run."""


class UserCodeError(RuntimeError):
    """The user's own code raised while it ran, or returned what cannot be used."""


@contextmanager
def blamed(kind: str, text: str, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn an exception of a user's own regulator or algorithm into one that names its file and line.

    ``kind`` is the setting, ``text`` its value. Exceptions of poise's own code stay as they are, and so do those of a
    ``passing`` type, which tell the user enough.
    """
    try:
        yield
    except passing:
        raise
    except Exception as error:
        if not asks_for_code({kind: text}):
            raise
        raise UserCodeError(f"{kind} {text!r} failed: {type(error).__name__}: {error}{place_of(error)}") from error


def place_of(error: BaseException) -> str:
    """The end of a message: where in the user's own code an exception arose, if it did."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    libraries = (str(Path(__file__).parents[1]), str(Path(torch).parent) if torch else "<", "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(libraries)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


# Consent


@dataclass(frozen=True)
class _Untrusted:
    source: str  # where the settings come from
    consent: frozenset[str]  # paths that the user typed on top of them


_UNTRUSTED: ContextVar[_Untrusted | None] = ContextVar("untrusted", default=None)


@contextmanager
def untrusted(source: str, typed: Iterable[Any] = ()) -> Iterator[None]:
    """Within, ``load`` refuses all code but poise's own and what the user typed.

    ``source`` is where the settings come from; ``typed`` are the values that the user put on top of them.
    """
    consent = frozenset(path for value in typed for path in _paths(value))
    token = _UNTRUSTED.set(_Untrusted(source, consent))
    try:
        yield
    finally:
        _UNTRUSTED.reset(token)


def check_trusted(what: str, path: str | None = None) -> None:
    """Raise within ``untrusted``, unless the user typed ``path``; ``what`` is the setting that asks for code."""
    settings = _UNTRUSTED.get()
    if settings is not None and path not in settings.consent:
        raise UntrustedError(
            f"{what}: {settings.source} asks to run code that is not part of poise, and it was not loaded; "
            "if you trust whoever wrote it, add --trust (in Python: trust=True)"
        )


def asks_for_code(settings: Mapping[str, Any]) -> bool:
    """Whether ``untrusted`` would refuse these settings: then ``--resume`` needs ``--trust``."""
    return bool(foreign(settings) or settings.get("remote_code"))


def foreign(settings: Mapping[str, Any]) -> list[str]:
    """The paths of code in a run's settings that is not part of poise."""
    task = settings.get("task")
    named = [task.get(key) for key in TASK_CODE] if isinstance(task, Mapping) else []
    named += [settings.get("regulator"), settings.get("algorithm")]
    return [path for value in named for path in _paths(value) if is_foreign(path)]


def code_of(settings: Mapping[str, Any]) -> Code:
    """What the code is made of that a run's settings name: for each path, the hashes of its files. Imports nothing.

    A notebook's code, and that of the script that runs (``__main__:Name``), is in no file: its parts are hashed.
    """
    found: Code = {}
    for path in foreign(settings):
        name, _, inner = _split_path(path)
        if name.endswith(".py"):
            file = Path(os.path.expanduser(name)).resolve()
            named = hashes(files([file], FOLDERS), file.parent) if file.is_file() else {}
            found[path] = {os.path.normpath(os.path.join(os.path.dirname(name), key)): named[key] for key in named}
        elif name in sys.modules:
            with suppress(AttributeError):  # ``load`` names what is missing
                found[path] = fingerprint(
                    attrgetter(inner)(sys.modules[name]) if name == "__main__" else sys.modules[name]
                )
    return found


def edited(before: Code, now: Code) -> list[str]:
    """The files that differ, by name."""
    pairs = [(before.get(path, {}), now.get(path, {})) for path in {**before, **now}]
    return sorted({file for old, new in pairs for file in {**old, **new} if old.get(file) != new.get(file)})


def is_foreign(name: str) -> bool:
    """Whether a name in the settings leads to code that is not part of poise. Names in poise's tables have no dots."""
    module, _, _ = _split_path(name)
    return ("." in name or ":" in name) and (module.endswith(".py") or module.partition(".")[0] != "poise")


def _paths(value: Any) -> list[str]:
    """The names in a value as settings have it: ``"ar | mine.py:Mine(power=2)"`` names ar and mine.py:Mine."""
    if isinstance(value, str):
        return [part.partition("(")[0].strip() for part in split_bars(value)]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [path for part in value for path in _paths(part)]


# Loading


def mark(kind: str, thing: F) -> F:
    """Say that ``thing`` is meant to be named in settings, as a ``kind`` ("regulator", …)."""
    setattr(thing, _MARK, kind)
    return thing


def load(
    kind: str,
    path: str,
    base: type | None = None,
    *,
    accepts: Callable[[Any], bool] | None = None,
    expected: str = "",
) -> Any:
    """The class or function behind ``file.py:Name``, ``package.module.Name`` or ``package.module:Name``, not called.

    It must be a subclass or an instance of ``base``, pass ``accepts``, or be marked as a ``kind``: a name in the
    settings must not reach any function there is. ``expected`` says so in words, for the message. What goes wrong is a
    ``ValueError`` or a ``TypeError``.
    """
    if path.endswith(".py"):
        raise ValueError(f"{kind} {path!r}: say which class or function of the file, {path}:Name")
    module_name, _, names = _split_path(path)
    if is_foreign(path):
        check_trusted(f"{kind} {path!r}", path)

    def fits(thing: Any) -> bool:
        return _is_one(kind, thing, base) or (accepts is not None and accepts(thing))

    found: Any = _module(kind, path, module_name)
    place = getattr(found, "__file__", None)
    for name in names.split("."):
        if not hasattr(found, name):
            known = [each for each, thing in _defined_in(found) if fits(thing)]
            where = f" ({place})" if place else ""
            raise ValueError(f"{kind} {path!r}{where}: " + unknown(f"name in {module_name}", name, known))
        found = getattr(found, name)
    if not callable(found):
        raise TypeError(f"{kind} {path!r} is not callable")
    if not fits(found):
        expected = expected or (f"let a class inherit from poise.{base.__name__}" if base else "")
        article = "an" if kind[0] in "aeiou" else "a"
        hint = f"{expected}, or " if expected else ""
        raise TypeError(f"{path!r} is not {article} {kind}: {hint}write @poise.{kind} above a function or class")
    return found


def forgotten_dataclass(thing: Any) -> str:
    """The end of a message about a setting that ``thing`` does not take: a class without @dataclass has none."""
    if not inspect.isclass(thing) or "__init__" in vars(thing):  # which @dataclass writes too
        return ""
    return f"; write @dataclass above class {thing.__name__}, and its fields (name: type = default) are settings"


def path_to(thing: Any) -> str:
    """The path that ``load`` finds a class or function by."""
    return f"{_FILES.get(thing.__module__, thing.__module__)}:{thing.__qualname__}"


def _split_path(path: str) -> tuple[str, str, str]:
    """Module or file, separator, name."""
    return path.rpartition(":") if ":" in path else path.rpartition(".")


def _module(kind: str, path: str, name: str) -> ModuleType:
    """The module of that name or file, imported."""
    file = Path(os.path.expanduser(name)).absolute() if name.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ValueError(f"{kind} {path!r}: there is no file {file}")
    if is_foreign(path):
        folders = [*FOLDERS, str(file.parent)] if file else FOLDERS  # a file may import those beside it
        sys.path += [folder for folder in folders if folder not in sys.path]
    try:
        return _from_name(name) if file is None else _from_file(file, name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (name + ".").startswith(missing + "."):
            raise ValueError(f"{kind} {path!r}: there is no module {name!r} to import") from None
        own = (__file__, "<frozen")
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)]
        skipped = 1 if file is None else 0  # importlib's own import_module
        at = f"{frames[-1].filename}, line {frames[-1].lineno}: " if len(frames) > skipped else ""
        raise ValueError(f"{kind} {path!r}: importing {name} failed: {at}{type(error).__name__}: {error}") from error


def _from_name(name: str) -> ModuleType:
    """The module of that name, imported again if it was edited: in a notebook, code changes while Python runs."""
    module = importlib.import_module(name)
    return importlib.import_module(name) if _forget_edited(module_files(module, FOLDERS)) else module


def _from_file(file: Path, written: str) -> ModuleType:
    """The module of a file, under a name that no installed module has and that changes with what the file imports."""
    file = file.resolve()
    contents = files([file], FOLDERS)
    name = f"{file.stem}_{hashlib.sha256(repr((file, contents)).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    _forget_edited(contents)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _FILES[name] = written
    return module


def _forget_edited(contents: Mapping[Path, bytes]) -> bool:
    """If one of these files was edited since its import, forget the modules of all, so that they are imported again."""
    changed = [file for file, text in contents.items() if _LOADED.get(file, text) != text]
    _LOADED.update(contents)
    if changed:
        for name, module in list(sys.modules.items()):
            if (
                name not in _FILES
                and getattr(module, "__file__", None)
                and Path(module.__file__ or "").resolve() in contents
            ):
                del sys.modules[name]
        for file in changed:  # Python tells bytecode apart by size and second
            remove(Path(importlib.util.cache_from_source(str(file))))
        importlib.invalidate_caches()
    return bool(changed)


def _defined_in(place: Any) -> Iterator[tuple[str, Any]]:
    """What a module or a class has of its own that can be called: not what it imported from elsewhere."""
    home = place.__name__ if isinstance(place, ModuleType) else getattr(place, "__module__", "")
    for name, thing in getattr(place, "__dict__", {}).items():
        if callable(thing) and not name.startswith("_") and str(getattr(thing, "__module__", "")).startswith(home):
            yield name, thing


def _is_one(kind: str, found: Any, base: type | None) -> bool:
    if base is not None and (isinstance(found, base) or (inspect.isclass(found) and issubclass(found, base))):
        return True
    return getattr(found, _MARK, None) == kind
