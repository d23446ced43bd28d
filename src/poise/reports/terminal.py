"""``poise tokens``: shows a response token by token in the terminal, shaded as in the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite

import torch
from rich.style import Style
from rich.text import Text
from torch import Tensor

from poise.runs.console import barred, visible

Arrays = Mapping[str, Tensor]
WARM, COOL = (213, 94, 0), (0, 114, 178)  # for values above and below the middle, as in the report


def _weight(tokens: Arrays) -> Tensor:
    return torch.stack([values for name, values in tokens.items() if name.startswith("weight/")]).sum(0)


def _gradient(tokens: Arrays) -> Tensor:
    """Size at the logits: ``w·|A|·‖e − π‖`` if it was measured, otherwise ``w·|A|·(1 − p)`` at the sampled token."""
    size = tokens["size"] if "size" in tokens else -torch.expm1(tokens["logp"])
    return (_weight(tokens) * tokens["advantage"]).abs() * size


SHADES: dict[str, tuple[Callable[[Arrays], Tensor], float]] = {  # each token's value, and the value that gets no shade
    "probability": (lambda tokens: tokens["logp"].exp(), 1.0),
    "weight": (_weight, 1.0),
    "advantage": (lambda tokens: tokens["advantage"], 0.0),
    "gradient": (_gradient, 0.0),
    "entropy": (lambda tokens: tokens["entropy"], 0.0),
    "nthr": (lambda tokens: tokens["nthr"], 0.0),
    "change": (lambda tokens: tokens["change"], 0.0),
}


def available(tokens: Arrays) -> list[str]:
    """The names of the shadings that these tokens have values for."""
    return [name for name in SHADES if name not in ("nthr", "change") or name in tokens]


def shaded(tokens: Arrays, texts: Mapping[int, str], by: str, environment: Sequence[tuple[int, str]] = ()) -> Text:
    """One response as shaded text; ``tokens`` are its arrays. Control characters are shown as escapes.

    ``environment`` has what was said between the replies, each with the number of tokens before it. It is dim, on lines
    of its own.
    """
    value_of, middle = SHADES[by]
    values = value_of(tokens).tolist()
    most = max((abs(value - middle) for value in values if isfinite(value)), default=0.0) or 1.0
    if by == "probability":
        most = 1.0
    text, said = Text(), dict(environment)
    for place, (token, value) in enumerate(zip(tokens["id"].tolist(), values, strict=True), 1):
        strength = abs(value - middle) / most if isfinite(value) else 0.0
        tone = WARM if value > middle or by == "probability" else COOL
        text.append(visible(texts[token]), _style(strength, tone) if strength > 0.01 else "")
        if place in said:
            text.append(visible(barred(said[place])), "dim")
    return text


def extremes(tokens: Arrays, texts: Mapping[int, str], by: str, count: int) -> list[dict[str, str | float | int]]:
    """The ``count`` tokens farthest from the unshaded value, as table rows, for terminals without colours."""
    value_of, middle = SHADES[by]
    values = value_of(tokens)
    ranked = (values - middle).abs().nan_to_num(-1.0).argsort(descending=True, stable=True)[:count].tolist()
    names = {"p": tokens["logp"].exp(), "advantage": tokens["advantage"], "weight": _weight(tokens)}
    rows: list[dict[str, str | float | int]] = []
    for i in ranked:
        own = {} if by in names or by == "probability" else {by: float(values[i])}
        facts = {name: float(value[i]) for name, value in names.items()}
        rows.append({"place": i + 1, "token": repr(visible(texts[int(tokens["id"][i])])), **own, **facts})
    return rows


def _style(strength: float, tone: tuple[int, int, int]) -> Style:
    """Black on a tint of the tone, which is readable on dark and light terminals."""
    mixed = [round(255 - min(1.0, strength) * 0.75 * (255 - part)) for part in tone]
    return Style(color="#000000", bgcolor="#" + "".join(f"{part:02x}" for part in mixed))
