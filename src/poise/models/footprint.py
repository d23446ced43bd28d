"""The least memory that training needs, from a model's configuration, before its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from poise._lib import live
from poise._lib.device import total_bytes
from poise._lib.errors import bytes_text
from poise.models.loading import adapted_model, add_adapter, check_config, resolve_device, resolve_dtype
from poise.models.location import ModelError, check_hub, locate, split_revision

FLOAT32 = 4  # bytes: the optimizer's weights, gradients and two moments


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device for as long as a run lasts, without activations, logits and the KV cache."""

    parameters: int
    weights: int
    training: int  # float32 masters of half-precision weights, gradients, and Adam's two moments
    copy: int = 0  # the frozen starting weights
    adapter: bool = False

    @classmethod
    def of(
        cls, name: str, *, device: str, dtype: str, lora: Any = None, copies: bool = False, remote_code: bool = False
    ) -> Footprint | None:
        """The footprint of a model by its name. None if transformers cannot build it from its configuration.

        ``copies``: whether the run needs the starting weights too. An adapter needs no copy of them.
        """
        kind = resolve_dtype(dtype, resolve_device(device))
        try:
            model = _without_weights(name, kind, remote_code)
            if lora is not None:
                with torch.device("meta"):
                    model = add_adapter(model, lora, seed=0)
        except ModelError:
            raise
        except Exception:  # of transformers, peft or third-party code: loading the model will say what is wrong
            return None
        if model is None:
            return None
        weights = sum(each.nbytes for each in model.parameters())
        trained = [each for each in model.parameters() if each.requires_grad]
        training = sum(each.numel() * (3 + (each.itemsize < FLOAT32)) * FLOAT32 for each in trained)
        adapter = lora is not None
        parameters = sum(each.numel() for each in model.parameters())
        return cls(parameters, weights, training, weights if copies and not adapter else 0, adapter)

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.training + self.copy

    def __str__(self) -> str:
        parts = {"weights": self.weights, "gradients and optimizer": self.training, "starting weights": self.copy}
        shown = ", ".join(f"{what} {bytes_text(size)}" for what, size in parts.items() if size)
        return f"{bytes_text(self.total)} ({shown}) for {self.parameters / 1e6:,.1f} M parameters"

    def check(self, name: str, device: str) -> None:
        """Raise ModelError if the device is too small for this."""
        place = resolve_device(device)
        room = total_bytes(place)
        if room is None or self.total <= room:
            return
        remedies = (
            [] if self.adapter else [f"train an adapter (lora.rank=16: {bytes_text(self.weights)} and little more)"]
        )
        remedies += ["set objective.kl_coef=0, which needs no copy of the starting weights"] if self.copy else []
        remedies += ["choose a smaller model"]
        needs = f"training takes at least {self}, and {place} has {bytes_text(room)}"
        raise ModelError(f"model={name}: {needs}: {', or '.join(remedies)}")


def _without_weights(name: str, dtype: torch.dtype, remote_code: bool) -> Any:
    """The model with its parameters on the meta device: shapes without values. None if its weights are quantised."""
    import transformers

    hub_id, revision = split_revision(name)
    source = locate(hub_id)
    if live.is_name(source):
        config = live.get(source).model.config
    elif (base := adapted_model(Path(source))) is not None:
        return _without_weights(base, dtype, remote_code)
    else:
        common: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": remote_code}
        if not Path(source).is_dir():
            check_hub(source, common["revision"])
        config = transformers.AutoConfig.from_pretrained(source, **common)
        check_config(name, config, remote_code)
    if getattr(config, "quantization_config", None):
        return None
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=remote_code)
