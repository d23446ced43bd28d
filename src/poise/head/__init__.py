"""Loss and log-probabilities from hidden states, without the logits of all tokens in memory."""

from poise.head.loss import policy_loss, token_logp
from poise.lm_head import Head, HeadLike, as_head

__all__ = ["Head", "HeadLike", "as_head", "policy_loss", "token_logp"]
