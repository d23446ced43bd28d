"""One reward, called on a batch: in this process, or in one of its own that is killed when it hangs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from poise._lib.errors import short
from poise.rewards import worker
from poise.rewards.base import RewardError, TrainerState
from poise.rewards.processes import LOADING, LostError, Process

if TYPE_CHECKING:
    from poise.rewards.names import Spec

MOST_FAILED = 0.05  # of a batch's rows; with more, waiting for each would take hours


@dataclass
class Batch:
    """What rewards are called with. ``shared`` has a value per row under each name."""

    shared: Mapping[str, Sequence[Any]]
    ids: list[str]
    state: TrainerState
    environments: Sequence[Any] | None

    def __post_init__(self) -> None:
        for name, values in {**self.shared, "environments": self.environments or self.ids}.items():
            if len(values) != len(self.ids):
                raise ValueError(f"{name} has {len(values)} rows for {len(self.ids)} completions")

    def arguments(self, rows: Sequence[int]) -> dict[str, Any]:
        """The shared ones of these rows, in lists that the reward may change."""
        return {name: [values[row] for row in rows] for name, values in self.shared.items()}


@dataclass
class Outcome:
    """What one reward said about a batch. ``failed`` says of rows why there is no value; it is None there."""

    values: list[float | None]
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Sequence[Outcome | str]) -> Outcome:
        """The outcomes of single rows; a text says why there is none."""
        whole = cls([None] * len(parts))
        for row, part in enumerate(parts):
            if isinstance(part, str):
                whole.failed[row] = part
                continue
            whole.values[row] = part.values[0]
            whole.metrics += part.metrics
            for column, values in part.extra.items():
                whole.extra.setdefault(column, [None] * len(parts))[row] = values[0]
        return whole


class Caller:
    """What both ways to call a reward share."""

    def __init__(self, name: str):
        self.name = name

    def values(self, batch: Batch) -> Outcome:
        """Call the reward on the whole batch. What is wrong with it becomes a ``RewardError`` that names the row."""
        try:
            return self._attempt(batch, range(len(batch.ids)))
        except worker.WrongError as error:
            row, text = (error.row, error.text) if not error.raised else self._culprit(batch, error)
            where = "" if row is None else f" (row {batch.ids[row]})"
            raise RewardError(f"reward {self.name!r} {text}{where}") from error

    def close(self) -> None:
        """Free what it holds."""

    def _attempt(self, batch: Batch, rows: Sequence[int]) -> Outcome:
        raise NotImplementedError

    def _culprit(self, batch: Batch, error: worker.WrongError) -> tuple[int | None, str]:
        """The row that makes the reward raise, which the exception does not tell, and what it raises there."""
        for row in range(len(batch.ids)):
            try:
                self._attempt(batch, [row])
            except worker.WrongError as alone:
                return row, alone.text
            except LostError:
                break  # no time to look for it
        return None, error.text


class InProcess(Caller):
    """A reward that runs in this process. Nothing can cut it off."""

    def __init__(self, name: str, reward: Callable[..., Any]):
        super().__init__(name)
        self.reward = reward

    def _attempt(self, batch: Batch, rows: Sequence[int]) -> Outcome:
        log = worker.Log(len(rows))
        arguments = batch.arguments(rows)
        arguments |= {"trainer_state": batch.state, "log_extra": log.log_extra, "log_metric": log.log_metric}
        if batch.environments is not None:
            arguments["environments"] = [batch.environments[row] for row in rows]
        return Outcome(worker.call(self.reward, arguments, len(rows)), log.extra, log.metrics)


class InWorker(Caller):
    """A reward that runs in a process of its own. A call that takes too long is cut off."""

    def __init__(self, name: str, spec: Spec, timeout: float):
        super().__init__(name)
        self.spec, self.timeout = spec, timeout
        self._process: Process | None = None
        self._warned = False

    def values(self, batch: Batch) -> Outcome:
        """As in ``Caller``; where the call is cut off, row by row, and rows that hang by themselves have failed."""
        try:
            return super().values(batch)
        except LostError as error:
            return self._one_by_one(batch, str(error))

    def close(self) -> None:
        """End its process."""
        if self._process is not None:
            self._process.kill()

    def _one_by_one(self, batch: Batch, why: str) -> Outcome:
        count, parts, failed = len(batch.ids), [], 0
        if count == 1:
            return Outcome.joined([f"reward {self.name!r} {why} (row {batch.ids[0]})"])
        for row, row_id in enumerate(batch.ids):
            part: Outcome | str
            try:
                part = self._attempt(batch, [row])
            except LostError as error:
                part = f"reward {self.name!r} {error} (row {row_id})"
                failed += 1
            except worker.WrongError as error:
                raise RewardError(f"reward {self.name!r} {error.text} (row {row_id})") from error
            parts.append(part)
            if failed > max(1, MOST_FAILED * count):
                raise RewardError(
                    f"reward {self.name!r} has no value for {failed} of the first {row + 1} rows (of {count}), and at "
                    f"most {MOST_FAILED:.0%} may fail; the last one: {part}"
                )
        if not failed and not self._warned:
            self._warned = True
            warnings.warn(
                f"reward {self.name!r} {why} on {count} rows together, and did not on any row alone: it was called "
                "row by row, which is slow; give it a longer time limit (reward_timeout)",
                RuntimeWarning,
                stacklevel=2,
            )
        return Outcome.joined(parts)

    def _attempt(self, batch: Batch, rows: Sequence[int]) -> Outcome:
        if self._process is None or not self._process.alive:
            self._process = self._started()
        arguments = batch.arguments(rows)
        request = {"do": "call", "count": len(rows), "arguments": arguments, "state": asdict(batch.state)}
        try:
            reply = self._process.ask(request, self.timeout)
        except (TypeError, ValueError) as error:
            raise self._cannot_send(arguments, error) from error
        if "wrong" in reply:
            raise worker.WrongError(reply["wrong"], reply["row"], reply["raised"])
        return Outcome(reply["values"], reply["extra"], [(name, value) for name, value in reply["metrics"]])

    def _started(self) -> Process:
        spec, process = self.spec, Process()
        found = {"module": spec.module, "name": spec.name, "args": spec.args, "settings": spec.settings}
        try:
            reply = process.ask({"do": "load", **found, "path": sys.path}, LOADING)
        except LostError as error:
            reply = {"wrong": str(error)}
        if "wrong" in reply:
            process.kill()
            raise RewardError(
                f"reward {self.name!r} could not be loaded in a process of its own: {reply['wrong']}; "
                "reward_quick=true runs it in the trainer's process"
            )
        return process

    def _cannot_send(self, arguments: Mapping[str, Any], error: Exception) -> RewardError:
        for name, values in arguments.items():
            for value in values:
                try:
                    worker.pack(value)
                except (TypeError, ValueError):
                    return RewardError(
                        f"reward {self.name!r}: column {name!r} has {short(value)}, which cannot be sent to the "
                        "reward's process (only text, numbers, lists and dicts can); reward_quick=true runs it in "
                        "the trainer's"
                    )
        return RewardError(f"reward {self.name!r}: the batch cannot be sent to the reward's process: {error}")
