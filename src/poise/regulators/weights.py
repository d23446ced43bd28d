"""``token_weights``: the weights alone, for a loop that has its own loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from poise._lib.errors import unknown
from poise.batch import TokenBatch
from poise.regulators.base import Regulator
from poise.regulators.names import parse


def token_weights(regulator: str | Regulator, **batch: Any) -> Tensor:
    """(B, T) policy weights of a regulator with one phase; the keywords are the fields of ``TokenBatch``.

    >>> weights = poise.token_weights("ar(alpha=0.2)", old_logp=old_logp, advantages=advantages, mask=mask)
    >>> advantages = advantages[:, None] * weights

    Weights are not negative, so weighting the advantage weights the clipped policy term, whatever its clip. For the
    weights of the KL and entropy terms (TR-GRPO) call the regulator and read ``Phase.kl``.
    """
    for name in batch:
        if name not in TokenBatch.__dataclass_fields__:
            hint = "settings go into the text form, as in 'ar(alpha=0.2)'"
            raise TypeError(unknown("field of TokenBatch", name, TokenBatch.__dataclass_fields__) + f"; {hint}")
    phases = parse(regulator)(TokenBatch(**batch))
    if len(phases) > 1:
        names = ", ".join(phase.name for phase in phases)
        raise ValueError(
            f"{regulator} updates in {len(phases)} phases ({names}), which one tensor of weights cannot express; "
            "use `for phase in poise.regulators.parse(...)(batch)`, one pass of optimizer steps each"
        )
    return phases[0].policy
