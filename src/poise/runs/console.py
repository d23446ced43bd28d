"""The console: a progress bar on a terminal, a bar and a curve in a notebook, plain lines anywhere else.

Model output is untrusted. Control characters and terminal escape sequences are shown as visible text, and rich never
parses model output as markup.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import Any, TextIO, cast

from rich import box
from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from poise.runs.notebook import Notebook, notebook_display

Sample = tuple[str, str, float, bool]  # prompt, completion, reward, correct

SHOWN = (  # metric, format
    ("loss", "loss {:.3f}"),
    ("reward/mean", "reward {:.2f}"),
    ("reward/accuracy", "accuracy {:.2f}"),
    ("rollout/length", "length {:.0f}"),
    ("rollout/entropy", "entropy {:.2f}"),
    ("time/tokens_per_s", "{:,.0f} tok/s"),
    ("memory", "{:.1f} GiB at most"),
)
NARROWEST = 16  # longer names wrap rather than cost a table another column
WINDOW = 20  # the last steps, which predict the remaining time


class _Lasting(io.TextIOBase):
    """A stream that never raises: its reader may have left (``poise train | head -1``), and the run continues."""

    def __init__(self, file: TextIO | None) -> None:
        self._to = file  # None: closed before poise started

    def write(self, text: str) -> int:
        """Write to the stream."""
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._try("flush")

    def _try(self, method: str, *args: str) -> None:
        try:
            if self._to is not None:
                getattr(self._to, method)(*args)
        except OSError as error:
            if isinstance(
                error, BrokenPipeError
            ):  # from now on to /dev/null: the rest of the buffer must not fail at exit
                with suppress(OSError, ValueError):
                    null = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(null, self._to.fileno())  # type: ignore[union-attr]
                    os.close(null)
        except (ValueError, RuntimeError):  # closed, or a signal handler writes during a write
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._to, name)

    def fileno(self) -> int:
        """The stream's file descriptor."""
        if self._to is None:
            raise io.UnsupportedOperation("fileno")
        return self._to.fileno()

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        with suppress(ValueError, AttributeError):
            return self._to is not None and self._to.isatty()
        return False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's encoding."""
        return getattr(self._to, "encoding", None) or "utf-8"


@contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, standard output and error never raise."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Lasting(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


class Console:
    """Shows a run's progress on ``file``, by default standard output. ``quiet`` shows nothing."""

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        budget: int | None = None,
        quiet: bool = False,
        file: TextIO | None = None,
    ) -> None:
        self.total_steps, self.budget = total_steps, budget  # sampled tokens; the run ends with what comes first
        self.quiet = quiet
        self._file = cast(TextIO, _Lasting(sys.stdout if file is None else file))
        self._seen = deque[tuple[int, int, float]](maxlen=WINDOW + 1)  # step, tokens until then, time
        self.begin(start_step)
        self._live: Live | None = None
        self._notebook: Notebook | None = None
        if not quiet and file is None and total_steps and (display := notebook_display()):
            self._notebook = Notebook(display)
        # Do not ask rich whether this is a terminal: environment variables can make it write escape codes to a file.
        self._rich: RichConsole | None = None
        if not quiet and self._file.isatty():
            rich = RichConsole(file=self._file, markup=False, emoji=False, highlight=False)
            if not rich.is_dumb_terminal:
                self._rich = rich
                if total_steps:  # without steps there are only tables
                    self._start(rich, start_step)

    def _start(self, rich: RichConsole, start_step: int) -> None:
        left = TextColumn("{task.fields[left]}", markup=False)
        done = TextColumn("{task.fields[done]}", markup=False)
        self._bar = Progress(TextColumn("step", markup=False), BarColumn(None), done, left, expand=True)
        self._task = self._bar.add_task("", total=1.0, left="", done=self._done(start_step, 0))
        self._bar.update(self._task, completed=start_step / self.total_steps)
        view = Group(self._bar, "")
        self._live = Live(console=rich, refresh_per_second=4, get_renderable=lambda: view)
        self._view = view
        self._live.start()

    def begin(self, step: int, tokens: int = 0) -> None:
        """Start predicting the remaining time at ``step``: the time before says nothing about a step."""
        self._seen.clear()
        self._seen.append((step, tokens, time.monotonic()))

    def step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Show a finished step. Missing metrics are skipped."""
        tokens = int(metrics.get("tokens/total") or 0)
        left = self._left(step, tokens)
        shown = [form.format(value) for key, form in SHOWN if (value := metrics.get(key)) is not None]
        if self._notebook:
            text = "  ".join([self._done(step, tokens), *([left] if left else []), *shown])
            self._notebook.step(step, self._share(step, tokens), text, metrics)
            return
        if self._live:
            self._bar.update(self._task, completed=self._share(step, tokens), left=left, done=self._done(step, tokens))
            self._view.renderables[1] = Text("  ".join(shown), overflow="fold")
            return
        self._print("  ".join([f"step  {self._done(step, tokens)}", *shown, *([left] if left else [])]))

    def note(self, text: str, *, wrap: bool = True) -> None:
        """Show a message, above the progress bar if there is one. Without ``wrap`` a long line can be copied whole."""
        self._print(visible(text), wrap=wrap)

    def picture(self, path: Path) -> None:
        """Show a picture of the run's curve, where pictures can be shown."""
        if self._notebook:
            self._notebook.picture(path)

    def table(self, rows: Sequence[Mapping[str, Any]], *, optional: Sequence[str] | None = None) -> None:
        """Print dicts as a table: one column per key, numbers right-aligned.

        With ``optional``, nothing but the first column is ever cut or wrapped on a terminal: if the table is too wide,
        these columns are left out, one after the other, as far as need be.
        """
        columns = list(dict.fromkeys(key for row in rows for key in row))
        if not rows or self.quiet:
            return
        if self._rich and optional is not None:
            columns = self._fitting(rows, columns, optional)
        cells = [[self._clean(visible(_cell(row.get(key)))) for key in columns] for row in rows]
        right = [all(isinstance(row.get(key, 0.0), int | float) for row in rows) for key in columns]
        lines = [[part.replace("\n", " ") for part in line] for line in [[visible(c) for c in columns], *cells]]
        widths = [max(cell_len(line[i]) for line in lines) for i in range(len(columns))]
        if self._rich and (optional is None or _framed([min(widths[0], NARROWEST), *widths[1:]]) <= self._rich.width):
            table = Table(box=box.SIMPLE_HEAD)
            for i, (column, number) in enumerate(zip(columns, right, strict=True)):
                title, whole = Text(self._clean(visible(column))), optional is not None and i > 0
                table.add_column(title, justify="right" if number else "left", no_wrap=whole, overflow="fold")
            for line in cells:
                table.add_row(*map(Text, line))
            self._rich.print(table)
            return
        for line in lines:
            padded = [
                " " * (width - cell_len(part)) + part if number else part + " " * (width - cell_len(part))
                for part, width, number in zip(line, widths, right, strict=True)
            ]
            self._print("  ".join(padded).rstrip(), wrap=False)

    def _fitting(self, rows: Sequence[Mapping[str, Any]], columns: list[str], optional: Sequence[str]) -> list[str]:
        """The columns without as many of the optional ones as the terminal has no room for."""
        assert self._rich
        widths = {key: max(cell_len(key), *(cell_len(visible(_cell(row.get(key)))) for row in rows)) for key in columns}
        widths[columns[0]] = min(widths[columns[0]], NARROWEST)
        for key in optional:
            if _framed(list(widths.values())) > self._rich.width:
                widths.pop(key, None)
        return list(widths)

    def before_after_table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print results before and after training. Rows have name, before, before_ci, after, after_ci and change.

        An interval is (low, high), half its width, or text. Missing values stay blank.
        """
        shown = []
        for row in rows:
            cells = {"": str(row.get("name", ""))}
            for when in ("before", "after"):
                cells[when] = " ".join(filter(None, [_fixed(row.get(when)), _interval(row.get(f"{when}_ci"))]))
            shown.append(cells | {"change": _fixed(row.get("change"), "+")})
        self.table(shown)

    def samples_table(self, samples: Sequence[Sample], k: int = 3, *, whole: bool = False) -> None:
        """Print ``k`` samples (prompt, completion, reward, correct), from the lowest reward to the highest.

        Long texts are cut in the middle, unless they are wanted ``whole``: then below each other, not in a table.
        """
        chosen = across_rewards(samples, k)
        if not chosen or self.quiet:
            return
        texts = [(visible(prompt), visible(completion)) for prompt, completion, _, _ in chosen]
        if not whole:
            texts = [(shorten(prompt, 300), shorten(completion, 700)) for prompt, completion in texts]
        verdicts = [(f"{reward:.2f}", "correct" if correct else "wrong") for _, _, reward, correct in chosen]
        if self._rich and not whole:
            table = Table("reward", "", "prompt", "completion", box=box.SIMPLE_HEAD, show_lines=True)
            for (reward, verdict), (prompt, completion) in zip(verdicts, texts, strict=True):
                style = "green" if verdict == "correct" else "red"
                cells = Text(reward), Text(verdict, style), Text(self._clean(prompt)), Text(self._clean(completion))
                table.add_row(*cells)
            self._rich.print(table)
            return
        for (reward, verdict), (prompt, completion) in zip(verdicts, texts, strict=True):
            self._print(f"sample  reward {reward}  {verdict}")
            for name, text in (("prompt", prompt), ("completion", completion)):
                self._print(f"  {name}:\n    " + text.replace("\n", "\n    "))

    def close(self) -> None:
        """Stop the progress bar and restore the terminal."""
        if self._live:
            self._live.stop()
            self._live = None
        if self._notebook:
            self._notebook.close()

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _done(self, step: int, tokens: int) -> str:
        """How far the run is, in words."""
        steps = f"{step:>{len(str(self.total_steps))}}/{self.total_steps}"
        return steps if self.budget is None else f"{steps}  {tokens:,}/{self.budget:,} tokens"

    def _share(self, step: int, tokens: int) -> float:
        """How far the run is, from 0 to 1."""
        return min(1.0, max(step / self.total_steps, tokens / self.budget if self.budget else 0.0))

    def _left(self, step: int, tokens: int) -> str:
        """The remaining time, predicted from the last steps: up to the last step, or to the end of the budget."""
        if step > self._seen[-1][0]:
            self._seen.append((step, tokens, time.monotonic()))
        (first, before, then), (last, until, now) = self._seen[0], self._seen[-1]
        if last == first or self._share(step, tokens) >= 1:
            return ""
        seconds = (now - then) / (last - first) * (self.total_steps - step)
        if self.budget and until > before:
            seconds = min(seconds, (now - then) / (until - before) * (self.budget - tokens))
        return f"{duration(seconds)} left"

    def _clean(self, text: str) -> str:
        """Escape what the stream cannot encode: an odd character must not end a run."""
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)

    def _print(self, text: str, *, wrap: bool = True) -> None:
        if self.quiet:
            return
        if self._rich:
            self._rich.print(Text(self._clean(text)), soft_wrap=not wrap)
        else:
            print(self._clean(text), file=self._file, flush=True)


# Fonts do not draw these characters, so different texts could look the same. They are Unicode's
# Default_Ignorable_Code_Point, which Python lacks, as far as str.isprintable accepts them.
IGNORABLE = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0"  # joiner, fillers, inherent vowels
    + "".join(map(chr, [*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)]))  # variation selectors
)


def visible(text: str) -> str:
    """Replace control and invisible characters by escapes such as ``\\x1b``. Line breaks stay."""
    return "".join(c if c == "\n" or (c.isprintable() and c not in IGNORABLE) else _escape(c) for c in text)


def barred(text: str) -> str:
    """What an environment said, to stand between the replies: on lines of its own, behind a bar."""
    return "".join(f"\n  │ {line}" for line in text.splitlines()) + "\n"


def complain(text: str) -> None:
    """Print a message on standard error."""
    print(visible(text), file=sys.stderr, flush=True)


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def shorten(text: str, characters: int, lines: int = 16) -> str:
    """Cut the middle out of a long text, and say how much was cut."""
    parts = text.split("\n")
    if len(parts) > lines:
        middle = f"[… {len(parts) - lines + 1:,} lines …]"
        text = "\n".join([*parts[: lines // 2], middle, *parts[len(parts) - (lines - 1 - lines // 2) :]])
    if len(text) > characters:
        half = characters // 2
        text = f"{text[:half]} [… {len(text) - 2 * half:,} characters …] {text[-half:]}"
    return text


def across_rewards(samples: Sequence[Sample], k: int) -> list[Sample]:
    """``k`` samples whose rewards are spread evenly from the lowest to the highest."""
    ranked = sorted((sample for sample in samples if isfinite(sample[2])), key=lambda sample: sample[2])
    if len(ranked) <= k or k < 1:
        return ranked[: max(k, 0)]
    low, high = ranked[0][2], ranked[-1][2]
    targets = [low + (high - low) * i / (k - 1) for i in range(k)] if k > 1 else [(low + high) / 2]
    chosen = []
    for target in targets:
        nearest = min(ranked, key=lambda sample: abs(sample[2] - target))
        ranked.remove(nearest)
        chosen.append(nearest)
    return sorted(chosen, key=lambda sample: sample[2])


def duration(seconds: float) -> str:
    """``2:10``, or ``1:02:10`` past an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _framed(widths: Sequence[int]) -> int:
    """The width of a table with these columns, each with its margin."""
    return sum(width + 3 for width in widths) + 1


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _fixed(value: object, sign: str = "") -> str:
    return f"{value:{sign}.3f}" if isinstance(value, int | float) else _cell(value)


def _interval(value: object) -> str:
    if isinstance(value, list | tuple) and len(value) == 2:
        return f"[{_fixed(value[0])}, {_fixed(value[1])}]"
    return f"± {_fixed(value)}" if isinstance(value, int | float) else _cell(value)
