"""What is tried of a model when it is loaded, so that nothing is trained wrongly later: weights, head and passes.

Trials are short. A window of 4,096 tokens would not show in them, and a trial of 4,097 tokens would take a large model
on a CPU minutes. So windows are shortened to a few tokens while a trial runs: in the configuration, from which
transformers makes its masks, and in the attention modules, which hand them to attention functions. A model that heeds
a window in one of the two places only is found out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from poise.rollout.types import Rollouts

if TYPE_CHECKING:
    from poise.models.policy import Policy

WINDOWS = ("sliding_window", "sliding_window_size", "window_size", "attention_window_size")
SHORT = 3  # tokens in a shortened window
LARGE_LOGIT = 300.0  # far above any cap in use, far below what float16 holds


@contextmanager
def short_windows(model: nn.Module) -> Iterator[None]:
    """Inside, no layer sees further back than a few tokens, where it has a window at all."""
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


def weights_defect(model: nn.Module, missing: Collection[str]) -> str | None:
    """What is wrong with the weights, in words: a part is random, since the files lack it, or is not a number."""
    if missing:
        return (
            f"the files have no weights for {_some(sorted(missing))}, which would be random; the folder is incomplete, "
            "or its config is of another model"
        )
    wrong = [name for name, value in model.named_parameters() if not bool(torch.isfinite(value).all())]
    return f"NaN or infinite weights in {_some(wrong)}; the files are damaged, or a run diverged" if wrong else None


def _some(names: Sequence[str], shown: int = 3) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


@torch.no_grad()
def head_fits(policy: Policy) -> bool:
    """Whether ``head(trunk(x))`` is the model's own output, for the states as they are and for larger ones.

    A cap leaves small logits as they are, and those of a few tokens may all be small. Training makes them grow.
    """
    ids = torch.arange(1, 5, device=policy.device)[None] % policy.head().vocabulary
    states = policy.trunk(input_ids=ids, use_cache=False).last_hidden_state
    ours, theirs = policy.head()(states[0]).float(), policy.model(input_ids=ids, use_cache=False).logits[0].float()
    if not _same_logits(ours, theirs, policy.head().weight.dtype):
        return False
    seen: list[Tensor] = []
    product = states[0] @ policy.head().weight.T.to(states.dtype)
    factor = LARGE_LOGIT / float(product.abs().max().clamp(min=0.5))

    def enlarge(_module: nn.Module, _inputs: object, output: Any) -> None:
        if hasattr(output, "last_hidden_state"):
            output.last_hidden_state = output.last_hidden_state * factor
            seen.append(output.last_hidden_state[0])

    hook = policy.trunk.register_forward_hook(enlarge)
    try:
        theirs = policy.model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        hook.remove()
    # A model may run its trunk in parts, past the hook (OPT): then this cannot be tried.
    return not seen or _same_logits(policy.head()(seen[0]).float(), theirs, policy.head().weight.dtype)


def _same_logits(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    allowed = 1e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-3
    return torch.allclose(ours, theirs, rtol=allowed, atol=allowed * float(theirs.abs().max()))


@torch.no_grad()
def passes_agree(policy: Policy) -> bool:
    """Whether responses that are read together have the states that each has by itself: nothing leaks.

    Two of them share a prompt; all are longer than the windows.
    """
    device, size = policy.device, policy.head().vocabulary
    prompts, lengths = [[1 % size, 2 % size]] * 2 + [[3 % size, 2 % size, 1 % size]], [6, 10, 8]
    ids = (torch.arange(1, 31, device=device) % size).view(3, 10)
    mask = torch.arange(10, device=device) < torch.tensor(lengths, device=device)[:, None]
    none = torch.zeros(3, device=device)
    tried = Rollouts(prompts, ids, mask, none, none, none)
    with short_windows(policy.base):
        alone = []
        for prompt, row, length in zip(prompts, ids, lengths, strict=True):
            text = torch.cat([torch.tensor(prompt, device=device), row[: length - 1]])[None]
            states = policy.trunk(input_ids=text, use_cache=False).last_hidden_state
            alone.append(states[0, len(prompt) - 1 :].float())
        try:
            together = policy.hidden(tried).float()
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return False  # what is handed down is not known, or not held
    return close(together, torch.cat(alone), policy.head().weight.dtype)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether two ways to compute something agree as far as rounding in ``dtype`` lets them."""
    half = dtype in (torch.float16, torch.bfloat16)
    return bool((found - expected).norm() <= (3e-2 if half else 1e-4) * expected.norm())
