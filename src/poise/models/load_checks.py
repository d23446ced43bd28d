"""Trials of a model's weights, head and packed passes at load: they reject models that poise would train wrongly.

Trials use a few tokens. A sliding window of 4,096 tokens would have no effect on them, and a trial of 4,097 tokens
would take a large model minutes on a CPU. So each trial shortens sliding windows to a few tokens. A model has its
window in two places: transformers builds masks from the configuration, and attention modules pass their own attribute
to the attention function. The trial shortens both, and a model that uses only one of the two fails it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from poise.batch import Prompt, padded_batch
from poise.models.location import ModelError
from poise.sampling.requests import Completion

if TYPE_CHECKING:
    from poise.models.policy import Policy

T = TypeVar("T")
WINDOWS = ("sliding_window", "sliding_window_size", "window_size", "attention_window_size")
SHORT = 3  # tokens in a shortened window
LARGE_LOGIT = 300.0  # far above any soft-cap in use, far below the range of float16


@contextmanager
def short_windows(model: nn.Module) -> Iterator[None]:
    """Inside the context, shorten every sliding window to SHORT tokens. Layers without a window are unchanged."""
    modules = list(model.modules())
    configs = [part for module in modules if (part := getattr(module, "config", None)) is not None]
    configs += [part.get_text_config() for part in configs if hasattr(part, "get_text_config")]
    places: dict[int, Any] = {id(place): place for place in [*modules, *configs]}
    before = [
        (place, name, value)
        for place in places.values()
        for name in WINDOWS
        if type(value := vars(place).get(name)) is int and value > SHORT
    ]
    try:
        for place, name, _ in before:
            setattr(place, name, SHORT)
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def check_weights(name: str, model: nn.Module, missing: Collection[str] = ()) -> None:
    """Raise ModelError if the files lack weights, which would then be random, or if weights are not finite."""
    if missing:
        raise ModelError(
            f"{name}: the files have no weights for {_some(sorted(missing))}, which would be random; the folder is "
            "incomplete, or its config belongs to another model"
        )
    if damaged := [path for path, value in model.named_parameters() if not bool(torch.isfinite(value).all())]:
        raise ModelError(
            f"{name}: NaN or infinite weights in {_some(damaged)}; the files are damaged, or a run diverged"
        )


def _some(names: Sequence[str], shown: int = 3) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


@torch.no_grad()
def head_fits(policy: Policy) -> bool:
    """Whether ``head(trunk(x))`` equals the model's own logits, for the real hidden states and for enlarged ones.

    A soft-cap barely changes small logits, and the few test tokens may have only small logits. Training makes logits
    grow, so the check also uses enlarged hidden states.
    """
    ids = torch.arange(1, 5, device=policy.device)[None] % policy.head().vocabulary
    states = policy.trunk(input_ids=ids, use_cache=False).last_hidden_state
    ours, theirs = policy.head()(states[0]).float(), policy.model(input_ids=ids, use_cache=False).logits[0].float()
    if not _same_logits(ours, theirs, policy.head().weight.dtype):
        return False
    enlarged: list[Tensor] = []
    product = states[0] @ policy.head().weight.T.to(states.dtype)
    factor = LARGE_LOGIT / float(product.abs().max().clamp(min=0.5))

    def enlarge(_module: nn.Module, _inputs: object, output: Any) -> None:
        if hasattr(output, "last_hidden_state"):
            output.last_hidden_state = output.last_hidden_state * factor
            enlarged.append(output.last_hidden_state[0])

    hook = policy.trunk.register_forward_hook(enlarge)
    try:
        theirs = policy.model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        hook.remove()
    # OPT runs its trunk in parts, so the hook does not run and there is nothing to compare.
    return not enlarged or _same_logits(policy.head()(enlarged[0]).float(), theirs, policy.head().weight.dtype)


def _same_logits(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    tolerance = 1e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-3
    return torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


@torch.no_grad()
def passes_agree(policy: Policy) -> bool:
    """Whether each response has the same hidden states in a shared pass as in a separate pass: nothing leaks.

    Two of the three responses share a prompt; all are longer than the shortened windows.
    """
    device, size = policy.device, policy.head().vocabulary
    prompts = [Prompt((1 % size, 2 % size))] * 2 + [Prompt((3 % size, 2 % size, 1 % size))]
    rows = [(10 * row + torch.arange(1, length + 1)) % size for row, length in enumerate((6, 10, 8))]
    batch = padded_batch(prompts, rows, device)
    with short_windows(policy.base):
        alone = []
        for prompt, row in zip(prompts, rows, strict=True):
            text = torch.cat([torch.tensor(prompt.tokens), row[:-1]])[None].to(device)
            alone.append(states_of(policy, text)[:, len(prompt.tokens) - 1 :])
        together = tried(lambda: policy.hidden(batch))
    return together is not None and states_close(together, torch.cat(alone, 1), policy.head().weight.dtype)


def tried(trial: Callable[[], T]) -> T | None:
    """The result of ``trial``; None if the model's code fails, for example because it does not know an argument."""
    try:
        return trial()
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None


def states_of(policy: Policy, ids: Tensor) -> Tensor:
    """(2, L, W) hidden states of one sequence (1, L): with exact embeddings, and with embeddings off by rounding."""
    return twice(policy, lambda: policy.trunk(input_ids=ids, use_cache=False).last_hidden_state[0])


@torch.no_grad()
def twice(policy: Policy, run: Callable[[], Tensor]) -> Tensor:
    """(2, …) results of ``run``: with the exact embeddings, and with embeddings off by about one rounding error.

    The distance between the two shows how far rounding can move a result. For SmolLM2 in bfloat16 the distance is 1 to
    10 % of most hidden states, but 100 % at the special tokens at the start of the vocabulary and at a few other
    tokens.
    """

    def shake(_module: nn.Module, _inputs: object, embedded: Tensor) -> Tensor:
        generator = torch.Generator(embedded.device).manual_seed(0)
        noise = torch.randn(embedded.shape, generator=generator, device=embedded.device)
        return embedded * (1 + torch.finfo(embedded.dtype).eps / 2 * noise).to(embedded.dtype)

    plain = run()
    hook = policy.base.get_input_embeddings().register_forward_hook(shake)
    try:
        return torch.stack([plain, run()]).float()
    finally:
        hook.remove()


def completions_agree(policy: Policy, prompts: Sequence[Prompt], trial: Sequence[Completion]) -> bool:
    """Whether an engine's log-probabilities match the policy's from one pass over prompts and responses."""
    batch = padded_batch(prompts, [completion.tokens for completion in trial], policy.device)
    expected = twice(policy, lambda: policy.score(batch)[0][batch.mask]).cpu()
    return logp_close(torch.cat([completion.logp for completion in trial]), expected, policy.head().weight.dtype)


def states_close(actual: Tensor, expected_twice: Tensor, dtype: torch.dtype) -> bool:
    """Whether hidden states (…, W) match ``expected_twice`` (2, …, W) from ``twice``, up to rounding in ``dtype``."""
    expected, shaken = expected_twice
    error, moved = ((x - expected).norm(dim=-1) for x in (actual.float(), shaken))
    return _within_rounding(error, moved, expected.norm(dim=-1), dtype)


def logp_close(actual: Tensor, expected_twice: Tensor, dtype: torch.dtype) -> bool:
    """``states_close`` for log-probabilities (N,): errors are relative to the root mean square of all values."""
    expected, shaken = expected_twice
    size = expected.square().mean().sqrt().expand_as(expected)
    return _within_rounding((actual.float() - expected).abs(), (shaken - expected).abs(), size, dtype)


def _within_rounding(error: Tensor, moved: Tensor, size: Tensor, dtype: torch.dtype) -> bool:
    """Whether the root mean square of the errors, each divided by its tolerance, is at most 1.

    A value's tolerance grows with the distance that rounding moves the value, up to the size of the value.
    """
    relative = 3e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-4
    allowed = relative * size + torch.minimum(2 * moved, size)
    ratio = error / allowed.clamp(min=torch.finfo(allowed.dtype).tiny)  # no 0 / 0 for equal values
    return bool(ratio.square().mean() <= 1)
