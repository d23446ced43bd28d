"""Parts of loading a model that need no policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def add_adapter(model: Any, lora: Any, seed: int) -> Any:
    """The model with a new LoRA adapter."""
    import peft

    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=lora.targets
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would touch the generators of all GPUs too
        return peft.get_peft_model(model, settings)


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """transformers' own progress bars, only where they do not get in the way."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    if not shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()
