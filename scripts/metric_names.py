"""All metrics of a run, for docs/reference.md. A test compares this table with what runs write.

Words in capitals stand for names of the run's own: a phase, a task, a part of the reward.
"""

from __future__ import annotations

import re
from functools import cache

METRICS: dict[str, str] = {
    # Rewards, over the first attempts of the step
    "reward/mean": "mean reward of the responses",
    "reward/accuracy": "share of the responses that the verifier calls correct",
    "reward/accuracy/DIFFICULTY": "the same, for the problems of one difficulty",
    "reward/no_spread": (
        "share of the responses whose advantage is 0 at every token, because all rewards of their group are equal; "
        "they teach nothing"
    ),
    "reward/PART": (
        "mean of one part of the reward, without its weight: a reward function by its name, `answer` or `format` of "
        "`kk`; or a number that a reward function reports with `log_metric`"
    ),
    "reward/math/cut_off": "answers that the reward `math` could not check in time; they are wrong",
    "reward/failed": "responses left out because the reward function hung or the environment failed",
    "reward/dropped_groups": "groups that `drop_equal_groups` left out",
    # Sampling
    "rollout/length": "mean number of tokens of a response that the model wrote itself",
    "rollout/entropy": "mean entropy of the next-token distribution at sampling, in nats",
    "rollout/finished": "share of the responses that ended by themselves, before the token limit",
    "rollout/continued": "later turns of episodes that went on from keys the engine had kept",
    "rollout/reread": "later turns of episodes that had to read their dialogue again",
    "rollout/too_long": "problems whose prompts were longer than rollout.max_prompt; others took their place",
    "rollout/importance": (
        "mean of old / sampler probability before truncation; 1 if both agree (only where they are computed apart, "
        "as with vLLM)"
    ),
    "rollout/truncated": "share of the tokens whose weight `objective.importance_cap` truncates",
    "rollout/mismatch": "mean distance of the two log-probabilities",
    "rollout/mismatch_p999": "99.9th percentile of that distance",
    "rollout/mismatch_max": "largest distance of the two log-probabilities",
    "rollout/mismatch_kl": "estimate (k3) of KL(sampler ‖ policy)",
    # The update, as a mean over the step's optimizer steps
    "optim/steps": "optimizer steps; 0: no token had an advantage, and nothing moved",
    "optim/loss": "the loss: policy, KL and entropy terms",
    "optim/policy_loss": "the policy term of the loss",
    "optim/grad_norm": "norm of the gradient before `optim.grad_clip`",
    "optim/clip_low": "share of the tokens with A < 0 that the clip holds back, of all tokens",
    "optim/clip_high": "share of the tokens with A > 0 that the clip holds back, of all tokens",
    "optim/held_unmoved": "such shares together before a batch's first optimizer step: rounding alone",
    "optim/drift": "estimate (k3) of KL(old policy ‖ current one): how far the update has moved",
    "optim/kl": "estimate of KL(policy ‖ reference) per token, with `objective.kl_coef`",
    "optim/entropy": "entropy of the current policy, with `objective.entropy_coef`",
    "optim/chosen": "share of the tokens that `kl-cov` or `lp-reg` chose",
    # The regulator. Intervals are of the sampled token's probability p
    "reg/PHASE/weight_mean": "mean policy weight over the response tokens",
    "reg/PHASE/kl_weight_mean": "mean weight of the KL and entropy terms",
    "reg/PHASE/zero_share": "share of the tokens whose policy weight is 0",
    "reg/PHASE/effective_tokens": "(Σw)² / Σw²: the number of tokens that share the weight",
    "reg/PHASE/weight_pINTERVAL": "mean policy weight of the tokens with p in that interval",
    "reg/pull_pINTERVAL": "the interval's share of Σ w·|A|·(1 − p), the gradient at the logits",
    "reg/PHASE/flagged_share": "`nthr`: share of the tokens of wrong responses that it spares",
    "reg/PHASE/scored_share": "`nthr`: share of the groups with right and wrong responses",
    "reg/PHASE/silenced_share": "`stapo`: share of the tokens whose policy term it zeroes",
    "reg/PHASE/clipped_share": "`clip-cov`: share of the tokens whose policy term it zeroes",
    "reg/PHASE/entropy": "`stare`: mean entropy that decides whether it acts",
    "reg/PHASE/chosen_share": "`stare`: share of the tokens that it weights",
    # Algorithms
    "first/success": "`erl`: share of first attempts that are right",
    "second/retried": "`erl`: share of first attempts that were tried again",
    "second/success": "`erl`: share of second attempts that are right; absent if there were none",
    "second/lone": "`erl`: retries that are alone in their group",
    "reflection/readable": "`erl`: share of reflections from which advice could be read",
    "reflection/shown": "`erl`: share of them whose advice the second attempt was shown",
    "reflection/length": "`erl`: mean tokens of a reflection",
    "reflection/unasked": "`erl`: failed attempts for which the question did not fit",
    "consolidated/rows": "`erl`: consolidated rows",
    "transfer/mean": "`rltr`: how often the receiver is right, over all responses; 0 without a prefix",
    "transfer/after_right": "`rltr`: the same, for prefixes of right responses",
    "transfer/after_wrong": "`rltr`: the same, for prefixes of wrong responses",
    "transfer/cut/QUARTER": "`rltr`: the same, for prefixes that end in that quarter of the reasoning",
    "transfer/uncut": "`rltr`: share of the responses without a prefix",
    "transfer/failed": "`rltr`: responses whose continuations got no score",
    # Held-out problems, in steps with an evaluation (``evaluation.every``)
    "eval/TASK/avg@K": "accuracy on held-out problems: mean over K samples each",
    "eval/TASK/pass@K": "share of the problems that one of K samples solves",
    "eval/TASK/maj@K": "share of the problems whose most frequent answer of K is right",
    "eval/TASK/greedy": "accuracy of greedy decoding",
    "eval/TASK/cut_off": "share of the samples that reached rollout.max_tokens",
    "eval/TASK/unreadable": "share of the samples that ended by themselves without a readable answer",
    "eval/TASK/avg@K/DIFFICULTY": "accuracy for the problems of one difficulty",
    "eval/TASK/greedy/DIFFICULTY": "greedy accuracy for the problems of one difficulty",
    # Tokens and time
    "tokens/sampled": "tokens sampled in this step, by all models together",
    "tokens/MODEL": "those sampled by a model other than the policy",
    "tokens/total": "tokens sampled since the run began, without evaluations; `budget` limits them",
    "time/problems": "seconds for drawing the problems",
    "time/rollout": "seconds for sampling",
    "time/score": "seconds for scoring, as far as sampling had to wait for it",
    "time/transfer": "`rltr`: seconds for what the receiver does",
    "time/regulate": "seconds for the batch, its reference log-probabilities and the regulator",
    "time/record": "seconds for writing responses and tokens",
    "time/update": "seconds for forward and backward passes and optimizer steps",
    "time/other": "the rest of the step",
    "time/step": "seconds of the whole step, evaluation and checkpoint apart",
    "time/tokens_per_s": "sampled tokens per second of the whole step",
}


def find(name: str) -> str | None:
    """The row of the table for a metric that a run wrote; None if there is none."""
    if name in METRICS:
        return name
    return next((row for row, pattern in _patterns() if re.fullmatch(pattern, name)), None)


@cache
def _patterns() -> list[tuple[str, str]]:
    """A pattern for each row with a word in capitals, those with the fewest of them first."""
    rows = sorted((row for row in METRICS if re.search("[A-Z]", row)), key=lambda row: len(re.findall("[A-Z]+", row)))
    anything = {"K": r"\d+", "INTERVAL": r"[\d.]+-[\d.]+", "TASK": ".+", "PART": ".+"}  # the last two may have slashes
    pieces = {row: re.split("([A-Z]+)", row) for row in rows}
    return [
        (row, "".join(anything.get(piece, "[^/]+") if piece.isupper() else re.escape(piece) for piece in pieces[row]))
        for row in rows
    ]
