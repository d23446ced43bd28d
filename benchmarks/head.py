"""The head of an update: hidden states to loss and gradients, poise against what people use instead.

    pip install -c constraints.txt -e '.[train,bench]' liger-kernel==0.8.5
    python benchmarks/head.py --json head.json                 # CUDA; on a CPU small sizes, without TRL and Liger

All ways get the same bfloat16 hidden states and weight, and compute the same loss: clipped GRPO, mean over tokens, no
KL. Timed is forward and backward; memory is what a call adds at its peak, gradients of hidden states and weight
included. "gemm" is the three products alone (``6·N·d·V`` FLOP), the floor of any way. "poise, whole" lets poise hold
all logits at once, "poise, master" returns the weight's gradient in float32, and "poise, two-pass" is
``poise.head.token_logp``, for losses that need log-probabilities first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from measure import environment, extra_memory, in_turns, median, spread, write
from torch import Tensor

from poise import Head, Phase, TokenBatch, objective
from poise.head import policy_loss, token_logp
from poise.objective import Settings

SIZES = {"cuda": [(8192, 576, 49152), (8192, 2048, 151936), (32768, 576, 49152)], "cpu": [(512, 64, 4096)]}
SETTINGS = Settings(clip_low=0.2, clip_high=0.2, dual_clip=None)
LENGTH = 512  # of a response
Gradients = tuple[Tensor, Tensor, Tensor]  # loss, of hidden states, of weight


class Problem:
    """One batch for all ways."""

    def __init__(self, n: int, d: int, v: int, device: str) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(n // LENGTH, LENGTH, d, device=device).bfloat16().requires_grad_()
        self.weight = (torch.randn(v, d, device=device) * (3 / d**0.5)).bfloat16().requires_grad_()
        self.master = self.weight.detach().float().requires_grad_()
        self.targets = torch.randint(v, (n // LENGTH, LENGTH), device=device)
        with torch.no_grad():
            logp, _ = token_logp(self.hidden.flatten(0, 1), self.targets.flatten(), self.weight)
        self.old = logp.view_as(self.targets) + 0.1 * torch.randn(self.targets.shape, device=device)
        self.advantages = torch.randn(n // LENGTH, device=device)
        self.mask = torch.ones_like(self.targets, dtype=torch.bool)
        self.batch = TokenBatch(self.old, self.mask, self.advantages, targets=self.targets)
        self.phase = Phase.of(self.batch)
        self.norm = float(n)
        self.tokens = torch.arange(n, device=device)

    def loss(self, logp: Tensor) -> Tensor:
        """The loss from log-probabilities, (B, T) or flat."""
        logp = logp.view_as(self.old)
        return objective.policy_loss(logp, self.batch, self.phase, SETTINGS, normalizer=self.norm)[0]

    def gradients(self, loss: Tensor, weight: Tensor | None = None) -> Gradients:
        """The backward pass."""
        return (loss.detach(), *torch.autograd.grad(loss, (self.hidden, self.weight if weight is None else weight)))  # type: ignore[return-value]


def gemm(problem: Problem) -> Callable[[], object]:
    hidden, weight = problem.hidden.detach().flatten(0, 1), problem.weight.detach()
    logits = hidden @ weight.T
    of_hidden, of_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        torch.mm(hidden, weight.T, out=logits)
        torch.mm(logits, weight, out=of_hidden)
        torch.mm(logits.T, hidden, out=of_weight)

    return run


def ours(problem: Problem, head: Head, memory: int | None = None) -> Gradients:
    """As the update calls it: with the states of the active tokens, whose places the host knows."""
    loss, _ = policy_loss(
        problem.hidden.flatten(0, 1), problem.batch, problem.phase, SETTINGS, normalizer=problem.norm, head=head,
        tokens=problem.tokens, memory=memory,
    )  # fmt: skip
    return problem.gradients(loss, head.master)


def two_pass(problem: Problem) -> Gradients:
    logp, _ = token_logp(problem.hidden.flatten(0, 1), problem.targets.flatten(), problem.weight)
    return problem.gradients(problem.loss(logp))


def naive(problem: Problem) -> Gradients:
    logs = (problem.hidden @ problem.weight.T).float().log_softmax(-1)
    return problem.gradients(problem.loss(logs.gather(-1, problem.targets[..., None])[..., 0]))


def trl(problem: Problem) -> Gradients:
    """TRL's chunked log-probabilities with entropy, as its GRPO trainer asks for them, on the same loss."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    logp = ChunkedLogProbFunction.apply(
        problem.hidden.flatten(0, 1), problem.weight, None, problem.targets.flatten(), 1.0,
        _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("entropy",),
    )[0]  # fmt: skip
    return problem.gradients(problem.loss(logp))


def liger(problem: Problem) -> Callable[[], Gradients]:
    """Liger's fused linear GRPO as it comes: compiled, one sequence at a time."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    torch._dynamo.reset()  # or it fails to recompile for another vocabulary
    fused = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, epsilon_low=0.2, epsilon_high=0.2, loss_type="dapo")

    def run() -> Gradients:
        loss = fused(
            problem.hidden, problem.weight, problem.targets, problem.mask, problem.advantages,
            old_per_token_logps=problem.old,
        )[0]  # fmt: skip
        return problem.gradients(loss)

    return run


def measure(n: int, d: int, v: int, device: str, peers: bool, repeats: int) -> list[dict[str, object]]:
    problem = Problem(n, d, v, device)
    head = Head(problem.weight)
    ways: dict[str, Callable[[], object]] = {
        "gemm": gemm(problem),
        "poise": lambda: ours(problem, head),
        "poise, whole": lambda: ours(problem, head, memory=1 << 50),
        "poise, master": lambda: ours(problem, Head(problem.weight, master=problem.master)),
        "poise, two-pass": lambda: two_pass(problem),
        "naive": lambda: naive(problem),
    }
    if peers:
        ways |= {"trl": lambda: trl(problem), "liger": liger(problem)}
    reference = naive(problem)
    checks = {name: agreement(way(), reference) for name, way in ways.items() if name != "gemm"}
    del reference
    times = in_turns(ways, device, repeats=repeats)
    memory = {name: extra_memory(way, device) for name, way in ways.items()}
    floor, poise = median(times["gemm"]), median(times["poise"])
    print(f"\n{n} × {d} × {v}, bfloat16")
    print(f"{'':20}{'ms':>26}{'/ gemm':>9}{'/ poise':>9}{'GiB':>8}{'TFLOP/s':>9}   gradients against naive")
    rows: list[dict[str, object]] = []
    for name, values in times.items():
        found, gib = median(values), (memory[name] or 0) / 2**30
        rate = 6 * n * d * v / found / 1e12
        check = checks.get(name, "")
        print(
            f"{name:20}{spread(values):>26}{found / floor:>9.2f}{found / poise:>9.2f}{gib:>8.2f}{rate:>9.0f}   {check}"
        )
        rows.append({
            "tokens": n, "width": d, "vocabulary": v, "way": name, "seconds": values, "extra_bytes": memory[name],
            "over_gemm": found / floor, "over_poise": found / poise, "check": check,
        })  # fmt: skip
    return rows


def agreement(found: object, reference: Gradients) -> str:
    """How far loss and gradients are from those of the naive way; both are bfloat16, so some of it is rounding."""
    assert isinstance(found, tuple)
    gaps = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, reference, strict=True)]
    return "loss {:.0e}, hidden {:.0e}, weight {:.0e}".format(*gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-peers", action="store_true", help="leave TRL and Liger out")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    peers = args.device == "cuda" and not args.no_peers
    rows = [row for size in SIZES[args.device] for row in measure(*size, args.device, peers, args.repeats)]
    write(args.json, {**environment(args.device), "rows": rows})


if __name__ == "__main__":
    main()
