"""A decoding step for Llama-like models with eight kernels per layer; transformers' own code launches about forty.

For a small model, launching kernels takes most of the decoding time, even from a CUDA graph. This file therefore
implements the step for common layers with fewer kernels: one product for queries, keys and values; one product for gate
and up; each residual sum fused with the next norm; the rotation inside the attention. A LoRA adapter adds two thin
products (``models/adapters.py``); few rows with many keys need one more kernel (``kernels.py``). The results equal
transformers' and peft's up to rounding; a trial compares both for every model (``engine.py``). Other models decode
through their own code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from poise._lib import device as _device
from poise.models.layers import JoinedLinear, can_join, join
from poise.models.policy import Policy
from poise.sampling.native.slot_cache import Rotation, SlotCache

FUSED = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})  # model types that have these layers
PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


class FusedStep:
    """The decoding step of one model. It reads the model's own weights, so in-place updates take effect."""

    def __init__(self, trunk: Any) -> None:
        self.trunk = trunk
        self.joined = [[join(parts) for parts in _joinable(layer)] for layer in trunk.layers]

    @property
    def usable(self) -> bool:
        """Whether the model still has these layers and joined weights. Moving a model separates joined weights."""
        return all(
            _is_usual(layer) and all(map(JoinedLinear.covers, weights, _joinable(layer)))
            for weights, layer in zip(self.joined, self.trunk.layers, strict=True)
        )

    @torch.no_grad()
    def run(self, token: Tensor, cache: SlotCache) -> Tensor:
        """Run the tokens (n,) through the model, store their keys and values, and return the hidden states (n, W)."""
        from poise.sampling.native.kernels import add_norm, silu_product

        trunk, n = self.trunk, len(token)
        x = trunk.embed_tokens(token)
        cosine, sine = (part[0].contiguous() for part in trunk.rotary_emb(x[None], cache.positions[None, :n]))
        delta: Tensor | None = None
        for number, (layer, products) in enumerate(zip(trunk.layers, self.joined, strict=True)):
            attention, (project, output, widen, narrow) = layer.self_attn, products
            x, inner = add_norm(x, delta, *_norm(layer.input_layernorm))
            query, key, value = _heads(project(inner), attention)
            rotation = _rotation(attention, cosine, sine)
            values = cache.attend(number, query, key, value, attention.scaling, _window(attention), rotation)
            x, inner = add_norm(x, output(values.reshape(n, -1)), *_norm(layer.post_attention_layernorm))
            delta = narrow(silu_product(widen(inner)))
        return add_norm(x, delta, *_norm(trunk.norm))[1]


def fused_step(policy: Policy) -> FusedStep | None:
    """Build the fused step for a policy's model; None if the model's type or layers are not supported."""
    trunk = policy.trunk
    config, like = policy.base.config, next(trunk.parameters())
    if not _device.suits_triton(like) or config.model_type not in FUSED or config.hidden_act != "silu":
        return None
    layers = getattr(trunk, "layers", None)
    usual = isinstance(layers, nn.ModuleList) and all(_is_usual(layer) for layer in layers)
    return FusedStep(trunk) if usual and isinstance(getattr(trunk, "embed_tokens", None), nn.Embedding) else None


def _is_usual(layer: nn.Module) -> bool:
    parts = (getattr(layer, name, None) for name in PARTS)
    return all(isinstance(part, nn.Module) for part in parts) and all(map(can_join, _joinable(layer)))


def _joinable(layer: Any) -> list[list[Any]]:
    """Return the linear layers, grouped by input: queries, keys and values together; gate and up together."""
    attention, mlp = layer.self_attn, layer.mlp
    groups = (
        (attention, ("q_proj", "k_proj", "v_proj")), (attention, ("o_proj",)),
        (mlp, ("gate_proj", "up_proj")), (mlp, ("down_proj",)),
    )  # fmt: skip
    return [[getattr(module, name, None) for name in names] for module, names in groups]


def _norm(module: Any) -> tuple[Tensor, float]:
    return module.weight, module.variance_epsilon


def _heads(products: Tensor, attention: Any) -> list[Tensor]:
    """Return views of the queries (n, H, D), keys and values (n, G, D) in the joined products."""
    sizes = [part.out_features for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
    return [part.unflatten(-1, (-1, attention.head_dim)) for part in products.split(sizes, -1)]


def _window(attention: Any) -> int | None:
    """Return a layer's sliding window. Mistral's layers read the configuration's window; Llama's layers ignore it."""
    place = attention.config if attention.config.model_type == "mistral" else attention
    window: int | None = getattr(place, "sliding_window", None)
    return window


def _rotation(attention: Any, cosine: Tensor, sine: Tensor) -> Rotation:
    rotation = Rotation(cosine, sine) if getattr(attention, "use_rope", True) else Rotation()
    if not hasattr(attention, "q_norm"):
        return rotation
    (query_weight, epsilon), (key_weight, _) = _norm(attention.q_norm), _norm(attention.k_norm)
    return rotation._replace(query_weight=query_weight, key_weight=key_weight, epsilon=epsilon)
