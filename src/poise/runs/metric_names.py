"""All metrics of a run, in one table: what ``metrics.jsonl``, trackers and curves call by these names.

Words in capitals stand for names of the run's own: a phase, a task, a part of the reward. docs/reference.md is made
from this table (``poise reference``), and a test compares the table with what runs write.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple


class Metric(NamedTuple):
    """What a metric means, and the module that computes it."""

    meaning: str
    module: str


_RECORDS, _OBJECTIVE, _SUMMARY = "training/records.py", "objective.py", "regulators/summary.py"
_ERL, _RLTR, _EVALUATE = "algorithms/erl.py", "algorithms/rltr.py", "training/evaluate.py"

METRICS: dict[str, Metric] = {
    # Rewards, over the first attempts of the step
    "reward/mean": Metric("mean reward of the responses", _RECORDS),
    "reward/accuracy": Metric("share of the responses that the verifier calls correct", _RECORDS),
    "reward/accuracy/DIFFICULTY": Metric("the same, for the problems of one difficulty", _RECORDS),
    "reward/no_spread": Metric(
        "share of the responses whose advantage is 0 at every token, because all rewards of their group are equal; "
        "they teach nothing",
        _RECORDS,
    ),
    "reward/PART": Metric(
        "mean of one part of the reward, without its weight: a reward function by its name, `answer` or `format` of "
        "`kk`; or a number that a reward function reports with `log_metric`",
        _RECORDS,
    ),
    "reward/math/cut_off": Metric("answers that the reward `math` could not check in time; they are wrong", _RECORDS),
    "reward/failed": Metric(
        "responses without a verdict (the reward function hung, the environment failed); they are left out",
        "training/batches.py",
    ),
    "reward/dropped_groups": Metric("groups that `drop_equal_groups` left out", "training/phases.py"),
    # Sampling
    "rollout/length": Metric("mean number of tokens of a response that the model wrote itself", _RECORDS),
    "rollout/entropy": Metric("mean entropy of the next-token distribution at sampling, in nats", _RECORDS),
    "rollout/finished": Metric("share of the responses that ended by themselves, before the token limit", _RECORDS),
    "rollout/continued": Metric("later turns of episodes that went on from keys the engine had kept", _RECORDS),
    "rollout/reread": Metric("later turns of episodes that had to read their dialogue again", _RECORDS),
    "rollout/importance": Metric(
        "mean of old / sampler probability before truncation; 1 if both agree (only where they are computed apart, "
        "as with vLLM)",
        _RECORDS,
    ),
    "rollout/truncated": Metric("share of the tokens whose weight `objective.importance_cap` truncates", _RECORDS),
    "rollout/mismatch": Metric("mean distance of the two log-probabilities", _RECORDS),
    "rollout/mismatch_max": Metric("largest distance of the two log-probabilities", _RECORDS),
    "rollout/mismatch_kl": Metric("estimate (k3) of KL(sampler ‖ policy)", _RECORDS),
    # The update, as a mean over the step's optimizer steps
    "optim/steps": Metric("optimizer steps; 0: no token had an advantage, and nothing moved", "training/update.py"),
    "optim/loss": Metric("the loss: policy, KL and entropy terms", _OBJECTIVE),
    "optim/policy_loss": Metric("the policy term of the loss", _OBJECTIVE),
    "optim/grad_norm": Metric("norm of the gradient before `optim.grad_clip`", "training/update.py"),
    "optim/clip_low": Metric("share of the tokens with A < 0 that the clip holds back, of all tokens", _OBJECTIVE),
    "optim/clip_high": Metric("share of the tokens with A > 0 that the clip holds back, of all tokens", _OBJECTIVE),
    "optim/drift": Metric("estimate (k3) of KL(old policy ‖ current one): how far the update has moved", _OBJECTIVE),
    "optim/kl": Metric("estimate of KL(policy ‖ reference) per token, with `objective.kl_coef`", _OBJECTIVE),
    "optim/entropy": Metric("entropy of the current policy, with `objective.entropy_coef`", _OBJECTIVE),
    "optim/chosen": Metric("share of the tokens that `kl-cov` or `lp-reg` chose", "training/update.py"),
    # The regulator. Intervals are of the sampled token's probability p
    "reg/PHASE/weight_mean": Metric("mean policy weight over the response tokens", _SUMMARY),
    "reg/PHASE/kl_weight_mean": Metric("mean weight of the KL and entropy terms", _SUMMARY),
    "reg/PHASE/zero_share": Metric("share of the tokens whose policy weight is 0", _SUMMARY),
    "reg/PHASE/effective_tokens": Metric("(Σw)² / Σw²: the number of tokens that share the weight", _SUMMARY),
    "reg/PHASE/weight_pINTERVAL": Metric("mean policy weight of the tokens with p in that interval", _SUMMARY),
    "reg/pull_pINTERVAL": Metric("the interval's share of Σ w·|A|·(1 − p), the gradient at the logits", _SUMMARY),
    "reg/PHASE/flagged_share": Metric(
        "`nthr`: share of the tokens of wrong responses that it spares", "regulators/nthr.py"
    ),
    "reg/PHASE/scored_share": Metric(
        "`nthr`: share of the groups with right and wrong responses", "regulators/nthr.py"
    ),
    "reg/PHASE/silenced_share": Metric(
        "`stapo`: share of the tokens whose policy term it zeroes", "regulators/stapo.py"
    ),
    "reg/PHASE/clipped_share": Metric(
        "`clip-cov`: share of the tokens whose policy term it zeroes", "regulators/clip_cov.py"
    ),
    "reg/PHASE/entropy": Metric("`stare`: mean entropy that decides whether it acts", "regulators/stare.py"),
    "reg/PHASE/chosen_share": Metric("`stare`: share of the tokens that it weights", "regulators/stare.py"),
    # Algorithms
    "first/success": Metric("`erl`: share of first attempts that are right", _ERL),
    "second/retried": Metric("`erl`: share of first attempts that were tried again", _ERL),
    "second/success": Metric("`erl`: share of second attempts that are right; absent if there were none", _ERL),
    "second/lone": Metric("`erl`: retries that are alone in their group", _ERL),
    "reflection/readable": Metric("`erl`: share of reflections from which advice could be read", _ERL),
    "reflection/shown": Metric("`erl`: share of them whose advice the second attempt was shown", _ERL),
    "reflection/length": Metric("`erl`: mean tokens of a reflection", _ERL),
    "reflection/unasked": Metric("`erl`: failed attempts for which the question did not fit", _ERL),
    "consolidated/rows": Metric("`erl`: consolidated rows", _ERL),
    "transfer/mean": Metric("`rltr`: how often the receiver is right, over all responses; 0 without a prefix", _RLTR),
    "transfer/after_right": Metric("`rltr`: the same, for prefixes of right responses", _RLTR),
    "transfer/after_wrong": Metric("`rltr`: the same, for prefixes of wrong responses", _RLTR),
    "transfer/cut/QUARTER": Metric("`rltr`: the same, for prefixes that end in that quarter of the reasoning", _RLTR),
    "transfer/uncut": Metric("`rltr`: share of the responses without a prefix", _RLTR),
    "transfer/failed": Metric("`rltr`: responses whose continuations got no verdict", _RLTR),
    # Held-out problems, in steps with an evaluation (``evaluation.every``)
    "eval/TASK/avg@K": Metric("accuracy on held-out problems: mean over K samples each", _EVALUATE),
    "eval/TASK/pass@K": Metric("share of the problems that one of K samples solves", _EVALUATE),
    "eval/TASK/maj@K": Metric("share of the problems whose most frequent answer of K is right", _EVALUATE),
    "eval/TASK/greedy": Metric("accuracy of greedy decoding", _EVALUATE),
    "eval/TASK/avg@K/DIFFICULTY": Metric("accuracy for the problems of one difficulty", _EVALUATE),
    "eval/TASK/greedy/DIFFICULTY": Metric("greedy accuracy for the problems of one difficulty", _EVALUATE),
    # Tokens and time
    "tokens/sampled": Metric("tokens sampled in this step, by all models together", _RECORDS),
    "tokens/MODEL": Metric("those sampled by a model other than the policy", _RECORDS),
    "tokens/total": Metric(
        "tokens sampled since the run began, evaluations apart; `budget` is compared with it", _RECORDS
    ),
    "time/problems": Metric("seconds for drawing the problems", "trainer.py"),
    "time/rollout": Metric("seconds for sampling", "algorithms/sampler.py"),
    "time/score": Metric("seconds for scoring, as far as sampling had to wait for it", "algorithms/sampler.py"),
    "time/transfer": Metric("`rltr`: seconds for what the receiver does", _RLTR),
    "time/regulate": Metric("seconds for the batch, its reference log-probabilities and the regulator", "trainer.py"),
    "time/record": Metric("seconds for writing responses and tokens", "trainer.py"),
    "time/update": Metric("seconds for forward and backward passes and optimizer steps", "trainer.py"),
    "time/other": Metric("the rest of the step", _RECORDS),
    "time/step": Metric("seconds of the whole step, evaluation and checkpoint apart", _RECORDS),
    "time/tokens_per_s": Metric("sampled tokens per second of the whole step", _RECORDS),
}


def find(name: str) -> str | None:
    """The row of the table that a metric of a run belongs to; None if there is none."""
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
