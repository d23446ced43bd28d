"""What training does to the right answers a model already gave: their likelihood before and after, for every arm.

    python experiments/comparison/displacement.py runs/main/kk-w1 displacement.json --problems 500

The first argument is the folder of a comparison whose models were kept. The model before training answers held-out
problems, four times each. Then the trained model of every run tells how likely it finds these responses. ``right`` and
``wrong`` hold the mean change of the log-likelihood of a response, in nats, and the share of responses whose
log-likelihood fell: for every seed, with Student's interval over seeds, and the difference to the baseline with the
interval of the sign-flip test. ``moved`` is how far the weights have gone, ‖θ − θ₀‖ / ‖θ₀‖: an arm may displace less
only because it moved less. NTHR (arXiv 2505.18830) says that GRPO makes right answers hardly likelier, or even less
likely, because wrong ones that share their tokens are punished.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from poise.models.scoring import score_batch
from poise.referee.compare.sign_flip import interval
from poise.referee.compare.statistics import student_interval
from poise.runs.folder import RunFolder
from poise.sampling.algorithms import Trajectory
from poise.trainer import Trainer
from poise.training.batches import make_batch
from poise.training.config.schema import restore
from poise.training.evaluation import evaluate


def runs_of(comparison: Path) -> dict[str, dict[int, Path]]:
    """The finished runs of a comparison, tuning apart: arm, seed, folder."""
    found: dict[str, dict[int, Path]] = {}
    with (comparison / "runs.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["state"] == "finished" and row.get("part", "compared") == "compared":
                place = Path(*Path(row["folder"]).parts[-3:])  # arms/VARIANT/seed-N, wherever the comparison was made
                found.setdefault(row["arm"], {})[int(row["seed"])] = comparison / place
    return found


def beginning(run: Path, place: str) -> Trainer:
    """A trainer with the model that a run began with."""
    config = restore(json.loads((run / "config.json").read_text()), trust=True)
    config = config.model_copy(update={"run": f"{place}/run", "regulator": "grpo"})
    return Trainer(config, RunFolder.create(config.run, config.model_dump(mode="json")), quiet=True)


def load(trainer: Trainer, run: Path, start: dict[str, Tensor]) -> list[float]:
    """Give the trainer's model the weights that a run ended with. Return how far they are from those before."""
    newest = max((run / "checkpoints").glob("step-*"))
    saved = load_file(newest / "parameters.safetensors", device=str(trainer.policy.device))
    parameters = trainer.checkpoints.master_weights.parameters
    distance, size = (
        sum(float(values.double().square().sum()) for values in tensors)
        for tensors in ((saved[name] - start[name] for name in start), start.values())
    )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])
    trainer.checkpoints.master_weights.publish()
    return [(distance / size) ** 0.5]


def likelihoods(trainer: Trainer, samples: list[Trajectory]) -> Tensor:
    """(B,) the log-likelihood of every response under the trainer's model."""
    temperature = trainer.config.rollout.temperature
    batch = make_batch(samples, trainer.policy, temperature=temperature)
    logp, _ = score_batch(trainer.policy, batch, temperature)
    return torch.where(batch.mask, logp.double(), 0.0).sum(1).cpu()


def summary(arm: dict[int, list[float]], baseline: dict[int, list[float]], which: int) -> dict[str, Any]:
    """The figures of one arm by seed, their mean, and the mean difference to the baseline over the seeds of both."""
    by_seed = {seed: values[which] for seed, values in arm.items()}
    differences = [value - baseline[seed][which] for seed, value in by_seed.items() if seed in baseline]
    found: dict[str, Any] = {"seeds": by_seed, "mean": sum(by_seed.values()) / len(by_seed)}
    found["interval"] = student_interval(list(by_seed.values()))
    if arm is not baseline:
        found["difference"] = sum(differences) / len(differences)
        found["difference_interval"] = interval(differences)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--problems", type=int, default=500)
    options = parser.parse_args()
    runs = runs_of(options.comparison)
    baseline = next(iter(runs))
    with tempfile.TemporaryDirectory() as place:
        trainer = beginning(next(iter(runs[baseline].values())), place)
        samples = list(evaluate(trainer.sampler, problems=options.problems, samples=4, seed=1).attempts)
        sets = {"right": [s for s in samples if s.score.correct], "wrong": [s for s in samples if not s.score.correct]}
        before = {name: likelihoods(trainer, chosen) for name, chosen in sets.items()}
        start = {name: value.detach().clone() for name, value in trainer.checkpoints.master_weights.parameters.items()}
        moved: dict[str, dict[int, list[float]]] = {}
        changes: dict[str, dict[str, dict[int, list[float]]]] = {name: {} for name in sets}
        for arm, seeds in runs.items():
            for seed, run in seeds.items():
                moved.setdefault(arm, {})[seed] = load(trainer, run, start)
                for name, chosen in sets.items():
                    change = likelihoods(trainer, chosen) - before[name]
                    fell = float((change < 0).double().mean())
                    changes[name].setdefault(arm, {})[seed] = [float(change.mean()), fell]
            print(f"{arm}: {len(seeds)} runs", flush=True)
    found: dict[str, Any] = {"comparison": str(options.comparison), "responses": {n: len(s) for n, s in sets.items()}}
    found["moved"] = {arm: summary(values, moved[baseline], 0) for arm, values in moved.items()}
    for name, arms in changes.items():
        found[name] = {
            arm: {"change": summary(values, arms[baseline], 0), "fell": summary(values, arms[baseline], 1)}
            for arm, values in arms.items()
        }
        for arm, row in found[name].items():
            change, fell = row["change"]["mean"], row["fell"]["mean"]
            print(
                f"{name:6} {arm:28} {change:+8.3f} nats a response, {fell:6.1%} fell, "
                f"weights moved by {found['moved'][arm]['mean']:.2%}"
            )
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
