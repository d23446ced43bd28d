"""What the user's own code is made of: a hash of every file, function and value that it depends on, by name.

A run and a comparison record it, because the same settings with edited code are another experiment.
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

DEEPEST = 100  # levels of values within values that are read, before Python's stack ends
LONG = 1000  # characters
_OWN = Path(__file__).resolve().parents[1]
_PLACES = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = tuple(os.path.realpath(folder) + os.sep for folder in (*_PLACES, str(_OWN)))


def fingerprint(thing: Any) -> dict[str, str]:
    """A hash of each part of ``thing``, by the part's name. ``thing`` is a module, a class, a function or an object.

    Code in a file is that file and what it imports from beside it. Code without a file, such as a notebook's or that
    of the script that runs, is its source with the globals that it uses. Closure values, default arguments and the
    state of objects count too. Python, poise and installed packages count by name; but an installed ``thing`` is its
    file.
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
    """Whether a file belongs to Python, to poise or to an installed package: its version says what it is."""
    return str(file).startswith(_LIBRARIES)


def module_files(module: ModuleType, folders: Iterable[str] = ()) -> dict[Path, bytes]:
    """``files`` of a module, with the packages that hold it; nothing for one that is installed or has no file."""
    file = _file(module)
    if file is None or is_installed(file):
        return {}
    packages = len(module.__name__.split(".")) - (file.name != "__init__.py")
    inits = [folder / "__init__.py" for folder in file.parents[:packages]]
    return files([file, *(init for init in inits if init.is_file())], folders)


def files(roots: Iterable[Path], folders: Iterable[str] = ()) -> dict[Path, bytes]:
    """Python files, and those that they import from beside them or from ``folders``, recursively: their contents."""
    waiting, found = [root.resolve() for root in roots], dict[Path, bytes]()
    beside = {home for root in waiting for home in (root.parent, _home(root))} | {Path(each) for each in folders}
    while waiting:
        file = waiting.pop()
        if file not in found and not is_installed(file):
            found[file] = file.read_bytes()
            waiting += sorted(_imports(file, found[file], beside))
    return dict(sorted(found.items()))


def hashes(contents: Mapping[Path, bytes], root: Path) -> dict[str, str]:
    """The hash of each file, by its name as seen from the folder ``root``."""
    return {Path(os.path.relpath(file, root)).as_posix(): _hash(text) for file, text in contents.items()}


def _home(file: Path) -> Path:
    """The folder of the outermost package that holds a file; the file's own folder if none does."""
    return next(folder for folder in file.parents if not (folder / "__init__.py").is_file() or folder == folder.parent)


def _imports(file: Path, source: bytes, beside: Iterable[Path]) -> Iterator[Path]:
    """The files in the folders ``beside``, or in its own package, that a file imports. Nothing is run."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            names, places = [alias.name for alias in node.names], beside
        elif isinstance(node, ast.ImportFrom):
            names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
            places = beside if not node.level else file.parents[node.level - 1 : node.level]
        else:
            continue
        for name in names:
            parts = name.split(".")
            for place in () if not getattr(node, "level", 0) and parts[0] in sys.stdlib_module_names else places:
                inner = [place.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
                candidates = [each for path in inner for each in (path.with_suffix(".py"), path / "__init__.py")]
                yield from (candidate.resolve() for candidate in candidates if candidate.is_file())


def _file(module: ModuleType | None) -> Path | None:
    """The Python file of a module; None for one without, and for the script that runs: its settings are there too."""
    name = getattr(module, "__file__", None)
    runs = getattr(module, "__name__", None) == "__main__"
    return Path(name).resolve() if name and name.endswith(".py") and not runs else None


def _hash(text: str | bytes) -> str:
    return sha256(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")).hexdigest()


class _Reader:
    """Turns values into texts that are equal in every process, and collects the parts that they depend on."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self._known: dict[int, tuple[Any, str]] = {}  # by id; the value is kept, so that its id stays its own
        self._depth = 0

    def text(self, value: Any) -> str:
        """A text for any value; a long one is its hash, since values may share parts many times."""
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
        if isinstance(value, CodeType):  # of a function without a source; its line numbers do not matter
            return f"{value.co_code.hex()} {value.co_names} {self.text(value.co_consts)}"
        if isinstance(value, BuiltinFunctionType) and not hasattr(value, "__wrapped__"):
            return value.__qualname__
        return self._object(value)

    def _add_files(self, module: ModuleType | None) -> bool:
        """Add a module's files to the parts. False: it has none, so that the source is all there is."""
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
            reduce = copyreg.dispatch_table.get(type(value))  # as pickle finds an object's state
            made = reduce(value) if reduce else value.__reduce_ex__(2)
        except Exception:  # of a lock, a generator, an open file
            return name
        parts = (
            [made] if isinstance(made, str) else [list(each) if isinstance(each, Iterator) else each for each in made]
        )
        return name + self.text(parts)


def _names(code: CodeType) -> set[str]:
    """The global names that a function may use, those of functions inside it included."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
