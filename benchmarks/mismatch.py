"""How the sampler's log-probabilities differ from the policy's, by depth in the response and by probability.

    python benchmarks/mismatch.py grpo model=Qwen/Qwen2.5-1.5B-Instruct rollout.max_tokens=4096 --json out.json
    python benchmarks/mismatch.py grpo model=M rollout.engine=vllm --json vllm.json
    python benchmarks/mismatch.py tiny --tokens 2000                      # on a CPU, seconds

Takes a recipe and settings as ``poise train`` does. It samples batches of a step, with the weights as they are, until
it has seen enough tokens, and lets the policy score them. Each row gives, for the tokens of a range, the mean and the
99.9th percentile of |log π(policy) − log π(sampler)|, and the share with a ratio outside 1 ± 0.2.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure import environment, write
from torch import Tensor

from poise.batch import TokenBatch
from poise.models.loading import resolve_device
from poise.runs.folder import RunFolder
from poise.tasks import draw
from poise.training.batches import drop_failed
from poise.training.building import build
from poise.training.config.schema import Config, load

DEPTHS = (0, 16, 64, 256, 1024, 2048, 4096, 8192)  # where each range of positions begins
PROBABILITIES = (0.0, 1e-6, 1e-4, 1e-2, 0.1, 0.5, 0.9)  # where each range of the policy's probabilities begins
CLIP = 0.2


def batches(config: Config, tokens: int) -> Iterator[TokenBatch]:
    """What the policy makes of sampled batches, until there are this many tokens."""
    run = build(config, RunFolder.create(config.run, config.model_dump(mode="json")))
    step = seen = 0
    while seen < tokens:
        problems = draw(run.sampler.task, "train", seed=step, count=config.prompts)
        trajectories, _ = run.algorithm.collect(problems, run.sampler, step, None)
        batch = run.make_batch(drop_failed(trajectories)[0])
        seen, step = seen + int(batch.mask.sum()), step + 1
        yield batch


def table(values: Tensor, gaps: Tensor, edges: tuple[float, ...]) -> list[dict[str, float]]:
    """One row for each range of ``values`` that has tokens."""
    ranges = torch.bucketize(values, torch.tensor(edges, dtype=values.dtype), right=True) - 1
    rows = []
    for index, edge in enumerate(edges):
        distance = gaps[ranges == index].abs().sort().values
        if len(distance):
            outside = (gaps[ranges == index].exp() - 1).abs() > CLIP
            rows.append({
                "from": edge, "tokens": len(distance), "mean": float(distance.mean()),
                "p99.9": float(distance[int(0.999 * (len(distance) - 1))]), "outside": float(outside.double().mean()),
            })  # fmt: skip
    return rows


def show(title: str, rows: list[dict[str, float]]) -> None:
    print(f"\n{title:>12s} {'tokens':>9s} {'mean':>9s} {'99.9 %':>9s} {'outside':>9s}")
    for row in rows:
        print(f"{row['from']:12g} {row['tokens']:9d} {row['mean']:9.2e} {row['p99.9']:9.2e} {row['outside']:9.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("settings", nargs="*", help="key=value")
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    gaps, depths, probabilities = [], [], []
    with tempfile.TemporaryDirectory() as place:
        config = load(args.recipe, ["rollout.old_logp=recomputed", *args.settings, f"run={place}/run"])
        for batch in batches(config, args.tokens):
            assert batch.sampler_logp is not None
            gaps.append((batch.old_logp - batch.sampler_logp)[batch.mask].double().cpu())
            depths.append((batch.mask.cumsum(1) - 1)[batch.mask].double().cpu())
            probabilities.append(batch.old_logp[batch.mask].double().exp().cpu())
            gap = torch.cat(gaps)
            found: dict[str, Any] = {
                "recipe": args.recipe, "settings": args.settings, **environment(resolve_device(config.device).type),
                "by_depth": table(torch.cat(depths), gap, DEPTHS),
                "by_probability": table(torch.cat(probabilities), gap, PROBABILITIES),
            }  # fmt: skip
            write(args.json, found, quiet=True)
    show("depth", found["by_depth"])
    show("probability", found["by_probability"])


if __name__ == "__main__":
    main()
