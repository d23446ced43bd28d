"""Frozen models on CUDA: graphs of their own, recorded once, that do not run the adapter."""

import pytest
import torch

from poise.models.loading import add_adapter
from poise.models.policy import Policy
from poise.sampling.native.engine import NativeEngine
from poise.sampling.native.graphs import GraphedDecoder
from poise.training.config.groups import LoraConfig
from poise.training.frozen_models import Frozen, FrozenEngine
from support.tiny_models import Words, prompts, sample, tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile has many for its own code


@pytest.mark.parametrize("compiled", [False, True])
def test_the_model_without_its_adapter_has_graphs_of_its_own(compiled):
    base = tiny("llama", "cuda", torch.bfloat16)
    adapted = add_adapter(tiny("llama", "cuda", torch.bfloat16).model, LoraConfig(rank=4), 0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    policy = Policy(adapted, Words(), compiled=compiled)
    own, inner = NativeEngine(policy), NativeEngine(policy)
    receiver = FrozenEngine(Frozen(policy, adapter=True), inner)
    before = sample(own, prompts(6), 4, max_tokens=30, seed=0)
    found = sample(receiver, prompts(6), 4, max_tokens=30, seed=0)
    decoder = inner._decoder
    assert isinstance(decoder, GraphedDecoder)
    assert decoder.graphs
    fewer = sample(receiver, prompts(5), 1, max_tokens=20, seed=0)
    assert inner._decoder is decoder  # other sizes record nothing anew
    after = sample(own, prompts(6), 4, max_tokens=30, seed=0)
    assert torch.equal(before.tokens, after.tokens)
    with torch.no_grad():
        for out in (found, fewer):
            gap = (out.logp - base.score(out.batch)[0])[out.mask].abs().mean()
            assert gap < 0.05  # bfloat16
            assert gap < (out.logp - policy.score(out.batch)[0])[out.mask].abs().mean() / 4
