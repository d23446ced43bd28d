"""How much of an update is signal, and which tokens bring it: at fixed weights, over many batches.

    python experiments/comparison/signal_share.py runs/models/kk-w1 signal.json task.people=3 --batches 64
    python experiments/comparison/signal_share.py embedded signal.json --batches 3 --methods "grpo; ar"

The gradient g of one batch is the mean one (over all possible batches, s) and noise. Two batches share the signal and
not the noise, so the mean of g_i · g_j over different batches is ‖s‖² without bias, and what ‖g_i‖² has beyond that is
noise. Its ``error`` (jackknife) is 1.3 to 1.5 times too large where signal is 1 to 3 %. For every regulator, with r its
gradient and g that of plain GRPO:

- ``efficiency``: (r · s)² / (‖r‖² ‖s‖²), the squared cosine between an update and GRPO's mean gradient. A plain batch
  n times as large has S / (S + N / n), with S = ‖s‖² and N the noise. While that is small it grows as n does: twice the
  efficiency is worth about twice the responses (exactly, n is the ratio of e / (1 − e)).
- ``gain_error``: the standard error of the regulator's efficiency divided by GRPO's.
- ``adam``: the efficiency after every parameter is divided by its root mean square over batches, as Adam does (without
  momentum).

A gain shrinks with larger batches: noise averages out, and a mean of r that points elsewhere than s stays.

For each kind of token (what a word is for; its probability; this with the sign of the advantage; its place), the shares
of tokens, signal and size; errors of shares are those of the kind's signal, not of the whole. ``best``: the gain of
weights that depend on the kind alone, chosen on one half of the batches and measured on the other. A negative weight
turns a kind's push around. Noise spoils the choice, so the very best weights gain more than this: equal ones have 1.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from oracles import texts_of, word_kinds
from torch import Tensor

from poise import regulators
from poise.batch import Phase, TokenBatch
from poise.runs.folder import RunFolder
from poise.sampling.draws import derived_seed
from poise.sampling.trajectories import collect
from poise.tasks import training_problems
from poise.trainer import Trainer
from poise.training import config as configs
from poise.training.update import UpdatePlan, backward

METHODS = ("grpo", "ar", "ar(alpha=1.0)", "tr-grpo", "nthr", "amplify", "entropy", "stare", "stapo", "clip-cov")
EDGES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
QUARTERS = 4


def token_kinds(batch: TokenBatch, words: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """(B, T) bool for every kind of token, by what tells them apart. Each way of telling covers all tokens once."""
    prob, positive, tokens = batch.prob, batch.token_advantages > 0, batch.targets
    assert tokens is not None
    by_word = {kind: chosen.to(tokens.device)[tokens.clamp(min=0)] & batch.mask for kind, chosen in words.items()}
    by_prob = {f"p {low:.2f}-{high:.2f}": batch.mask & (prob > low) & (prob <= high) for low, high in pairwise(EDGES)}
    place = (batch.mask.cumsum(1) - 1) * QUARTERS // batch.lengths[:, None].clamp(min=1)
    return {
        "word": by_word,
        "probability": by_prob,
        "probability and sign": {
            f"{kind}, {sign}": mask & (positive == (sign == "right"))
            for kind, mask in by_prob.items()
            for sign in ("right", "wrong")
        },
        "place": {f"quarter {quarter + 1}": batch.mask & (place == quarter) for quarter in range(QUARTERS)},
    }


class Gradients:
    """The gradients of many batches, by name."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.parameters = trainer, trainer.policy.parameters()
        self.of: dict[str, list[Tensor]] = {}

    def add(self, name: str, batch: TokenBatch, phases: Sequence[Phase]) -> None:
        """The gradient of all phases together, at the present weights."""
        policy, kl = (torch.stack(weights).sum(0) for weights in zip(*((p.policy, p.kl) for p in phases), strict=True))
        whole = Phase("all", policy, kl)
        for parameter in self.parameters:
            parameter.grad = None
        backward(self.trainer.policy, batch, whole, UpdatePlan(self.trainer.config.objective))
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.of.setdefault(name, []).append(torch.cat([part.detach().flatten().float() for part in parts]))

    def rows(self, name: str) -> Tensor:
        """(M, P), one row a batch."""
        return torch.stack(self.of[name])


def between(a: Tensor, b: Tensor) -> float:
    """The mean inner product of rows of different batches."""
    total = float((a.sum(0).double() * b.sum(0)).sum() - (a.double() * b).sum())
    return total / (len(a) * (len(a) - 1))


def within(a: Tensor, b: Tensor) -> float:
    """The mean inner product of rows of the same batch."""
    return float((a.double() * b).sum() / len(a))


def left_out(a: Tensor, b: Tensor) -> Tensor:
    """(M,) ``between`` without each batch in turn."""
    n = len(a)
    products = (a @ b.T).double().fill_diagonal_(0.0)
    return (products.sum() - products.sum(0) - products.sum(1)) / ((n - 1) * (n - 2))


def jackknife(values: Tensor) -> float:
    """The standard error of a figure, from its values without each batch in turn."""
    n = len(values)
    return float(((values - values.mean()) ** 2).sum().mul((n - 1) / n).sqrt())


def error(a: Tensor, b: Tensor) -> float:
    """The standard error of ``between``."""
    return jackknife(left_out(a, b))


def gain_error(rows: Tensor, plain: Tensor) -> float:
    """The standard error of the ratio of two efficiencies. They share the batches, so their errors are not apart."""
    own, base = (each.double().square().sum(1) for each in (rows, plain))
    sizes = (base.sum() - base) / (own.sum() - own)
    return jackknife((left_out(rows, plain) / left_out(plain, plain)) ** 2 * sizes)


def scaled(rows: Tensor) -> Tensor:
    """Every parameter divided by its root mean square over batches."""
    return rows / (rows.square().mean(0).sqrt() + 1e-8 * float(rows.abs().mean()))


def efficiency(rows: Tensor, plain: Tensor) -> float:
    """(r · s)² / (‖r‖² ‖s‖²)."""
    return between(rows, plain) ** 2 / (within(rows, rows) * between(plain, plain))


def best(kinds: Sequence[Tensor], plain: Tensor) -> dict[str, Any]:
    """The weights of kinds with the greatest efficiency, from one half of the batches; how they do on the other half.

    They are C⁻¹ s, where C has the kinds' inner products within a batch and s those with the signal; a small ridge
    keeps kinds without tokens at 0.
    """
    gains, chosen = [], []
    for fit, test in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        parts = [kind[fit] for kind in kinds]
        together = torch.tensor([[within(a, b) for b in parts] for a in parts], dtype=torch.float64)
        along = torch.tensor([between(a, plain[fit]) for a in parts], dtype=torch.float64)
        ridge = 1e-3 * together.diagonal().mean() * torch.eye(len(parts), dtype=torch.float64)
        weights = torch.linalg.solve(together + ridge, along)
        weights = weights / weights.abs().max()
        chosen.append(weights.tolist())
        mixed = sum(w * kind[test] for w, kind in zip(weights.tolist(), kinds, strict=True))
        gains.append(efficiency(mixed, plain[test]) / efficiency(plain[test], plain[test]))
    return {"gain": sum(gains) / 2, "halves": gains, "weights": chosen}


def figures(gradients: Gradients, methods: Sequence[str], ways: dict[str, list[str]]) -> dict[str, Any]:
    """Efficiencies of regulators, shares of kinds, and the best weights for each way of telling kinds apart."""
    plain = gradients.rows("grpo")
    signal, size = between(plain, plain), within(plain, plain)
    found: dict[str, Any] = {"batches": len(plain), "signal": signal / size, "error": error(plain, plain) / size}
    found |= {"norm": size**0.5, "methods": {}, "kinds": {}, "best": {}}
    for name in methods:
        rows = gradients.rows(name)
        found["methods"][name] = {
            "efficiency": efficiency(rows, plain), "adam": efficiency(scaled(rows), plain),
            "error": 2 * error(rows, plain) / abs(between(rows, plain)), "gain_error": gain_error(rows, plain),
            "norm": (within(rows, rows) / size) ** 0.5,
        }  # fmt: skip
    for way, names in ways.items():
        parts = [gradients.rows(name) for name in names]
        found["best"][way] = best(parts, plain)
        for name, rows in zip(names, parts, strict=True):
            found["kinds"][name] = {
                "signal": between(rows, plain) / signal, "error": error(rows, plain) / signal,
                "size": within(rows, rows) / size,
            }  # fmt: skip
    return found


def batches_of(trainer: Trainer, count: int) -> Iterator[TokenBatch]:
    """Batches of responses from one policy, to problems of their own."""
    config, task = trainer.config, trainer.sampler.task
    for number in range(1, count + 1):
        seed = derived_seed(config.seed, f"signal {number}")
        problems = training_problems(task, seed=config.seed, step=number, step_seed=seed, count=config.prompts)
        samples, _ = collect(
            trainer.algorithm, problems, trainer.sampler, seed, None, name=config.algorithm, advantage=trainer.advantage
        )
        yield trainer.make_batch(samples)


@contextmanager
def trainer_of(model: str, settings: Sequence[str]) -> Iterator[Trainer]:
    """A trainer whose batches have all that regulators read."""
    with tempfile.TemporaryDirectory() as place:
        given = [f"model={model}", "compile=false", f"run={place}/run", "regulator=nthr", *settings]
        config = configs.load("tiny", given)
        yield Trainer(config, RunFolder.create(config.run, config.model_dump(mode="json")), quiet=True)


def measure(
    trainer: Trainer, methods: Sequence[str], batches: int, say: Callable[[str], None], *, apart: bool = True
) -> dict[str, Any]:
    """Sample batches from one policy, and take their gradients apart, by regulator and, with ``apart``, by kind."""
    words = word_kinds(texts_of(trainer.policy.tokenizer))
    chosen = {name: regulators.parse(name) for name in methods}
    gradients, counts, ways = Gradients(trainer), dict[str, float](), dict[str, list[str]]()
    for number, batch in enumerate(batches_of(trainer, batches), 1):
        for name, regulator in chosen.items():
            gradients.add(name, batch, regulator(batch))
        for way, kinds in token_kinds(batch, words).items() if apart else ():
            ways[way] = list(kinds)
            for kind, mask in kinds.items():
                counts[kind] = counts.get(kind, 0.0) + float(mask.sum() / batch.mask.sum()) / batches
                gradients.add(kind, batch, [Phase.of(batch, mask.float())])
        say(f"{number} of {batches} batches")
    found = figures(gradients, methods, ways)
    for kind, row in found["kinds"].items():
        row["tokens"] = counts[kind]
    return found


def show(found: dict[str, Any]) -> None:
    """Print the tables."""
    print(f"signal {found['signal']:.2%} ± {found['error']:.2%} of ‖g‖², {found['batches']} batches")
    plain = found["methods"]["grpo"]
    for name, row in found["methods"].items():
        gain = row["efficiency"] / plain["efficiency"]
        shown = f"gain {gain:5.2f} ± {row['gain_error']:4.2f}  with adam {row['adam'] / plain['adam']:5.2f}"
        print(f"  {name:30} norm {row['norm']:5.2f}  {shown}")
    for name, row in found["kinds"].items():
        shares = f"tokens {row['tokens']:6.1%}  size {row['size']:6.1%}  signal {row['signal']:7.1%}"
        print(f"  {name:30} {shares} ± {row['error']:.1%}")
    for way, row in found["best"].items():
        print(f"  best weights by {way}: gain {row['gain']:.2f} ({row['halves'][0]:.2f}, {row['halves'][1]:.2f})")


def arguments(text: str | None) -> argparse.ArgumentParser:
    """What such a study is told: a model, a file, and settings."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("settings", nargs="*", help="key=value, as for poise train")
    parser.add_argument("--batches", type=int, default=64)
    return parser


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--methods", help="regulators, with ; between them")
    parser.add_argument("--methods-only", action="store_true", help="do not take gradients apart by kind of token")
    options = parser.parse_intermixed_args()
    methods = [name.strip() for name in options.methods.split(";")] if options.methods else list(METHODS)
    start = time.monotonic()
    with trainer_of(options.model, options.settings) as trainer:
        methods = ["grpo", *(name for name in methods if name != "grpo")]

        def say(text: str) -> None:
            print(f"{time.monotonic() - start:6.1f} s  {text}", flush=True)

        found = measure(trainer, methods, options.batches, say, apart=not options.methods_only)
    found["command"] = {"model": options.model, "settings": options.settings, "batches": options.batches}
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    show(found)


if __name__ == "__main__":
    main()
