"""Load the user's own code. Settings name it as ``file.py:Name`` or ``package.module.Name``.

Importing a module runs it. So a name is imported only with the user's consent: the user typed it, wrote it in Python,
or chose the recipe that names it. Anybody may have written the settings in a run folder, so poise reads them inside
``untrusted``, where ``load`` refuses all code except poise's own. docs/security.md explains the rule to users.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from poise._lib import live
from poise._lib.calls import split_outside
from poise._lib.errors import UserError, check_settings, unknown
from poise._lib.files import remove
from poise._lib.fingerprint import files, fingerprint, hashes, in_place, module_files, shadowed

FOLDERS: list[str] = []  # searched for modules after all installed packages; the command line adds one
TASK_CODE = ("name", "reward", "factory")  # the settings of a task that may name code
METHODS = ("regulator", "algorithm", "advantage")  # settings that name a method, poise's or the user's
MARKED = (*METHODS, "task")  # kinds that @poise.KIND marks
_MARK = "_poise_kind"
_FILES: dict[str, str] = {}  # module name → file, as the user wrote it, for modules loaded from a file
_LOADED: dict[Path, bytes] = {}  # file → contents at the last import

F = TypeVar("F", bound=Callable[..., Any])
Code = dict[str, dict[str, str]]  # path in the settings → {file: hash}: see ``code_of``


class UntrustedError(ValueError):
    """Settings from an unknown author ask to run code."""


class UserCodeError(UserError, RuntimeError):
    """The user's own code raised an exception, or returned an unusable value."""


@contextmanager
def blamed(
    kind: str, text: str, passing: tuple[type[Exception], ...] = (), *, raised_there: bool = False
) -> Iterator[None]:
    """Turn an exception in the user's own code, such as a regulator, into one that names the file and line.

    ``kind`` is the setting and ``text`` its value. An exception passes unchanged if its type is in ``passing``, if the
    code is poise's own or, with ``raised_there``, if the traceback has none of the user's files.
    """
    try:
        yield
    except passing:
        raise
    except Exception as error:
        place = place_of(error)
        if not any(is_foreign(path) for path in _paths(text)) or (raised_there and not place):
            raise
        raise UserCodeError(f"{kind} {text!r} failed: {type(error).__name__}: {error}{place}") from error


def place_of(error: BaseException) -> str:
    """The end of a message: the last file and line of the user's code in the error's traceback.

    Empty if the traceback contains none.
    """
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    libraries = (str(Path(__file__).parents[1]), str(Path(torch).parent) if torch else "<", "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(libraries)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


# Consent


@dataclass(frozen=True)
class _Untrusted:
    source: str  # where the settings come from
    consent: frozenset[str]  # paths that the user typed as overrides


_UNTRUSTED: ContextVar[_Untrusted | None] = ContextVar("untrusted", default=None)


@contextmanager
def untrusted(source: str, typed: Iterable[Any] = ()) -> Iterator[None]:
    """Within this context, ``load`` refuses all code except poise's own and the code that the user typed.

    ``source`` is where the settings come from; ``typed`` has the values that the user typed as overrides.
    """
    consent = frozenset(path for value in typed for path in _paths(value))
    token = _UNTRUSTED.set(_Untrusted(source, consent))
    try:
        yield
    finally:
        _UNTRUSTED.reset(token)


def check_trusted(what: str, path: str | None = None) -> None:
    """Within ``untrusted``, raise UntrustedError unless the user typed ``path``.

    ``what`` is the setting that asks for code.
    """
    settings = _UNTRUSTED.get()
    if settings is not None and path not in settings.consent:
        raise UntrustedError(
            f"{what}: {settings.source} asks to run code that is not part of poise, and it was not loaded; "
            "if you trust whoever wrote it, add --trust (in Python: trust=True)"
        )


def asks_for_code(settings: Mapping[str, Any]) -> bool:
    """Whether ``untrusted`` would refuse these settings. If so, ``--resume`` needs ``--trust``."""
    return any(not live.is_name(path) for path in foreign(settings)) or bool(settings.get("remote_code"))


def foreign(settings: Mapping[str, Any]) -> list[str]:
    """The paths in a run's settings that lead to code outside poise."""
    task = settings.get("task")
    named = [task.get(key) for key in TASK_CODE] if isinstance(task, Mapping) else []
    objective = settings.get("objective")
    named += [settings.get(name) for name in METHODS]
    named += [objective.get("surrogate")] if isinstance(objective, Mapping) else []
    named += [settings.get("model")] if live.is_name(settings.get("model")) else []
    return [path for value in named for path in _paths(value) if is_foreign(path)]


def code_of(settings: Mapping[str, Any]) -> Code:
    """Fingerprint of the code that a run's settings name: for each path, the hashes of its files. Imports nothing.

    Code in a notebook or in the running script (``__main__:Name``) has no file, so its parts are hashed. Python objects
    (``python:name``), such as a loaded model, are hashed by their parts too.
    """
    code: Code = {}
    for path in foreign(settings):
        name, _, inner = _split_path(path)
        if live.is_name(path):
            code |= {path: live.fingerprint(path)} if live.known(path) else {}
        elif name.endswith(".py"):
            file = in_place(Path(os.path.expanduser(name)))
            named = hashes(files([file], FOLDERS), file.parent) if file.is_file() else {}
            code[path] = {os.path.normpath(os.path.join(os.path.dirname(name), key)): named[key] for key in named}
        elif name in sys.modules:
            with suppress(AttributeError):  # ``load`` will report the missing name
                module = sys.modules[name]
                code[path] = fingerprint(attrgetter(inner)(module) if name == "__main__" else module)
    return code


def edited(before: Code, now: Code) -> list[str]:
    """The names of the files and Python objects whose hashes differ."""
    pairs = [(path, before.get(path, {}), now.get(path, {})) for path in {**before, **now}]
    return sorted(
        {
            path if live.is_name(path) else file
            for path, old, new in pairs
            for file in {**old, **new}
            if old.get(file) != new.get(file)
        }
    )


def is_foreign(name: str) -> bool:
    """Whether a name in the settings leads to code outside poise. Names in poise's tables have no dots."""
    module, _, _ = _split_path(name)
    return ("." in name or ":" in name) and (module.endswith(".py") or module.partition(".")[0] != "poise")


def _paths(value: Any) -> list[str]:
    """The names in the value of a setting: ar and mine.py:Mine in ``"ar | mine.py:Mine(power=2)"``."""
    if isinstance(value, str):
        return [part.partition("(")[0].strip() for part in split_outside(value, "|")]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [path for part in value for path in _paths(part)]


# Loading


def mark(kind: str, thing: F) -> F:
    """Allow settings to name ``thing`` as a ``kind`` ("regulator", …)."""
    setattr(thing, _MARK, kind)
    return thing


def find(kind: str, name: str, table: Mapping[str, Any], base: type | None = None) -> Any:
    """Return the entry of ``table`` with this name, or else load the user's own code (``load``)."""
    if name in table:
        return table[name]
    if not any(sign in name for sign in ".:"):
        own = "; for your own code, write file.py:Name, or its dotted path, package.module.Name"
        raise ValueError(unknown(kind, name, table) + own)
    return load(kind, name, base)


def load(
    kind: str,
    path: str,
    base: type | None = None,
    *,
    accepts: Callable[[Any], bool] | None = None,
    expected: str = "",
) -> Any:
    """Load a class or function by ``file.py:Name``, ``package.module.Name`` or ``package.module:Name``. Do not call it.

    It must be a subclass or an instance of ``base``, pass ``accepts``, or be marked as a ``kind``: settings must not
    reach arbitrary functions. ``expected`` describes this requirement in the error message. Raises ``ValueError`` or
    ``TypeError``. ``python:name`` is an object that the user passed (``_lib.live``).
    """
    if live.is_name(path):
        return live.get(path)
    if path.endswith(".py"):
        raise ValueError(f"{kind} {path!r}: name a class or function of the file, {path}:Name")
    module_name, _, names = _split_path(path)
    if is_foreign(path):
        check_trusted(f"{kind} {path!r}", path)

    def fits(thing: Any) -> bool:
        return _is_one(kind, thing, base) or (accepts is not None and accepts(thing))

    target: Any = _module(kind, path, module_name)
    place = getattr(target, "__file__", None)
    for name in names.split("."):
        if not hasattr(target, name):
            known = [each for each, thing in _defined_in(target) if fits(thing)]
            where = f" ({place})" if place else ""
            raise ValueError(f"{kind} {path!r}{where}: " + unknown(f"name in {module_name}", name, known))
        target = getattr(target, name)
    if not callable(target):
        raise TypeError(f"{kind} {path!r} is not callable")
    if not fits(target):
        article = "an" if kind[0] in "aeiou" else "a"
        ways = [expected or (f"let a class inherit from poise.{base.__name__}" if base else "")]
        ways += [f"write @poise.{kind} above a function or class"] if kind in MARKED else []
        raise TypeError(f"{path!r} is not {article} {kind}: {', or '.join(filter(None, ways))}")
    return target


def build(name: str, kind: Callable[..., Any], settings: Mapping[str, Any], args: Sequence[Any] = ()) -> Any:
    """Return ``kind(*args, **settings)``. Raises only ``ValueError`` or ``TypeError``."""
    allowed, hint = list(inspect.signature(kind).parameters), forgotten_dataclass(kind)
    check_settings(name, settings, allowed, hint)
    if len(args) > len(allowed):
        raise TypeError(f"{name} takes at most {len(allowed)} settings ({', '.join(allowed)}), got {len(args)}{hint}")
    try:
        return kind(*args, **settings)
    except (ValueError, TypeError):
        raise
    except Exception as error:  # a user's class may raise anything
        raise ValueError(f"{name}: {type(error).__name__}: {error}") from error


def forgotten_dataclass(thing: Any) -> str:
    """A hint for the message about an unknown setting: a class without @dataclass takes no settings."""
    if not inspect.isclass(thing) or "__init__" in vars(thing):  # @dataclass writes __init__ too
        return ""
    return f"; write @dataclass above class {thing.__name__}, and its fields (name: type = default) are settings"


def path_to(thing: Any) -> str:
    """The path under which ``load`` finds a class or function."""
    return f"{_FILES.get(thing.__module__, thing.__module__)}:{thing.__qualname__}"


def _split_path(path: str) -> tuple[str, str, str]:
    """Split a path into module or file, separator, and name."""
    return path.rpartition(":") if ":" in path else path.rpartition(".")


def _module(kind: str, path: str, name: str) -> ModuleType:
    """Import a module by its name or its file."""
    file = in_place(Path(os.path.expanduser(name))) if name.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ValueError(f"{kind} {path!r}: there is no file {file}")
    if is_foreign(path):
        folders = [*FOLDERS, str(file.parent)] if file else FOLDERS  # a file may import its neighbours
        sys.path += [folder for folder in folders if folder not in sys.path]
    _forget_moved()
    if file is not None:
        _check_shadows(f"{kind} {path!r}: {name}", file)
    try:
        module = _from_name(name) if file is None else _from_file(file, name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (name + ".").startswith(missing + "."):
            raise ValueError(f"{kind} {path!r}: there is no module {name!r} to import") from None
        own = (__file__, "<frozen")
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)]
        skipped = 1 if file is None else 0  # importlib's own import_module
        at = f"{frames[-1].filename}, line {frames[-1].lineno}: " if len(frames) > skipped else ""
        raise ValueError(f"{kind} {path!r}: importing {name} failed: {at}{type(error).__name__}: {error}") from error
    if file is None and module_files(module):  # the module's file is known only after the import
        _check_shadows(f"{kind} {path!r}: {name}", Path(str(module.__file__)))
    return module


def _check_shadows(what: str, file: Path) -> None:
    """Raise ValueError if Python would import another file in place of one that ``file`` imports.

    ``what`` is the start of the message and names ``file``.
    """
    if pair := shadowed(file, FOLDERS):
        raise ValueError(
            f"{what} imports {pair[0]}, but Python would import {pair[1]} instead, because a process has one module "
            "per name: rename one of the two, make them identical, or use a new process"
        )


def _from_name(name: str) -> ModuleType:
    """Import a module. Reimport it if its files were edited after the last import, as in a notebook."""
    module = importlib.import_module(name)
    return importlib.import_module(name) if _forget_edited(module_files(module, FOLDERS)) else module


def _from_file(file: Path, written: str) -> ModuleType:
    """Import a file as a module whose name contains a hash of the file and its imports.

    So no installed module has the same name, and an edited file is a new module.
    """
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
    """If one of these files was edited since its import, unload all their modules, so that Python reimports them."""
    changed = [file for file, text in contents.items() if _LOADED.get(file, text) != text]
    _LOADED.update(contents)
    if changed:
        _drop(contents)
        for file in changed:  # Python reuses bytecode if the file's size and modification second are unchanged
            remove(Path(importlib.util.cache_from_source(str(file))))
    return bool(changed)


def _forget_moved() -> None:
    """Unload modules whose files are gone. After a folder is renamed, another file may have the module's name."""
    if gone := {file for file in [*_LOADED] if not file.is_file()}:
        _drop(gone)
        for file in gone:
            del _LOADED[file]


def _drop(files: Container[Path]) -> None:
    """Unload the modules of these files, so that Python reimports them."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name not in _FILES and in_place(Path(file)) in files:
            del sys.modules[name]
    importlib.invalidate_caches()


def _defined_in(place: Any) -> Iterator[tuple[str, Any]]:
    """The callables that a module or a class defines, without those that it imports from elsewhere."""
    home = place.__name__ if isinstance(place, ModuleType) else getattr(place, "__module__", "")
    for name, thing in getattr(place, "__dict__", {}).items():
        if callable(thing) and not name.startswith("_") and str(getattr(thing, "__module__", "")).startswith(home):
            yield name, thing


def _is_one(kind: str, thing: Any, base: type | None) -> bool:
    if base is not None and (isinstance(thing, base) or (inspect.isclass(thing) and issubclass(thing, base))):
        return True
    return getattr(thing, _MARK, None) == kind
