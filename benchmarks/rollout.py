"""What sampling takes: the native engine, the one on transformers' cache, and transformers' own ``generate``.

    OMP_WAIT_POLICY=passive python benchmarks/rollout.py                 # the embedded model; two minutes on two cores
    python benchmarks/rollout.py --model HuggingFaceTB/SmolLM2-135M --device cuda --prompts 64 --max-tokens 256

They take turns, in one process. Responses end where the model ends them, so each is asked for the same prompts but
samples other responses; with ``--endless`` none ends early, and all do the same work. Prompts are Knights & Knaves'.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from measure import environment, extra_memory, in_turns, median, spread, write

from poise.policy import Policy, load_policy, pad_left
from poise.rollout.base import Engine
from poise.rollout.cached import CachedEngine
from poise.rollout.native import NativeEngine
from poise.tasks import get

NEVER = 1_000_000  # an end token that no vocabulary has


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=112)
    parser.add_argument("--batch", type=int, default=0, help="rows of the native engine; 0: all")
    parser.add_argument("--endless", action="store_true", help="no response ends before max-tokens")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    policy = load_policy(args.model, device=args.device, dtype=args.dtype)
    if args.endless:
        policy.model.generation_config.eos_token_id = NEVER
        policy.tokenizer.eos_token = None
    asked = [policy.encode(p.prompt) for p in islice(get("kk", people="2-3").problems("train", 1), args.prompts)]

    used: dict[str, list[tuple[int, float]]] = {}

    def way(name: str, sample: Callable[[int], int]) -> Callable[[], None]:
        def run() -> None:
            begin = time.process_time()
            tokens = sample(len(used.setdefault(name, [])))
            used[name].append((tokens, time.process_time() - begin))

        return run

    def by(engine: Engine) -> Callable[[int], int]:
        settings = {"max_tokens": args.max_tokens, "temperature": 1.0}
        return lambda seed: sum(engine.generate(asked, args.group, seed=seed, **settings).lengths)

    ways = {
        "native": way("native", by(NativeEngine(policy, args.batch))),
        "cached": way("cached", by(CachedEngine(policy))),
        "generate": way("generate", lambda seed: generate(policy, asked, args.group, args.max_tokens, seed)),
    }
    warm_up = 1
    times = in_turns(ways, args.device, repeats=args.repeats, warmup=warm_up)
    title = f"{args.model}, {args.prompts} × {args.group} responses of at most {args.max_tokens} tokens"
    print(f"{title} on {environment(args.device)['device']}: medians of {args.repeats} (lowest–highest)")
    results = []
    for name in ways:
        rounds = used[name][warm_up:]
        tokens = sum(count for count, _ in rounds) / len(rounds)
        memory = extra_memory(ways[name], args.device)
        row = {"way": name, "wall_s": times[name], "cpu_s": [cpu for _, cpu in rounds], "tokens": tokens}
        results.append({**row, "extra_memory": memory})
        print(
            f"  {name:9s} wall {spread(times[name], 1)} s   processor {spread([cpu for _, cpu in rounds], 1)} s   "
            f"{tokens / median(times[name]):,.0f} tokens/s" + (f"   {memory / 2**30:.2f} GiB" if memory else "")
        )
    write(args.json, {**environment(args.device), "case": title, "endless": args.endless, "results": results})


@torch.no_grad()
def generate(policy: Policy, prompts: list[list[int]], group: int, max_tokens: int, seed: int) -> int:
    """transformers' own sampling; the number of response tokens."""
    torch.manual_seed(seed)
    ids, seen = pad_left([prompt for prompt in prompts for _ in range(group)], policy.device)
    ends = policy.end_tokens
    out = policy.model.generate(
        ids, attention_mask=seen, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max_tokens, pad_token_id=0,
        eos_token_id=ends,
    )[:, ids.shape[1] :]  # fmt: skip
    ending = torch.isin(out, torch.tensor(ends, device=out.device)).long()
    return int((ending.cumsum(1) - ending == 0).sum())


if __name__ == "__main__":
    main()
