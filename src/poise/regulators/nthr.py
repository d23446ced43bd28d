"""NTHR: spare the tokens of wrong answers whose punishment would pull the right answers down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from poise._errors import check_range
from poise._transfer import send
from poise.batch import Phase, TokenBatch
from poise.influence import scores
from poise.regulators.base import Regulator


@dataclass(frozen=True)
class NTHR(Regulator):
    """Negative-token handling by hidden reward: tokens of incorrect responses with ``s⁻ > τ`` get ``A' = η·A``.

    ``s⁻(k') = Σ_k ⟨e_{y_k} − π_k, e_{y_k'} − π_k'⟩·⟨h_k, h_k'⟩`` over the tokens k of the group's correct responses,
    and ``τ = β · min_i s̄⁺_i`` with s̄⁺_i the mean over the tokens of correct response i of the same score
    (poise.influence). ``eta=None`` is the paper's ``η = 2·|0.5 − p̂|``, p̂ the group's share of correct responses;
    ``eta=0`` its diagnostic; ``eta=1`` is GRPO exactly. Paper: "On the Effect of Negative Gradient in GRPO", arXiv
    2505.18830.

    **Ours**, since the paper leaves it open: a correct response is scored against the *other* correct ones
    (``self_inclusive=True`` for all of them), so that a group with a single correct response is left alone; scores are
    sums over the tokens of the correct responses, s̄⁺ a mean over the tokens of response i. These matter: with
    positives and negatives drawn alike, the exclusive τ flags about half of the wrong tokens, the inclusive one 7 to
    30 %. Watch ``reg/…/flagged_share``. Groups with no correct or no incorrect response are left alone. π is the
    distribution that sampling used: give the batch a ``poise.Head`` with its temperature and soft-capping.
    """

    beta: float = 1.0
    eta: float | None = None
    self_inclusive: bool = False
    needs = frozenset({"groups", "correct", "hidden", "head", "targets"})

    def __post_init__(self) -> None:
        check_range("nthr", "beta", self.beta)
        if self.eta is not None:
            check_range("nthr", "eta", self.eta, 0.0, 1e6)

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """One phase; KL untouched. Reports the share of wrong tokens flagged, and of groups that could be scored.

        ``tokens["nthr"]`` of the phase holds s⁻ for the tokens of incorrect responses, NaN where there is none.
        """
        assert batch.correct is not None
        assert batch.head is not None
        assert batch.targets is not None
        # A GPU is waited for here, once in _tokens, and at the end; not in every group.
        correct, lengths = torch.stack([batch.correct.long(), batch.lengths]).tolist()
        groups = batch.group_members()
        scored = [group for rows in groups if (group := self._group(rows, correct, lengths))]
        row, column, place = _tokens(batch, scored)

        weight = torch.ones_like(batch.mask, dtype=batch.dtype)
        found = torch.full_like(weight, torch.nan)
        flagged = torch.zeros((), dtype=torch.long, device=batch.mask.device)
        finite = []
        end = 0
        for group in scored:
            sizes = [lengths[i] for i in group.right] + [sum(lengths[i] for i in group.wrong)]
            begin, end = end, end + sum(sizes)
            hidden = batch.hidden_of(send(group.rows, row.device))[place[begin:end], column[begin:end]]
            targets = batch.targets[row[begin:end], column[begin:end]]
            *positive, negative = zip(hidden.split(sizes), targets.split(sizes), strict=True)
            result = scores(batch.head, positive, negative, self_inclusive=self.self_inclusive)
            finite.append(torch.stack([values.isfinite().all() for values in result]).all())

            share = sum(correct[i] for i in group.rows) / len(group.rows)
            eta = 2 * abs(0.5 - share) if self.eta is None else self.eta
            hit = result.negative > self.beta * result.positive.min()
            incorrect = slice(end - sizes[-1], end)
            weight[row[incorrect], column[incorrect]] = torch.ones_like(hit, dtype=weight.dtype).masked_fill_(hit, eta)
            found[row[incorrect], column[incorrect]] = result.negative.to(found.dtype)
            flagged += hit.sum()

        n_flagged, *all_finite = torch.stack([flagged, *finite]).tolist()
        for group, is_finite in zip(scored, all_finite, strict=True):
            if not is_finite:
                where = f"the group of rows {group.rows}"
                raise ValueError(f"NTHR: the scores of {where} are not finite: look at hidden and head")
        wrong_tokens = sum(length for length, is_correct in zip(lengths, correct, strict=True) if not is_correct)
        metrics = {"flagged_share": n_flagged / max(wrong_tokens, 1), "scored_share": len(scored) / max(len(groups), 1)}
        return [Phase.of(batch, weight, metrics=metrics, tokens={"nthr": found})]

    def _group(self, rows: list[int], correct: list[int], lengths: list[int]) -> _Group | None:
        """A group's responses that have tokens, if they can be scored."""
        right = [row for row in rows if correct[row] and lengths[row]]
        wrong = [row for row in rows if not correct[row] and lengths[row]]
        enough = bool(wrong) and len(right) >= (1 if self.self_inclusive else 2)
        return _Group(rows, right, wrong) if enough else None


class _Group(NamedTuple):
    rows: list[int]
    right: list[int]
    wrong: list[int]


def _tokens(batch: TokenBatch, groups: list[_Group]) -> tuple[Tensor, Tensor, Tensor]:
    """The row, the column, and the row's place in its group of each token: by group, correct responses first."""
    order = [row for group in groups for row in group.right + group.wrong]
    place = [group.rows.index(row) for group in groups for row in group.right + group.wrong]
    order_and_place = torch.tensor([order, place], dtype=torch.long, device=batch.mask.device)
    which, column = batch.mask[order_and_place[0]].nonzero(as_tuple=True)
    row, within = order_and_place[:, which]
    return row, column, within
