"""What it brings to decode with queries, keys and values as one product (``models/fused_projections.py``).

    python experiments/performance/projections.py --json out.json     # CUDA; about two minutes

The native engine samples with compiled layers, once with the projections fused and once as transformers has them. The
two take turns, in one process, on the same prompts of 128 random tokens and responses of 256.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measure import environment, in_turns, spread, write
from rollout import NEVER, own_code, random_policy, random_requests, sampled

from poise.engines.native.engine import NativeEngine
from poise.models import compilation
from poise.models.fused_projections import join_projections

CASES = (("135M", 64), ("135M", 512), ("1.7B", 512))  # shape, responses
LENGTH = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures: dict[str, Any] = {**environment("cuda"), "cases": {}}
    for shape, responses in CASES:
        ways: dict[str, Callable[[], object]] = {}
        for name, join in (("fused", join_projections), ("plain", lambda _: None)):
            torch.manual_seed(0)
            with mock.patch.object(compilation, "join_projections", join):
                policy = random_policy(shape, "cuda")
            policy.model.generation_config.eos_token_id, policy.tokenizer.eos_token = NEVER, None
            requests = random_requests(shape, responses // 8, 8, [LENGTH] * responses)
            run = sampled(own_code(NativeEngine(policy, 0)), requests)
            ways[name] = lambda run=run: run(0)  # type: ignore[misc]
        times = in_turns(ways, "cuda", repeats=9, warmup=2)
        figures["cases"][f"{shape}, {responses} × {LENGTH}"] = times
        shown = ", ".join(f"{name} {spread(each, 1.0)} s" for name, each in times.items())
        print(f"{shape}, {responses} responses: {shown}", flush=True)
        write(args.json, figures)
        del ways, policy, run
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
