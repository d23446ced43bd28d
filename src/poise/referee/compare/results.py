"""Results of runs (read from their folders), of arms (one method's runs by seed) and of tuning.

Tuning chooses a learning rate for each arm. It tries the same rates and seeds for all arms, and the comparison uses
other seeds.

A run is *finished*, *diverged* (the trainer found a gradient that is not finite, and wrote ``diverged.json``) or
*unfinished*. A diverged run is a result: its scores are the last scores measured during training, or 0. An unfinished
run has no scores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from poise._lib.files import SEAL, was_changed
from poise.referee.compare.arms import PlannedArm, Variant
from poise.referee.compare.plan import Plan
from poise.runs.folder import COPY, DamagedError, RunFolder
from poise.training.accuracy import BY_DIFFICULTY, LOST, is_summary, lost_shares

State = Literal["finished", "diverged", "unfinished"]
Line = Mapping[str, Any]  # the metrics of a step
ACCURACY = "accuracy"  # avg@k, the main score
TOTALS = ("tokens/sampled", "tokens/total")  # any other tokens/NAME is a count of another model's tokens


@dataclass(frozen=True)
class Cost:
    """The cost of a run, without its evaluations."""

    tokens: float = 0.0  # sampled tokens
    optimizer_steps: float = 0.0
    seconds: float = 0.0
    flop: float | None = None  # an estimate; None if the number of parameters is unknown

    def __add__(self, other: Cost) -> Cost:
        return self.weighted(1, other, 1)

    def weighted(self, own: float, other: Cost, others: float) -> Cost:
        """This cost times ``own``, plus the other cost times ``others``."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        values: list[Any] = [None if None in pair else own * pair[0] + others * pair[1] for pair in pairs]
        return Cost(*values)


@dataclass(frozen=True)
class Point:
    """Held-out scores after a step, and the cost up to it.

    ``scores`` has accuracy (avg@k), greedy, pass@k, maj@k, and the shares of samples that were cut off or unreadable.
    """

    step: int
    cost: Cost
    scores: Mapping[str, float]

    def towards(self, other: Point, step: int) -> Point:
        """The point at ``step`` on the straight line to the later point ``other``."""
        share = (step - self.step) / (other.step - self.step)
        cost = self.cost.weighted(1 - share, other.cost, share)
        both = [name for name in self.scores if name in other.scores]
        scores = {name: self.scores[name] + share * (other.scores[name] - self.scores[name]) for name in both}
        return Point(step, cost, scores)


@dataclass(frozen=True)
class RunResult:
    """One run of a comparison."""

    seed: int
    state: State
    steps: int  # finished steps
    curve: tuple[Point, ...]  # in the order of steps; the first is before training
    cost: Cost = field(default_factory=Cost)
    entropy: tuple[float, ...] = ()  # by step; NaN if unknown
    why: str = ""  # the reason if it diverged
    folder: str = ""
    problems: str = ""  # a fingerprint of the held-out problems; empty if unknown
    sealed: bool = True  # whether the results have a checksum

    @property
    def scores(self) -> Mapping[str, float]:
        """The final scores. A diverged run has its last measured scores, an unfinished run has none.

        Scores before training do not count: a run that diverged before its first evaluation during training has 0.
        """
        if self.state == "unfinished" or not self.curve:
            return {}
        last = self.curve[-1]
        return {name: 0.0 for name in last.scores if name not in LOST} if self.counts_as_zero else last.scores

    @property
    def counts_as_zero(self) -> bool:
        """Whether the run diverged before its first evaluation during training."""
        return self.state == "diverged" and bool(self.curve) and not self.curve[-1].step

    def until(self, cut: int) -> RunResult:
        """The run as it was after ``cut`` steps. Scores and cost are interpolated linearly between evaluations."""
        if self.steps <= cut:
            return self
        points = [point for point in self.curve if point.step <= cut]
        after = next((point for point in self.curve if point.step > cut), None)
        if after is not None and points and points[-1].step < cut:
            points.append(points[-1].towards(after, cut))
        whole = points and (after is not None or points[-1].step == cut)  # whether the score at the cut is known
        return replace(
            self,
            state="finished" if whole and self.state == "diverged" else self.state,
            steps=cut,
            curve=tuple(points),
            cost=points[-1].cost if points else self.cost,
            entropy=self.entropy[:cut],
        )

    @classmethod
    def read(cls, path: str | Path) -> RunResult:
        """Read the result of the run in a folder, in any state.

        Raises FileNotFoundError if there is no run, ValueError if one of its files is damaged. Both messages say what
        to do.
        """
        folder = RunFolder.open(path, resume=False)
        config, lines = folder.config, folder.metrics()
        seed, prompts, group, _ = (_whole(folder, config, key) for key in ("seed", "prompts", "group", "steps"))
        reached = lines[-1]["step"] if lines else 0
        summary = _final(folder, config, reached)
        after = summary["after"] if summary else None
        costs = list(_costs(folder, prompts * group, lines))
        curve = _curve(folder, lines, costs)
        if after is not None and lines:
            curve = [point for point in curve if point.step < reached] + [Point(reached, costs[-1], _scores(after))]
        diverged = _divergence(folder, reached)
        state: State = "finished" if after is not None else "diverged" if diverged is not None else "unfinished"
        return cls(
            seed=seed,
            state=state,
            steps=reached,
            curve=tuple(curve),
            cost=costs[-1] if costs else Cost(),
            entropy=tuple(nan if (value := line.get("rollout/entropy")) is None else float(value) for line in lines),
            why=(diverged or "") if state == "diverged" else "",
            folder=str(folder.path),
            problems=str((after or {}).get("problems", "")),
            sealed=summary is None or SEAL in summary,
        )


def result_of(folder: str | Path) -> RunResult | None:
    """The result of the run in a folder; None if it has none yet. Raises DamagedError if a file is damaged."""
    try:
        result = RunResult.read(folder)
    except FileNotFoundError:
        return None
    except ValueError as error:
        remedy = "" if isinstance(error, DamagedError) else f": {COPY}"
        raise DamagedError(f"{error}{remedy}, or move {folder} away and run the command again to retrain it") from None
    return None if result.state == "unfinished" else result


@dataclass(frozen=True)
class Arm:
    """One method of a comparison: its name, the settings in which it differs, and its runs by seed."""

    name: str
    settings: Mapping[str, Any]
    runs: Mapping[int, RunResult]
    control: str = ""  # why ``controls=auto`` added this arm, which then makes no claims

    def results(self, score: str = ACCURACY) -> dict[int, float]:
        """The final score of every seed with a result, in ascending order of seeds."""
        done = ((seed, self.runs[seed].scores) for seed in sorted(self.runs))
        return {seed: scores[score] for seed, scores in done if score in scores}

    def only(self, seeds: Collection[int]) -> Arm:
        """The arm with only the runs of these seeds."""
        return replace(self, runs={seed: run for seed, run in self.runs.items() if seed in seeds})

    def until(self, cut: int) -> Arm:
        """The arm as it was after ``cut`` steps."""
        return replace(self, runs={seed: run.until(cut) for seed, run in self.runs.items()})


def _final(folder: RunFolder, config: Line, reached: int) -> dict[str, Any] | None:
    """The content of ``summary.json``; None until the run, or its extension to more steps, has ended."""
    summary = _read(folder, "summary.json", lambda data: type(data["steps"]) is int and is_summary(data["after"]))
    if summary is None:
        return None
    stopped_early = config.get("stop_at") is not None or config.get("budget") is not None
    if reached != summary["steps"] or (reached < config["steps"] and not stopped_early):
        return None
    return summary


def _read(folder: RunFolder, name: str, usable: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    """Read a JSON file; None if it does not exist. Raises ValueError if its content is unusable or was changed."""
    data: dict[str, Any] | None = folder.read_json(name)
    try:
        known = data is None or usable(data)
    except (KeyError, TypeError):
        known = False
    if not known:
        raise ValueError(f"{folder.path}/{name} is not in the form that poise writes")
    if was_changed(data):
        raise ValueError(f"{folder.path}/{name} was changed after the run wrote it (its checksum does not match)")
    return data


def _divergence(folder: RunFolder, reached: int) -> str | None:
    """Why the run diverged after its last step; None if it did not diverge, or has continued past that step."""
    data = _read(folder, "diverged.json", lambda data: type(data["step"]) is int and isinstance(data["why"], str))
    return f"step {data['step']}: {data['why']}" if data is not None and reached < data["step"] else None


def _curve(folder: RunFolder, lines: Sequence[Line], costs: Sequence[Cost]) -> list[Point]:
    """The accuracy before training, and every evaluation during training."""
    before = _read(folder, "before.json", is_summary)
    if before is None:
        return []
    points = [Point(0, Cost(), _scores(before))]
    ending = f"/avg@{before['samples']}"
    for line, cost in zip(lines, costs, strict=True):
        if key := next((key for key in line if key.startswith("eval/") and key.endswith(ending)), None):
            prefix = key.removesuffix(ending) + "/"
            scores = {key.removeprefix(prefix): value for key, value in line.items() if key.startswith(prefix)}
            values = {name: value for name, value in scores.items() if "/" not in name and value is not None}
            if ending[1:] in values:
                points.append(Point(line["step"], cost, {ACCURACY: values[ending[1:]], **values}))
    return points


def _scores(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """The scores over all difficulties, and the shares of samples that were cut off or unreadable."""
    table = {name: row["value"] for name, row in evaluation["table"].items() if BY_DIFFICULTY not in name}
    return {ACCURACY: evaluation["accuracy"], **table, **lost_shares(evaluation)}


def _costs(folder: RunFolder, responses: int, lines: Sequence[Line]) -> Iterator[Cost]:
    """The cost up to each step.

    FLOP are estimated per parameter and token. Each model's sampling costs 2. Each phase of the update costs 6 in
    rows with a gradient: 2 for the forward pass, 2 for the gradients of the layers' inputs, and 2 for the gradients of
    the weights, which LoRA does not need. Prompts, attention, adapters and evaluations do not count.
    """
    parameters, others = _parameters(folder)
    per_token = 6 if folder.config.get("lora") is None else 4
    total = Cost(flop=None if parameters is None else 0.0)
    for line in lines:
        first = responses * (line.get("rollout/length") or 0.0)
        tokens = line.get("tokens/sampled") or 0.0
        phases = sum(key.startswith("reg/") and key.endswith("/kl_weight_mean") for key in line)
        passes = phases * (1 - (line.get("reward/no_spread") or 0.0))
        flop = None
        if parameters is not None:
            flop = parameters * (2 * tokens + per_token * passes * _update_tokens(line, tokens, first, responses))
            for name, own in others.items():
                flop += (own - parameters) * 2 * (line.get(f"tokens/{name}") or 0)
        total += Cost(tokens, line.get("optim/steps") or 0.0, line.get("time/step") or 0.0, flop)
        yield total


def _update_tokens(line: Line, sampled: float, first: float, responses: int) -> float:
    """The tokens of a step's update: the policy's sampled tokens, plus consolidated rows, which repeat second attempts.

    ``first`` is the number of tokens in first attempts. The other tokens belong to reflections (a metric
    reports their length) and to second attempts.
    """
    others = (value for key, value in line.items() if key.startswith("tokens/") and key not in TOTALS)
    own = sampled - sum(value or 0.0 for value in others)
    retried = responses * (line.get("second/retried") or 0.0)
    if not retried:
        return own
    second = max(0.0, own - first - retried * (line.get("reflection/length") or 0.0))
    return own + second * (line.get("consolidated/rows") or 0.0) / retried


def _parameters(folder: RunFolder) -> tuple[int | None, dict[str, int]]:
    """The number of parameters of the policy (None if unknown) and of each frozen model, by name."""
    environment = folder.read_json("environment.json")
    environment = environment if isinstance(environment, dict) else {}
    own, others = environment.get("parameters"), environment.get("parameters_of")
    others = others if isinstance(others, dict) else {}
    return own if type(own) is int else None, {name: n for name, n in others.items() if type(n) is int}


def _whole(folder: RunFolder, config: Line, name: str) -> int:
    value = config.get(name)
    if type(value) is not int:
        raise ValueError(f"{folder.path}/config.json: {name} must be a whole number, got {value!r}")
    return value


Results = Callable[[Path], RunResult | None]  # the result of the run in a folder; None if it has none yet


def tuning_scores(plan: Plan, arm: PlannedArm, variant: Variant, results: Results) -> dict[str, Any]:
    """A variant's held-out accuracy for every tuning seed (empty until all have results), and its diverged runs."""
    runs = [results(plan.run(arm, variant, seed).folder) for seed in plan.settings.tuning_seeds]
    done = [run for run in runs if run is not None and ACCURACY in run.scores]
    done = done if len(done) == len(runs) else []
    scores = [run.scores[ACCURACY] for run in done]
    return {
        "rate": variant.rate,
        "scores": scores,
        "mean": fmean(scores) if scores else None,
        "diverged": sum(run.state == "diverged" for run in done),
    }


def choose_rate(plan: Plan, arm: PlannedArm, results: Results) -> Variant | None:
    """Choose the variant of an arm for the comparison; None until all its tuning runs have results.

    Among the variants with the fewest diverged runs, the highest mean accuracy wins; in a tie, the lower rate.
    """
    if len(arm.variants) == 1:
        return arm.variants[0]
    rates = [tuning_scores(plan, arm, variant, results) for variant in arm.variants]
    if not all(rate["scores"] for rate in rates):
        return None
    ranks = [(rate["diverged"], -rate["mean"], rate["rate"]) for rate in rates]
    return arm.variants[ranks.index(min(ranks))]


def tuning_report(plan: Plan, results: Results) -> list[dict[str, Any]]:
    """The chosen learning rate of each arm and the scores of all rates, for ``comparison.json``."""
    report = []
    for arm in plan.arms:
        if len(arm.variants) == 1:
            continue
        chosen = choose_rate(plan, arm, results)
        rates = [tuning_scores(plan, arm, variant, results) for variant in arm.variants]
        report.append({"arm": arm.name, "chosen": chosen.rate if chosen else None, "rates": rates})
    return report
