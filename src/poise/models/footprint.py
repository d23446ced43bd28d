"""Compute the memory that training takes from a model's configuration alone, before its weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from poise._lib.device import total_bytes
from poise._lib.errors import bytes_text
from poise.models.activations import USABLE_SHARE, Activations, measure
from poise.models.loading import add_adapter, configuration, resolve_device, resolve_dtype
from poise.models.location import ModelError

FLOAT32 = 4  # bytes: the optimizer's weights and gradients


@dataclass(frozen=True)
class Rows:
    """The sizes of a step, in tokens and in responses."""

    prompt: int  # largest number of tokens
    response: int  # largest number of tokens
    group: int
    count: int  # responses that are sampled together

    @property
    def longest(self) -> int:
        """The largest combined length of a prompt and its response, in tokens."""
        return self.prompt + self.response


@dataclass(frozen=True)
class Footprint:
    """The bytes that a run holds on the device from start to end.

    With ``rows``, also the bytes of a pass and of the KV cache.
    """

    parameters: int
    weights: int
    training: int  # float32 masters of half-precision weights, gradients, and Adam's two moments
    copy: int = 0  # the frozen starting weights
    adapter: bool = False
    rows: Rows | None = None
    activations: Activations | None = None  # None: not asked for, or the model cannot be run packed

    @classmethod
    def of(
        cls,
        name: str,
        *,
        device: str,
        dtype: str,
        lora: Any = None,
        copies: bool = False,
        remote_code: bool = False,
        moments: float = 2 * FLOAT32,
        rows: Rows | None = None,
    ) -> Footprint | None:
        """The footprint of a model by its name. None if transformers cannot build it from its configuration.

        ``copies`` says whether the run also needs the starting weights; a run with an adapter needs no copy of them.
        ``moments`` is the number of bytes of Adam's moments per trained weight. With ``rows``, activations are measured
        too.
        """
        kind = resolve_dtype(dtype, resolve_device(device))
        try:
            model = _without_weights(name, kind, remote_code)
            if lora is not None:
                with torch.device("meta"):
                    model = add_adapter(model, lora, seed=0)
        except ModelError:
            raise
        except Exception:  # raised by transformers, peft or third-party code: loading the model reports the cause
            return None
        if model is None:
            return None
        weights = sum(each.nbytes for each in model.parameters())
        trained = [each for each in model.parameters() if each.requires_grad]
        masters = (each.numel() * FLOAT32 for each in trained if each.itemsize < FLOAT32)
        training = sum(masters) + int((FLOAT32 + moments) * sum(each.numel() for each in trained))
        adapter = lora is not None
        parameters = sum(each.numel() for each in model.parameters())
        copied = weights if copies and not adapter else 0
        return cls(parameters, weights, training, copied, adapter, rows, _activations(model, rows))

    @property
    def total(self) -> int:
        """The bytes that the run holds on the device from start to end."""
        return self.weights + self.training + self.copy

    def __str__(self) -> str:
        parts = {"weights": self.weights, "gradients and optimizer": self.training, "starting weights": self.copy}
        shown = ", ".join(f"{what} {bytes_text(size)}" for what, size in parts.items() if size)
        return f"{bytes_text(self.total)} ({shown}) for {self.parameters / 1e6:,.1f} M parameters"

    def passes(self, tokens: int) -> str:
        """A sentence about the activations of a pass of ``tokens`` tokens and the cache of all rows."""
        if self.activations is None or self.rows is None:
            return "activations and the KV cache come on top"
        kept, again = (self.activations.peak(tokens, checkpointed=each) for each in (False, True))
        cache = self.rows.count * self.rows.longest * self.activations.cache
        rows = f"{self.rows.count} rows of {self.rows.longest:,} tokens"
        return (
            f"activations of a pass of {tokens:,} tokens {bytes_text(kept)}, or {bytes_text(again)} with gradient "
            f"checkpointing; KV cache up to {bytes_text(cache)} ({rows}; with less memory, some rows wait)"
        )

    def room(self, device: torch.device) -> float:
        """The bytes that the device has left for passes and the cache."""
        return USABLE_SHARE * total_bytes(device) - self.total

    @property
    def least(self) -> int:
        """The total plus the smallest pass or one row's cache, whichever is larger, for the longest response."""
        if self.activations is None or self.rows is None:
            return self.total
        longest = self.rows.longest
        return self.total + max(self.activations.peak(longest, checkpointed=True), longest * self.activations.cache)

    def fits(self, device: torch.device) -> bool:
        """Whether the run may fit on the device. On CUDA this includes the smallest pass."""
        room = total_bytes(device)
        return not room or (self.least <= USABLE_SHARE * room if device.type == "cuda" else self.total <= room)

    def check(
        self, name: str, device: str, others: Callable[[], Iterable[tuple[str, Footprint | None]]] = tuple
    ) -> None:
        """Raise ModelError if the device is too small.

        ``others`` returns changed settings that would need less memory, each with its footprint.
        """
        place = resolve_device(device)
        if self.fits(place):
            return
        smaller = [(change, other) for change, other in others() if other is not None and other.fits(place)]
        remedies = [f"{change} ({bytes_text(other.least)})" for change, other in smaller]
        remedies += ["choose a smaller model"]
        needs = f"training takes at least {self}"
        if place.type == "cuda" and self.least > self.total:
            needs += f", and {bytes_text(self.least - self.total)} for a pass of a single response"
        room = bytes_text(total_bytes(place))
        usable = f", of which {USABLE_SHARE:.0%} can be used" if place.type == "cuda" else ""
        raise ModelError(f"model={name}: {needs}, and {place} has {room}{usable}: {', or '.join(remedies)}")


def _activations(model: Any, rows: Rows | None) -> Activations | None:
    if rows is None:
        return None
    try:
        return measure(model, rows.prompt, rows.response, rows.group)
    except Exception:  # a model's code may ask for values: then the pass size is found by trial
        return None


def _without_weights(name: str, dtype: torch.dtype, remote_code: bool) -> Any:
    """The model with its parameters on the meta device: shapes without values. None if its weights are quantised."""
    import transformers

    config = configuration(name, remote_code)
    if getattr(config, "quantization_config", None):
        return None
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=remote_code)
