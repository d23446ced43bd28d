"""Attention over packed sequences of different lengths, registered with transformers as ``"poise"``.

transformers' models pass keywords of the forward call on to their attention function. Without ``packing=``, poise's
function is transformers' own "sdpa", mask included. With ``packing=``, the tokens belong to a ``Packed``: half
precision on CUDA runs torch's variable-length flash kernel; in all other cases segments are padded, but only inside the
attention function. With ``decoding=``, an engine manages the keys and values (``sampling/native/kv_cache.py``).

Shapes: L packed tokens, S segments, n sequences in decoding, H query heads, G key heads (H is a multiple of G), D head
width.
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
UNKNOWN = ("s_aux", "softcap", "head_mask", "position_bias", "cache")  # keywords that change the result: not supported
_kernel = torch.ops.aten._flash_attention_forward
LAYERS = {"full_attention", "sliding_attention"}


Shape = tuple[int, int, int]  # of a layer's keys and values: key heads, width of a key, width of a value


def run(trunk: nn.Module, ids: Tensor, positions: Tensor, mask: Tensor | None = None, **keywords: object) -> Tensor:
    """(…, d) hidden states of a pass whose layers pass ``packing=`` or ``decoding=`` on to ``attention``.

    transformers passes a four-dimensional ``mask`` on unchanged, and builds no other mask.
    """
    mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=ids.device) if mask is None else mask
    states: Tensor = trunk(
        input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False, **keywords
    ).last_hidden_state
    return states


class ShapeRecorder:
    """A stand-in for an engine's KV cache. It records the shapes of every layer's keys and values."""

    def __init__(self) -> None:
        self.shapes: dict[int, Shape] = {}

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Record the shapes of the keys and values (G, L, D)."""
        self.shapes[layer] = (key.shape[0], key.shape[2], value.shape[2])


class Decoding(Protocol):
    """An engine's KV cache, as the attention function uses it."""

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the keys and values of packed tokens, (G, L, D)."""
        ...

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """(n, H, D) attention of one new token per sequence to the cached tokens and to itself."""
        ...

    def attend_text(self, layer: int, query: Tensor, scale: float | None, window: int | None) -> Tensor:
        """(L, H, D) attention of packed tokens to themselves and all earlier tokens of their sequences.

        The keys and values of all these tokens are in the cache.
        """
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
    """transformers' interface: from (1, H, L, D) queries and (1, G, L, D) keys and values to (1, L, H, D).

    A decoding step maps (n, H, 1, D) to (n, 1, H, D). With both ``packing`` and ``decoding``, a packed pass over
    prompts fills the engine's KV cache.
    """
    if decoding is not None:
        return _decode(module, query, key, value, packing, decoding, settings), None
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)  # type: ignore[no-any-return]
    _check(module, settings)
    return _over_segments(query, key, value, packing, settings.get("scaling"), settings.get("sliding_window")), None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # KV bookkeeping stays outside the compiled graph
def _decode(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packed | None,
    decoding: Decoding,
    settings: dict[str, Any],
) -> Tensor:
    _check(module, settings)
    layer, scale, window = int(module.layer_idx), settings.get("scaling"), settings.get("sliding_window")  # type: ignore[arg-type]
    if packing is None:
        step: Tensor = decoding.attend(layer, query[:, :, 0], key[:, :, 0], value[:, :, 0], scale, window)
        return step.contiguous()[:, None]  # contiguous, like transformers' own functions: JetMoE takes a view
    decoding.keep(layer, key[0], value[0])
    if packing.cached_S is not None:
        return decoding.attend_text(layer, query[0].transpose(0, 1), scale, window).contiguous()[None]
    out: Tensor = _over_segments(query, key, value, packing, scale, window)
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]  # uncompiled, so that new lengths need no new compilation
def _over_segments(
    query: Tensor, key: Tensor, value: Tensor, packing: Packed, scale: float | None, window: int | None
) -> Tensor:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (L, heads, D) each
    return (_flash if _has_kernel(q, v) else _padded)(q, k, v, packing, scale, window).contiguous()[None]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def adopt(model: Any) -> bool:
    """Set the model's attention implementation, and return whether the model can be run packed.

    A model can be run packed if its layers pass everything that the attention function needs to it; transformers' flash
    attention has the same condition. Only "eager" applies a soft-cap on attention scores; "sdpa" would silently ignore
    it.
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
        raise NotImplementedError(f"{type(module).__name__}: packed attention does not support {', '.join(unknown)}")


@cache
def _has_flash(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8


def flash_takes(like: Tensor, key: int, value: int) -> bool:
    """Whether torch's flash kernel supports heads of these widths on the device and in the dtype of ``like``.

    The meta device counts as CUDA with the kernel, because memory is forecast there.
    """
    if key != value or key % 8 or key > 256:
        return False
    half = like.dtype in (torch.bfloat16, torch.float16)
    return like.is_meta or (like.is_cuda and half and _has_flash(like.device))


def _has_kernel(q: Tensor, v: Tensor) -> bool:
    return flash_takes(q, q.shape[-1], v.shape[-1])


def _flash(q: Tensor, k: Tensor, v: Tensor, packing: Packed, scale: float | None, window: int | None) -> Tensor:
    if packing.keys is not None:
        k, v = repeat(k, packing.keys), repeat(v, packing.keys)
    longest = packing.longest_q, packing.longest_k
    return _run_kernel(q, k, v, packing.starts_q, packing.starts_k, *longest, scale, window)


def _run_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float | None,
    window: int | None,
    *,
    causal: bool = True,
    used: Tensor | None = None,
) -> Tensor:
    """torch's variable-length flash kernel, without dropout."""
    out: Tensor = _kernel(
        q,
        k,
        v,
        starts_q,
        starts_k,
        longest_q,
        longest_k,
        0.0,
        causal,
        False,  # no debug mask
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0 if causal or window is not None else -1,
        seqused_k=used,
    )[0]
    return out


def over_slots(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    used: Tensor,
    scale: float | None,
    window: int | None,
    longest_q: int | None = None,
) -> Tensor:
    """Attention of (n, H, D) queries, one per slot, over the first ``used`` (n,) of (n, length, G, D) keys.

    Each query belongs to the token of the last used key. ``starts_q`` has the boundaries of queries (0, 1, …),
    ``starts_k`` the boundaries of slots (0, length, …). ``used``, ``starts_q`` and ``starts_k`` are int32.

    With ``longest_q``, a slot has up to this number of queries, which belong to the tokens of its last keys. Only the
    flash kernel supports this.
    """
    if longest_q is not None or _has_kernel(q, values):
        # A single query belongs to the last key, so a causal mask would hide nothing. Without a mask, the kernel reads
        # a key once for all query heads that share it.
        packed, longest = (q.contiguous(), keys.flatten(0, 1), values.flatten(0, 1)), (longest_q or 1, keys.shape[1])
        causal = longest_q is not None
        return _run_kernel(*packed, starts_q, starts_k, *longest, scale, window, causal=causal, used=used)
    distance = used[:, None] - 1 - torch.arange(keys.shape[1], device=q.device)
    allowed = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    k, v = (repeat_kv(x.transpose(1, 2), q.shape[1] // x.shape[2]) for x in (keys, values))
    return scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=allowed[:, None, None], scale=scale)[:, :, 0]


def text_over_keys(q: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: int | None) -> Tensor:
    """Attention of the last (N, H, D) queries of one sequence over all of its (G, T, D) keys, in the keys' dtype."""
    n, total = len(q), keys.shape[1]
    positions = torch.arange(total, device=q.device)
    distance = positions[total - n :, None] - positions
    allowed = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    k, v = (repeat_kv(x[None], q.shape[1] // len(x)) for x in (keys, values))
    out = scaled_dot_product_attention(q.transpose(0, 1)[None].to(k.dtype), k, v, attn_mask=allowed, scale=scale)
    return out[0].transpose(0, 1).to(q.dtype)


def repeat(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]``. The gradients of a repeated row are summed in float32."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return _Repeat.apply(x, index) if half else x.index_select(0, index)  # type: ignore[no-untyped-call]


class _Repeat(torch.autograd.Function):
    """``index_select`` whose backward pass sums in float32: half precision would round at every addition."""

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
    queries, keys, values = (_to_rectangles(x, padded) for x in (q, k, v))
    outs = []
    for rectangle, own_q, own_k, own_v in zip(padded.rectangles, queries, keys, values, strict=True):
        if rectangle.longest_prefix:
            own_k, own_v = (
                torch.cat([repeat(prefixes[:, : rectangle.longest_prefix], rectangle.prefix), own], 1)
                for prefixes, own in ((keys[0], own_k), (values[0], own_v))
            )
        outs.append(_attend(own_q, own_k, own_v, rectangle.mask(window, q.dtype), scale))
    return _Collect.apply(torch.cat(outs), padded.slots)  # type: ignore[no-untyped-call,no-any-return]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """From (rows, width, H, D) queries and (rows, prefix + width, G, D) keys and values to (rows · width, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (repeat_kv(x, q.shape[1] // x.shape[1]) for x in (k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, is_causal=mask is None)
    return out.transpose(1, 2).flatten(0, 1)


def _to_rectangles(x: Tensor, padded: Padded) -> list[Tensor]:
    """From (L, heads, D) to one (rows, width, heads, D) per rectangle."""
    slots = _Spread.apply(x, padded.index, padded.slots)  # type: ignore[no-untyped-call]
    parts = slots.split([r.rows * r.width for r in padded.rectangles])
    return [part.unflatten(0, (r.rows, r.width)) for part, r in zip(parts, padded.rectangles, strict=True)]


class _Spread(torch.autograd.Function):
    """Copy packed tokens to slots. The output of padding is never read, so the gradient is a selection too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, slots: Tensor) -> Tensor:
        ctx.slots = slots
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.slots), None, None


class _Collect(_Repeat):
    """Copy slots back to packed tokens. No slot is read twice, and padding gets a gradient of 0."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        slots_grad = grad.new_zeros((ctx.rows, *grad.shape[1:]))
        slots_grad[ctx.index] = grad
        return slots_grad, None
