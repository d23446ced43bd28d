"""Log-probabilities and hidden states of a whole rollout batch, in packed passes without gradients.

Shapes: B responses, T response tokens (padded), n selected responses, N own tokens of a pass, d hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from poise._lib.device import is_planned, send, total_bytes
from poise.batch import TokenBatch
from poise.head import min_p_logp
from poise.models.layers import FixedPassError, OutOfMemoryError
from poise.models.packing import extents_of, own_tokens, tokens_in
from poise.models.policy import Policy

KEPT_SHARE = 1 / 16  # of the device's memory, for hidden states between a scoring pass and the regulator


class HiddenStates:
    """The policy's hidden states for the rows of a batch: the function form of ``TokenBatch.hidden``.

    A scoring pass (``score_batch``) stores the states of the rows in ``wanted`` here, up to ``most`` bytes. Reading the
    states of other rows takes a forward pass. ``forget`` frees the stored states.
    """

    def __init__(self, policy: Policy, batch: TokenBatch, wanted: Sequence[int] = (), most: int | None = None) -> None:
        self.policy, self.batch = policy, batch
        self.kept: dict[int, Tensor] = {}  # row → (own tokens, d)
        width, like = policy.head().weight.shape[1], next(policy.trunk.parameters())
        if most is None:
            most = int(total_bytes(policy.device) * KEPT_SHARE)
        self.wanted: set[int] = set()
        for row in wanted:
            most -= extents_of(batch)[row].own * width * like.element_size()
            if most < 0:
                break
            self.wanted.add(row)

    def keep(self, rows: Sequence[int], states_N: Tensor) -> None:
        """Store the states of a pass over these rows, but only for wanted rows."""
        parts = states_N.split([extents_of(self.batch)[row].own for row in rows])
        whole = self.wanted.issuperset(rows)  # else a view would keep the other rows alive
        self.kept |= {
            row: part if whole else part.clone() for row, part in zip(rows, parts, strict=True) if row in self.wanted
        }

    def forget(self) -> None:
        """Free the stored states. Later reads take a forward pass with the weights at that time."""
        self.kept, self.wanted = {}, set()

    @torch.no_grad()
    def __call__(self, rows: Tensor) -> Tensor:
        """(n, T, d) the states of these rows, 0 outside the mask."""
        numbers, part = rows.tolist(), self.batch.rows(rows)
        missing = [place for place, row in enumerate(numbers) if row not in self.kept]
        if len(missing) == len(numbers):
            return self.policy.padded_hidden(part)
        computed = iter(())
        if missing:
            states_N = self.policy.hidden(part.rows(missing))
            computed = iter(states_N.split([extents_of(part)[place].own for place in missing]))
        known = [self.kept[row] if row in self.kept else next(computed) for row in numbers]
        return self.policy.padded_hidden(part, torch.cat(known))


@torch.no_grad()
def score_batch(
    policy: Policy,
    batch: TokenBatch,
    temperature: float,
    micro_tokens: int | None = None,
    states: HiddenStates | None = None,
) -> tuple[Tensor, Tensor]:
    """(B, T) log-probabilities and entropies of all responses under the current policy.

    ``states`` stores the hidden states of its wanted rows. If memory runs out, it frees all of them.
    """
    logp_BT, entropy_BT = torch.zeros_like(batch.old_logp), torch.zeros_like(batch.old_logp)

    def score(rows: list[int]) -> None:
        part, ix = batch.rows(rows), send(rows, batch.mask.device)
        if states is not None and not states.wanted.isdisjoint(rows):
            states_N = policy.hidden(part)
            states.keep(rows, states_N)
            logp, entropy = policy.score(part, temperature, states_N)
        else:
            logp, entropy = policy.score(part, temperature)
        logp_BT[ix], entropy_BT[ix] = logp.to(logp_BT.dtype), entropy.to(entropy_BT.dtype)

    _in_passes(policy, batch, micro_tokens, score, states)
    return logp_BT, entropy_BT


@torch.no_grad()
def score_min_p(
    policy: Policy, batch: TokenBatch, temperature: float, min_p: float, micro_tokens: int | None = None
) -> Tensor:
    """(B, T) log-probabilities under the current policy filtered by min-p: see ``poise.head.min_p_logp``."""
    logp_BT = torch.zeros_like(batch.old_logp)

    def score(rows: list[int]) -> None:
        part = batch.rows(rows)
        assert part.targets is not None
        places = own_tokens(part)
        states, targets = policy.hidden(part, places), part.targets.flatten()[places]
        logp = min_p_logp(states, targets, policy.head(temperature), min_p)
        scored = torch.zeros_like(part.old_logp).view(-1).index_put_((places,), logp.to(logp_BT.dtype))
        logp_BT[send(rows, logp_BT.device)] = scored.view(part.old_logp.shape)

    _in_passes(policy, batch, micro_tokens, score)
    return logp_BT


def _in_passes(
    policy: Policy,
    batch: TokenBatch,
    micro_tokens: int | None,
    score: Callable[[list[int]], None],
    states: HiddenStates | None = None,
) -> None:
    """Call ``score`` with the rows of each packed pass.

    If memory runs out, retry without stored states, then with smaller passes.
    """
    while True:
        bins = policy.passes(batch, range(len(batch.mask)), micro_tokens)
        try:
            for rows in bins:
                score(rows)
            return
        except torch.OutOfMemoryError:
            pass  # retry outside of this block: here the error still references the tensors that filled the memory
        if states is not None and states.kept and not is_planned():
            states.forget()
            continue
        take_less(policy, largest_pass(batch, bins))


def take_less(policy: Policy, largest: int) -> None:
    """Limit later passes to half of ``largest``, the number of tokens in the pass that did not fit.

    Raises an error if that pass had a single response (``largest`` is 0), or with ``deterministic=true``.
    """
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if not largest:
        raise OutOfMemoryError("with a single response per pass")
    if is_planned():
        raise FixedPassError(largest)
    policy.most_tokens = largest // 2


def largest_pass(batch: TokenBatch, bins: Sequence[Sequence[int]]) -> int:
    """The largest number of tokens in a pass of several responses, counting each prompt once.

    0 if every pass has a single response.
    """
    return max((tokens_in(batch, rows) for rows in bins if len(rows) > 1), default=0)
