"""The native engine as it runs on a CPU, and with the slots that it has on CUDA."""

from poise.sampling.native import graphs
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


ENGINES = [NativeEngine, SlotEngine]
