"""NTHR: spare tokens of incorrect responses whose penalty would lower the likelihood of the correct ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from poise._lib.device import send
from poise._lib.errors import check_range
from poise.batch import Phase, TokenBatch
from poise.head.influence import Scores, group_scores
from poise.regulators.base import Scorer

TOKENS = 1 << 15  # padded tokens per forward pass of hidden states
BLOCK = 1 << 27  # elements of the largest temporary on a GPU: far less memory than an update, but few kernel launches


@dataclass(frozen=True)
class NTHR(Scorer):
    """Negative-token handling by hidden reward: tokens of incorrect responses with ``s⁻ > τ`` get ``A' = η·A``.

    ``s⁻(k') = Σ_k ⟨e_{y_k} − π_k, e_{y_k'} − π_k'⟩·⟨h_k, h_k'⟩`` over the tokens k of the group's correct responses,
    and ``τ = β · min_i s̄⁺_i``, where s̄⁺_i is the mean of the same score over the tokens of correct response i
    (``head.influence``). ``beta`` is β. ``eta=None`` is the paper's ``η = 2·|0.5 − p̂|``, where p̂ is the group's share
    of correct responses; ``eta=0`` is the paper's diagnostic; ``eta=1`` is GRPO exactly. Paper: "On the Effect of
    Negative Gradient in GRPO", arXiv 2505.18830.

    **Ours**, because the paper does not specify it: a correct response is scored against the *other* correct responses
    (with ``self_inclusive=True`` against all), so a group with a single correct response is unchanged; scores are sums
    over the tokens of the correct responses, s̄⁺_i is a mean over the tokens of response i. These choices matter: if
    correct and incorrect tokens have the same distribution, the exclusive τ flags about half of the incorrect tokens,
    the inclusive τ 7 to 30 %. Monitor ``reg/…/flagged_share``. Groups with no correct or no incorrect response are
    unchanged. π is the distribution that sampling used: pass a ``poise.Head`` with the same temperature and
    soft-capping in the batch.
    """

    beta: float = 1.0
    eta: float | None = None
    self_inclusive: bool = False
    needs = frozenset({"groups", "correct", "hidden", "head", "targets"})
    scope = "group"

    def __post_init__(self) -> None:
        check_range("nthr", "beta", self.beta)
        if self.eta is not None:
            check_range("nthr", "eta", self.eta, 0.0, 1e6)

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """One phase; the KL weights are 1.

        ``flagged_share`` is the share of the incorrect responses' tokens that are flagged, ``scored_share`` the share
        of groups that are scored. A response alone in its group has weight 1 and counts in neither. The phase's
        ``tokens["nthr"]`` has s⁻ for the tokens of incorrect responses, NaN elsewhere.
        """
        plan = self._plan(batch)
        return self._phases(batch, plan, _scores(batch, plan.scored, self.self_inclusive) if plan.scored else None)

    def scores(self, batch: TokenBatch) -> Tensor:
        """(B, T) s⁻ for tokens of incorrect responses, s̄⁺ for tokens of correct ones; NaN in groups not scored."""
        groups = self._plan(batch).scored
        if not groups:
            return torch.full_like(batch.mask, torch.nan, dtype=batch.dtype)
        found, row, column = _scores(batch, groups, self.self_inclusive)
        if not torch.cat(found).isfinite().all():
            raise _not_finite(groups, found)
        values = torch.full_like(batch.mask, torch.nan, dtype=found.negative.dtype)
        values[row, column] = found.negative
        right = send([row for group in groups for row in group.right], values.device)
        values[right] = torch.where(batch.mask[right], found.positive[:, None], torch.nan)
        return values

    def weigh(self, batch: TokenBatch, scores: Tensor) -> list[Phase]:
        """The phase for these scores. Groups without scores are unchanged and lower ``scored_share``."""
        plan = self._plan(batch)
        at_first = scores.gather(1, batch.mask.int().argmax(1, keepdim=True))[:, 0]  # s̄⁺ is the same in a whole row
        known = at_first.isfinite().tolist()
        plan = plan._replace(scored=[group for group in plan.scored if all(known[row] for row in group.right)])
        if not plan.scored:
            return self._phases(batch, plan, None)
        right = send([row for group in plan.scored for row in group.right], scores.device)
        wrong = send([row for group in plan.scored for row in group.wrong], scores.device)
        which, column = batch.mask[wrong].nonzero(as_tuple=True)
        row = wrong[which]
        return self._phases(batch, plan, (Scores(scores[row, column], at_first[right]), row, column))

    def _plan(self, batch: TokenBatch) -> _Plan:
        """Find the groups that can be scored. The host waits for a GPU only here and at the end of ``_fill``."""
        assert batch.correct is not None
        correct, lengths = torch.stack([batch.correct.long(), batch.lengths]).tolist()
        groups = [rows for rows in batch.group_members() if len(rows) > 1]
        scored = [group for rows in groups if (group := self._scorable(rows, correct, lengths))]
        wrong = sum(lengths[row] for rows in groups for row in rows if not correct[row])
        return _Plan(scored, len(groups), wrong)

    def _phases(self, batch: TokenBatch, plan: _Plan, found: _Found | None) -> list[Phase]:
        weight = torch.ones_like(batch.mask, dtype=batch.dtype)
        score = torch.full_like(weight, torch.nan)
        n_flagged = self._fill(plan.scored, found, weight, score) if found else 0
        metrics = {
            "flagged_share": n_flagged / max(plan.wrong, 1),
            "scored_share": len(plan.scored) / max(plan.groups, 1),
        }
        return [Phase.of(batch, weight, metrics=metrics, tokens={"nthr": score})]

    def _fill(self, groups: list[_Group], found: _Found, weight: Tensor, score: Tensor) -> int:
        """Write weights and scores of the groups' incorrect tokens in place; return the number of flagged tokens."""
        device = weight.device
        (negative, positive), row, column = found
        right, wrong = [len(group.right) for group in groups], [group.sizes[-1] for group in groups]
        threshold = self.beta * torch.segment_reduce(positive, "min", lengths=send(right, device), unsafe=True)
        eta = [2 * abs(0.5 - group.share) if self.eta is None else self.eta for group in groups]
        owner = torch.repeat_interleave(send(wrong, device), output_size=len(row))
        flagged = negative > threshold[owner]
        weight[row, column] = torch.where(flagged, send(torch.tensor(eta, dtype=weight.dtype), device)[owner], 1)
        score[row, column] = negative.to(score.dtype)
        finite = negative.isfinite().all() & positive.isfinite().all()
        n_flagged, all_finite = torch.stack([flagged.sum(), finite]).tolist()
        if not all_finite:
            raise _not_finite(groups, found[0])
        return int(n_flagged)

    def _scorable(self, rows: list[int], correct: list[int], lengths: list[int]) -> _Group | None:
        """The group of these rows without its empty responses; None if it cannot be scored."""
        right = [row for row in rows if correct[row] and lengths[row]]
        wrong = [row for row in rows if not correct[row] and lengths[row]]
        if not wrong or len(right) < (1 if self.self_inclusive else 2):
            return None
        sizes = [*(lengths[row] for row in right), sum(lengths[row] for row in wrong)]
        return _Group(rows, right, wrong, sizes, sum(correct[row] for row in rows) / len(rows))


class _Group(NamedTuple):
    rows: list[int]
    right: list[int]  # rows of correct responses
    wrong: list[int]  # rows of incorrect responses
    sizes: list[int]  # tokens of each correct response, then of all incorrect ones
    share: float  # p̂: share of correct responses


class _Plan(NamedTuple):
    scored: list[_Group]
    groups: int  # the number of groups with at least two rows
    wrong: int  # the number of tokens in the incorrect responses of these groups


_Found = tuple[Scores, Tensor, Tensor]  # scores of some groups, and the rows and columns of their incorrect tokens


def _not_finite(groups: list[_Group], found: Scores) -> ValueError:
    negative = found.negative.split([group.sizes[-1] for group in groups])
    positive = found.positive.split([len(group.right) for group in groups])
    parts = zip(groups, negative, positive, strict=True)
    rows = next(group.rows for group, *both in parts if not torch.cat(both).isfinite().all())
    return ValueError(f"NTHR: the scores of the group in rows {rows} are not finite: check hidden and head")


def _scores(batch: TokenBatch, groups: list[_Group], self_inclusive: bool) -> _Found:
    """The groups' scores, and the rows and columns of their incorrect tokens."""
    assert batch.head is not None
    assert batch.targets is not None
    device = batch.mask.device
    order = send([row for group in groups for row in group.right + group.wrong], device)
    which, column = batch.mask[order].nonzero(as_tuple=True)
    row = order[which]
    parts, wrong, end, last = [], [], 0, 0
    for batch_groups in _batches(groups, batch.mask.shape[1]):
        begin, end = end, end + sum(sum(group.sizes) for group in batch_groups)
        first, last = last, last + sum(len(group.right + group.wrong) for group in batch_groups)
        tokens = slice(begin, end)
        hidden = batch.hidden_of(order[first:last])[which[tokens] - first, column[tokens]]
        parts.append(
            group_scores(
                batch.head, hidden, batch.targets[row[tokens], column[tokens]], [group.sizes for group in batch_groups],
                self_inclusive=self_inclusive, block=BLOCK if hidden.is_cuda else None,
            )
        )  # fmt: skip
        for group in batch_groups:
            begin += sum(group.sizes)
            wrong.append(slice(begin - group.sizes[-1], begin))
    negative, positive = (torch.cat(values) for values in zip(*parts, strict=True))
    return Scores(negative, positive), torch.cat([row[i] for i in wrong]), torch.cat([column[i] for i in wrong])


def _batches(groups: list[_Group], longest: int) -> list[list[_Group]]:
    """Cut the groups into batches for one forward pass each: at most TOKENS padded tokens, or a single group."""
    batches: list[list[_Group]] = []
    room = 0
    for group in groups:
        need = longest * len(group.right + group.wrong)
        if need > room:
            batches.append([])
            room = TOKENS
        batches[-1].append(group)
        room -= need
    return batches
