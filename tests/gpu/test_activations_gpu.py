"""The forecast of a pass against what it takes on CUDA.

On an H200, a checkpointed pass kept 0.6 % more than the forecast with all weights trained, and 1.0 % more with LoRA.
"""

import pytest
import torch
import transformers

from poise.batch import Prompt, padded_batch
from poise.models.activations import measure
from poise.models.loading import add_adapter
from poise.models.policy import Policy
from poise.training.config.groups import LoraConfig
from support.tiny_models import Words

CONFIG = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": None,
    "eos_token_id": 5,
}  # fmt: skip
PROMPT, RESPONSE, GROUP = 256, 1024, 8


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=8)], ids=["full", "lora"])
def test_a_pass_takes_what_was_forecast(lora, checkpointed):
    config = transformers.Qwen2Config(**CONFIG)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = add_adapter(model, lora, 0) if lora else model
    forecast = measure(model, PROMPT, RESPONSE, GROUP)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
    policy = Policy(add_adapter(model, lora, 0) if lora else model, Words())
    if checkpointed:
        assert policy.save_memory()
    tokens = [torch.randint(6, 512, (RESPONSE,)) for _ in range(GROUP)]
    batch = padded_batch([Prompt(tuple(range(6, 6 + PROMPT)))] * GROUP, tokens, torch.device("cuda"))
    policy.hidden(batch).float().square().sum().backward()  # workspaces
    policy.model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    states = policy.hidden(batch)
    # ``kept`` forecasts what the backward pass needs. The trunk's result is not part of that: ``peak`` adds it.
    kept = torch.cuda.memory_allocated() - before - states.nbytes
    count = PROMPT + GROUP * (RESPONSE - 1)
    assert kept == pytest.approx(forecast.kept(count, checkpointed=checkpointed), rel=0.1)
    states.square().sum().backward()
    took = torch.cuda.max_memory_allocated() - before
    gradients = sum(x.nbytes for x in policy.trunk.parameters() if x.requires_grad)
    assert took - gradients < 1.1 * forecast.peak(count, checkpointed=checkpointed)
