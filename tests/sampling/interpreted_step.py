"""The fused step on a CPU, by Triton's interpreter; started by test_fused_step.py in a process of its own."""

import os
from itertools import cycle, islice

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
import transformers

from poise._lib import device as _device
from poise.sampling.native import engine, fused_step, graphs, kernels
from support.tiny_models import ARCHITECTURES, COMMON, adapted, tiny

ARCHITECTURES["smollm3"] = lambda: transformers.SmolLM3Config(**COMMON, no_rope_layer_interval=2)
ARCHITECTURES["biased"] = lambda: transformers.LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True)


@torch.no_grad()
def states(policy, step, count):
    """The hidden states of some steps, in kernels or, without ``step``, by plain torch and the model's own code."""
    _device.suits_triton = lambda _: step is not None
    shapes = engine.layer_shapes(policy)
    decoder = engine._new_decoder(policy, shapes, engine.TRIAL_CACHE, graphed=True, step=step)
    prompts, prompt_of, tokens = engine._trial_texts(policy)
    engine._begin_trial(decoder, prompts, prompt_of)
    found = []
    for row in islice(cycle((tokens, tokens[::-1])), count):
        decoder.forward(3, torch.tensor(row))
        found.append(decoder.hidden[:3].clone())
        decoder.cache.advance()
    return torch.stack(found)


def main():
    graphs.usable, kernels._processors = lambda *_: True, lambda _: 132
    _device.free_bytes = lambda _: 1 << 34
    for name in ("llama", "qwen2", "qwen3", "mistral", "smollm3", "biased", "adapter"):
        policy = adapted(tiny("qwen2")) if name == "adapter" else tiny(name)
        _device.suits_triton = lambda _: True
        step = fused_step.fused_step(policy)
        assert step is not None, name
        count = 10 if name == "mistral" else 3  # enough for its window of 8 tokens to leave keys out
        torch.testing.assert_close(states(policy, step, count), states(policy, None, count), atol=2e-5, rtol=1e-5)
        print(name)


if __name__ == "__main__":
    main()
