"""Loss and log-probabilities from hidden states, without the logits of all tokens in memory."""

from poise.head.loss import min_p_logp, policy_loss, token_logp
from poise.lm_head import Head, HeadLike, as_head

__all__ = ["Head", "HeadLike", "as_head", "min_p_logp", "policy_loss", "token_logp"]
