"""Packed attention with the flash kernel, in half precision, against float32. Needs a CUDA device."""

import warnings

import pytest
import torch
import transformers

from poise.batch import Prompt, padded_batch
from poise.models.attention import _has_kernel
from poise.models.packing import layout
from poise.models.policy import Policy

COMMON = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": 5, "pad_token_id": 0, "head_dim": 64,
}  # fmt: skip
MODELS = {
    "as many key heads": lambda: transformers.LlamaConfig(**COMMON, num_key_value_heads=8),
    "fewer key heads": lambda: transformers.Qwen3Config(**COMMON, num_key_value_heads=2),
    "sliding window": lambda: transformers.MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=48),
    "windows and wide heads": lambda: transformers.Gemma3TextConfig(
        **COMMON | {"head_dim": 256, "num_hidden_layers": 2},
        num_key_value_heads=4,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
SHAPES = {
    "one group": [[300, 1, 129, 77, 128, 2]],
    "many groups": [[200, 1, 64], [1, 1], [33, 150, 151, 8], [90] * 16],
    "nothing shared": [[300], [1], [77], [128]],
    "some shared": [[90], [300, 14], [1], [130, 1, 2]],
}


class Words:
    eos_token_id = 5
    chat_template = None


def make(name, dtype):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)  # attention that is far from uniform
    return Policy(model.cuda().to(dtype).eval(), Words())


def responses(lengths):
    g = torch.Generator().manual_seed(0)
    counts = [n for own in lengths for n in own]
    tokens = torch.randint(6, 512, (len(counts), max(counts)), generator=g)
    sizes = torch.randint(1, 200, (len(lengths),), generator=g)
    asked = [Prompt(tuple(torch.randint(6, 512, (int(n),), generator=g).tolist())) for n in sizes]
    prompts = [prompt for prompt, own in zip(asked, lengths, strict=True) for _ in own]
    rows = [row[:n] for row, n in zip(tokens, counts, strict=True)]
    return padded_batch(prompts, rows, torch.device("cuda"))


def gradients(policy, batch):
    policy.model.zero_grad()
    states = policy.hidden(batch)
    direction = torch.randn(states.shape, generator=torch.Generator().manual_seed(1)).to(states)
    (states * direction).sum().backward()
    grads = {n: p.grad.float() for n, p in policy.trunk.named_parameters() if p.grad is not None}
    return {"states": states.detach().float(), **grads}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_less_exact_than_padded_attention_in_half_precision(name, shape):
    batch = responses(SHAPES[shape])
    plain, half = make(name, torch.float32), make(name, torch.bfloat16)
    half.model.load_state_dict(plain.model.state_dict())
    assert half.packed
    query = torch.zeros(1, 1, COMMON["head_dim"], device="cuda", dtype=torch.bfloat16)
    assert _has_kernel(query, query)  # or this is no test of the kernel
    # Both from the same rounded weights, so that the difference is that of the arithmetic.
    plain.model.load_state_dict({n: p.float() for n, p in half.model.state_dict().items()})
    packed = gradients(half, batch)
    half.packed = plain.packed = False
    padded, exact = gradients(half, batch), gradients(plain, batch)
    for part, value in exact.items():
        error, allowed = (packed[part] - value).norm(), (padded[part] - value).norm()
        assert error <= 2 * allowed + 1e-6 * value.norm(), part


@pytest.mark.parametrize("name", MODELS)
def test_float32_is_padded_in_the_attention_and_exact(name):
    batch = responses(SHAPES["many groups"])
    policy = make(name, torch.float32)
    assert policy.packed
    packed = gradients(policy, batch)
    policy.packed = False
    for part, value in gradients(policy, batch).items():
        assert (packed[part] - value).norm() <= 1e-4 * value.norm(), part


def test_layers_computed_twice():
    policy = make("fewer key heads", torch.bfloat16)
    batch = responses(SHAPES["some shared"])
    once = gradients(policy, batch)
    assert policy.save_memory()
    for part, value in gradients(policy, batch).items():
        assert (once[part] - value).norm() <= 1e-2 * value.norm(), part


def test_a_pass_makes_the_host_wait_for_nothing():
    policy = make("fewer key heads", torch.bfloat16)
    batch = responses(SHAPES["many groups"])
    rows = list(range(len(batch.mask)))
    policy.score(batch.rows(rows))[0].sum().backward()
    try:
        with warnings.catch_warnings(action="ignore"):  # that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        packed = layout(batch.rows(rows[3:]))
        policy.score(batch.rows(rows[3:]))[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert packed.ids.is_cuda
