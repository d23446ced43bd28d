"""The memory of a pass, forecast without weights, against what a pass with weights keeps, and takes at most."""

import weakref

import pytest
import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from poise.batch import Prompt, padded_batch
from poise.models import attention
from poise.models.activations import Activations, Passes, choose_passes, measure
from poise.models.loading import add_adapter
from poise.models.policy import Policy
from poise.training.config.groups import LoraConfig
from support.tiny_models import Words

PROMPT, RESPONSE, GROUP = 30, 60, 4
SHAPES = {  # kind, width, inner width, layers, heads, key heads
    "llama 32": (transformers.LlamaConfig, 32, 96, 2, 4, 4),
    "llama 64": (transformers.LlamaConfig, 64, 160, 4, 4, 2),
    "qwen2 64": (transformers.Qwen2Config, 64, 344, 3, 8, 2),
    "qwen2 128": (transformers.Qwen2Config, 128, 688, 5, 8, 1),
    "qwen3 64": (transformers.Qwen3Config, 64, 160, 3, 4, 2),
}


class Flash(torch.autograd.Function):
    """Keeps what the flash kernel keeps: queries, keys, values, the result, and a float32 number per query and head."""

    @staticmethod
    def forward(ctx, q, k, v, starts_q, starts_k):
        out = Flash.compute(q, k, v, starts_q.tolist(), starts_k.tolist())
        ctx.save_for_backward(q, k, v, out, q.new_zeros(q.shape[1], len(q), dtype=torch.float32))
        ctx.starts = starts_q.tolist(), starts_k.tolist()
        return out

    @staticmethod
    def backward(ctx, grad):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors[:3]]
        with torch.enable_grad():
            grads = torch.autograd.grad(Flash.compute(*inputs, *ctx.starts), inputs, grad)
        return (*grads, None, None)

    @staticmethod
    def compute(q, k, v, starts_q, starts_k):
        outs = []
        for i in range(len(starts_q) - 1):
            parts = [q[starts_q[i] : starts_q[i + 1]], *(x[starts_k[i] : starts_k[i + 1]] for x in (k, v))]
            seen = torch.ones(len(parts[0]), len(parts[1]), dtype=torch.bool).tril(len(parts[1]) - len(parts[0]))
            parts = [x.transpose(0, 1)[None] for x in parts]
            outs.append(scaled_dot_product_attention(*parts, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(outs)


@pytest.fixture
def flash(monkeypatch):
    """On a CPU, packed attention as on CUDA."""
    real, kernel = attention.flash_takes, attention._kernel
    monkeypatch.setattr(attention, "flash_takes", lambda like, k, v: real(like.to("meta"), k, v))
    monkeypatch.setattr(
        attention, "_kernel",
        lambda q, *rest, **how: kernel(q, *rest, **how) if q.is_meta else (Flash.apply(q, *rest[:4]),),
    )  # fmt: skip


def config_of(name, **more):
    kind, width, inner, layers, heads, key_heads = SHAPES[name]
    return kind(
        vocab_size=97, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, head_dim=width // heads,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=4096, eos_token_id=5,
        bos_token_id=None, **more,
    )  # fmt: skip


def forecast(name, dtype, lora=None, rows=(PROMPT, RESPONSE, GROUP)):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_of(name), dtype=dtype)
        model = add_adapter(model, lora, 0) if lora else model
    return measure(model, *rows)


def made(name, dtype, lora=None, rows=(PROMPT, RESPONSE, GROUP)):
    """A policy with weights, and a group of responses."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name), dtype=dtype).eval()
    policy = Policy(add_adapter(model, lora, 0) if lora else model, Words())
    prompt, response, group = rows
    tokens = [torch.randint(6, 97, (response,)) for _ in range(group)]
    return policy, padded_batch([Prompt(tuple(range(6, 6 + prompt)))] * group, tokens, torch.device("cpu"))


def counted(policy, batch):
    """Bytes that autograd keeps of a pass, besides weights: each storage once."""
    weights = {x.untyped_storage().data_ptr() for x in policy.model.parameters()}
    kept = {}

    def keep(x):
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        policy.hidden(batch)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_pass_keeps_what_was_forecast(name, lora, dtype):
    policy, batch = made(name, dtype, lora)
    tokens = PROMPT + GROUP * (RESPONSE - 1)
    assert forecast(name, dtype, lora).kept(tokens, checkpointed=False) == pytest.approx(
        counted(policy, batch), rel=0.02
    )


def test_of_a_llama_it_is_this_formula():
    """Norms keep float32 inputs, the normed and the weighted states; the MLP keeps four tensors of its width."""
    _, width, inner, layers, heads, key_heads = SHAPES["llama 64"]
    tokens = PROMPT + GROUP * (RESPONSE - 1)
    keys = (PROMPT + GROUP * (PROMPT + RESPONSE - 1)) / tokens  # a prompt's keys are there once for every response
    head = width // heads
    norms, mlp = 2 * width * (4 + 2 + 2) + 2 * 4, 2 * 4 * inner
    attended = 2 * (2 * heads * head + 2 * key_heads * head * keys) + 4 * heads
    found = forecast("llama 64", torch.bfloat16)
    assert found.layers == layers
    assert found.layer == pytest.approx(norms + mlp + attended, rel=0.02)
    assert found.states == 2 * width
    assert found.cache == layers * 2 * key_heads * head * 2
    assert found.head_gradient == 97 * width * 4
    assert forecast("llama 64", torch.bfloat16, LoraConfig()).head_gradient == 0


class Live(TorchDispatchMode):
    """The bytes of tensors made inside, now and at most. Views of the model's weights do not count."""

    def __init__(self, model):
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in model.parameters()}
        self.now = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.known:
                storage, size = x.untyped_storage(), x.untyped_storage().nbytes()
                self.known.add(storage._cdata)
                self.now += size
                weakref.finalize(storage, self.freed, storage._cdata, size)
        self.most = max(self.most, self.now)
        return out

    def freed(self, place, size):
        self.known.discard(place)
        self.now -= size


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_checkpointed_pass_keeps_what_was_forecast(name, lora, dtype):
    """Every layer's input and the rotary embeddings, once each, and some of the three indices of the packing."""
    policy, batch = made(name, dtype, lora)
    assert policy.save_memory()
    with Live(policy.model) as live:
        states = policy.hidden(batch)
        kept = live.now - states.nbytes
    tokens = PROMPT + GROUP * (RESPONSE - 1)
    assert 0 <= kept - forecast(name, dtype, lora).kept(tokens, checkpointed=True) <= 3 * 8 * tokens


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["llama 64", "qwen2 128"])
def test_a_pass_takes_at_most_what_was_forecast(name, lora, checkpointed):
    """In float32, with enough tokens that the weights' gradients are small; the head is left out."""
    rows = 64, 256, 4
    policy, batch = made(name, torch.float32, lora, rows)
    if checkpointed:
        assert policy.save_memory()
    expected = forecast(name, torch.float32, lora, rows)
    with Live(policy.model) as live:
        policy.hidden(batch).square().sum().backward()
    tokens = 64 + 4 * 255
    gradients = sum(x.nbytes for x in policy.trunk.parameters() if x.requires_grad)
    share = (live.most - gradients) / expected.peak(tokens, checkpointed=checkpointed)
    assert 0.7 < share < 1.1  # rather too much than too little
    assert live.most > 3 * gradients


OF_3B = Activations(36, 130_000.0, 12_000.0, 36 * 4096.0, 4096, 303_872, 1_244_659_712, 36_864)


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (90, Passes(16384, False)),
        (78, Passes(8192, False)),  # rather than computing activations twice
        (30, Passes(5461, False)),
        (20, Passes(16384, True)),
        (5, Passes(8192, True)),
        (3, Passes(2048, True)),
        (2.2, Passes(1536, True)),  # a single response
        (1, None),
    ],
)
def test_passes_are_chosen_by_the_room(room, expected):
    found = choose_passes(OF_3B, room * 1e9, most=16384, busy=5461, longest=1536)
    assert found == expected
    if found:
        assert OF_3B.peak(found.tokens, checkpointed=found.checkpointed) <= room * 1e9
