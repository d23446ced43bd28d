"""Decoding attention with the keys of a slot split between several programs, for few rows with many keys."""

import pytest
import torch
import transformers

from poise.models.policy import Policy
from poise.sampling.draws import Sampling
from poise.sampling.native.engine import NativeEngine
from poise.sampling.requests import Request
from support import slots
from support.sampled import ask
from support.tiny_models import COMMON, VOCABULARY, Words, adapted

pytestmark = pytest.mark.filterwarnings("ignore")
LONG = COMMON | {"max_position_embeddings": 4096, "num_hidden_layers": 2}
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**LONG),
    "qwen3": lambda: transformers.Qwen3Config(**LONG),
    "mistral": lambda: transformers.MistralConfig(**LONG, sliding_window=700),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **LONG, sliding_window=300, layer_types=["sliding_attention", "full_attention"]
    ),
}
USED = {1: [1500], 3: [1, 4608, 2049], 8: [1, 2, 64, 256, 257, 1025, 3500, 4608]}  # keys of each row


@pytest.fixture
def calls(monkeypatch):
    """The numbers of splits that were asked for."""
    from poise.sampling.native import kernels

    found, count = [], kernels.split_count
    monkeypatch.setattr(kernels, "split_count", lambda *args: found.append(count(*args)) or found[-1])
    return found


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("rows", USED)
@pytest.mark.parametrize(
    ("heads", "shared", "width", "dtype", "rotated"),
    [
        (9, 3, 64, torch.bfloat16, True),
        (4, 4, 96, torch.float16, False),
        (16, 2, 128, torch.bfloat16, True),
        (7, 1, 256, torch.float16, False),
    ],
)
def test_a_split_slot_against_float64_and_against_one_split(
    monkeypatch, calls, heads, shared, width, dtype, rotated, rows, window
):
    inputs = (heads, shared, width, USED[rows], 4608, window)
    case, whole = (slots.case(*inputs, device="cuda", dtype=dtype, rotated=rotated) for _ in range(2))
    found = slots.check(case, error=0.01)
    assert min(calls) > 1
    monkeypatch.setattr("poise.sampling.native.kernels.split_count", lambda *_: 1)
    expected = slots.check(whole, error=0.01)
    assert (found - expected).norm() <= 0.01 * expected.norm()


def test_few_splits_for_many_rows_and_none_for_short_slots():
    from poise.sampling.native import kernels

    processors = torch.cuda.get_device_properties(0).multi_processor_count
    query, keys = torch.empty(8, 16, 128, device="cuda"), torch.empty(8, 8192, 2, 128, device="cuda")
    splits = kernels.split_count(query, keys)
    assert 16 * splits <= 4 * processors
    assert 16 * splits >= 2 * processors or splits == 8192 // 256
    assert kernels.split_count(query, keys[:, :1024]) == 1
    many = torch.empty(2 * processors, 1, 8, device="cuda")
    assert kernels.split_count(many, torch.empty(2 * processors, 8192, 2, 8, device="cuda")) == 1


def test_a_graph_replayed_with_growing_lengths(calls):
    case = slots.case(16, 2, 128, [1, 255, 1000], 2048, device="cuda", dtype=torch.bfloat16, rotated=True)
    for store in (case.keys, case.values):
        store.nan_to_num_()
    case.attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.attend()
    assert min(calls) > 1
    for grown in (0, 1, 1, 62, 193, 700):
        case.used += grown
        graph.replay()
        from_graph = found.clone()
        torch.testing.assert_close(slots.check(case, error=0.01), from_graph, atol=0, rtol=0)


def long_policy(name, dtype):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # far from uniform
    return Policy(model.to("cuda", dtype), Words())


def long_requests(lengths):
    g = torch.Generator().manual_seed(0)
    return [Request(torch.randint(6, VOCABULARY, (n,), generator=g).tolist(), 40, ()) for n in lengths]


@pytest.mark.parametrize(
    ("name", "lengths", "adapter"),
    [
        ("llama", [1500], False),
        ("llama", [1100, 3, 2200], False),
        *((name, [1, 1024, 1025, 2, 700, 2999, 64, 1281], False) for name in MODELS),
        ("llama", [1100, 3, 2200], True),
    ],
)
def test_greedy_rollouts_choose_what_transformers_would(calls, name, lengths, adapter):
    """Each token's logit is the largest in a float32 forward pass of transformers, up to the rounding of bfloat16."""
    policy, whole = long_policy(name, torch.bfloat16), long_policy(name, torch.bfloat16)
    if adapter:
        policy, whole = adapted(policy, std=0.2), adapted(whole, std=0.2)
    whole.model.float()
    out = ask(NativeEngine(policy), long_requests(lengths), Sampling(0.0), 0)
    assert max(calls) > 1
    for prompt, tokens, length in zip(out.prompts, out.tokens, out.lengths, strict=True):
        ids = torch.cat([torch.tensor(prompt, device="cuda"), tokens[:length]])
        with torch.no_grad():
            half, exact = (p.model(ids[None]).logits[0, len(prompt) - 1 : -1].float() for p in (policy, whole))
        chosen = exact.gather(1, tokens[:length, None])[:, 0]
        assert (exact.max(1).values - chosen).max() <= 4 * (half - exact).abs().max()
