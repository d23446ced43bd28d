"""Fingerprint of the user's code: a hash of every file, function and value that it depends on, by name.

Runs and comparisons record the fingerprint, because the same settings with edited code are another experiment.
"""

from __future__ import annotations

import ast
import copyreg
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from poise._lib.calls import syntax_tree

DEEPEST = 100  # levels of nested values that are read; more could exhaust Python's stack
LONG = 1000  # characters; a longer text is replaced by its hash
_OWN = Path(__file__).resolve().parents[1]
_PLACES = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = tuple(os.path.realpath(folder) + os.sep for folder in (*_PLACES, str(_OWN)))


def fingerprint(thing: Any) -> dict[str, str]:
    """A hash of each part of ``thing``, by the part's name. ``thing`` is a module, a class, a function or an object.

    For code in a file, the parts are that file and the neighbouring files that it imports. For code without a file, as
    in a notebook or the running script, the parts are its source and the globals that it uses. Closure values, default
    arguments and the state of objects count too. Python, poise and installed packages count by name only, but if
    ``thing`` itself is installed, its file counts.
    """
    reader = _Reader()
    text = reader.text(thing)
    if not isinstance(thing, ModuleType):
        name = getattr(thing, "__qualname__", type(thing).__qualname__)
        reader.parts[name] = _hash(reader.parts.get(name, "") + text)
    place = thing if isinstance(thing, ModuleType | type | FunctionType) else type(thing)
    file = _file(place if isinstance(place, ModuleType) else sys.modules.get(place.__module__))
    if file is not None and is_installed(file) and _OWN not in file.parents:
        reader.parts[file.name] = _hash(file.read_bytes())
    return reader.parts


@cache
def package_hash() -> str:
    """A hash of poise's own code."""
    return _hash(repr(hashes({file: file.read_bytes() for file in sorted(_OWN.rglob("*.py"))}, _OWN)))


def is_installed(file: Path) -> bool:
    """Whether a file belongs to Python, poise or an installed package.

    Installed files are identified by their version, so their contents need no hash.
    """
    return str(file.resolve()).startswith(_LIBRARIES)


def in_place(file: Path) -> Path:
    """Resolve links in the path's folder, but not the file itself if it is a link.

    A linked file imports the files beside the link.
    """
    return file.parent.resolve() / file.name


def module_files(module: ModuleType, folders: Iterable[str] = ()) -> dict[Path, bytes]:
    """``files`` of a module and its packages; empty if the module is installed or has no file."""
    file = _file(module)
    if file is None or is_installed(file):
        return {}
    packages = len(module.__name__.split(".")) - (file.name != "__init__.py")
    inits = [folder / "__init__.py" for folder in file.parents[:packages]]
    return files([file, *(init for init in inits if init.is_file())], folders)


def files(roots: Iterable[Path], folders: Iterable[str] = ()) -> dict[Path, bytes]:
    """The contents of Python files and, recursively, of files that they import from their folders or ``folders``."""
    waiting, contents = [in_place(root) for root in roots], dict[Path, bytes]()
    search_path = _search_path(waiting, folders)
    while waiting:
        file = waiting.pop()
        if file not in contents and not is_installed(file):
            contents[file] = file.read_bytes()
            waiting += sorted(in_place(place / name) for place, name in _imports(file, contents[file], search_path))
    return dict(sorted(contents.items()))


def shadowed(root: Path, folders: Iterable[str] = ()) -> tuple[Path, Path] | None:
    """A file that ``root`` imports, and the different file that Python would import instead; None if there is none."""
    contents, search_path = files([root], folders), _search_path([in_place(root)], folders)
    places = [Path(folder).resolve() for folder in sys.path]  # "" is the current folder
    for file, text in contents.items():
        for place, name in _imports(file, text, search_path):
            if place.resolve() not in places:
                continue
            module = name.parent if name.name == "__init__.py" else name.with_suffix("")
            loaded = getattr(sys.modules.get(".".join(module.parts)), "__file__", None)
            ways = (each / way for each in places for way in (module / "__init__.py", module.with_suffix(".py")))
            other = Path(loaded) if loaded else next((each for each in ways if each.is_file()), place / name)
            same = other.is_file() and other.read_bytes() == contents.get(in_place(place / name))
            if not same and not is_installed(other):
                return place / name, other
    return None


def hashes(contents: Mapping[Path, bytes], root: Path) -> dict[str, str]:
    """The hash of each file, by its path relative to ``root``."""
    return {Path(os.path.relpath(file, root)).as_posix(): _hash(text) for file, text in contents.items()}


def _search_path(roots: Iterable[Path], folders: Iterable[str]) -> set[Path]:
    """The folders to search for files that ``roots`` import."""
    return {home for root in roots for home in (root.parent, _home(root))} | {Path(each) for each in folders}


def _home(file: Path) -> Path:
    """The folder that contains a file's outermost package; the file's own folder if it is in no package."""
    return next(folder for folder in file.parents if not (folder / "__init__.py").is_file() or folder == folder.parent)


def _imports(file: Path, source: bytes, search_path: Iterable[Path]) -> Iterator[tuple[Path, Path]]:
    """The files that ``file`` imports from ``search_path`` or its own package, as pairs (folder, path in the folder).

    The path corresponds to the module's name: it starts at the folder of the outermost package. No code is run.
    """
    try:
        nodes = list(ast.walk(syntax_tree(source)))
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in nodes:
        level = getattr(node, "level", 0)
        places = file.parents[level - 1 : level] if level else search_path
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            for place in () if not level and parts[0] in sys.stdlib_module_names else places:
                root = _home(place / file.name) if level else place
                inner = [place.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
                candidates = [each for path in inner for each in (path.with_suffix(".py"), path / "__init__.py")]
                yield from ((root, candidate.relative_to(root)) for candidate in candidates if candidate.is_file())


def _file(module: ModuleType | None) -> Path | None:
    """The module's Python file. None if the module has no file or is the running script.

    The running script is excluded because its file also contains the settings.
    """
    name = getattr(module, "__file__", None)
    runs = getattr(module, "__name__", None) == "__main__"
    return in_place(Path(name)) if name and name.endswith(".py") and not runs else None


def _hash(text: str | bytes) -> str:
    return sha256(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")).hexdigest()


class _Reader:
    """Turns values into strings that are equal in every process, and collects the parts that the values depend on."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self._known: dict[int, tuple[Any, str]] = {}  # by id; holding the value keeps its id from being reused
        self._depth = 0

    def text(self, value: Any) -> str:
        """A string for any value. A hash replaces a long string, because the same part may occur many times."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return repr(value)
        if id(value) not in self._known:
            self._known[id(value)] = value, "…"  # for a value that contains itself
            self._depth += 1
            text = self._compute(value) if self._depth < DEEPEST else type(value).__qualname__
            self._depth -= 1
            self._known[id(value)] = value, text if len(text) < LONG else _hash(text)
        return self._known[id(value)][1]

    def _compute(self, value: Any) -> str:
        if isinstance(value, ModuleType):
            self._add_files(value)
            return value.__name__
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self.text(key)}: {self.text(each)}" for key, each in value.items()) + "}"
        if isinstance(value, list | tuple | set | frozenset):
            texts = [self.text(each) for each in value]
            return (
                f"{type(value).__name__}({', '.join(sorted(texts) if isinstance(value, set | frozenset) else texts)})"
            )
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, CodeType):  # a function without source; line numbers do not matter
            return f"{value.co_code.hex()} {value.co_names} {value.co_varnames} {self.text(value.co_consts)}"
        if isinstance(value, BuiltinFunctionType) and not hasattr(value, "__wrapped__"):
            return value.__qualname__
        return self._object(value)

    def _add_files(self, module: ModuleType | None) -> bool:
        """Add a module's files to the parts. Return False if the caller must hash the source instead."""
        if (file := _file(module)) is None:
            return module is not None and module.__name__ != "__main__"  # built-in
        assert module is not None
        self.parts |= hashes(module_files(module), _home(file) if "." in module.__name__ else file.parent)
        return True

    def _class(self, kind: type) -> str:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if not self._add_files(sys.modules.get(kind.__module__)):
            own = {key: getattr(each, "__func__", getattr(each, "fget", each)) for key, each in vars(kind).items()}
            own = {key: each for key, each in own.items() if key[:2] != "__" or isinstance(each, FunctionType)}
            self.parts[kind.__qualname__] = _hash(self.text(own) + self.text(kind.__bases__))
        return name

    def _function(self, function: FunctionType) -> str:
        name = f"{function.__module__}.{function.__qualname__}"
        module = sys.modules.get(function.__module__ or "")
        file = _file(module)
        if file is not None and is_installed(file):
            return name
        if not self._add_files(module):
            try:
                if function.__name__ == "<lambda>":  # its source contains the whole statement
                    raise OSError
                source = inspect.getsource(function)
            except (OSError, TypeError):
                source = self.text(function.__code__)
            used = {key: function.__globals__.get(key) for key in sorted(_names(function.__code__))}
            self.parts[function.__qualname__] = _hash(source + self.text(used))
        cells = [_contents(cell) for cell in function.__closure__ or ()]
        return name + self.text([cells, function.__defaults__, function.__kwdefaults__])

    def _object(self, value: Any) -> str:
        name = self.text(type(value))
        if hasattr(value, "__wrapped__"):  # such as a function with a cache
            return name + self.text(value.__wrapped__)
        if hasattr(value, "detach") and hasattr(value, "dtype"):  # a tensor
            array = value.detach().cpu().contiguous().flatten()
            content = array.view(sys.modules["torch"].uint8).numpy().tobytes() if array.numel() else b""
            return f"{name} {value.dtype} {tuple(value.shape)} {_hash(content)}"
        try:
            reduce = copyreg.dispatch_table.get(type(value))  # where pickle looks for an object's state
            state = reduce(value) if reduce else value.__reduce_ex__(2)
        except Exception:  # a lock, a generator or an open file has no state to read
            return name
        parts = [state] if isinstance(state, str) else state
        return name + self.text([list(each) if isinstance(each, Iterator) else each for each in parts])


def _names(code: CodeType) -> set[str]:
    """The global names that a function may use, including inner functions."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
