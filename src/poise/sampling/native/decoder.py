"""Decodes a few steps for the first rows of a cache, without checking which sequences have ended."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from poise._lib import device as _device
from poise._lib.device import send
from poise.batch import Prompt
from poise.lm_head import Head
from poise.models import attention
from poise.models.attention import Shape
from poise.models.packing import first_fit, layout_continued, layout_prompts
from poise.models.policy import Policy
from poise.sampling.draws import Sampling, uniform
from poise.sampling.native.kv_cache import CacheSizes, SavedRow, SharedPromptCache
from poise.sampling.native.slot_cache import SlotCache

STEPS_PER_LOOK = {"cpu": 8, "cuda": 32}  # steps between two looks at the tokens; at a look the host waits
PASS_TOKENS = 8192  # prompt tokens per pass


class UnreadPrompt(NamedTuple):
    """A prompt to run through the model, and the first row for its keys."""

    number: int  # identifies the prompt in the cache
    row: int  # the first row that needs it
    prompt: Prompt
    saved: SavedRow | None = None  # keys of its first tokens, from the previous turn


class RowLengths(NamedTuple):
    """The lengths of the decoded rows; each list has one entry per row."""

    prompts: list[int]  # tokens of the prompt
    counts: list[int]  # response tokens so far
    limits: list[int]  # maximum response tokens


class Decoder:
    """A model, its key-value cache, and the tensors that a step reads and writes.

    A step draws a token from the last hidden state of every row, and runs these tokens through the model. The step's
    inputs and outputs are tensors with fixed addresses, so that the step can be recorded as a CUDA graph.
    """

    def __init__(self, policy: Policy, cache: SharedPromptCache | SlotCache) -> None:
        self.policy, self.cache = policy, cache
        device = cache.device
        self.steps_per_look = STEPS_PER_LOOK.get(device.type, 32)
        self.hidden = torch.zeros_like(cache.prompt_states)  # (S, W) the states from which the next tokens are drawn
        by_step = (self.steps_per_look, cache.slots)
        self.points = torch.zeros(by_step, dtype=torch.float64, device=device)  # random numbers in [0, 1)
        self.tokens = torch.zeros(by_step, dtype=torch.long, device=device)
        self.logp, self.entropy = torch.zeros(by_step, device=device), torch.zeros(by_step, device=device)
        self.step_number = torch.zeros(1, dtype=torch.long, device=device)  # steps since the last look
        self.mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)

    def clear(self) -> None:
        """Forget all sequences: the weights may have changed."""
        self.cache.clear()

    def decoded_rows(self, sequences: int) -> int:
        """Return the number of rows to decode when the first ``sequences`` rows hold a sequence."""
        return sequences

    def read(self, prompts: Sequence[UnreadPrompt]) -> None:
        """Run prompts through the model, packed, and store their keys. If keys are saved, run only the new tokens."""
        for whole in (True, False):
            part = [each for each in prompts if (each.saved is None) == whole]
            costs = [len(each.prompt.tokens) - (each.saved.length if each.saved else 0) for each in part]
            for numbers in first_fit(costs, PASS_TOKENS):
                self._read([part[i] for i in numbers])

    def _read(self, prompts: Sequence[UnreadPrompt]) -> None:
        """Run prompts through the model in one pass. Either all or none of them must have saved keys."""
        numbers, device = [each.number for each in prompts], self.mask.device
        saved = [each.saved for each in prompts if each.saved is not None]
        if saved:
            texts = [each.prompt.tokens[row.length :] for each, row in zip(prompts, saved, strict=True)]
            packed = layout_continued(texts, [row.length for row in saved], device)
        else:
            packed = layout_prompts([each.prompt for each in prompts], device)
        lengths = [len(each.prompt.tokens) for each in prompts]
        self.cache.assign(packed, numbers, lengths, [each.row for each in prompts])
        if saved:
            self.cache.copy_in(saved, numbers)
        states = self._trunk(packed.ids, packed.positions, packing=packed)[0, packed.places]
        self.cache.keep_states(numbers, states)

    def occupy(self, rows: list[int], prompts: list[int]) -> None:
        """Assign rows to sequences. ``prompts`` are the numbers of their prompts, which must have been read."""
        self.hidden[send(rows, self.hidden.device)] = self.cache.occupy(rows, prompts)

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Move sequences to free rows."""
        self.cache.move(sources, targets)
        device = self.hidden.device
        self.hidden[send(targets, device)] = self.hidden[send(sources, device)]

    def free(self, rows: list[int]) -> None:
        """Free the rows of ended sequences."""
        self.cache.free(rows)

    def decode(
        self, rows: RowLengths, numbers: list[int], steps: int, sampling: Sampling, seed: int, *, last: bool
    ) -> None:
        """Decode ``steps`` tokens in the first rows. ``numbers`` are the sequence numbers, for the random numbers.

        ``last`` skips the model's pass over the last tokens, because no row continues after these steps.
        """
        n, device = len(numbers), self.hidden.device
        self.cache.set_lengths(*rows)
        step = torch.arange(steps, device=device)[:, None]
        self.points[:steps, :n] = uniform(seed, send(numbers, device)[None], self.cache.counts[:n] + step)
        self.run(n, steps, sampling, last=last)

    def run(self, n: int, steps: int, sampling: Sampling, *, last: bool) -> None:
        """Run ``steps`` steps on the first n rows, whose lengths and random numbers must be set."""
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
        """Return torch's inference mode on a CPU, where it makes operations cheaper; elsewhere a null context.

        Tensors that outlive a step must be created outside this context. Custom model code always runs in a null
        context, because tables that it creates in inference mode could not be used in training.
        """
        base = self.policy.base
        custom = getattr(base, "is_custom_code", base.is_remote_code)()  # older versions lack is_custom_code
        return torch.inference_mode() if not custom and self.mask.device.type == "cpu" else nullcontext()

    def draw(self, n: int, head: Head, sampling: Sampling) -> Tensor:
        """Draw the next token of each row, (n,), and record the tokens, log-probabilities and entropies."""
        records = [record[:, :n] for record in (self.tokens, self.logp, self.entropy)]
        hidden, points = self.hidden[:n], self.points[:, :n]
        if sampling.whole and _device.suits_triton(hidden):
            from poise.sampling.native import kernels

            product = hidden @ head.weight.T.to(hidden.dtype)
            kernels.draw(product, head, sampling.temperature == 0, points, self.step_number, *records)
            return records[0].index_select(0, self.step_number)[0]
        values = sampling.draw(head(hidden), points.index_select(0, self.step_number)[0])
        for record, new in zip(records, values, strict=True):
            record.index_copy_(0, self.step_number, new[None].to(record.dtype))
        return values[0]

    def forward(self, n: int, token: Tensor) -> None:
        """Run the tokens (n,) just drawn through the model."""
        self.cache.begin_step()
        self.hidden[:n] = self._trunk(token[:, None], self.cache.positions[:n, None])[:, 0]

    def _trunk(self, ids: Tensor, positions: Tensor, **more: object) -> Tensor:
        return attention.run(self.policy.trunk, ids, positions, self.mask, decoding=self.cache, **more)


def plain_decoder(policy: Policy, shapes: Sequence[Shape], sizes: CacheSizes) -> Decoder:
    """Build a decoder with a ``SharedPromptCache``."""
    like, width = next(policy.trunk.parameters()), policy.head().weight.shape[1]
    return Decoder(policy, SharedPromptCache(shapes, sizes, width, like))


def layer_shapes(policy: Policy) -> list[Shape]:
    """Return the shapes of every layer's keys and values, recorded while one token runs through the model."""
    packed, recorder = layout_prompts([Prompt((0,))], policy.device), attention.ShapeRecorder()
    with torch.no_grad():
        attention.run(policy.trunk, packed.ids, packed.positions, packing=packed, decoding=recorder)
    count = len(recorder.shapes)
    if sorted(recorder.shapes) != list(range(count)):
        raise NotImplementedError(f"layers are numbered {sorted(recorder.shapes)}, not 0 to {count - 1}")
    return [recorder.shapes[layer] for layer in range(count)]
