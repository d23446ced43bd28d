"""Which learning rate of plain GRPO is a method worth? From finished runs, and from gradients before any run.

    python experiments/comparison/effective_rate.py runs runs/main/kk-w0 effective.json
    python experiments/comparison/effective_rate.py gradients runs/models/kk-w0 steps.json task.people=3

``runs`` reads one comparison or several, in which GRPO has several learning rates: the seeds that every arm has at
every rate (where rates are tuned, those for tuning). An arm's mean accuracy while it trains, over the first ``--share``
of the batches, is interpolated between GRPO's at its rates (straight lines over the logarithm of the rate, the outer
ones prolonged): ``factor`` is the rate at which GRPO would have it, divided by the arm's own; ``by_seed`` has it for
every seed alone, ``error`` is a jackknife's over seeds. ``beyond`` says that the arm has less, or more, than GRPO at
any of its rates: then the factor is a guess.

``gradients`` predicts it at fixed weights. Adam divides by v, the mean square of past gradients, and its momentum
averages the gradients themselves. So in one batch a method with phases r₁, r₂, … moves along Σ r / √v, where v is the
mean of r² over phases and batches, and GRPO along g / √v with v the mean of g². ``factor`` is the first one's inner
product with GRPO's mean gradient divided by the second one's, between different batches; ``error`` is a jackknife's.
Two plain passes have 2. Two phases whose gradients add up to g and have nothing to do with each other have √2, however
large each is. A weight that is the same for all tokens has 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from signal_share import Gradients, arguments, batches_of, between, jackknife, left_out, trainer_of
from torch import Tensor

from poise import regulators
from poise.runs.folder import RunFolder
from poise.training.config.groups import OptimConfig

METHODS = ("grpo", "lopti", "random-split", "ar", "tr-grpo", "nthr")
Curves = dict[tuple[str, float], dict[int, list[float]]]  # by arm and rate, then by seed


def curves_of(comparisons: Sequence[Path]) -> Curves:
    """Accuracy on the problems of every batch, before it was trained on, of all finished runs."""
    found: Curves = {}
    for folder in sorted(folder for each in comparisons for folder in each.glob("arms/*/seed-*")):
        if (folder / "summary.json").exists():
            config = json.loads((folder / "config.json").read_text())
            rows = RunFolder.open(folder, resume=False).metrics()
            accuracy = [row["reward/accuracy"] for row in rows if "reward/accuracy" in row]
            betas = tuple(config["optim"]["betas"])
            arm = config["regulator"] + (f", betas={betas}" if betas != OptimConfig().betas else "")
            found.setdefault((arm, config["optim"]["lr"]), {})[config["seed"]] = accuracy
    return found


def rate_at(rates: Sequence[float], scores: Sequence[float], score: float) -> float:
    """The rate at which a line through points (log rate, score) has the score; the outer pieces go on.

    Pieces where the score stays the same tell nothing; NaN if there are no others.
    """
    x = [math.log(rate) for rate in rates]
    pieces = [i for i, (before, after) in enumerate(pairwise(scores)) if before != after]
    if not pieces:
        return math.nan
    reached = (i for i in pieces if (score - scores[i + 1]) * (scores[i + 1] - scores[i]) <= 0)
    piece = next(reached, pieces[-1])
    slope = (scores[piece + 1] - scores[piece]) / (x[piece + 1] - x[piece])
    return math.exp(x[piece] + (score - scores[piece]) / slope)


def from_runs(curves: Curves, baseline: str, share: float = 0.5) -> dict[str, Any]:
    """The factor of each arm at each of its rates."""
    rates = sorted(rate for arm, rate in curves if arm == baseline)
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in curves.values())))
    batches = min(len(curve) for by_seed in curves.values() for curve in by_seed.values())
    batches = max(1, int(share * batches))
    score = {key: {seed: mean(by_seed[seed][:batches]) for seed in seeds} for key, by_seed in curves.items()}

    def factor(arm: str, rate: float, chosen: Sequence[int]) -> float:
        plain = [mean(score[baseline, each][seed] for seed in chosen) for each in rates]
        return rate_at(rates, plain, mean(score[arm, rate][seed] for seed in chosen)) / rate

    ends = sorted(mean(score[baseline, rate].values()) for rate in rates)
    rows = []
    for arm, rate in sorted(curves):
        scores = [score[arm, rate][seed] for seed in seeds]
        without = [factor(arm, rate, [other for other in seeds if other != seed]) for seed in seeds if len(seeds) > 1]
        rows.append(
            {
                "arm": arm, "rate": rate, "score": mean(scores), "scores": scores,
                "factor": factor(arm, rate, seeds), "error": jackknife(torch.tensor(without)) if without else None,
                "by_seed": [factor(arm, rate, [seed]) for seed in seeds],
                "beyond": not ends[0] <= mean(scores) <= ends[-1],
            }
        )  # fmt: skip
    return {"seeds": seeds, "batches": batches, "rates": rates, "rows": rows}


def adam_steps(phases: Sequence[Tensor]) -> Tensor:
    """(M, P): what Adam makes of every batch's phases (each (M, P)), once its averages have settled."""
    square = sum((phase.square().mean(0) for phase in phases), torch.zeros(())) / len(phases)
    return sum(phases, torch.zeros(())) / (square.sqrt() + 1e-12)


def factor_of(phases: Sequence[Tensor], plain: Tensor) -> dict[str, float]:
    """How far a method steps along GRPO's mean gradient, divided by how far GRPO does."""
    own, base = adam_steps(phases), adam_steps([plain])
    error = jackknife(left_out(own, plain) / left_out(base, plain))
    return {"factor": between(own, plain) / between(base, plain), "error": error}


def from_gradients(options: argparse.Namespace) -> dict[str, Any]:
    """The predicted factor of each method, with the model as it is."""
    with trainer_of(options.model, options.settings) as trainer:
        gradients, names = Gradients(trainer), dict[str, list[str]]()
        for number, batch in enumerate(batches_of(trainer, options.batches), 1):
            for method in METHODS:
                phases = regulators.parse(method)(batch)
                names[method] = [f"{method} {phase.name}" for phase in phases]
                for name, phase in zip(names[method], phases, strict=True):
                    gradients.add(name, batch, [phase])
            print(f"{number} of {options.batches} batches", end="\r", flush=True)
        (plain,) = (gradients.rows(name) for name in names["grpo"])
        found = {method: factor_of([gradients.rows(name) for name in names[method]], plain) for method in METHODS}
    command = {"model": options.model, "settings": options.settings, "batches": options.batches}
    return {"command": command, "methods": found}


def main() -> None:
    if sys.argv[1:2] == ["gradients"]:
        options = arguments(__doc__).parse_intermixed_args(sys.argv[2:])
        found = from_gradients(options)
        for method, row in found["methods"].items():
            print(f"{method:16} {row['factor']:5.2f} ± {row['error']:.2f}")
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("what", choices=["runs", "gradients"])
        parser.add_argument("comparisons", type=Path, nargs="+")
        parser.add_argument("out", type=Path)
        parser.add_argument("--baseline", default="grpo")
        parser.add_argument("--share", type=float, default=0.5, help="of the batches, from the first on")
        options = parser.parse_args()
        found = from_runs(curves_of(options.comparisons), options.baseline, options.share)
        for row in found["rows"]:
            seeds = ", ".join(f"{value:.2f}" for value in row["by_seed"])
            guess = " a guess" * row["beyond"]
            print(f"{row['arm']:16} {row['rate']:8.1e} {row['score']:.4f}  {row['factor']:5.2f} ({seeds}){guess}")
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
