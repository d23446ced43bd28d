"""NTHR: spare the tokens of wrong answers whose punishment would pull the right answers down."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from poise._errors import check_range
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
        """One phase; KL untouched. Reports the share of wrong tokens flagged, and of groups that could be scored."""
        assert batch.correct is not None
        assert batch.head is not None
        assert batch.targets is not None
        weight = torch.ones_like(batch.mask, dtype=batch.dtype)
        groups = scored = 0
        flagged = torch.zeros((), dtype=torch.long, device=batch.mask.device)
        for rows in batch.group_rows():
            groups += 1
            occupied = batch.mask[rows].any(1)
            right = (batch.correct[rows] & occupied).nonzero()[:, 0]
            wrong = (~batch.correct[rows] & occupied).nonzero()[:, 0]
            if len(wrong) == 0 or len(right) < (1 if self.self_inclusive else 2):
                continue
            scored += 1
            hidden, targets, mask = batch.hidden_of(rows), batch.targets[rows], batch.mask[rows]
            result = scores(
                batch.head,
                [(hidden[i][mask[i]], targets[i][mask[i]]) for i in right],
                (hidden[wrong][mask[wrong]], targets[wrong][mask[wrong]]),
                self_inclusive=self.self_inclusive,
            )
            if not all(torch.isfinite(values).all() for values in result):
                raise ValueError(
                    f"NTHR: the scores of the group of rows {rows.tolist()} are not finite: look at hidden and head"
                )
            share = float(batch.correct[rows].double().mean())
            eta = 2 * abs(0.5 - share) if self.eta is None else self.eta
            hit = torch.zeros_like(mask[wrong])
            hit[mask[wrong]] = result.negative > self.beta * result.positive.min()
            weight[rows[wrong]] = weight[rows[wrong]].masked_fill(hit, eta)
            flagged += hit.sum()
        wrong_tokens = (batch.mask & ~batch.correct[:, None]).sum()
        metrics = {
            "flagged_share": float(flagged / wrong_tokens.clamp(min=1)),
            "scored_share": scored / max(groups, 1),
        }
        return [Phase.of(batch, weight, metrics=metrics)]
