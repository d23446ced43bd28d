"""Train with a step size that follows the measured drift of the policy; run the arms of a plan, one after another.

    python experiments/step-size/step_size.py experiments/step-size/plans/test.yaml runs/step-size/test --hours 1

The drift of an update is the mean, over responses or over tokens, of ρ − 1 − log ρ (k3), an estimate of KL(old ‖ new),
where ρ is the ratio of the probabilities of a sampled token after and before the update. It is measured after the
update, on every fourth response of the batch. ``Update`` stands in for ``poise.training.update.update`` inside the
trainer.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml

import poise
from poise.batch import Phase, TokenBatch
from poise.models.policy import Policy
from poise.models.scoring import score_batch
from poise.training.update import UpdatePlan, update

EVERY = 4  # one response in this many is measured
MOST = 4  # passes over a batch
CHANGE = 2.0  # the rate changes at most by this factor from step to step


@torch.no_grad()
def drifts(policy: Policy, batch: TokenBatch, plan: UpdatePlan) -> tuple[float, float]:
    """The drift since the batch was sampled, on every fourth response: mean per token, and per response."""
    part = batch.rows(list(range(0, len(batch.mask), EVERY)))
    logp_BT, _ = score_batch(policy, part, plan.temperature, plan.micro_tokens)
    log_ratio_BT = torch.where(part.mask, (logp_BT - part.old_logp).double(), 0.0)
    total = float((torch.expm1(log_ratio_BT) - log_ratio_BT).sum())
    return total / int(part.mask.sum()), total / len(part.mask)


@dataclass
class Update:
    """An update whose drift is controlled, per token or per response.

    ``rate``: the learning rate of the next step is multiplied by √(target / drift), at most by 2 either way.
    ``rescale``: the update of this step is multiplied by √(target / drift), since drift is quadratic in its length. The
    weights must be in float32: no half-precision copies are updated.
    ``passes``: passes over the batch, at most four, until the drift reaches the target.
    """

    kind: str = "none"
    target: float = math.nan
    per_response: bool = False
    rate: float | None = None  # of the next step; None: what the run's settings say

    def __call__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        batch: TokenBatch,
        phases: Sequence[Phase],
        plan: UpdatePlan,
        seed: int = 0,
    ) -> dict[str, float]:
        """Update, measure, and act on what was measured."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        before = [parameter.detach().clone() for parameter in parameters] if self.kind == "rescale" else []
        if self.kind == "rate" and self.rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = self.rate
        used, passes, measurements = optimizer.param_groups[0]["lr"], 0, 0
        while True:
            metrics = update(policy, optimizer, batch, phases, plan, seed + 1000 * passes)
            found, passes, measurements = drifts(policy, batch, plan), passes + len(phases), measurements + 1
            drift = found[self.per_response]
            if self.kind != "passes" or drift >= self.target or passes >= MOST:
                break
        factor = math.sqrt(self.target / drift) if drift > 0 else 1.0
        if self.kind == "rate":
            self.rate = used * min(max(factor, 1 / CHANGE), CHANGE)
        if self.kind == "rescale" and drift > 0:
            with torch.no_grad():
                for parameter, old in zip(parameters, before, strict=True):
                    parameter.copy_(old + factor * (parameter - old))
            used *= factor
            found = drifts(policy, batch, plan)  # for the table alone
        return metrics | {
            "optim/rate": used,
            "optim/drift_token": found[0],
            "optim/drift_response": found[1],
            "optim/passes": float(passes),
            "optim/measurements": float(measurements if self.kind != "none" else 0),
        }


def run(settings: dict[str, Any], arm: dict[str, Any], rate: float, seed: int) -> dict[str, Any]:
    """One run: its greedy curve, and what each step measured."""
    control = Update(arm.get("control", "none"), float(arm.get("target", math.nan)), arm.get("per_response", False))
    own = {
        key: value for key, value in arm.items() if key not in ("name", "control", "target", "per_response", "rates")
    }
    with tempfile.TemporaryDirectory() as folder, patch("poise.trainer.update", control):
        changes = {**settings, **own, "optim.lr": rate, "seed": seed, "run": f"{folder}/run"}
        began = time.process_time()
        summary = poise.train(recipe="tiny", quiet=True, **changes).summary
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    greedy = {0: summary["before"]["greedy"], summary["steps"]: summary["after"]["greedy"]}
    greedy |= {line["step"]: value for line in lines for key, value in line.items() if key.endswith("/greedy")}
    kept = ("optim/rate", "optim/drift_token", "optim/drift_response", "optim/passes")
    steps = {name.removeprefix("optim/"): [float(f"{line[name]:.3g}") for line in lines] for name in kept}
    flop = sum(each_flop(line, 4 if "lora" in changes else 6) for line in lines)
    about = {"arm": arm["name"], "lr": rate, "seed": seed, "seconds": round(time.process_time() - began)}
    return {
        **about,
        "greedy": dict(sorted(greedy.items())),
        "flop": round(flop),
        "tokens": sum(line["tokens/sampled"] for line in lines),
        **steps,
    }


def each_flop(line: dict[str, float], trained: int) -> float:
    """The FLOP of a step per parameter, as ``poise compare`` estimates them, and those of measuring the drift."""
    passes = line["optim/passes"] * (1 - line["reward/no_spread"])
    return line["tokens/sampled"] * (2 + trained * passes + 2 * line["optim/measurements"] / EVERY)


def planned(plan: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], float, int]]:
    """Every run of a plan, seed by seed, so that what is cut off is whole seeds."""
    for seed in range(max(max(regime["seeds"]) for regime in plan["regimes"].values()) + 1):
        for name, regime in plan["regimes"].items():
            for arm in regime["arms"] if seed in regime["seeds"] else ():
                for rate in arm["rates"]:
                    yield name, regime["settings"], arm, float(rate), seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("raw", type=Path, help="a folder: one file a run")
    parser.add_argument("--regimes", nargs="*")
    parser.add_argument("--hours", type=float, default=math.inf)
    words = parser.parse_args()
    words.raw.mkdir(parents=True, exist_ok=True)
    end = time.time() + 3600 * words.hours
    for name, settings, arm, rate, seed in planned(yaml.safe_load(words.plan.read_text())):
        key = f"{name}: {arm['name']} @ {rate:g}, seed {seed}"
        place = words.raw / f"{key.replace('/', '_')}.json"
        if place.exists() or time.time() > end or name not in (words.regimes or [name]):
            continue
        place.touch()  # another process of the same command takes other runs
        found = {"regime": name, **run(settings, arm, rate, seed)}
        place.write_text(json.dumps(found))
        print(f"{key}: {found['greedy'][max(found['greedy'])]:.3f}, {found['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
