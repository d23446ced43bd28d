"""What regulators cost at scale: FLOP and bytes by formula, and the controller's part of it by measurement.

    python benchmarks/scale.py                       # the formulas, and the time of weights on a CPU
    .venv-verl/bin/python benchmarks/scale.py --queue   # and the way through verl's queue, under Ray, on this machine

The formulas: P parameters, N response tokens of a step, d hidden width, V vocabulary. A forward pass is 2·P·N FLOP, an
update 6·P·N, or 8·P·N where activations are computed twice. Attention's own FLOP are left out on both sides.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from poise import TokenBatch, regulators

METHODS = ["grpo", "ar", "tr-grpo", "entropy", "clip-cov", "ar(alpha=0.3) | lopti(threshold=0.5)"]


@dataclass(frozen=True)
class Shape:
    """A model."""

    name: str
    parameters: float
    width: int
    vocabulary: int


SHAPES = [
    Shape("Qwen2.5-7B", 7.62e9, 3584, 152064),
    Shape("Llama-3.3-70B", 70.6e9, 8192, 128256),
]


def formulas(shape: Shape, tokens: float, places: float, recompute: bool = True) -> dict[str, float]:
    """A step of GRPO in FLOP, and what methods add to it. ``places``: tokens of the padded batch, which TRL has."""
    forward, update = 2 * shape.parameters * tokens, (8 if recompute else 6) * shape.parameters * tokens
    step = 2 * forward + update  # rollouts, old log-probabilities, update
    scores = 6 * tokens * shape.vocabulary * shape.width  # NTHR's linear form, which is never beaten by much
    return {
        "step, FLOP": step,
        "Lopti: second update": update / step,
        "a forward pass for old log-probabilities or entropies": forward / step,
        "NTHR: scores": scores / step,
        "NTHR: hidden states in bfloat16, bytes": 2 * shape.width * places,
        "verl: read from the queue, bytes": 20 * tokens,  # old_log_probs, advantages, rm_scores: 4 each; mask: 8
        "verl: written for a phase, bytes": 8 * tokens,  # advantages, there and back
        "verl: the same with a mask, bytes": 24 * tokens,
        "TRL: gathered, bytes": 12 * places,  # old log-probabilities 4, mask 8
    }


def made_up(rows: int, length: int) -> TokenBatch:
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(length // 4, length + 1, (rows, 1), generator=random)
    return TokenBatch(
        -torch.empty(rows, length).exponential_(generator=random),
        torch.arange(length) < lengths,
        torch.randn(rows, generator=random),
        groups=torch.arange(rows) // 8,
        entropy=torch.rand(rows, length, generator=random),
    )


def median(run: Any, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def queue(batch: TokenBatch, repeats: int) -> dict[str, dict[str, float]]:
    """Seconds that poise's trainer adds to an update of verl's, on top of the update itself."""
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from tensordict import TensorDict

    from poise.integrations.demands import probe
    from poise.integrations.verl_trainer import RegulatorMixin

    class NoUpdate:
        def _update_actor(self, batch: Any, metrics: Any) -> Any:  # noqa: ARG002
            return batch

    class Trainer(RegulatorMixin, NoUpdate):
        def __init__(self, text: str) -> None:
            self.regulator, self._regulator_name = regulators.parse(text), text
            self._wants = probe(self.regulator)
            actor = {"use_kl_loss": True, "entropy_coeff": 0, "ppo_mini_batch_size": rows // 16}
            self.config = OmegaConf.create({"actor_rollout_ref": {"actor": actor, "rollout": {"n": 8}}})
            self.actor_rollout_wg = type("Group", (), {"_dispatch_info": {"actor": list(range(8))}})

    rows = len(batch.mask)

    def nested(values: torch.Tensor) -> torch.Tensor:
        parts = [row[:count] for row, count in zip(values, batch.lengths.tolist(), strict=True)]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    try:
        fields = TensorDict(
            {
                "response_mask": nested(batch.mask.long()),
                "old_log_probs": nested(batch.old_logp),
                "advantages": nested(batch.token_advantages),
                "rm_scores": nested(torch.zeros_like(batch.old_logp)),
                "entropy": nested(batch.entropy if batch.entropy is not None else batch.old_logp),
            },
            batch_size=rows,
        )
        fields["uid"] = [f"p{row // 8}" for row in range(rows)]
        keys = [f"p{row // 8}_{row % 8}_0" for row in range(rows)]
        meta = tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=[{} for _ in keys])
        found = {}
        for text in METHODS:
            trainer = Trainer("tr-grpo(kl_weighted=False)" if text == "tr-grpo" else text)
            found[text] = {
                "read": median(lambda t=trainer: t._token_batch(meta), repeats),
                "all": median(lambda t=trainer: t._update_actor(meta, {}), repeats),
            }
        return found
    finally:
        tq.close()
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--queue", action="store_true", help="verl's queue too; needs verl")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batch = made_up(args.rows, args.length)
    tokens = int(batch.mask.sum())
    print(f"{args.rows} responses of up to {args.length} tokens, {tokens:,} in all; torch {torch.__version__}, "
          f"{torch.get_num_threads()} thread(s), {platform.machine()}")  # fmt: skip
    result: dict[str, Any] = {"tokens": tokens, "formulas": {}, "weights": {}}
    for shape in SHAPES:
        result["formulas"][shape.name] = formulas(shape, tokens, batch.mask.numel())
        print(f"\n{shape.name}, by formula")
        for name, value in result["formulas"][shape.name].items():
            print(f"  {name:58s} {value:.3g}" if value > 1 else f"  {name:58s} {value:.2%} of the step")
    print("\nweights on this CPU, seconds a step")
    for text in METHODS:
        regulator = regulators.parse(text)
        result["weights"][text] = median(lambda r=regulator: r(batch), args.repeats)
        print(f"  {text:40s} {result['weights'][text]:.3f}")
    if args.queue:
        result["queue"] = queue(batch, args.repeats)
        print("\nverl's queue on this machine, seconds a step: reading, and all that poise's trainer adds")
        for text, row in result["queue"].items():
            print(f"  {text:40s} {row['read']:.3f} {row['all']:.3f}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
