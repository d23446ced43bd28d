"""Hidden states and head of the model inside a TRL trainer, for methods that read them (NTHR)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from poise.integrations.demands import CannotRegulateError
from poise.lm_head import Head


def causal_model(trainer: Any) -> Any:
    """The trainer's language model, without the wrappers of accelerate and PEFT."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "peft_config") else model


def head_of(trainer: Any) -> Head:
    """The model's head at the trainer's temperature."""
    model = causal_model(trainer)
    return Head.of(model.get_output_embeddings(), model.config.get_text_config(), trainer.temperature)


@contextmanager
def collected(trainer: Any, states: list[Tensor], length: int) -> Iterator[None]:
    """Append to ``states`` the hidden states that predict the last ``length`` tokens, by a hook on the base model."""
    hook = causal_model(trainer).base_model.register_forward_hook(
        lambda _module, _args, out: states.append(out.last_hidden_state[:, -length - 1 : -1].detach())
    )
    try:
        yield
    finally:
        hook.remove()


def check_head(trainer: Any, hidden: Tensor, logp: Tensor, output: dict[str, Any], name: str) -> None:
    """Raise unless our log-probabilities from these hidden states are TRL's, for some tokens of the batch."""
    row, column = (places[:64] for places in output["completion_mask"].nonzero(as_tuple=True))
    logits = head_of(trainer)(hidden[row, column]).float()
    ours = logits.log_softmax(-1).gather(-1, output["completion_ids"][row, column][:, None])[:, 0]
    gap = float((ours - logp[row, column].float()).abs().max()) if len(row) else 0.0
    exact = hidden.dtype == torch.float32 and trainer.accelerator.mixed_precision == "no"
    if not gap <= (1e-3 if exact else 0.3):
        raise CannotRegulateError(
            f"{type(causal_model(trainer)).__name__} does something between its base model and its head that poise "
            f"does not support (log-probabilities differ by {gap:.2g}): {name} cannot be used with it"
        )
