"""A few decoding steps for the first rows of a cache, without looking at what comes out."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from poise._lib import device as _device
from poise.batch import Prompt
from poise.engines.native.kv_cache import SavedRow, Shape
from poise.engines.native.shared_cache import SharedPromptCache
from poise.engines.native.slot_cache import SlotCache
from poise.lm_head import Head
from poise.models.packing import Packed, layout_continued, layout_prompts
from poise.models.policy import Policy
from poise.rollout.sampling import Sampling

STEPS_PER_LOOK = {"cpu": 8, "cuda": 32}  # steps between two looks at the tokens, for which the host has to wait


class Decoder:
    """A model, its key-value cache, and the tensors that a step reads and writes.

    A step draws a token from the last hidden state of every row, and runs it through the model. All of its inputs and
    outputs are in tensors that stay where they are, so that it can be recorded as a CUDA graph. It does not know which
    sequences have ended.
    """

    def __init__(self, policy: Policy, cache: SharedPromptCache | SlotCache) -> None:
        self.policy, self.cache = policy, cache
        device = cache.device
        self.steps_per_look = STEPS_PER_LOOK.get(device.type, 32)
        self.hidden = torch.zeros_like(cache.prompt_states)  # (S, W) what the next token of each row is drawn from
        by_step = (self.steps_per_look, cache.slots)
        self.points = torch.zeros(by_step, dtype=torch.float64, device=device)  # random numbers in [0, 1)
        self.tokens = torch.zeros(by_step, dtype=torch.long, device=device)
        self.logp, self.entropy = torch.zeros(by_step, device=device), torch.zeros(by_step, device=device)
        self.step_number = torch.zeros(1, dtype=torch.long, device=device)  # since the last look
        # transformers uses a mask of four dimensions as it is, and builds none of its own.
        self.mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)

    def decoded_rows(self, taken: int) -> int:
        """How many rows to decode when the first ``taken`` rows hold a sequence."""
        return taken

    def read(self, prompts: list[Prompt], numbers: list[int], rows: list[int]) -> None:
        """Run different prompts through the model, packed, and store their keys."""
        packed = layout_prompts(prompts, self.mask.device)
        self.cache.assign(packed, numbers, [len(prompt) for prompt in prompts], rows)
        self._read(packed, numbers)

    def read_on(self, prompts: list[Prompt], saved: list[SavedRow], numbers: list[int], rows: list[int]) -> None:
        """Do the same for prompts whose first keys are saved: only the rest runs through the model."""
        cached = [row.length for row in saved]
        texts = [prompt.tokens[length:] for prompt, length in zip(prompts, cached, strict=True)]
        packed = layout_continued(texts, cached, self.mask.device)
        self.cache.assign(packed, numbers, [len(prompt) for prompt in prompts], rows)
        self.cache.copy_in(saved, numbers)
        self._read(packed, numbers)

    def _read(self, packed: Packed, numbers: list[int]) -> None:
        states = self._trunk(packed.ids, packed.positions, packing=packed)[0, packed.places]
        self.cache.keep_states(numbers, states)

    def run(self, n: int, steps: int, sampling: Sampling, *, last: bool) -> None:
        """Decode ``steps`` tokens in the first n rows; after the ``last`` ones of all, the model need not run."""
        self.step_number.zero_()
        head = self.policy.head(sampling.temperature or 1.0)
        with self._light():
            for step in range(steps):
                token = self.draw(n, head, sampling)
                self.step_number += 1
                if not (last and step + 1 == steps):
                    self.forward(n, token)
                    self.cache.advance()

    def _light(self) -> AbstractContextManager[object]:
        """On a CPU, torch's inference mode, in which an operation costs less. Tensors that stay are made outside.

        Not for code that is not transformers' own: a table that such a model makes here could never be trained with.
        """
        own = type(self.policy.base).__module__.startswith("transformers.")
        return torch.inference_mode() if own and self.mask.device.type == "cpu" else nullcontext()

    def draw(self, n: int, head: Head, sampling: Sampling) -> Tensor:
        """Draw a token (n,) for each row; record it with its log-probability and entropy."""
        records = [record[:, :n] for record in (self.tokens, self.logp, self.entropy)]
        hidden, points = self.hidden[:n], self.points[:, :n]
        if sampling.whole and _device.suits_triton(hidden):
            from poise.engines.native import kernels

            product = hidden @ head.weight.T.to(hidden.dtype)
            kernels.draw(product, head, sampling.temperature == 0, points, self.step_number, *records)
            return records[0].index_select(0, self.step_number)[0]
        drawn = sampling.draw(head(hidden), points.index_select(0, self.step_number)[0])
        for record, new in zip(records, drawn, strict=True):
            record.index_copy_(0, self.step_number, new[None].to(record.dtype))
        return drawn[0]

    def forward(self, n: int, token: Tensor) -> None:
        """Run the tokens (n,) just drawn through the model."""
        self.cache.begin_step()
        self.hidden[:n] = self._trunk(token[:, None], self.cache.positions[:n, None])[:, 0]

    def _trunk(self, ids: Tensor, positions: Tensor, **more: object) -> Tensor:
        states: Tensor = self.policy.trunk(
            input_ids=ids, position_ids=positions, attention_mask=self.mask, use_cache=False, decoding=self.cache,
            **more,
        ).last_hidden_state  # fmt: skip
        return states


def layer_shapes(policy: Policy) -> list[Shape]:
    """The shape of every layer's keys and values, recorded while one token runs through the model."""
    packed = layout_prompts([Prompt((0,))], policy.device)
    mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=policy.device)
    recorder = _ShapeRecorder()
    with torch.no_grad():
        policy.trunk(
            input_ids=packed.ids, position_ids=packed.positions, attention_mask=mask, use_cache=False, packing=packed,
            decoding=recorder,
        )  # fmt: skip
    count = len(recorder.shapes)
    if sorted(recorder.shapes) != list(range(count)):
        raise NotImplementedError(f"layers are numbered {sorted(recorder.shapes)}, not 0 to {count - 1}")
    return [recorder.shapes[layer] for layer in range(count)]


class _ShapeRecorder:
    def __init__(self) -> None:
        self.shapes: dict[int, Shape] = {}

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.shapes[layer] = (key.shape[0], key.shape[2], value.shape[2])
