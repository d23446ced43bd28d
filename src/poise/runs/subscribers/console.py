"""Shows a run's progress: a bar on a terminal, a bar and a curve in a notebook, plain lines elsewhere.

Model output is untrusted: control characters and terminal escape sequences are shown as visible text, and rich never
parses model output as markup.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.cells import cell_len, set_cell_size
from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from poise._lib.errors import visible
from poise.runs.notebook import Notebook, notebook_display

if TYPE_CHECKING:  # importing torch would delay the command line by seconds
    from poise.batch import Prompt
    from poise.sampling.trajectories import Trajectory
    from poise.training.steps import State, StepResult

Response = tuple[str, str, float, bool]  # prompt, completion, reward, correct

SHOWN = (  # metric, format
    ("reward/mean", "reward {:.2f}"),
    ("reward/accuracy", "accuracy {:.2f}"),
    ("rollout/length", "length {:.0f}"),
    ("rollout/entropy", "entropy {:.2f}"),
    ("time/tokens_per_s", "{:,.0f} tok/s"),
)
WINDOW = 20  # predict the remaining time from this many recent steps


class _Lasting:
    """A stream whose writes never raise an error: the run continues if the reader exits (``poise train | head -1``)."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = io.StringIO() if file is None else file  # None: the stream was closed before poise started

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """Write to the stream."""
        self._try(self._file.write, text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._try(self._file.flush)

    def _try(self, method: Callable[..., object], *args: str) -> None:
        try:
            method(*args)
        except BrokenPipeError:  # redirect to /dev/null, so that the rest of the buffer does not fail at exit
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), self._file.fileno())
        except (OSError, ValueError, RuntimeError):  # full disk, closed stream, or a write within a write
            pass


@contextmanager
def lasting_output() -> Iterator[None]:
    """Within this context, writing to standard output or standard error never raises an error."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Lasting(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


class Console:
    """Shows a run's progress, notes and tables on ``file``, by default standard output. ``quiet`` shows nothing.

    The run ends after ``total_steps``, or once ``budget`` tokens are sampled.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        budget: int | None = None,
        quiet: bool = False,
        file: TextIO | None = None,
        read: Callable[[Prompt], str] | None = None,
    ) -> None:
        self.total_steps, self.budget, self._read = total_steps, budget, read
        self.quiet = quiet
        self._file = cast(TextIO, _Lasting(sys.stdout if file is None else file))
        self._times = deque[tuple[int, int, float]](maxlen=WINDOW + 1)  # step, tokens up to it, time
        self.begin(start_step)
        self._live: Live | None = None
        self._notebook: Notebook | None = None
        if not quiet and file is None and total_steps and (display := notebook_display()):
            self._notebook = Notebook(display)
        # Do not ask rich whether this is a terminal: environment variables could make it write escape codes to a file.
        self._rich: RichConsole | None = None
        if not quiet and self._file.isatty():
            rich = RichConsole(file=self._file, markup=False, emoji=False, highlight=False)
            if not rich.is_dumb_terminal:
                self._rich = rich
                if total_steps:  # without steps, only tables are shown
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

    def on_start(self, state: State) -> None:
        """Start to predict the remaining time, after the first evaluation. Note if nothing is left to train."""
        if setting := state.ending(self.total_steps, self.budget):
            self.note(f"already at step {state.step}: nothing to train; to continue, raise {setting}=")
        self.begin(state.step, state.tokens)

    def on_step(self, result: StepResult) -> None:
        """Show a step; for the first and last step, also a few first attempts across the range of rewards."""
        from poise.sampling.trajectories import FIRST

        step, tokens, ending = result.state.step, result.state.tokens, result.ending
        if not result.trajectories:
            self.note(f"step {step}: no group has two attempts with a reward; nothing is learned")
        elif step == 1 or ending:
            self.samples_table([shown(each, self._read) for each in result.trajectories if each.role == FIRST])
        self.step(step, result.metrics)
        if self.budget is not None and ending:
            spent, early = f"budget={self.budget} is spent", f"steps={step} ended the run before budget={self.budget}"
            self.note(f"{spent if ending == 'budget' else early}: {tokens} tokens were sampled in {step} steps")

    def begin(self, step: int, tokens: int = 0) -> None:
        """Start measuring time at ``step``, to predict the remaining time. Earlier evaluations do not count."""
        self._times.clear()
        self._times.append((step, tokens, time.monotonic()))

    def step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Show a finished step. Missing metrics are skipped."""
        tokens = int(metrics.get("tokens/total") or 0)
        left = self._left(step, tokens)
        numbers = [form.format(value) for key, form in SHOWN if (value := metrics.get(key)) is not None]
        if self._notebook:
            text = "  ".join([self._done(step, tokens), *([left] if left else []), *numbers])
            self._notebook.step(step, self._share(step, tokens), text, metrics)
            return
        if self._live:
            self._bar.update(self._task, completed=self._share(step, tokens), left=left, done=self._done(step, tokens))
            self._view.renderables[1] = Text("  ".join(numbers), overflow="fold")
            return
        self._print("  ".join([f"step  {self._done(step, tokens)}", *numbers, *([left] if left else [])]))

    def note(self, text: str, *, wrap: bool = True) -> None:
        """Show a message, above the progress bar if there is one. Without ``wrap``, a long line stays one line."""
        self._print(visible(text), wrap=wrap)

    def stopped(self, resume_command: str) -> None:
        """Close the console, and show how to continue a run that ends early."""
        self.close()
        self.note(f"stopped; continue with: {resume_command}")

    def picture(self, path: Path) -> None:
        """In a notebook, show a picture of the run's curve."""
        if self._notebook:
            self._notebook.picture(path)

    def table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print dicts as a table: one column per key, numbers right-aligned."""
        columns = list(dict.fromkeys(key for row in rows for key in row))
        cells = [[visible(_cell(row.get(key))).replace("\n", " ") for key in columns] for row in rows]
        lines = [[visible(key).replace("\n", " ") for key in columns], *cells]
        right = [all(isinstance(row.get(key, 0.0), int | float) for row in rows) for key in columns]
        widths = [max(cell_len(line[i]) for line in lines) for i in range(len(columns))]
        for line in lines if rows else []:
            padded = [
                " " * (width - cell_len(cell)) + cell if number else set_cell_size(cell, width)
                for cell, width, number in zip(line, widths, right, strict=True)
            ]
            self._print("  ".join(padded).rstrip(), wrap=False)

    def samples_table(self, samples: Sequence[Response], k: int = 3, *, whole: bool = False) -> None:
        """Print ``k`` samples (prompt, completion, reward, correct), from the lowest reward to the highest.

        Long texts are cut in the middle, unless ``whole`` is set.
        """
        for prompt, completion, reward, correct in across_rewards(samples, k):
            self._print(f"sample  reward {reward:.2f}  {'correct' if correct else 'wrong'}")
            for name, text in (("prompt", prompt), ("completion", completion)):
                excerpt = visible(text) if whole else shorten(visible(text), 700)
                self._print(f"  {name}:\n    " + excerpt.replace("\n", "\n    "))

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
        """Format the run's progress."""
        steps = f"{step:>{len(str(self.total_steps))}}/{self.total_steps}"
        return steps if self.budget is None else f"{steps}  {tokens:,}/{self.budget:,} tokens"

    def _share(self, step: int, tokens: int) -> float:
        """The run's progress, from 0 to 1."""
        return min(1.0, max(step / self.total_steps, tokens / self.budget if self.budget else 0.0))

    def _left(self, step: int, tokens: int) -> str:
        """Predict the time until the last step or the end of the budget, from the recent steps."""
        if step > self._times[-1][0]:
            self._times.append((step, tokens, time.monotonic()))
        (first, before, then), (last, until, now) = self._times[0], self._times[-1]
        if last == first or self._share(step, tokens) >= 1:
            return ""
        seconds = (now - then) / (last - first) * (self.total_steps - step)
        if self.budget and until > before:
            seconds = min(seconds, (now - then) / (until - before) * (self.budget - tokens))
        return f"{duration(seconds)} left"

    def _clean(self, text: str) -> str:
        """Escape characters that the stream cannot encode, so that printing them does not end the run."""
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)

    def _print(self, text: str, *, wrap: bool = True) -> None:
        if self.quiet:
            return
        if self._rich:
            self._rich.print(Text(self._clean(text)), soft_wrap=not wrap)
        else:
            print(self._clean(text), file=self._file, flush=True)


def shorten(text: str, characters: int, lines: int = 16) -> str:
    """Cut the middle out of a long text, and state how much was cut."""
    parts = text.split("\n")
    if len(parts) > lines:
        middle = f"[… {len(parts) - lines + 1:,} lines …]"
        text = "\n".join([*parts[: lines // 2], middle, *parts[len(parts) - (lines - 1 - lines // 2) :]])
    if len(text) > characters:
        half = characters // 2
        text = min(text, f"{text[:half]} [… {len(text) - 2 * half:,} characters …] {text[-half:]}", key=len)
    return text


def across_rewards(samples: Sequence[Response], k: int) -> list[Response]:
    """Choose ``k`` samples whose rewards are spread evenly from the lowest to the highest."""
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
    """Format seconds as ``2:10``; from one hour, as ``1:02:10``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def dialogue(sample: Trajectory) -> str:
    """Join the replies and the environment's messages in order, with a bar before each line from the environment."""
    parts = [
        message["content"]
        if message["role"] == "assistant"
        else "".join(f"\n  │ {line}" for line in message["content"].splitlines()) + "\n"
        for message in sample.messages
    ]
    return "".join(parts) or sample.text


def shown(sample: Trajectory, read: Callable[[Prompt], str] | None) -> Response:
    """Return what the console shows of a sample. With ``read``, the prompt is the exact text that the model read."""
    return (
        read(sample.prompt) if read else sample.problem.prompt,
        dialogue(sample),
        sample.score.reward,
        sample.score.correct,
    )
