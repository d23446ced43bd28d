"""A few steps of decoding for the first rows, without looking at what comes out."""

from __future__ import annotations

import torch
from torch import Tensor

from poise._lib import triton as _triton
from poise.engines.native.kv_cache import Shape, SharedKeys, SlotKeys
from poise.lm_head import Head
from poise.models.packing import layout_prompts
from poise.models.policy import Policy
from poise.rollout.sampling import Sampling

EVERY = {"cpu": 8, "cuda": 32}  # steps between two looks at what has finished; a look makes the host wait


class Decoder:
    """A model, its keys, and the tensors that a step reads and writes.

    A step draws a token from the state of the one before, and runs it through the model. Everything it needs is in
    tensors that stay where they are, so that it can be recorded as a CUDA graph; it does not know which sequences have
    ended.
    """

    def __init__(self, policy: Policy, keys: SharedKeys | SlotKeys) -> None:
        self.policy, self.keys = policy, keys
        like = keys.states
        self.every = EVERY.get(like.device.type, 32)
        self.hidden = torch.zeros_like(like)  # (slots, d) what the next token is drawn from
        self.points = torch.zeros((self.every, keys.slots), device=like.device)  # random numbers, a row per step
        self.tokens = torch.zeros((self.every, keys.slots), dtype=torch.long, device=like.device)
        self.logp, self.entropy = torch.zeros_like(self.points), torch.zeros_like(self.points)
        self.tick = torch.zeros(1, dtype=torch.long, device=like.device)  # the step's number since the last look
        # A mask of four dimensions is one that transformers takes as it is.
        self.mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=like.device)

    def size(self, n: int) -> int:
        """How many rows to decode where n are taken: as many."""
        return n

    def read(self, prompts: list[list[int]], numbers: list[int], rows: list[int]) -> None:
        """Run different prompts through the model, packed, and keep their keys."""
        packed = layout_prompts(prompts, self.mask.device)
        self.keys.reading(packed, numbers, [len(prompt) for prompt in prompts], rows)
        states = self._trunk(packed.ids, packed.positions, packing=packed)[0, packed.places]
        self.keys.keep_states(numbers, states)

    def run(self, n: int, steps: int, sampling: Sampling, *, last: bool) -> None:
        """``steps`` steps for the first n rows. After the ``last`` one of all no model is needed."""
        self.tick.zero_()
        head = self.policy.head(sampling.temperature or 1.0)
        for step in range(steps):
            token = self.draw(n, head, sampling)
            self.tick += 1
            if not (last and step + 1 == steps):
                self.forward(n, token)
                self.keys.advance()

    def draw(self, n: int, head: Head, sampling: Sampling) -> Tensor:
        """A token for each row, written down beside those of the steps before."""
        stores = [store[:, :n] for store in (self.tokens, self.logp, self.entropy)]
        hidden, points = self.hidden[:n], self.points[:, :n]
        if sampling.whole and _triton.suits(hidden):
            from poise.engines.native import kernels

            product = hidden @ head.weight.T.to(hidden.dtype)
            kernels.draw(product, head, sampling.temperature == 0, points, self.tick, *stores)
            return stores[0].index_select(0, self.tick)[0]
        found = sampling.draw(head(hidden), points.index_select(0, self.tick)[0])
        for store, new in zip(stores, found, strict=True):
            store.index_copy_(0, self.tick, new[None].to(store.dtype))
        return found[0]

    def forward(self, n: int, token: Tensor) -> None:
        """The tokens just drawn, through the model."""
        self.keys.begin()
        self.hidden[:n] = self._trunk(token[:, None], self.keys.position[:n, None])[:, 0]

    def _trunk(self, ids: Tensor, positions: Tensor, **more: object) -> Tensor:
        states: Tensor = self.policy.trunk(
            input_ids=ids, position_ids=positions, attention_mask=self.mask, use_cache=False, decoding=self.keys, **more
        ).last_hidden_state
        return states


def layer_shapes(policy: Policy) -> list[Shape]:
    """What the keys of every layer look like, as one token shows it."""
    packed = layout_prompts([[0]], policy.device)
    mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=policy.device)
    probe = _Probe()
    with torch.no_grad():
        policy.trunk(
            input_ids=packed.ids, position_ids=packed.positions, attention_mask=mask, use_cache=False, packing=packed,
            decoding=probe,
        )  # fmt: skip
    count = len(probe.shapes)
    if sorted(probe.shapes) != list(range(count)):
        raise NotImplementedError(f"layers are numbered {sorted(probe.shapes)}")
    return [probe.shapes[layer] for layer in range(count)]


class _Probe:
    def __init__(self) -> None:
        self.shapes: dict[int, Shape] = {}

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.shapes[layer] = (key.shape[0], key.shape[2], value.shape[2])
