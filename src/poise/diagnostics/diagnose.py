"""``poise diagnose``: the dominance figures for a model, a task and settings, on fresh rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poise import regulators
from poise._user_code import blamed
from poise.batch import Phase, TokenBatch
from poise.config import Config
from poise.diagnostics.dominance import dominance
from poise.diagnostics.intervals import Intervals
from poise.diagnostics.verdict import combine, verdict
from poise.masters import Masters
from poise.policy import Policy, load_policy
from poise.records import environment, response_records, token_arrays
from poise.rollout.base import Engine, Rollouts
from poise.rollout.choose import choose
from poise.rollout.forecast import announce
from poise.rollout.limits import check_settings, encode_problem
from poise.run import RunFolder
from poise.scoring import Scoring
from poise.tasks import Problem, Score, Task, draw
from poise.trainer import ADVANTAGES
from poise.update import score_all, update

SUSPECTS = 20  # tokens with the highest NTHR scores that are named
METHODS = ("grpo", "ar", "lopti", "tr-grpo", "nthr")
Progress = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Sampled:
    """One batch of fresh responses."""

    problems: list[Problem]  # one for each response
    texts: list[str]
    scores: list[Score]
    rollouts: Rollouts
    batch: TokenBatch


class _Still(torch.optim.Optimizer):
    """Takes no steps: what is wanted of an update is its gradient."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(list(parameters), {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""


class PolicyLoop:
    """The trainer's own update, as the diagnostics see it."""

    def __init__(self, policy: Policy, config: Config, sampled: Sampled) -> None:
        assert policy.masters is not None
        self.policy, self.config, self.rollouts, self.batch = policy, config, sampled.rollouts, sampled.batch
        self.settings = config.objective.model_copy(update={"kl_coef": 0.0}).settings()
        self.parameters: Sequence[Tensor] = list(policy.masters.parameters.values())

    def gradient(self, phase: Phase) -> None:
        """A mini-batch of all responses, as ``update`` runs it, unclipped."""
        optim, still = self.config.optim, _Still(self.parameters)
        update(
            self.policy, still, self.rollouts, self.batch, [phase], self.settings, grad_clip=torch.inf,
            temperature=self.config.rollout.temperature, micro_tokens=optim.micro_tokens,
        )  # fmt: skip

    def logp(self) -> Tensor:
        """Without gradients."""
        return score_all(self.policy, self.rollouts, self.config.rollout.temperature, self.config.optim.micro_tokens)[0]

    def changed(self) -> None:
        """Half-precision copies follow."""
        assert self.policy.masters is not None
        self.policy.masters.publish()


def diagnose(
    config: Config,
    folder: RunFolder,
    *,
    task: Task | None = None,
    methods: Sequence[str] = METHODS,
    intervals: Intervals | None = None,
    batches: int = 3,
    warmup: int = 3,
    say: Progress = lambda _: None,
) -> dict[str, Any]:
    """Draw ``batches`` batches from the config's model and task, and measure each (``dominance``). Nothing is trained.

    ``task`` may be any task at all; by default it is the config's.

    Steps are AdamW's, scaled by second moments that were gathered on ``warmup`` batches more, at these same weights: on
    a fresh state Adam's first step is only the gradient's signs, whatever its size. There is no momentum (β₁ = 0):
    it would carry tokens of other batches, and of a method's earlier phases, into every step. No KL term either.
    Responses and tokens are written to ``folder`` as a run's are, and the figures to ``diagnose.json``.
    """
    intervals = intervals or Intervals()
    chosen = {name: regulators.parse(name) for name in methods}
    task = task or config.task.build()
    policy = load_policy(
        config.model, device=config.device, dtype=config.dtype, remote_code=config.remote_code,
        longest=config.rollout.longest,
    )  # fmt: skip
    policy.masters = Masters(policy.model)
    check_settings(policy, config.rollout.max_prompt, config.rollout.max_tokens)
    engine = choose(policy, config.rollout.engine, config.rollout.batch, say, memory=config.rollout.vllm_memory)
    announce(
        engine, say, responses=config.prompts * config.group, max_prompt=config.rollout.max_prompt,
        max_tokens=config.rollout.max_tokens,
    )  # fmt: skip
    optim = config.optim
    betas = (0.0, optim.betas[1])
    optimizer = torch.optim.AdamW(policy.masters.parameters.values(), lr=0.0, betas=betas, weight_decay=0.0)
    for number in range(warmup):
        say(f"warm-up batch {number + 1} of {warmup}: gathering the optimizer's second moments")
        loop = PolicyLoop(policy, config, sample(policy, engine, task, config, seed=-1 - number))
        loop.gradient(Phase.of(loop.batch))
        torch.nn.utils.clip_grad_norm_(loop.parameters, optim.grad_clip)
        optimizer.step()
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = optim.lr, optim.weight_decay
    found, suspects, cut_off = [], list[dict[str, Any]](), 0
    for number in range(1, batches + 1):
        say(f"batch {number} of {batches}: sampling {config.prompts} × {config.group} responses")
        sampled = sample(policy, engine, task, config, seed=number)
        loop = PolicyLoop(policy, config, sampled)
        said = f"batch {number} of {batches}: {int(loop.batch.mask.sum())} tokens; gradients and steps of"
        numbers, tokens = dominance(
            loop, _announced(chosen, said, say), optimizer, intervals=intervals, clip=optim.grad_clip
        )
        found.append(numbers)
        cut_off += int((~sampled.rollouts.finished).sum())
        suspects += _suspects(number, sampled, policy, tokens)
        _record(folder, number, sampled, policy, tokens)
    mean, error = combine(found)
    result = {
        "intervals": intervals.names, "edges": list(intervals.edges), "mean": mean, "error": error, "batches": found,
        "verdict": verdict(mean, error, intervals.names), "settings": {"batches": batches, "warmup": warmup},
        "responses": batches * config.prompts * config.group, "cut_off": cut_off,
        "suspects": sorted(suspects, key=lambda each: -each["score"])[:SUSPECTS],
    }  # fmt: skip
    folder.write_json("diagnose.json", result)
    folder.write_json("environment.json", environment(policy.device))
    return result


def sample(policy: Policy, engine: Engine, task: Task, config: Config, seed: int) -> Sampled:
    """A batch as the trainer draws it, with hidden states for whoever asks."""
    drawn = 1_000_003 * (config.seed + 1) + seed
    problems = draw(task, "train", drawn, config.prompts)
    asked = [problem for problem in problems for _ in range(config.group)]
    settings = config.rollout
    prompts = [encode_problem(policy, problem, settings.max_tokens, settings.max_prompt) for problem in problems]
    with Scoring(policy, task, asked) as scoring:
        rollouts = engine.generate(
            prompts, config.group, max_tokens=settings.max_tokens, temperature=settings.temperature, seed=drawn,
            top_p=settings.top_p, top_k=settings.top_k, done=scoring.take,
        )  # fmt: skip
        texts, scores = scoring.finish(rollouts)
    device = rollouts.mask.device
    rewards = torch.tensor([score.reward for score in scores], device=device)
    groups = torch.arange(config.prompts, device=device).repeat_interleave(config.group)

    @torch.no_grad()
    def hidden(rows: Tensor) -> Tensor:
        return policy.padded_hidden(rollouts.rows(rows))

    batch = TokenBatch(
        old_logp=score_all(policy, rollouts, config.rollout.temperature, config.optim.micro_tokens)[0],
        mask=rollouts.mask,
        advantages=ADVANTAGES[config.advantage](rewards, groups),
        groups=groups,
        rewards=rewards,
        correct=torch.tensor([score.correct for score in scores], device=device),
        entropy=rollouts.entropy,
        hidden=hidden,
        head=policy.head(config.rollout.temperature),
        targets=rollouts.tokens,
    )
    return Sampled(asked, texts, scores, rollouts, batch)


def _announced(chosen: dict[str, regulators.Regulator], said: str, say: Progress) -> dict[str, regulators.Regulator]:
    """The same regulators, each of which says when its turn has come."""

    def told(name: str, regulator: regulators.Regulator) -> regulators.Regulator:
        def announce(batch: TokenBatch) -> list[Phase]:
            say(f"{said} {name}")
            with blamed(name):
                return regulator(batch)

        return regulators.Function(announce)

    return {name: told(name, regulator) for name, regulator in chosen.items()}


def _suspects(step: int, sampled: Sampled, policy: Policy, tokens: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The tokens of wrong responses that pull most on the right ones of their group, with what stands before them."""
    if "nthr" not in tokens:
        return []
    scores, prob, ids = tokens["nthr"].nan_to_num(-torch.inf), sampled.batch.prob, sampled.rollouts.tokens
    values, places = scores.flatten().topk(min(SUSPECTS, scores.numel()))
    named = []
    for score, place in zip(values.tolist(), places.tolist(), strict=True):
        row, column = divmod(place, scores.shape[1])
        if score > 0:
            before = policy.decode(ids[row, max(0, column - 12) : column].tolist())
            text = policy.texts(ids[row, column])[int(ids[row, column])]  # an end token has a text here
            at = {"step": step, "row": row, "column": column, "p": float(prob[row, column])}
            named.append({"score": score, "text": text, "before": before, **at})
    return named


def _record(folder: RunFolder, step: int, sampled: Sampled, policy: Policy, tokens: dict[str, Tensor]) -> None:
    phase = Phase.of(sampled.batch, tokens=tokens)
    folder.save_rollouts(
        step, response_records(step, sampled.problems, sampled.texts, sampled.scores, sampled.rollouts)
    )
    arrays = token_arrays(sampled.rollouts, sampled.batch, [phase])
    folder.save_tokens(step, arrays, policy.texts(arrays["id"]))
