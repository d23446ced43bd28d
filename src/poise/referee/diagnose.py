"""``poise diagnose``: measure on fresh responses which tokens drive a model's update, and write a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, sqrt
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from poise import regulators
from poise._lib.user_code import blamed
from poise.batch import Phase, TokenBatch
from poise.diagnostics import Intervals, dominance, interval_means, logit_rounding, token_gradient_sizes
from poise.models.loading import load_policy
from poise.models.master_weights import MasterWeights
from poise.models.policy import Policy
from poise.models.scoring import score_batch
from poise.referee.compare.statistics import student_factor
from poise.referee.report.weighing import percent
from poise.runs.folder import RunFolder
from poise.runs.subscribers.recorder import environment, response_records, token_arrays
from poise.sampling.draws import derived_seed
from poise.sampling.sampler import Sampler
from poise.sampling.trajectories import FIRST, Trajectory, collect
from poise.tasks import Task, draw
from poise.training.batches import drop_failed, make_batch
from poise.training.building import build_sampler, steps_taken
from poise.training.config.run_settings import starting_model
from poise.training.config.schema import Config
from poise.training.frozen_models import FrozenModels
from poise.training.steps import State
from poise.training.update import UpdatePlan, backward, clip

SUSPECTS = 20  # the number of listed tokens with the highest NTHR scores
METHODS = ("grpo", "ar", "lopti", "tr-grpo", "nthr")
Progress = Callable[[str], None]
CONCATENATED = "questions"  # one value per question; batches have different questions, so there is no mean


class SampledBatch(NamedTuple):
    """One batch of fresh responses."""

    samples: list[Trajectory]
    batch: TokenBatch


class PolicyLoop:
    """The trainer's own update as a ``diagnostics.Loop``."""

    def __init__(self, policy: Policy, config: Config, batch: TokenBatch) -> None:
        self.policy, self.batch, self.plan = policy, batch, UpdatePlan.of(config)
        self.settings = replace(config.objective, kl_coef=0.0)
        self.parameters: Sequence[Tensor] = policy.parameters()

    def gradient(self, phase: Phase) -> None:
        """Store the phase's gradient over all responses, unclipped, in the parameters."""
        backward(self.policy, self.batch, phase, replace(self.plan, objective=self.settings))
        clip(self.parameters, torch.inf, phase.name)

    def logp(self) -> Tensor:
        """The log-probabilities under the current weights, without gradients."""
        return score_batch(self.policy, self.batch, self.plan.temperature, self.plan.micro_tokens)[0]

    def noise(self, masks: Tensor) -> dict[str, list[float | None]]:
        """The mean |Δp| per interval from rounding alone: with passes of half the size, and with bfloat16 logits."""
        smaller = min(self.policy.budget(self.plan.micro_tokens), int(self.batch.mask.sum())) // 2
        again = score_batch(self.policy, self.batch, self.plan.temperature, max(1, smaller))[0]
        rounded = token_gradient_sizes(self.batch, logit_rounding)
        moved = {"again": (again.double().exp() - self.logp().double().exp()).abs(), "bfloat16": rounded}
        return {name: interval_means(value, masks) for name, value in moved.items() if value is not None}

    def changed(self) -> None:
        """Round the changed master weights into the half-precision model."""
        assert self.policy.master_weights is not None
        self.policy.master_weights.publish()


def diagnose(
    config: Config,
    folder: RunFolder,
    *,
    task: Task | None = None,
    methods: Sequence[str] = METHODS,
    intervals: Intervals | None = None,
    batches: int = 8,
    warmup: int = 3,
    say: Progress = lambda _: None,
) -> dict[str, Any]:
    """Sample ``batches`` batches from the config's model and task, and run ``dominance`` on each, without training.

    ``task`` replaces the config's task. Responses and tokens are written to ``folder`` as in a run, and the results to
    ``diagnose.json``. The gradients do not include the KL term.
    """
    intervals = intervals or Intervals()
    by_name = {name: regulators.parse(name) for name in methods}
    rollout = config.rollout
    policy = load_policy(config.model_name, **config.loading)
    policy.master_weights = MasterWeights(policy.model)
    policy.check_settings(rollout.max_prompt, rollout.max_tokens)
    frozen = FrozenModels(config, policy, config.build_algorithm(), say, start=starting_model(config.model))
    sampler = frozen.add_to(build_sampler(config, policy, say, task=task))
    sampler = sampler.at(State(steps_taken(config.model)).progress(config, sampler.task))
    optimizer = _warm_optimizer(sampler, config, warmup, say)
    results, suspects, cut_off = [], list[dict[str, Any]](), 0
    for number in range(1, batches + 1):
        title = f"batch {number} of {batches}"
        say(f"{title}: sampling {config.prompts} × {config.group} responses")
        sampled = sample(sampler, config, number)
        reporting = _with_progress(
            by_name, f"{title}: {int(sampled.batch.mask.sum())} tokens; gradients and steps of", say
        )
        loop = PolicyLoop(policy, config, sampled.batch)
        figures, tokens = dominance(loop, reporting, optimizer, intervals=intervals, clip=config.optim.grad_clip)
        results.append(figures | {"noise": loop.noise(intervals.masks(sampled.batch))})
        cut_off += sum(not sample.finished for sample in sampled.samples if sample.role == FIRST)
        suspects += _suspects(number, sampled, policy, tokens)
        _record(folder, number, sampled, sampler, tokens)
    mean, error = combine(results)
    result = {
        "intervals": intervals.names,
        "edges": list(intervals.edges),
        "mean": mean,
        "error": error,
        "batches": results,
        "verdict": verdict(mean, error, intervals.names, batches),
        "settings": {"batches": batches, "warmup": warmup},
        "responses": batches * config.prompts * config.group,
        "cut_off": cut_off,
        "suspects": sorted(suspects, key=lambda each: -each["score"])[:SUSPECTS],
    }
    folder.write_json("diagnose.json", result)
    folder.write_json("environment.json", environment(policy.device))
    return result


def _warm_optimizer(sampler: Sampler, config: Config, warmup: int, say: Progress) -> torch.optim.AdamW:
    """Return AdamW without momentum (β₁ = 0), with second moments from ``warmup`` other batches at the same weights.

    Without this state, Adam's first step would be the sign of the gradient. Momentum would add the gradients of other
    batches and of a method's earlier phases to every step.
    """
    policy, optim = sampler.policy, config.optim
    betas = (0.0, optim.betas[1])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, betas=betas, weight_decay=0.0)
    for number in range(warmup):
        say(f"warm-up batch {number + 1} of {warmup}: gathering the optimizer's second moments")
        loop = PolicyLoop(policy, config, sample(sampler, config, -1 - number).batch)
        loop.gradient(Phase.of(loop.batch))
        clip(loop.parameters, optim.grad_clip, "all")
        optimizer.step()  # lr is 0: the weights do not change
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = optim.lr, optim.weight_decay
    return optimizer


def sample(sampler: Sampler, config: Config, number: int) -> SampledBatch:
    """Sample a batch as the trainer does, with hidden states for methods that read them.

    Old log-probabilities come from a forward pass, so that changes start at 0 with every engine.
    """
    seed = derived_seed(config.seed, f"diagnose {number}")
    problems = draw(sampler.task, "train", seed, config.prompts, sampler.fits)
    algorithm, advantage = config.build_algorithm(), config.build_advantage()
    trajectories, _ = collect(algorithm, problems, sampler, seed, name=config.algorithm, advantage=advantage)
    samples, _ = drop_failed(trajectories, advantage)
    samples = [replace(trajectory, sampler_logp=None) for trajectory in samples]
    batch = make_batch(
        samples,
        sampler.policy,
        advantage=advantage,
        temperature=config.rollout.temperature,
        recompute=True,
        hidden=True,
        min_p=config.objective.min_p,
        micro_tokens=config.optim.micro_tokens,
    )
    return SampledBatch(samples, replace(batch, sampler_logp=None))


def _with_progress(
    by_name: dict[str, regulators.Regulator], title: str, say: Progress
) -> dict[str, regulators.Regulator]:
    """Wrap the regulators, so that each reports its name when ``dominance`` calls it."""

    def announce(name: str, regulator: regulators.Regulator) -> regulators.Regulator:
        def phases(batch: TokenBatch) -> list[Phase]:
            say(f"{title} {name}")
            with blamed("regulator", name):
                return regulator(batch)

        return regulators.Function(phases)

    return {name: announce(name, regulator) for name, regulator in by_name.items()}


def _suspects(step: int, sampled: SampledBatch, policy: Policy, tokens: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The tokens of incorrect responses with the highest NTHR scores, each with the text before it."""
    if "nthr" not in tokens:
        return []
    scores, prob, ids = tokens["nthr"].nan_to_num(-torch.inf), sampled.batch.prob, sampled.batch.targets
    own = sampled.batch.mask
    assert ids is not None
    values, places = scores.flatten().topk(min(SUSPECTS, scores.numel()))
    suspects = []
    for score, place in zip(values.tolist(), places.tolist(), strict=True):
        row, column = divmod(place, scores.shape[1])
        if score > 0:
            first = max(0, column - 12)
            turn = own[row, first:column].int().flip(0).cumprod(0).flip(0).bool()  # the model's current turn
            before = policy.decode(ids[row, first:column][turn].tolist())
            text = policy.texts(ids[row, column])[int(ids[row, column])]  # shows end tokens, unlike decode
            at = {"step": step, "row": row, "column": int(own[row, :column].sum()), "p": float(prob[row, column])}
            suspects.append({"score": score, "text": text, "before": before, **at})
    return suspects


def _record(folder: RunFolder, step: int, sampled: SampledBatch, sampler: Sampler, tokens: dict[str, Tensor]) -> None:
    phase = Phase.of(sampled.batch, tokens=tokens)
    folder.save_rollouts(step, response_records(step, sampled.samples, sampler.task, sampler.policy.read))
    arrays = token_arrays(sampled.batch, [phase])
    folder.save_tokens(step, arrays, sampler.policy.texts(arrays["id"]))


def combine(figures: Sequence[Any]) -> tuple[Any, Any]:
    """Return the means over batches and their standard errors (None for a single batch), in the same structure.

    Per-question values are concatenated instead.
    """
    figures = [each for each in figures if each is not None]  # without a correct response a batch has no displacement
    if not figures:
        return None, None
    if isinstance(figures[0], dict):
        pairs = {key: combine([each.get(key) for each in figures]) for key in figures[0] if key != CONCATENATED}
        if CONCATENATED in figures[0]:
            pairs[CONCATENATED] = [value for each in figures for value in each[CONCATENATED]], None
        return {k: mean for k, (mean, _) in pairs.items()}, {k: error for k, (_, error) in pairs.items()}
    if isinstance(figures[0], list):
        columns = [combine(column) for column in zip(*figures, strict=True)]
        return [mean for mean, _ in columns], [error for _, error in columns]
    return fmean(figures), stdev(figures) / sqrt(len(figures)) if len(figures) > 1 else None


def verdict(mean: dict[str, Any], error: dict[str, Any], names: Sequence[str], batches: int) -> list[str]:
    """Sentences about the first method: the lowest interval compared with the highest.

    Errors are 95 % intervals by Student's t; with two batches they reach 13 standard errors to each side.
    """
    if not mean["with_gradient"]:
        return ["No token had an advantage: each group's responses got equal scores, so there is nothing to learn."]
    method, low, high = next(iter(mean["regulators"])), names[0], names[-1]
    base, off = mean["regulators"][method], error["regulators"][method]
    if base["share"][0] is None:
        return [f"{method} leaves no gradient: put a method first that learns from these tokens."]
    if not (mean["tokens"][0] and mean["tokens"][-1]):
        return [f"The interval {low} or {high} has no tokens: choose other intervals."]
    wide, over = inf, ""
    if batches > 1:
        wide, over = student_factor(batches), f" (95 % interval over {batches} batches)"
    parts = [
        f"p in {name}: {percent(mean['token_share'][i])} of the tokens, "
        f"{percent(base['share'][i], off['share'][i] and wide * off['share'][i])} of the gradient of {method}{over}"
        for name, i in ((low, 0), (high, -1))
    ]
    return [*parts, *_influence(base, off, low, high, wide), *_noise(mean, base, low, high)]


def table(mean: dict[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """One row per method: its gradient, how far its update moves tokens, and its effect on correct responses."""
    rows = []
    for name, method in mean["regulators"].items():
        part, moved, displacement = method["share"][0], method["influence"][-1]["moved"], method["displacement"] or {}
        change, fallen = displacement.get("lld/change"), displacement.get("lld/fallen_share")
        row = {
            "method": name,
            f"part of {names[0]}": None if part is None else percent(part),
            "gradient norm": method["full"],
            f"moves {names[0]}": moved[0],
            f"moves {names[-1]}": moved[-1],
            "correct: Δ log p": None if change is None else f"{change:+.3f}",
            "of them fell": None if fallen is None else percent(fallen),
        }
        rows.append(row)
    return rows


def _influence(base: dict[str, Any], error: dict[str, Any], low: str, high: str, wide: float) -> list[str]:
    """A sentence: whether a step on one interval moves the other interval farther than that interval's own step."""
    rows, errors = ([row["moved"] for row in each["influence"]] for each in (base, error))
    corners = [(i, j) for i in (0, -2) for j in (0, -1)]  # the last row is the update on all tokens
    if not all(rows[i][j] for i, j in corners):
        return []
    onto_high, onto_low = rows[0][-1] / rows[-2][-1], rows[-2][0] / rows[0][0]
    figures = [(rows[i][j], errors[i][j]) for i, j in corners]
    figures += [(base["share"][i], error["share"][i]) for i in (0, -1)]
    if any(off is not None and wide * off >= abs(value) > 0 for value, off in figures):
        conclusion = "a value is no larger than its error, so this shows nothing: measure more (--batches, prompts=)"
    elif onto_high > 1 > onto_low:
        conclusion = "the unlikely tokens dominate, as in arXiv 2505.12929"
    elif onto_low > 1 > onto_high:
        conclusion = "the likely tokens dominate, unlike in arXiv 2505.12929"
    else:
        conclusion = "neither side drowns out the other"
    return [
        f"a step on {low} alone moves {high} {onto_high:.2g} times as far as a step on {high}, and a step on {high} "
        f"alone moves {low} {onto_low:.2g} times as far as a step on {low}: {conclusion}"
    ]


def _noise(mean: dict[str, Any], base: dict[str, Any], low: str, high: str) -> list[str]:
    """A sentence: how far rounding moves probabilities, compared with the update."""
    noise = mean.get("noise", {})
    if "bfloat16" not in noise:
        return []
    moved = {"again": noise["again"], "bfloat16": noise["bfloat16"], "update": base["influence"][-1]["moved"]}
    ends = {name: f"{values[0]:.2g} in {low} and {values[-1]:.2g} in {high}" for name, values in moved.items()}
    pairs = zip(moved["update"], moved["bfloat16"], strict=True)
    below = any(update < rounding for update, rounding in pairs if update is not None)
    conclusion = "; so with bfloat16 logits, part of the measured change is rounding" if below else ""
    return [
        f"noise floor of |Δp|: the same weights in smaller passes {ends['again']}, logits rounded to bfloat16 "
        f"{ends['bfloat16']}; the update itself {ends['update']}{conclusion}"
    ]
