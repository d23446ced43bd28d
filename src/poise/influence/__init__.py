"""How one token's gradient at the head moves another token: the scores behind NTHR."""

from poise.influence.inner_products import Form, Scores, cheaper_form, default_block, group_scores

__all__ = ["Form", "Scores", "cheaper_form", "default_block", "group_scores"]
