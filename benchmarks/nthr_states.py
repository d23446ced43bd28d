"""Do NTHR's flags depend on where its hidden states come from? States of sampling beside those of a forward pass.

    python benchmarks/nthr_states.py                                       # embedded, and a random model, float32
    python benchmarks/nthr_states.py --device cuda --models 135M 1.5B --dtypes bfloat16 --groups 64 --tokens 256

Both are compared with states that a float64 copy of the model computes, scored in float64. Of each group every other
response counts as correct. A random model is far more certain of nothing than a trained one: its logits are scaled up
to about three nats of entropy, as in ``nthr.py``. Times are of what each way adds to a step: keeping the states while
sampling (both ways of sampling take turns), looking them up, or running the model.
"""

from __future__ import annotations

import argparse
import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import Way, environment, in_turns, median, write
from torch import Tensor
from update import SHAPES, model_of

from poise import Head, TokenBatch
from poise import regulators as registry
from poise.engines.native.engine import NativeEngine
from poise.models.policy import Policy, load_policy
from poise.rollout.sampling import Sampling
from poise.rollout.types import Rollouts, repeated
from poise.tasks import draw
from poise.tasks.knights_knaves import KnightsKnaves

PROMPT = 64  # tokens of the prompts of a random model
ROWS = 128  # responses in a forward pass: with 256 tokens each, as many as NTHR takes


class NoWords:
    """The part of a tokenizer that an engine asks for."""

    eos_token_id = None
    chat_template = None


def policy_of(name: str, device: str, dtype: str) -> Policy:
    if name not in SHAPES:
        return load_policy(name, device=device, dtype=dtype)
    model = model_of(name, device, torch.float32)
    width, vocabulary = SHAPES[name][0], SHAPES[name][-1]
    # A head of its own: a tied one would say each token again. The last norm leaves states of norm √d.
    spread = math.sqrt(2 * (math.log(vocabulary) - 3)) / math.sqrt(width)
    weight = torch.randn(vocabulary, width, generator=torch.Generator(device).manual_seed(1), device=device)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(spread * weight)
    return Policy(model.to(getattr(torch, dtype)), NoWords())


def prompts_of(policy: Policy, name: str, groups: int) -> list[list[int]]:
    if name in SHAPES:
        g = torch.Generator().manual_seed(0)
        return torch.randint(1, SHAPES[name][-1], (groups, PROMPT), generator=g).tolist()
    task = KnightsKnaves()
    return [policy.encode(problem.prompt) for problem in draw(task, "train", 0, groups)]


def passed(policy: Policy, rollouts: Rollouts) -> Tensor:
    """(N, d) states from forward passes of ROWS responses."""
    rows = range(0, len(rollouts.prompts), ROWS)
    return torch.cat([policy.hidden(rollouts.rows(slice(row, row + ROWS))) for row in rows])


def flags(rollouts: Rollouts, hidden: Tensor, head: Head, group: int) -> tuple[Tensor, Tensor]:
    """(B, T) flagged tokens, and the tokens of incorrect responses."""
    padded = torch.zeros(*rollouts.mask.shape, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    padded.view(-1, hidden.shape[1])[rollouts.index] = hidden
    rows = torch.arange(len(rollouts.prompts), device=hidden.device)
    batch = TokenBatch(
        rollouts.logp, rollouts.mask, torch.zeros(len(rows), device=hidden.device), groups=rows // group,
        correct=rows % 2 == 0, hidden=padded, targets=rollouts.tokens, head=head,
    )  # fmt: skip
    (phase,) = registry.get("nthr", eta=0.0)(batch)
    wrong = rollouts.mask & (rows % 2 == 1)[:, None]
    return (phase.policy == 0) & wrong, wrong


def double(policy: Policy) -> Policy:
    """A copy in float64, but for the norms and rotary angles that transformers computes in float32."""
    return Policy(copy.deepcopy(policy.base).double(), policy.tokenizer)


def doubled(head: Head) -> Head:
    return replace(head, weight=head.weight.double(), bias=None if head.bias is None else head.bias.double())


def measure(name: str, dtype: str, device: str, groups: int, group: int, tokens: int, rounds: int) -> dict[str, Any]:
    policy = policy_of(name, device, dtype)
    engine, sampling = NativeEngine(policy), Sampling()
    plain = repeated(prompts_of(policy, name, groups), group, tokens, policy.end_tokens)
    asked = [replace(request, hidden=True) for request in plain]
    out = engine.sample(asked, sampling, 0)
    assert out.hidden is not None
    forward, exact = passed(policy, out), passed(double(policy), out)
    found = {
        "sampled": flags(out, out.hidden, policy.head(), group),
        "forward": flags(out, forward, policy.head(), group),
        "exact": flags(out, exact, doubled(policy.head()), group),
    }
    wrong = found["exact"][1]

    def differ(a: str, b: str) -> float:
        return float((found[a][0] != found[b][0])[wrong].double().mean())

    def error(states: Tensor) -> float:
        return float((states.double() - exact).norm() / exact.norm())

    ways: dict[str, Way] = {
        "sampling": lambda: engine.sample(plain, sampling, 0),
        "sampling, keeping states": lambda: engine.sample(asked, sampling, 0),
        "forward pass": lambda: passed(policy, out),
    }
    times = in_turns(ways, device, repeats=rounds, warmup=1) if rounds else {}
    return {
        "tokens": sum(out.lengths), "of incorrect responses": int(wrong.sum()),
        "entropy": float(out.entropy[out.mask].mean()),
        "flagged": float(found["exact"][0][wrong].double().mean()),
        "error of states": {"sampled": error(out.hidden), "forward": error(forward)},
        "other flags": {
            "sampled against forward": differ("sampled", "forward"),
            "sampled against float64": differ("sampled", "exact"),
            "forward against float64": differ("forward", "exact"),
        },
        "seconds": times, "ms": {key: 1e3 * median(values) for key, values in times.items()},
        "MiB of states": out.hidden.nbytes / 2**20,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", nargs="+", default=["embedded", "14M"], help=f"embedded, or of {', '.join(SHAPES)}")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="of the timing; 0 for none")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: dict[str, Any] = environment(args.device) | {"models": {}}
    with torch.no_grad():
        for name in args.models:
            for dtype in args.dtypes:
                row = measure(name, dtype, args.device, args.groups, args.group, args.tokens, args.rounds)
                rows["models"][f"{name}, {dtype}"] = row
                print(
                    f"{name}, {dtype}: " + ", ".join(f"{key} {value}" for key, value in row.items() if key != "seconds")
                )
                write(args.json, rows)


if __name__ == "__main__":
    main()
