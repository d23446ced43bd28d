"""Tiny models of several architectures, and responses to run through them."""

from __future__ import annotations

import torch
import transformers

from poise.batch import Prompt, padded_batch
from poise.models.policy import Policy
from poise.sampling.draws import Sampling
from poise.sampling.requests import repeated
from support.sampled import ask

VOCABULARY = 97
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None,
    "eos_token_id": 5, "pad_token_id": 0, "head_dim": 8,
}  # fmt: skip
ARCHITECTURES = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=8),
    "gemma2": lambda: transformers.Gemma2Config(**COMMON, sliding_window=8, final_logit_softcapping=3.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **COMMON, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "granite": lambda: transformers.GraniteConfig(**COMMON, logits_scaling=4.0),
}


class Words:
    """The part of a tokenizer that engines use."""

    eos_token_id = 5
    chat_template = None


def tiny(name, device="cpu", dtype=torch.float32, *, compiled=False):
    """A policy with a small random model of an architecture; its weights depend on nothing else."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(ARCHITECTURES[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # far from uniform
    return Policy(model.to(device, dtype), Words(), compiled=compiled)


def adapted(policy, *, std=0.5, **settings):
    """The policy's model with a LoRA adapter that changes what it says; ``settings`` are peft's."""
    import peft

    config = peft.LoraConfig(
        task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | settings
    )
    model = peft.get_peft_model(policy.model, config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return Policy(model, policy.tokenizer)


def bytes_policy(positions=512):
    """A tiny random model with a token for each byte, and a chat template whose turns end with ``<|im_end|>``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=0,
        max_position_embeddings=positions,
    )  # fmt: skip
    return Policy(transformers.LlamaForCausalLM(config).eval(), tokenizer)


LEARNED = {  # a table of positions, of which there are no more than in the config
    "gpt2": lambda positions: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=positions, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=5
    ),
    "opt": lambda positions: transformers.OPTConfig(
        vocab_size=VOCABULARY, max_position_embeddings=positions, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64,
        num_hidden_layers=2, num_attention_heads=4, bos_token_id=None, eos_token_id=5, pad_token_id=1,
    ),
}  # fmt: skip


def learned(name, positions):
    """A policy whose model has a learned table of positions."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(LEARNED[name](positions), attn_implementation="sdpa")
    return Policy(model.eval(), Words())


HEADS = {  # what is done to the logits, with weights that make them large
    "temperature": ("qwen2", {}, 0.7),
    "softcap": ("gemma2", {"final_logit_softcapping": 30.0}, 1.0),
    "softcap and temperature": ("gemma3", {"final_logit_softcapping": 30.0}, 1.3),
    "scale": ("granite", {"logits_scaling": 3.0}, 0.9),
}


def head_alone(name, device="cpu", dtype=torch.bfloat16):
    """A model of ``HEADS`` whose layers add nothing, and the temperature to sample at.

    A token's hidden state is then the same in every pass, so that what differs between two passes is the head's doing.
    """
    architecture, changes, temperature = HEADS[name]
    config = ARCHITECTURES[architecture]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        torch.nn.init.normal_(embedding)
        head.mul_(1.5 / head.std())  # tied, it is the embedding
    return Policy(model.to(device, dtype), Words()), temperature


def prompts(n, seed=0):
    """Random prompts of 2 to 13 tokens, without the end token."""
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randint(6, VOCABULARY, (int(k),), generator=g).tolist() for k in torch.randint(2, 14, (n,), generator=g)
    ]


def exact(policy):
    """In float64 throughout: transformers' norms alone would still round to float32."""
    attention = policy.base.config._attn_implementation
    if attention == "eager":  # it would round too, and turn the mask's float64 into −inf
        return policy
    policy.model.double()
    for module in policy.model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            offset = 1.0 if name.startswith("Gemma") else 0.0
            epsilon = getattr(module, "eps", None) or module.variance_epsilon
            module.forward = lambda x, m=module, o=offset, e=epsilon: (
                x * torch.rsqrt(x.square().mean(-1, keepdim=True) + e) * (m.weight + o)
            )
    return policy


def responses(asked, lengths, seed=0):
    """A batch of random tokens of the given lengths: one list of lengths for each prompt."""
    counts = [n for own in lengths for n in own]
    tokens = torch.randint(6, VOCABULARY, (len(counts), max(counts)), generator=torch.Generator().manual_seed(seed))
    repeated = [Prompt(tuple(p)) for p, own in zip(asked, lengths, strict=True) for _ in own]
    return padded_batch(repeated, [row[:n] for row, n in zip(tokens, counts, strict=True)], torch.device("cpu"))


def sample(engine, prompts, group, *, max_tokens, seed, temperature=1.0, top_p=1.0, top_k=0, done=None):
    """``group`` responses to each prompt, group after group."""
    wanted = repeated(prompts, group, max_tokens, engine.policy.end_tokens)
    return ask(engine, wanted, Sampling(temperature, top_p, top_k), seed, done)
