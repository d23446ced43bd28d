"""Which of transformers' causal language models poise can train, and on which path: tried one by one, as tiny models.

    python scripts/architectures.py                      # all of them, about ten minutes on two cores
    python scripts/architectures.py llama phimoe         # some
    python scripts/architectures.py --results runs/models.json --write docs/models.md

``--results`` keeps what was found, so that some models can be tried again; ``--write`` replaces the page's list.

Every architecture is built with random weights, windows of 8 tokens and room for few positions. A copy with plain
("eager") attention reads each response by itself: those log-probabilities and gradients are the truth. Then the policy
reads all responses together, packed or padded, and the engines sample, all at once and two at a time. What poise
accepts must agree with the truth; what it does not serve must be refused at load, with a sentence.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import signal
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from poise.batch import Prompt, padded_batch
from poise.models import rope
from poise.models.policy import ModelError, Policy
from poise.sampling.choose import choose
from poise.sampling.draws import Sampling
from poise.sampling.native.engine import NativeEngine
from poise.sampling.requests import repeated

VOCABULARY, WINDOW, ORIGINAL, LONGEST = 97, 8, 16, 64
BOUND = 2e-3  # of log-probabilities in float32: a token more or less in a window changes them by far more
SECONDS = 60  # for one model
MOST = 20_000_000  # parameters of a model that counts as tiny
WIDTH = 120  # of the page

# Sizes by the names that configurations use for them; only those that a configuration has are set.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": LONGEST,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LONGEST, "d_model": 32, "ffn_dim": 64, "decoder_layers": 2,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "encoder_layers": 2, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "moe_num_experts": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_layers": 2, "n_heads": 4, "num_layers": 2, "num_heads": 4,
    "sliding_window": WINDOW, "attention_chunk_size": WINDOW, "window_size": WINDOW, "kv_channels": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 5, "first_k_dense_replace": 1, "mamba_d_state": 8,
    "mamba_n_heads": 4, "mamba_d_head": 16, "vocab_size_per_layer_input": VOCABULARY, "is_decoder": True,
    "original_max_position_embeddings": ORIGINAL, "alt_window_size": WINDOW,
}  # fmt: skip
LEAVE: dict[str, dict[str, Any]] = {  # settings of their own, by model type
    "ernie4_5_moe": {"moe_k": 2},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "electra": {"embedding_size": 32},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}},
    "rembert": {"output_embedding_size": 32, "input_embedding_size": 32},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 2, "indexer_head_dim": 8, "indexer_budget": 16,
                       "indexer_compress_ratio": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                       "linear_num_key_heads": 2, "linear_num_value_heads": 4, "ple_embed_dim": 16, "hc_lowrank": 8,
                       "ngram_vocab_size_base": 97},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
                     "num_kv_shared_layers": 2, "intermediate_size": 64, "activation_sparsity_pattern": [0.0] * 4,
                     "laurel_rank": 8, "hidden_size_per_layer_input": 8},
    "gemma4_text": {"hidden_size_per_layer_input": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
DROP = {  # names that a configuration has, and that cannot be set
    "falcon": ["head_dim"], "xlstm": ["v_head_dim"], "prophetnet": ["num_hidden_layers"],
    "xlnet": ["max_position_embeddings"], "gemma4_text": ["head_dim"], "gemma4_unified_text": ["head_dim"],
}  # fmt: skip
ROTARY: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": ORIGINAL},
    "longrope": {"factor": 4.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 6.0, 8.0],
                 "original_max_position_embeddings": ORIGINAL},
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # beside the model types themselves
    "falcon with ALiBi": ("falcon", {"alibi": True}),
    "falcon with ALiBi (new decoder)": ("falcon", {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "phimoe with a window": ("phimoe", {"sliding_window": WINDOW}),
    **{
        f"phimoe with longrope RoPE ({name})": (
            "phimoe",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_mscale": 1.2,
                    "long_mscale": long,
                }
                | ROTARY["longrope"]
            },
        )
        for name, long in (("one scale", 1.2), ("two scales", 1.5))
    },
    "qwen2 with a window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "gemma2 without a soft-cap": ("gemma2", {"attn_logit_softcapping": None}),
    "llama with tied weights": ("llama", {"tie_word_embeddings": True}),
    **{
        f"{base} with {kind} RoPE": (
            base,
            {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "partial_rotary_factor": 1.0, **more}}
            | ({"max_position_embeddings": ORIGINAL} if kind == "dynamic" else {}),
        )
        for base in ("llama", "qwen2", "mistral", "phi3", "deepseek_v3", "gpt_neox", "olmo2")
        for kind, more in ROTARY.items()
        if base != "phi3" or kind == "longrope"  # it takes no other
    },
}


@dataclass
class Result:
    """What became of one model."""

    name: str
    class_name: str
    verdict: str = ""  # packed, padded, refused or not tried; "wrong" begins a defect
    engine: str = ""
    note: str = ""
    gaps: dict[str, float] = field(default_factory=dict)


class Words:
    """As much of a tokenizer as an engine needs."""

    eos_token_id = 5
    chat_template = None


def build(kind: str, settings: dict[str, Any]) -> Any:
    """A tiny model of this type, with random weights far from uniform probabilities."""
    text = CONFIG_MAPPING[kind]().get_text_config()
    has = {name for name in dir(text) if not name.startswith("_")} | set(vars(text))
    small = {name: value for name, value in SMALL.items() if name in has and name not in DROP.get(kind, [])}
    if "kv_lora_rank" in small:  # latent attention: as many key heads as query heads
        small["num_key_value_heads"] = small["num_attention_heads"]
        small.pop("head_dim", None)
    layer_types = vars(text).get("layer_types")
    if layer_types:  # one of each kind, at least two
        kinds = list(dict.fromkeys(layer_types))
        small["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        small["num_hidden_layers"] = len(small["layer_types"])
    config = type(text)(**small | LEAVE.get(kind, {}) | settings)
    name = CLASSES[kind]
    cls = getattr(transformers, name if isinstance(name, str) else name[0])
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls(copy.deepcopy(config)).parameters())
    if size > MOST:
        raise ValueError(f"{size / 1e6:.0f} M parameters, however small it is configured")
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def alone(model: Any, prompts: Sequence[Prompt], responses: Sequence[Tensor]) -> Tensor:
    """The truth: log-probabilities of each response by itself, end to end."""
    rows = []
    for prompt, tokens in zip(prompts, responses, strict=True):
        ids = torch.tensor([[*prompt.tokens, *tokens[:-1].tolist()]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt.tokens) - 1 :]
        rows.append(logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])
    return torch.cat(rows)


def some_responses() -> tuple[list[Prompt], list[Tensor]]:
    """Shorter and longer than windows and original lengths; some share a prompt."""
    g = torch.Generator().manual_seed(0)
    prompts = [Prompt(tuple(torch.randint(6, VOCABULARY, (n,), generator=g).tolist())) for n in (3, 3, 12, 5)]
    prompts[1] = prompts[0]
    tokens = torch.randint(6, VOCABULARY, (4, 30), generator=g)
    return prompts, [row[:length] for row, length in zip(tokens, (4, 30, 20, 9), strict=True)]


def gradients(model: Any, logp: Tensor) -> Tensor:
    """Of a random combination of log-probabilities, for all of the model's parameters, end to end."""
    direction = torch.randn(logp.shape, generator=torch.Generator().manual_seed(1))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad((logp * direction).sum(), parameters, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, grads, strict=True)]
    )


def read(result: Result, policy: Policy, truth: Any) -> None:
    """All responses together, forwards and backwards."""
    batch = padded_batch(*some_responses(), policy.device)
    expected = alone(truth, *some_responses())
    found = policy.score(batch)[0][batch.mask]
    result.gaps["log-probabilities"] = float((found - expected).abs().max())
    right = gradients(truth, expected)
    result.gaps["gradient"] = float((gradients(policy.model, found) - right).norm() / right.norm().clamp(min=1e-9))


@torch.no_grad()
def sample(result: Result, policy: Policy, truth: Any) -> None:
    """Through every engine that is open to the model, all at once and two at a time."""
    prompts = some_responses()[0][1:]
    for choice in ("auto", "transformers"):
        engines = [choose(policy, choice, batch, note=lambda _: None) for batch in (0, 2)]
        if choice == "auto":
            result.engine = "native" if isinstance(engines[0], NativeEngine) else "transformers"
        wanted = repeated(prompts, 2, 30, policy.end_tokens)
        drawn = [engine.sample(wanted, Sampling(), 0) for engine in engines]
        drawn.append(engines[0].sample(wanted[:2], Sampling(), 0))
        for sampled in drawn:
            asked = [request.prompt for request in wanted[: len(sampled)]]
            expected = alone(truth, asked, [each.tokens for each in sampled])
            gap = float((torch.cat([each.logp for each in sampled]) - expected).abs().max())
            result.gaps[choice] = max(gap, result.gaps.get(choice, 0.0))
        if not all(torch.equal(a.tokens, b.tokens) for a, b in zip(*drawn[:2], strict=True)):
            result.gaps[f"{choice}: tokens by rollout.batch"] = float("inf")


def examine(name: str) -> Result:
    """Build a model and put it through everything."""
    kind, settings = VARIANTS.get(name, (name, {}))
    classes = CLASSES[kind]
    result = Result(name, classes if isinstance(classes, str) else classes[0])
    try:
        model = build(kind, settings)
        truth = copy.deepcopy(model)
        with suppress(AttributeError, ValueError):
            truth.set_attn_implementation("eager")
        alone(truth, *some_responses())
    except Exception as error:  # of any kind: that is about the tiny configuration, and not about poise
        result.verdict, result.note = "not tried", line(error)
        return result
    try:
        policy = Policy(model, Words(), longest=LONGEST)
        rope.pin(truth, LONGEST)
        result.verdict = "packed" if policy.packed else "padded"
        read(result, policy, truth)
        sample(result, policy, truth)
    except ModelError as error:
        result.verdict, result.note = "refused", str(error)
    except Exception as error:
        result.verdict, result.note = "wrong: crashed", f"{type(error).__name__}: {line(error)}"
    worst = max(result.gaps, key=lambda key: result.gaps[key], default=None)
    if worst is not None and result.verdict != "refused" and not result.gaps[worst] <= BOUND:
        result.verdict, result.note = "wrong", f"{worst} off by {result.gaps[worst]:.2g}"
    return result


def line(error: Exception) -> str:
    """An error in one line."""
    return " ".join((str(error) or type(error).__name__).split())[:160]


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError when it takes longer."""

    def late(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


BETWEEN = r"(?s)(<!-- models[^\n]*\n).*?(<!-- end -->)"  # the part of the page that ``listing`` writes


def listing(results: Sequence[Result]) -> str:
    """What docs/models.md says of each model: how poise trains it, or why it refuses it."""
    served = [result for result in results if result.verdict in ("packed", "padded")]
    worst = max(gap for result in served for gap in result.gaps.values())
    text = (
        f"The list has {len(results)} classes and variants of transformers {transformers.__version__}. Among the "
        f"accepted ones, the largest difference was {worst:.1g}; the limit is {BOUND:g}."
    )
    text = textwrap.fill(text, WIDTH) + "\n"
    groups = [
        ("Packed, native engine", "packed", "native"),
        ("Packed, transformers' cache", "packed", "transformers"),
        ("Padded, transformers' cache", "padded", "transformers"),
    ]
    for title, verdict, engine in groups:
        text += paragraph(title, [r for r in served if (r.verdict, r.engine) == (verdict, engine)])
    for title, verdict in (("Refused at load", "refused"), ("Wrong", "wrong")):
        chosen = [result for result in results if result.verdict.startswith(verdict)]
        reasons: dict[str, list[Result]] = {}
        for result in chosen:
            note = result.note.replace(result.class_name, "the model").removeprefix("the model: ")
            reasons.setdefault(note, []).append(result)
        if chosen:
            text += f"\n**{title}**\n\n"
        for reason, those in sorted(reasons.items(), key=lambda item: -len(item[1])):
            text += wrapped(f"{names(those)}: {reason}", "- ", "  ")
    tiny = "Not tried, because the script could not build tiny versions"
    return text + paragraph(tiny, [result for result in results if result.verdict == "not tried"])


def paragraph(title: str, results: Sequence[Result]) -> str:
    """A group of models; empty if it has none."""
    return "\n" + wrapped(f"**{title}**: {names(results)}.") if results else ""


def names(results: Sequence[Result]) -> str:
    """The models in alphabetical order, the kinds of RoPE of one base together."""
    ropes: dict[str, list[str]] = {}
    for result in sorted(results, key=lambda result: result.name):
        found = re.fullmatch(r"(\S+) with (\w+) RoPE", result.name)
        base, kind = found.groups() if found else (result.name, "")
        ropes.setdefault(base, []).append(kind)
    shown = []
    for base, kinds in ropes.items():
        more = "/".join(filter(None, kinds))
        shown.append(base + (f" ({'also' if '' in kinds else 'with'} {more} RoPE)" if more else ""))
    return ", ".join(shown)


def wrapped(text: str, first: str = "", later: str = "") -> str:
    """Lines of the page, which break at spaces only."""
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False) + "\n"


def main() -> None:
    """Examine the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types, such as llama; default: all")
    parser.add_argument("--results", type=Path, help="keep results here, beside those of earlier calls")
    parser.add_argument("--write", type=Path, help="write the list into this page, between its marks")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    kept = args.results and args.results.exists()
    results = {name: Result(**row) for name, row in json.loads(args.results.read_text()).items()} if kept else {}
    for name in args.names or [*CLASSES, *VARIANTS]:
        with limited(SECONDS):
            results[name] = examine(name)
        r = results[name]
        print(f"{name:36} {r.verdict:12} {r.engine:12} {r.note}", flush=True)
        if args.results:
            args.results.write_text(json.dumps({name: asdict(result) for name, result in results.items()}, indent=1))
    if args.write:
        written = listing(list(results.values()))
        page = args.write.read_text()
        args.write.write_text(re.sub(BETWEEN, lambda marks: marks[1] + written + marks[2], page))
    sys.exit(any(result.verdict.startswith("wrong") for result in results.values()))


if __name__ == "__main__":
    main()
