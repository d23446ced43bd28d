"""The native engine as it runs on a CPU, and with the slots and the fused step that it has on CUDA."""

import sys
from types import ModuleType, SimpleNamespace

import torch

from poise.sampling.native import fused_step, graphs
from poise.sampling.native.decoder import Decoder
from poise.sampling.native.engine import NativeEngine
from poise.sampling.native.slot_cache import SlotCache
from support.tiny_models import ARCHITECTURES

NATIVE = [name for name in ARCHITECTURES if name != "gemma2"]  # whose attention has a soft-cap


class SlotEngine(NativeEngine):
    """As on CUDA, with fixed slots and few numbers of rows, but without CUDA graphs and kernels."""

    def _decoder_for(self, requests, least=(0, 0)):
        del least

        class Fixed(Decoder):
            def decoded_rows(self, n):
                return next(s for s in graphs.sizes(self.cache.slots) if s >= n) if n else 0

        like = next(self.policy.trunk.parameters())
        slots = min(len(requests), self.batch or len(requests))
        length = max(len(r.prompt.tokens) for r in requests) + max(r.max_tokens for r in requests)
        width = self.policy.head().weight.shape[1]
        return Fixed(self.policy, SlotCache(self.shapes, slots, length, width, like))


class StepEngine(SlotEngine):
    """As on CUDA, with the fused step; see ``without_kernels``."""

    def __init__(self, policy, batch=0):
        super().__init__(policy, batch)
        self.step = fused_step.fused_step(policy)

    def _decoder_for(self, requests, least=(0, 0)):
        return UngraphedDecoder(self.policy, super()._decoder_for(requests, least).cache, self.step)


class UngraphedDecoder(graphs.GraphedDecoder):
    """Takes the steps that it would record."""

    run = Decoder.run


def without_kernels(monkeypatch):
    """Let the fused step run on a CPU, in any dtype: plain torch in place of its kernels."""

    def add_norm(x, delta, weight, epsilon):
        total = x if delta is None else x + delta
        return total, total * torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon) * weight

    def silu_product(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    plain = ModuleType("poise.sampling.native.kernels")
    plain.add_norm, plain.silu_product = add_norm, silu_product
    monkeypatch.setitem(sys.modules, plain.__name__, plain)
    monkeypatch.setattr(fused_step, "_device", SimpleNamespace(suits_triton=lambda _: True))


ENGINES = [NativeEngine, SlotEngine]
