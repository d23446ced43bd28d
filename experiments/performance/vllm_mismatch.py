"""How far vLLM's log-probabilities are from the policy's, and what sampling with it takes. In vLLM's own environment:

    OMP_WAIT_POLICY=passive .venv-vllm/bin/python experiments/performance/vllm_mismatch.py MODEL --dtype float32
    OMP_WAIT_POLICY=passive .venv-vllm/bin/python experiments/performance/vllm_mismatch.py MODEL --dtype bfloat16

Responses to Knights & Knaves. Before every round but the first the weights are moved by a little noise, as training
would move them, so that a push that does not arrive would show.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from pathlib import Path

import torch
from measure import environment, median, write

from poise.batch import padded_batch
from poise.models.loading import load_policy
from poise.objective import Settings
from poise.sampling.cached_engine import CachedEngine
from poise.sampling.draws import Sampling
from poise.sampling.requests import Engine, repeated
from poise.sampling.vllm_engine import VllmEngine
from poise.tasks import get
from poise.training.steps import mismatch_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="longest response")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    policy = load_policy(args.model, device=args.device, dtype=args.dtype)
    problems = islice(get("kk", people="2-3").problems("train", 1), args.prompts)
    asked = [policy.encode(problem.prompt) for problem in problems]
    engines: dict[str, Engine] = {"vllm": VllmEngine(policy), "transformers": CachedEngine(policy)}
    seconds: dict[str, list[float]] = {"start": [], "push": [], **{name: [] for name in engines}}
    rows, spread = [], torch.Generator(policy.device).manual_seed(0)
    for number in range(args.rounds + 1):
        for name, engine in engines.items():
            start = time.perf_counter()
            wanted = repeated(asked, args.group, args.tokens, policy.end_tokens)
            out = engine.sample(wanted, Sampling(args.temperature), number)
            taken = time.perf_counter() - start
            tokens = sum(len(each.tokens) for each in out)
            if number == 0:  # where vLLM starts
                seconds["start"] += [taken] * (name == "vllm")
                continue
            seconds[name].append(taken)
            if reported := [each.sampler_logp for each in out if each.sampler_logp is not None]:
                batch = padded_batch(
                    [request.prompt for request in wanted], [each.tokens for each in out], policy.device,
                    old_logp=[each.logp for each in out], sampler_logp=reported,
                )  # fmt: skip
                found = mismatch_metrics(batch, Settings(importance_cap=2.0))
                rows.append({"round": number, "tokens": tokens, **found})
                print(f"{number}: {tokens} tokens", {key: float(f"{value:.3g}") for key, value in found.items()})
            print(f"   {name}: {tokens / taken:.0f} tokens/s")
        start = time.perf_counter()
        engines["vllm"]._push()  # type: ignore[attr-defined]
        seconds["push"].append(time.perf_counter() - start)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                noise = torch.randn(parameter.shape, generator=spread, device=policy.device)
                parameter.add_((1e-2 * parameter.std() * noise).to(parameter.dtype))
    print({name: round(median(values), 3) for name, values in seconds.items()}, "seconds")
    about = {"environment": environment(args.device), "model": args.model, "dtype": args.dtype}
    write(args.json, {**about, "rounds": rows, "seconds": seconds})


if __name__ == "__main__":
    main()
