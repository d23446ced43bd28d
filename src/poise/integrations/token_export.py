"""Writes a trainer's responses with their tokens to a file for ``poise report`` and ``poise diagnose``.

docs/report.md ("Runs of other trainers") lists the fields of a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from poise._lib.files import check_output, dumps, expand, loads, replacing
from poise.batch import Phase, TokenBatch
from poise.referee.report.token_texts import Decoder, response_texts


class TokenExport:
    """A token file with the first batch and every ``every``-th batch; a batch of long responses takes megabytes.

    A resumed run appends to its file, and replaces the lines of the steps that it repeats.
    """

    def __init__(self, path: str | Path, every: int = 10) -> None:
        self.path, self.every = expand(path), every
        if self.path.suffix != ".jsonl":
            raise ValueError(f"export={str(path)!r}: name a file that ends with .jsonl")
        if every < 1:
            raise ValueError(f"export_every={every}: it must be at least 1")
        check_output(self.path)
        self._batches, self._begun = 0, False

    def wants_next(self) -> bool:
        """Whether to write the next batch. Call this once per batch."""
        self._batches += 1
        return self._batches == 1 or self._batches % self.every == 0

    def write(self, step: int, lines: Iterable[dict[str, Any]]) -> None:
        """Append the responses of a step."""
        if not self._begun:
            self._begin(step)
        self._begun = True
        with self.path.open("ab") as file:
            file.writelines(dumps({"step": step, **line}) for line in lines)

    def _begin(self, step: int) -> None:
        """Keep the file's lines of earlier steps. Raise FileExistsError for a file that has no recorded tokens."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return
        with self.path.open("rb") as old, replacing(self.path) as kept:
            for number, line in enumerate(old):
                earlier = _step(line)
                if earlier is None and number == 0:
                    raise FileExistsError(f"{self.path} is not a file of recorded tokens: export to another file")
                if earlier is not None and earlier < step:
                    kept.write(line)


def _step(line: bytes) -> int | None:
    """The step of a line of a token file; None if the line is damaged."""
    try:
        data = loads(line)
        return int(data["step"]) if "tokens" in data else None
    except (ValueError, TypeError, KeyError):
        return None


def lines(
    batch: TokenBatch,
    phases: Sequence[Phase],
    prompts: Sequence[Tensor],
    responses: Sequence[Tensor],
    decode: Callable[[list[int]], str],
) -> list[dict[str, Any]]:
    """One line per row of a batch. ``prompts`` and ``responses`` are token ids without padding."""
    decoder = Decoder(decode)
    numbers = {"logp": batch.old_logp, "advantage": batch.token_advantages, "entropy": batch.entropy}
    made = []
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        own = batch.mask[row]
        line: dict[str, Any] = {"prompt": decoder.text(prompt.tolist())}
        line |= response_texts(response.tolist(), own[: len(response)].tolist(), decoder)
        line |= {name: _digits(values[row, own]) for name, values in numbers.items() if values is not None}
        line["weight"] = {phase.name: _digits(phase.policy[row, own]) for phase in phases}
        scalars = {"reward": batch.rewards, "correct": batch.correct, "group": batch.groups}
        made.append(line | {name: values[row].item() for name, values in scalars.items() if values is not None})
    return made


def _digits(values: Tensor) -> list[float]:
    """Round the values to the 7 digits of float32."""
    return [float(f"{value:.7g}") for value in values.tolist()]
