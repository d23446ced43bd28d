"""Attention over packed sequences of different lengths, as one of transformers' attention functions.

Registered as ``"poise"``. Without ``packing=`` it is transformers' own "sdpa", mask included. With it, a keyword that
transformers' models hand down to their attention, the tokens are those of a ``Packed``: half precision on CUDA goes to
the variable-length flash kernel that comes with torch; anything else is padded here, inside the attention alone. With
``decoding=`` the keys and values are those of an engine (``rollout/slots.py``).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from poise.models.packing import Packed, Padded

NAME = "poise"
UNKNOWN = ("s_aux", "softcap", "head_mask", "position_bias", "cache")  # what would change the result, and is not done
_kernel = torch.ops.aten._flash_attention_forward
LAYERS = {"full_attention", "sliding_attention"}


class Decoding(Protocol):
    """An engine's keys and values."""

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Take the keys and values of packed tokens, (heads, L, D)."""
        ...

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Attention of one token per sequence, (n, heads, D), to all that went before it and to itself."""
        ...


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packed | None = None,
    decoding: Decoding | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """(1, H, L, D) queries, keys and values to (1, L, H, D), as transformers calls it.

    In decoding (n, H, 1, D) to (n, 1, H, D); while a prompt is read, packed, its keys are kept for that.
    """
    if decoding is not None:
        return _decode(module, query, key, value, packing, decoding, settings), None
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)  # type: ignore[no-any-return]
    _check(module, settings)
    return _over_segments(query, key, value, packing, settings.get("scaling"), settings.get("sliding_window")), None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # what is kept where is no business of a compiled layer
def _decode(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, packing: Packed | None, decoding: Decoding,
    settings: dict[str, Any],
) -> Tensor:  # fmt: skip
    _check(module, settings)
    layer, scale, window = int(module.layer_idx), settings.get("scaling"), settings.get("sliding_window")  # type: ignore[arg-type]
    if packing is None:
        new: Tensor = decoding.attend(layer, query[:, :, 0], key[:, :, 0], value[:, :, 0], scale, window)
        return new.contiguous()[:, None]  # as transformers' own functions return it: JetMoE takes a view
    decoding.keep(layer, key[0], value[0])
    out: Tensor = _over_segments(query, key, value, packing, scale, window)
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled layer calls it as it is, whatever the lengths
def _over_segments(
    query: Tensor, key: Tensor, value: Tensor, packing: Packed, scale: float | None, window: int | None
) -> Tensor:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (L, heads, D)
    return (_flash if _has_kernel(q, v) else _padded)(q, k, v, packing, scale, window).contiguous()[None]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def adopt(model: Any) -> bool:
    """Give the model the attention that it needs, and say whether it may be run packed.

    What has to be known of a layer must reach the attention function: so it must for transformers' flash attention.
    A soft-cap on attention scores is known to "eager" alone; "sdpa" would leave it out without a word.
    """
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    if model.config._attn_implementation not in ("sdpa", NAME):
        return False
    layers = set(getattr(config, "layer_types", None) or ())
    supported = model._supports_attention_backend and getattr(model, "_supports_flash_attn", False)
    if not supported or not layers <= LAYERS:
        return False
    model.set_attn_implementation(NAME)
    return bool(model.config._attn_implementation == NAME)


def _check(module: nn.Module, settings: dict[str, Any]) -> None:
    unknown = [name for name in UNKNOWN if settings.get(name) is not None]
    if settings.get("dropout"):
        unknown.append("dropout")
    causal = settings.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        unknown.append("is_causal=False")
    if unknown:
        raise NotImplementedError(f"{type(module).__name__}: packed attention does not know {', '.join(unknown)}")


@cache
def _has_flash(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8


def flash_takes(like: Tensor, key: int, value: int) -> bool:
    """Whether torch's flash kernel takes heads of these widths, where and in the precision that ``like`` is."""
    half = like.dtype in (torch.bfloat16, torch.float16)
    return like.is_cuda and half and key == value and key % 8 == 0 and key <= 256 and _has_flash(like.device)


def _has_kernel(q: Tensor, v: Tensor) -> bool:
    return flash_takes(q, q.shape[-1], v.shape[-1])


def _flash(q: Tensor, k: Tensor, v: Tensor, packing: Packed, scale: float | None, window: int | None) -> Tensor:
    if packing.keys is not None:
        k, v = repeat(k, packing.keys), repeat(v, packing.keys)
    out: Tensor = _kernel(
        q, k, v, packing.starts_q, packing.starts_k, packing.longest_q, packing.longest_k, 0.0, True, False,
        scale=scale, window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )[0]  # fmt: skip
    return out


def over_slots(
    q: Tensor, keys: Tensor, values: Tensor, starts_q: Tensor, starts_k: Tensor, used: Tensor, scale: float | None,
    window: int | None,
) -> Tensor:  # fmt: skip
    """(n, heads, D) queries, one per slot of (n, length, fewer heads, D) keys, of which the first ``used`` (n,) count.

    A query is that of the last key used. ``starts_q`` and ``starts_k`` are where queries and slots begin: 0, 1, … and
    0, length, …; all three are int32.
    """
    if _has_kernel(q, values):
        # Neither causal nor bounded on the right, which would change nothing: without both, the kernel reads a key once
        # for all query heads that share it.
        out: Tensor = _kernel(
            q.contiguous(), keys.flatten(0, 1), values.flatten(0, 1), starts_q, starts_k, 1, keys.shape[1], 0.0, False,
            False, scale=scale, window_size_left=-1 if window is None else window - 1,
            window_size_right=-1 if window is None else 0, seqused_k=used,
        )[0]  # fmt: skip
        return out
    back = used[:, None] - 1 - torch.arange(keys.shape[1], device=q.device)
    seen = back >= 0 if window is None else (back >= 0) & (back < window)
    k, v = (repeat_kv(x.transpose(1, 2), q.shape[1] // x.shape[2]) for x in (keys, values))
    return scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=seen[:, None, None], scale=scale)[:, :, 0]


def repeat(x: Tensor, index: Tensor) -> Tensor:
    """Some rows of x, often several times, with gradients that are added up in float32."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return _Repeat.apply(x, index) if half else x.index_select(0, index)  # type: ignore[no-untyped-call]


class _Repeat(torch.autograd.Function):
    """Rounding to half precision at every addition would show."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.index, ctx.rows = index, len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = torch.zeros(ctx.rows, *grad.shape[1:], dtype=torch.float32, device=grad.device)
        return total.index_add_(0, ctx.index, grad.float()).to(grad.dtype), None


def _padded(q: Tensor, k: Tensor, v: Tensor, packing: Packed, scale: float | None, window: int | None) -> Tensor:
    padded = packing.padded
    queries, keys, values = (_spread(x, padded) for x in (q, k, v))
    outs = []
    for shape, own_q, own_k, own_v in zip(padded.rectangles, queries, keys, values, strict=True):
        if shape.longest_prefix:
            own_k, own_v = (
                torch.cat([repeat(first[:, : shape.longest_prefix], shape.prefix), own], 1)
                for first, own in ((keys[0], own_k), (values[0], own_v))
            )
        outs.append(_attend(own_q, own_k, own_v, shape.mask(window, q.dtype), scale))
    return _Collect.apply(torch.cat(outs), padded.slots)  # type: ignore[no-untyped-call,no-any-return]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """(n, T, heads, D) queries and (n, K, fewer heads, D) keys and values to (n · T, heads, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (repeat_kv(x, q.shape[1] // x.shape[1]) for x in (k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, is_causal=mask is None)
    return out.transpose(1, 2).flatten(0, 1)


def _spread(x: Tensor, padded: Padded) -> list[Tensor]:
    """(L, heads, D) as rectangles, (rows, width, heads, D) each."""
    slots = _Spread.apply(x, padded.index, padded.slots)  # type: ignore[no-untyped-call]
    parts = slots.split([shape.rows * shape.width for shape in padded.rectangles])
    return [part.unflatten(0, (s.rows, s.width)) for part, s in zip(parts, padded.rectangles, strict=True)]


class _Spread(torch.autograd.Function):
    """Packed tokens into slots. Only real slots are ever looked at, so the gradient is a plain selection too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, slots: Tensor) -> Tensor:
        ctx.slots = slots
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.slots), None, None


class _Collect(torch.autograd.Function):
    """Packed tokens out of their slots; padding gets a gradient of 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor) -> Tensor:
        ctx.slots, ctx.rows = slots, len(x)
        return x.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        spread = grad.new_zeros((ctx.rows, *grad.shape[1:]))
        spread[ctx.slots] = grad
        return spread, None
