"""Tests on the first batch, before the first update, whether a trainer's loss weights tokens.

The adapter weights the advantage of each token. This regulates tokens only if the loss applies each token's own
advantage. Let g be the gradient of the loss with respect to each token's log-probability, (B, T). For weights w and
advantages A the loss must satisfy

    g(w·A) − g(0) = w · (g(A) − g(0))        each token in proportion to its own weight,
    g(A as (B, T)) = g(A as the batch has them)

and, if KL terms have weights v, g(w·A, v) = w · (g(A) − g(0)) + v · g(0). A ratio or a mean over whole responses breaks
the first rule; a loss written for advantages (B,) breaks the second; a loss that does not multiply each token's KL term
by ``self.beta`` breaks the third. With random w and v, a wrong loss hardly ever passes.

The test needs no forward pass. The trainer gets its log-probabilities from ``_get_per_token_logps_and_entropies``;
during the test this method returns random values. So PEFT, DDP, FSDP and DeepSpeed are not involved. Each process runs
the test alone, without the collectives that the loss uses for its metrics; then the processes exchange their results.
After the test, the trainer's state is restored.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from poise.integrations.demands import CannotRegulateError

SOURCE = "_get_per_token_logps_and_entropies"
TOLERANCE = 0.01  # share of a response's largest gradient: above bfloat16 rounding, far below a wrong loss's error
Loss = Callable[[Any, dict[str, Any]], Any]


def check_loss(trainer: Any, loss: Loss, model: Any, inputs: dict[str, Any], name: str, *, kl: bool) -> bool:
    """Raise an error if the loss does not weight tokens. Return False if this batch is too small to test it.

    ``kl``: test the weights v of KL terms too.
    """
    with _restored(trainer):
        fault = _fault(_Bench(trainer, loss, model, inputs), kl=kl)
    faults = [fault] if trainer.accelerator.num_processes == 1 else gather_object([fault])
    known = [fault for fault in faults if fault is not None]
    if message := next(filter(None, known), None):
        raise CannotRegulateError(
            f"the loss of {_owner(trainer, loss)} cannot be regulated by {name}: {message}. It must accept advantages "
            "of shape (B, T) and weight each token's gradient by its own advantage, as the loss of TRL's GRPOTrainer "
            "does; regulator='grpo' works with every loss"
        )
    return bool(known)


class _Beta(float):
    """TRL's ``beta`` with a weight per token, for ``self.beta * per_token_kl``."""

    weights: Tensor

    def __mul__(self, per_token_kl: Any) -> Any:
        return float(self) * (self.weights * per_token_kl)


@contextmanager
def kl_weights(trainer: Any, weights: Tensor | None) -> Iterator[None]:
    """Within this context, the trainer's loss multiplies the tokens' KL terms by these weights (B, T)."""
    if weights is None:
        yield
        return
    beta = trainer.beta
    trainer.beta = _Beta(beta)
    trainer.beta.weights = weights
    try:
        yield
    finally:
        trainer.beta = beta


class _Bench:
    """The trainer's loss as a function of the advantages, on random log-probabilities."""

    def __init__(self, trainer: Any, loss: Loss, model: Any, inputs: dict[str, Any]) -> None:
        self.trainer, self.loss, self.model = trainer, loss, model
        mask = inputs["completion_mask"]
        self.mask = (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask) != 0
        self.generator = torch.Generator().manual_seed(0)
        self.near = -self.random(0.1, 2.0)  # log-probabilities of the old policy, the reference and the sampler
        known = {"old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"} & inputs.keys()
        ratio = {"importance_sampling_ratio"} & inputs.keys()  # the batch's own ratios may all be 0
        replacements = dict.fromkeys(known, self.near) | {field: torch.ones_like(inputs[field]) for field in ratio}
        self.inputs = inputs | replacements
        # Half of the log-probabilities are as in a first update; half change so much that the loss clips.
        shift = torch.where(self.random(0, 1) > 0.5, self.random(-0.01, 0.01), self.random(-0.4, 0.4))
        self.tokens = _FakePass(trainer, self.near + shift, self.random(0.1, 2.0))

    def random(self, low: float, high: float) -> Tensor:
        """Uniform random numbers (B, T), the same on every device."""
        numbers = torch.rand(self.mask.shape, generator=self.generator) * (high - low) + low
        return numbers.to(self.mask.device)

    def gradient(self, advantages: Tensor, weights: Tensor | None = None) -> Tensor:
        """Gradients (2, B, T) with respect to log-probabilities and entropies; 0 outside the mask."""
        leaves = self.tokens.renew()
        with (
            _restored(self.trainer),
            torch.enable_grad(),
            kl_weights(self.trainer, weights),
        ):  # a loss may change the trainer's state, such as entropy_coef
            torch.manual_seed(0)  # the same random numbers each time, if the loss uses any
            value = self.loss(self.model, self.inputs | {"advantages": advantages})
        if not value.requires_grad:
            return torch.zeros((2, *self.mask.shape), device=self.mask.device)
        grads = torch.autograd.grad(value, leaves, allow_unused=True)
        both = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]
        return torch.where(self.mask, torch.stack(both), 0.0)


@dataclass
class _FakePass:
    """Replaces the policy's forward pass: returns random log-probabilities and entropies."""

    trainer: Any
    logp: Tensor
    entropy: Tensor
    called: bool = False

    def __post_init__(self) -> None:
        self.original = getattr(self.trainer, SOURCE)
        setattr(self.trainer, SOURCE, self)  # _restored undoes this

    def renew(self) -> list[Tensor]:
        self.logp, self.entropy = (x.detach().clone().requires_grad_() for x in (self.logp, self.entropy))
        return [self.logp, self.entropy]

    def __call__(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        if model is getattr(self.trainer, "ref_model", None) or (len(input_ids), logits_to_keep) != self.logp.shape:
            return self.original(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        self.called = True
        return self.logp, self.entropy, self.logp.new_zeros(())


def _fault(bench: _Bench, *, kl: bool) -> str | None:
    """Return why the loss is rejected; "" if the loss is correct, None if this batch is too small to test it."""
    mask, inputs = bench.mask, bench.inputs
    scale = inputs["advantages"].abs().max().clamp(min=2) / 2  # so that weighted advantages are as large as the batch's
    rows = torch.where(torch.arange(len(mask)) % 2 == 0, 1.0, -0.5).to(mask.device) * scale
    ones = rows[:, None].expand(mask.shape).contiguous()
    try:
        own = bench.gradient(ones if inputs["advantages"].dim() == 2 else rows)
    except Exception as error:  # before any weights are involved
        error.add_note("This happened when poise tested the loss on random log-probabilities, before any update.")
        raise
    if not bench.tokens.called:
        return f"it does not get its log-probabilities from self.{SOURCE}, so poise cannot test it"
    weights = bench.random(0.2, 2.0) * (bench.random(0, 1) > 0.2)  # some are 0
    of_kl = bench.random(0.2, 2.0) * (bench.random(0, 1) > 0.4) if kl else None
    try:
        plain, rest = bench.gradient(ones), bench.gradient(torch.zeros_like(ones))
        weighted = bench.gradient(ones * weights, of_kl)
    except Exception as error:
        return f"it fails on advantages of shape (B, T), with {type(error).__name__}: {error}"
    if not mask.any():
        return None
    if not ((plain - rest) != 0).any():
        return "its gradient does not depend on the advantages"
    if _differ(plain, own):
        return "its gradient changes when the same advantages are passed as (B, T) instead of (B,)"
    expected = weights * (plain - rest) + (rest if of_kl is None else of_kl * rest)
    if _differ(weighted, expected, largest=plain.abs() + rest.abs()):
        also = " and, in its KL term, to self.beta" if kl else ""
        return (
            f"the gradient of a token is not in proportion to its own advantage{also}, or depends on other tokens' "
            "advantages"
        )
    several = ((plain - rest)[0] != 0).sum(1) > 1  # a response of one token has no other tokens
    return "" if several.any() else None


def _differ(gradient: Tensor, expected: Tensor, largest: Tensor | None = None) -> bool:
    """Whether the gradients of any response differ by more than rounding."""
    largest = expected.abs() if largest is None else largest
    allowed = TOLERANCE * largest.amax((0, 2)) + 1e-6 * largest.max()
    return not bool(((gradient - expected).abs().amax((0, 2)) <= allowed).all())  # NaN counts as different


def _owner(trainer: Any, loss: Loss) -> str:
    """The name of the class that defines the loss."""
    function = getattr(loss, "__func__", None)
    kinds = (kind for kind in type(trainer).__mro__ if vars(kind).get("_compute_loss") is function)
    return next((kind.__name__ for kind in kinds), type(trainer).__name__)


class _WithoutCollectives:
    """An accelerator without collectives: processes have batches of different sizes, and one process may fail."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self.accelerator, name)

    def gather(self, values: Any, *_: Any, **__: Any) -> Any:
        return values

    gather_for_metrics = reduce = pad_across_processes = gather


@contextmanager
def _restored(trainer: Any) -> Iterator[None]:
    """On exit, restore the trainer's attributes, its metrics and the random number generators."""
    before = dict(vars(trainer))
    containers = (list, dict, set, deque)
    vars(trainer).update({k: copy.copy(v) for k, v in before.items() if isinstance(v, containers)})
    trainer._metrics = copy.deepcopy(trainer._metrics)
    trainer.accelerator = _WithoutCollectives(trainer.accelerator)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for name in vars(trainer).keys() - before.keys():
            delattr(trainer, name)
        vars(trainer).update(before)
