"""A model as an ordinary transformers folder: adapters merged, safetensors, tokenizer and chat template."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError

from poise._lib.files import TEMPORARY, remove
from poise.models.errors import first_line
from poise.models.hub import check_hub
from poise.models.loading import adapted_model, load_model, progress_bars
from poise.models.places import locate


def export(name: str, folder: Path, *, dtype: str = "auto", remote_code: bool = False) -> None:
    """Write the model of a run, a checkpoint or an adapter to a new folder. ``auto`` keeps the dtype of the base model.

    Adapters are merged in float32, and rounded once. The folder appears when it is complete.
    """
    source = locate(name)
    base = adapted_model(Path(source))
    target = _stored_dtype(source if base is None else locate(base)) if dtype == "auto" else getattr(torch, dtype)
    loaded = target if base is None else torch.float32
    model, tokenizer = load_model(name, device="cpu", dtype=str(loaded).removeprefix("torch."), remote_code=remote_code)
    model.to(target)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(TEMPORARY + folder.name)
    remove(temporary)
    try:
        with progress_bars(False):
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        if folder.exists():
            folder.rmdir()  # it is empty
        os.replace(temporary, folder)
    except Exception as error:
        # safetensors and tokenizers, written in Rust, raise their own error types for a full disk.
        if isinstance(error, SafetensorError) or "(os error " in str(error):
            raise OSError(f"{folder} could not be written: {first_line(error)}") from error
        raise
    finally:
        remove(temporary)


def _stored_dtype(source: str) -> torch.dtype:
    """The dtype that a model's config.json names."""
    import transformers

    if not Path(source).is_dir():
        check_hub(source)
    try:
        found = getattr(transformers.AutoConfig.from_pretrained(source), "dtype", None)
    except Exception:  # ``load_model`` says what is wrong with the model
        found = None
    return found if isinstance(found, torch.dtype) else torch.float32
