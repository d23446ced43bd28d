"""How tokens pull on each other through the head: the scores behind NTHR."""

from poise.influence.inner_products import Form, Scores, cheaper_form, default_block, group_scores, scores

__all__ = ["Form", "Scores", "cheaper_form", "default_block", "group_scores", "scores"]
