"""What a run is made of: settings with defaults that work, read from a recipe and changed by overrides.

>>> config = load("grpo", ["regulator=ar", "regulator.alpha=0.3", "task.people=3-5", "optim.lr=2e-6"])
>>> print(dump(config))

A recipe is a YAML file with the keys of ``Config``, or the name of one that ships with the package; ``base: name`` (or
a path) inherits from another. Whatever is wrong, ``load`` raises one ``ConfigError`` with a line per problem.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from poise import algorithms, regulators, tasks
from poise._lib import user_code as _user_code
from poise._lib.errors import unknown
from poise._lib.files import expand
from poise.config.documents import (
    DEEPEST,
    ConfigError,
    Document,
    merge,
    read,
    recipes,
    split_overrides,
    to_yaml,
    too_deep,
)
from poise.config.messages import explain
from poise.config.regulator_settings import change_regulator, parts_of, settings_of
from poise.objective import Settings
from poise.runs.trackers import TRACKERS

__all__ = ["Config", "ConfigError", "dump", "load", "recipes"]


def _number(value: Any) -> Any:
    # pydantic would take true for 1 and "3" for 3.
    if isinstance(value, bool | str):
        raise ValueError("must be a number")
    return value


def _plain(value: Any) -> Any:
    """Tuples as lists, so that settings are the same after a trip through YAML or JSON."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _usable(value: str) -> str:
    os.fsencode(value)  # most texts are names of files
    if "\0" in value:
        raise ValueError("must not contain the character NUL")
    return value


LARGEST = 2**31 - 1  # so that counts and seeds fit wherever they go
TOLD = 20  # problems that are explained at once
Whole = Annotated[int, BeforeValidator(_number), Field(ge=-LARGEST, le=LARGEST)]
Real = Annotated[float, BeforeValidator(_number)]
Count = Annotated[Whole, Field(ge=1)]
CountOrZero = Annotated[Whole, Field(ge=0)]
Text = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_usable)]


class _Group(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TaskConfig(_Group):
    """A task by name. Every other key is a setting of that task: ``task: {name: kk, people: 3-7}``."""

    model_config = ConfigDict(extra="allow")

    name: Text = "kk"
    _task: tasks.Task = PrivateAttr()  # built once: a task may hold a whole dataset

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the task, those that are given."""
        return dict(self.model_extra or {})

    def build(self) -> tasks.Task:
        """The task itself."""
        return self._task

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, value: Any) -> Any:
        return _plain(value)

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        if self.name in tasks.TASKS:
            for key in self.settings:
                if key not in tasks.settings_of(self.name):
                    raise PydanticCustomError("unknown_setting", "unknown setting {key}", {"key": key})
        try:
            self._task = tasks.get(self.name, **self.settings)
        except TypeError as error:  # which pydantic does not take for a refusal
            raise ValueError(str(error)) from None
        return self


class RolloutConfig(_Group):
    """How responses are sampled."""

    max_tokens: Count = 1024  # longest response; of several turns: longest reply
    # Longest episode of several turns: replies and what the environment says, without the prompt; null: no limit but
    # the model's positions. An episode that reaches it is scored as it stands, and counts as cut off.
    max_episode_tokens: Count | None = None
    temperature: Annotated[Real, Field(gt=0)] = 1.0
    batch: CountOrZero = 0  # sequences that are decoded together; 0: all of a step
    max_prompt: Count = 512  # longest prompt, in tokens
    # Tokens to draw from: the most likely ones that together reach top_p, or top_k of them; 1 and 0: all. Ratios and
    # entropies are of the whole distribution all the same.
    top_p: Annotated[Real, Field(gt=0, le=1)] = 1.0
    top_k: CountOrZero = 0
    # auto: native where the model can use it, else transformers; vllm needs the extra of that name
    engine: Literal["auto", "native", "transformers", "vllm"] = "auto"
    vllm_memory: Annotated[Real, Field(gt=0, le=1)] = 0.3  # share of the device's memory that vLLM may take
    # Where the old policy's log-probabilities come from: the sampler, or a forward pass of the training model. The
    # second costs that pass, and is for samplers whose arithmetic differs from the trainer's.
    old_logp: Literal["sampled", "recomputed"] = "sampled"

    @property
    def longest(self) -> int:
        """The most tokens that a prompt and its response may have together."""
        return self.max_prompt + max(self.max_tokens, self.max_episode_tokens or 0)

    @model_validator(mode="after")
    def _a_reply_fits_into_its_episode(self) -> Self:
        if self.max_episode_tokens is not None and self.max_episode_tokens < self.max_tokens:
            raise ValueError(
                f"max_episode_tokens = {self.max_episode_tokens} is less than max_tokens = {self.max_tokens}, the "
                "longest reply: lower max_tokens, or raise max_episode_tokens"
            )
        return self


class OptimConfig(_Group):
    """AdamW, and how a step's responses are cut up for it. The learning rate is one for pretrained models."""

    lr: Annotated[Real, Field(gt=0)] = 1e-6
    weight_decay: Annotated[Real, Field(ge=0)] = 0.01
    betas: tuple[Annotated[Real, Field(ge=0, lt=1)], Annotated[Real, Field(ge=0, lt=1)]] = (0.9, 0.999)
    grad_clip: Annotated[Real, Field(gt=0)] = 1.0
    warmup_steps: CountOrZero = 0
    # Most responses per optimizer step, spread evenly over the steps; 0, or more than there are: all of them.
    mini_batch: CountOrZero = 0
    micro_tokens: Count | None = None  # tokens per pass, null: by the device; changes memory and speed, not the result


class ObjectiveConfig(_Group):
    """``poise.objective.Settings``, field by field; the meaning, the ranges and the defaults are those."""

    clip_low: Real = Settings.clip_low
    clip_high: Real = Settings.clip_high
    dual_clip: Real | None = Settings.dual_clip
    kl: str = Settings.kl
    kl_coef: Real = Settings.kl_coef
    entropy_coef: Real = Settings.entropy_coef
    aggregation: str = Settings.aggregation
    max_length: Whole | None = Settings.max_length
    importance_cap: Real | None = Settings.importance_cap

    def settings(self) -> Settings:
        """What the objective takes."""
        return Settings(**self.model_dump())

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        try:
            self.settings()
        except ValueError as error:
            raise ValueError(str(error).removeprefix("objective: ")) from None
        return self


class EvaluationConfig(_Group):
    """How accuracy on held-out problems is measured: before training, after it and every so many steps."""

    every: CountOrZero = 0  # steps; 0: only before and after
    problems: Count = 200
    samples: Count = 1  # per problem: the k of avg@k, pass@k and maj@k
    seed: CountOrZero = 0  # of the problems
    temperature: Annotated[Real, Field(ge=0)] | None = None  # None: as in training; 0: greedy

    @model_validator(mode="after")
    def _samples_can_differ(self) -> Self:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"samples = {self.samples} at temperature 0: greedy samples are all the same, so take 1, or another "
                "temperature"
            )
        return self


class LoraConfig(_Group):
    """Train low-rank adapters in place of all the weights."""

    rank: Count = 16
    alpha: Annotated[Real, Field(gt=0)] = 32
    dropout: Real = 0.0  # nothing else is allowed
    targets: str | tuple[str, ...] = "all-linear"  # or the names of the modules

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, value: float) -> float:
        if value != 0:
            raise ValueError(
                "must be 0: with dropout the update would not see the policy that sampled, and the probability ratio "
                "would not begin at 1; for regularisation use a smaller lora.rank or optim.weight_decay"
            )
        return value

    @field_validator("targets", mode="before")
    @classmethod
    def _known_targets(cls, value: Any) -> Any:
        names = isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value)
        if value != "all-linear" and not names:
            raise ValueError("must be all-linear, or a list of module names such as [q_proj, v_proj]")
        return value if isinstance(value, str) else tuple(value)


class Config(_Group):
    """One training run."""

    model: Text = "embedded"  # hub id, folder, or the tiny model that ships with the package
    run: Text = "runs/train"  # folder
    steps: Count = 100
    seed: CountOrZero = 0
    prompts: Count = 16  # per step
    group: Count = 8  # responses per prompt
    regulator: Text = "grpo"  # in its text form
    algorithm: Text = "grpo"  # in its text form: what is sampled and compared
    advantage: Literal["group-zscore", "group-centered", "leave-one-out", "reinforce-pp"] = "group-zscore"
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    optim: OptimConfig = OptimConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    lora: LoraConfig | None = None
    checkpoint_every: CountOrZero = 50  # steps; 0: only at the end
    keep_checkpoints: Count = 2
    rollouts_every: CountOrZero = 10  # steps between samples written down token by token; 0: never
    stop_at: Annotated[Real, Field(gt=0, le=1)] | None = None  # held-out accuracy that is enough
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of computing; the optimizer's weights are float32
    compile: bool | None = None  # layers through torch.compile for the update; null: on CUDA, where it can
    tracking: tuple[str, ...] = ()
    remote_code: bool = False  # whether a model's own Python may run

    @field_validator("model", "run")
    @classmethod
    def _path(cls, value: str) -> str:
        try:
            return str(expand(value)) if value.startswith("~") else value
        except OSError as error:
            raise ValueError(str(error)) from None

    @property
    def test_temperature(self) -> float:
        """The temperature that held-out problems are sampled at."""
        asked = self.evaluation.temperature
        return self.rollout.temperature if asked is None else asked

    def build_regulator(self) -> regulators.Regulator:
        """The regulator itself."""
        return regulators.parse(self.regulator)

    def build_algorithm(self) -> algorithms.Algorithm:
        """The algorithm itself."""
        return algorithms.get(self.algorithm, self.group)

    @field_validator("regulator")
    @classmethod
    def _regulator_can_be_read(cls, value: str) -> str:
        try:
            regulators.parse(value)
        except TypeError as error:
            raise ValueError(str(error)) from None
        return value

    @field_validator("algorithm")
    @classmethod
    def _algorithm_can_be_read(cls, value: str) -> str:
        try:
            algorithms.get(value, 2)
        except TypeError as error:
            raise ValueError(str(error)) from None
        return value

    @field_validator("remote_code")
    @classmethod
    def _code_is_trusted(cls, value: bool) -> bool:
        if value:
            _user_code.check_trusted("it lets the model's own Python run")
        return value

    @field_validator("device")
    @classmethod
    def _device_exists_in_torch(cls, value: str) -> str:
        try:
            if value != "auto":
                torch.device(value)
        except RuntimeError:
            raise ValueError("must be auto, or a device of torch such as cpu, cuda or cuda:1") from None
        return value

    @field_validator("tracking", mode="before")
    @classmethod
    def _one_is_a_list_of_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("tracking")
    @classmethod
    def _trackers_exist(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in TRACKERS:
                raise ValueError(unknown("tracker", name, TRACKERS))
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.group < 2 and self.advantage != "reinforce-pp":
            raise ValueError(
                f"group = {self.group}: advantage {self.advantage!r} compares the responses to a prompt with each "
                "other, so there must be at least 2; with one, use advantage reinforce-pp"
            )
        if self.stop_at is not None and self.evaluation.every == 0:
            raise ValueError(
                f"stop_at = {self.stop_at}: accuracy is measured only before and after training; set evaluation.every"
            )
        return self


def load(recipe: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a recipe, by name or path (None: the demo), with ``key=value`` overrides on top.

    Keys are dotted, values YAML. ``regulator.alpha=0.3`` changes that setting of the one part of the regulator that has
    it.
    """
    document = read("demo" if recipe is None else recipe)
    changes, settings = split_overrides(overrides)
    document = merge(document, changes)
    if settings:
        document["regulator"] = change_regulator(str(document.get("regulator", "grpo")), settings)
    return _validated(document)


def restore(document: Document, *, source: str = "this run", trust: bool = False) -> Config:
    """The configuration of a whole document, such as the config.json of a run, which may be anybody's.

    Unless ``trust`` is given, no code is run that it names (docs/security.md). ``source`` names it in messages.
    """
    if trust:
        return _validated(document)
    with _user_code.untrusted(source):
        return _validated(document)


def _validated(document: Document) -> Config:
    if too_deep(document):
        raise ConfigError([f"the settings have more than {DEEPEST} levels"])
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        known = [*_keys(Config, ""), *_task_keys(document), *_regulator_keys(document)]
        found = error.errors(include_url=False)
        more = [f"… and {len(found) - TOLD} problems more"] if len(found) > TOLD else []
        raise ConfigError([*(explain(problem, known) for problem in found[:TOLD]), *more]) from None


def dump(config: Config) -> str:
    """The whole configuration as YAML, a recipe in itself."""
    return to_yaml(config.model_dump(mode="json"))


# The keys there are, for whoever mistypes one


def _keys(model: type[BaseModel], prefix: str) -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        kinds = [kind for kind in (field.annotation, *getattr(field.annotation, "__args__", ())) if _is_group(kind)]
        keys += [prefix + name, *(_keys(kinds[0], f"{prefix}{name}.") if kinds else ())]
    return keys


def _task_keys(document: Document) -> list[str]:
    task = document.get("task")
    name = task.get("name", "kk") if isinstance(task, dict) else "kk"
    return [f"task.{setting}" for setting in tasks.settings_of(name)] if name in tasks.names() else []


def _regulator_keys(document: Document) -> list[str]:
    try:
        parts = parts_of(str(document.get("regulator", "grpo")))
    except (TypeError, ValueError):
        return []
    return [f"regulator.{setting}" for part in parts for setting in settings_of(part)]


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, _Group)
