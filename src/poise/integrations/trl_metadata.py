"""Records a run's regulator in its checkpoints, model card and trackers, and checks it on resume."""

from __future__ import annotations

from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import poise
from poise.integrations.demands import CannotRegulateError
from poise.regulators import Function, Regulator, text
from poise.regulators.base import parts_of

KEY = "poise"  # in trainer_state.json under stateful_callbacks, which TRL saves and restores
STOCK = "grpo"  # TRL's own update; also assumed for a checkpoint without an entry


def describe(regulator: Regulator) -> str:
    """The regulator's text form, or else the name of its class or function; the same in every process."""
    return " | ".join(_describe_one(part) for part in parts_of(regulator))


def _describe_one(part: Regulator) -> str:
    try:
        return text(part)
    except ValueError:
        target: Any = part.function if isinstance(part, Function) else part
        if is_dataclass(target):
            return repr(target)
        owner = target if hasattr(target, "__qualname__") else type(target)
        return f"{owner.__module__}:{owner.__qualname__}"


def check_resume(state: Any, regulator: str) -> None:
    """Raise if the checkpoint that this run resumes was trained with another regulator."""
    earlier = (state.stateful_callbacks or {}).get(KEY, {}).get("regulator", STOCK)
    if state.global_step and earlier != regulator:
        raise CannotRegulateError(
            f"the checkpoint of step {state.global_step} was trained with {earlier!r}, and this run would continue "
            f"with {regulator!r}; pass regulator={earlier!r}, or change_regulator=True if you want the change"
        )


def write_card(folder: str, regulator: str) -> None:
    """Add a section about the regulator to the model card, if TRL has written a card."""
    card = Path(folder) / "README.md"
    if not card.exists():
        return
    section = (
        f"\n## Token regulator\n\nThe update weighted tokens by `{regulator}` (poise {poise.__version__}).\n"
        "`grpo` is TRL's own update.\n"
    )
    card.write_text(card.read_text(encoding="utf-8").rstrip("\n") + "\n" + section, encoding="utf-8")


def tell_trackers(callbacks: list[Any], regulator: str) -> None:
    """Add the regulator to the run's settings in TensorBoard, W&B and trackio."""
    for callback in callbacks:
        if (writer := getattr(callback, "tb_writer", None)) is not None:
            writer.add_text("poise_regulator", regulator)
        for client in ("_wandb", "_trackio"):
            if (tracker := getattr(callback, client, None)) is not None:
                tracker.config.update({"poise_regulator": regulator}, allow_val_change=True)
