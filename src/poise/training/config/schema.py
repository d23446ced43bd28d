"""The settings of a run: defaults, changed by a recipe and by overrides.

>>> config = load("grpo", ["regulator=ar(alpha=0.3)", "task.people=3-5", "optim.lr=2e-6"])
>>> print(dump(config))

A recipe is a YAML file with the keys of ``Config``, or the name of a shipped recipe; ``base: name`` (or a path)
inherits from another recipe. ``load`` reports all problems at once, in one ``ConfigError`` with one line per problem.

torch takes seconds to import, so this module imports torch only to build objects that need it. Most mistakes are
reported before that import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from poise import tasks
from poise._lib import live
from poise._lib import user_code as _user_code
from poise._lib.calls import split_outside
from poise._lib.errors import short, unknown
from poise._lib.files import expand
from poise._lib.user_code import METHODS
from poise.objective_settings import ADVANTAGE, TOKEN_MEAN, Settings
from poise.runs.trackers import TRACKERS
from poise.sampling import GROUP
from poise.training.config.documents import (
    DEEPEST,
    ConfigError,
    Document,
    default_recipe,
    merge,
    read,
    recipes,
    split_overrides,
    to_yaml,
    too_deep,
)
from poise.training.config.groups import (
    Count,
    CountOrZero,
    EvaluationConfig,
    Group,
    LoraConfig,
    OptimConfig,
    Real,
    RolloutConfig,
    TaskConfig,
    Text,
    TokenCount,
)
from poise.training.config.messages import explain

if TYPE_CHECKING:
    from poise.advantages import Estimate
    from poise.regulators import Regulator
    from poise.sampling.algorithms import Algorithm

__all__ = ["Config", "ConfigError", "dump", "keys", "load", "recipes", "restore"]

MOST_PROBLEMS = 20  # problems in one error
TASK = (("task",), ("task", "name"))  # the locations of pydantic's error about a missing task
MOST_RESPONSES = 1_000_000  # per step; more is probably a typing error
GRPO = "grpo"  # the default regulator and algorithm, accepted without building them


class Config(Group):
    """One training run."""

    model: Text = "embedded"
    """Hub id, folder, or a tiny model that ships with the package: ``embedded``, or ``embedded-plain`` (the demo's)."""
    revision: Text | None = None
    """Branch, tag or commit of a model on the hub; null: the newest."""
    template: dict[str, Any] | None = None
    """Arguments of the model's chat template, such as ``{enable_thinking: false}``."""
    run: Text = "runs/train"
    """The folder that the run writes to."""
    steps: Count = 100
    """Number of steps; budget or stop_at may end the run earlier."""
    budget: TokenCount | None = None
    """Stop after this many sampled tokens (all models)."""
    seed: CountOrZero = 0
    """Seed of problems, samples and mini-batches; the same seed repeats a run."""
    prompts: Count = 16
    """Problems per step."""
    group: Count = GROUP
    """Attempts at each problem."""
    regulator: Text = GRPO
    """Token weights: a name, or a text such as "ar(alpha=0.3) | lopti"."""
    algorithm: Text = GRPO
    """Decides what a step samples and compares: a name, or a text such as "rltr(transfer=0.5)"."""
    advantage: Text = ADVANTAGE
    """How rewards become advantages. group-zscore and group-centered compare a reward with the mean of its group;
    leave-one-out compares it with the mean of the others in its group. reinforce-pp normalises over the batch by
    response, reinforce-pp-tokens by token; reinforce-pp-baseline and reinforce-pp-baseline-tokens first subtract group
    means. Or your own function: file.py:name."""
    drop_equal_groups: bool = False
    """Drop groups with equal rewards before the update. They then count neither in the KL term nor in the denominator
    nor in the mini-batches."""
    task: TaskConfig
    rollout: RolloutConfig = RolloutConfig()
    optim: OptimConfig = OptimConfig()
    objective: Settings = Settings()
    evaluation: EvaluationConfig = EvaluationConfig()
    lora: LoraConfig | None = None
    checkpoint_every: CountOrZero = 50
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: Count = 2
    """How many of the newest checkpoints stay on disk."""
    rollouts_every: CountOrZero = 10
    """Steps between recordings of responses with all their tokens; 0: never."""
    stop_at: Annotated[Real, Field(gt=0, le=1)] | None = None
    """Stop once held-out accuracy reaches this value. It is measured on different problems than the accuracy before and
    after training."""
    device: str = "auto"
    """auto (CUDA if there is one), cpu, cuda or cuda:1."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the computation; the optimizer keeps float32 weights."""
    compile: bool | None = None
    """Use torch.compile for the update; null: on CUDA, if it saves time over the remaining steps and deterministic is
    off."""
    deterministic: bool = False
    """Runs with the same seed are bit-identical on the same GPU model, even after a kill and a resume. This is slower,
    and a pass that runs out of memory ends the run. On a CPU the setting has no effect."""
    tracking: tuple[str, ...] = ()
    """Trackers that receive the metrics: tensorboard, wandb, trackio."""
    remote_code: bool = False
    """Allow Python code from the model's repository to run."""
    _code: _user_code.Code = PrivateAttr(default_factory=dict)

    if not TYPE_CHECKING:  # type checkers and editors take the arguments from the fields

        def __init__(self, /, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise _explained(error, settings) from None

    @property
    def code(self) -> _user_code.Code:
        """The hashes of the user's code files, computed when these settings were read."""
        return self._code

    @field_validator("model", "run")
    @classmethod
    def _path(cls, value: str) -> str:
        try:
            return str(expand(value)) if value.startswith("~") else value
        except OSError as error:
            raise ValueError(str(error)) from None

    @property
    def model_name(self) -> str:
        """The model's name with its revision, for loading."""
        from poise.models.location import with_revision

        return with_revision(self.model, self.revision)

    @property
    def loading(self) -> dict[str, Any]:
        """The keyword arguments for ``load_policy`` that all models of a run share."""
        names = ("device", "dtype", "remote_code", "template")
        return {"longest": self.rollout.longest, **{name: getattr(self, name) for name in names}}

    def tokens_left(self, steps: int = 0, tokens: int = 0) -> int:
        """The maximum number of response tokens left to sample after ``steps`` steps and ``tokens`` tokens."""
        longest = max(self.rollout.max_tokens, self.rollout.max_episode_tokens or 0)
        most = (self.steps - steps) * self.prompts * self.group * longest
        return most if self.budget is None else min(most, self.budget - tokens)

    @property
    def test_temperature(self) -> float:
        """The sampling temperature for held-out problems."""
        own = self.evaluation.temperature
        return self.rollout.temperature if own is None else own

    def build_regulator(self) -> Regulator:
        """Build the regulator."""
        from poise import regulators

        return regulators.parse(self.regulator)

    def build_algorithm(self) -> Algorithm:
        """Build the algorithm."""
        from poise.sampling import algorithms

        return algorithms.get(self.algorithm, self.group)

    def build_advantage(self) -> Estimate:
        """Build the advantage estimate."""
        from poise import advantages

        return advantages.get(self.advantage)

    @field_validator("template")
    @classmethod
    def _arguments_of_the_template(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in ("messages", "tools", "add_generation_prompt"):
            if name in (value or ()):
                raise ValueError(f"{name} cannot be set: poise passes it to the chat template itself")
        return value or None

    @field_validator(*METHODS)
    @classmethod
    def _method_can_be_read(cls, value: str, info: ValidationInfo) -> str:
        if value == (ADVANTAGE if info.field_name == "advantage" else GRPO):
            return value
        from poise import advantages, regulators
        from poise.sampling import algorithms

        try:
            if info.field_name == "regulator":
                regulators.parse(value)
            elif info.field_name == "algorithm":
                algorithms.get(value, 2)
            else:
                advantages.get(value)
        except TypeError as error:
            raise ValueError(str(error)) from None
        return value

    @field_validator("objective", mode="wrap")
    @classmethod
    def _objective_can_be_read(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Settings:
        for name, setting in value.items() if isinstance(value, dict) else ():
            if isinstance(setting, bool):  # pydantic would accept true as 1
                raise ValueError(f"{name} must not be true or false")
        try:
            settings: Settings = validate(value)
        except TypeError as error:
            raise ValueError(str(error)) from None
        if not isinstance(settings.surrogate, str):
            raise ValueError(f"surrogate must be text, got {short(settings.surrogate)}")
        return settings

    @field_validator("remote_code")
    @classmethod
    def _code_is_trusted(cls, value: bool) -> bool:
        if value:
            _user_code.check_trusted("it lets the model's own Python run")
        return value

    @field_validator("device")
    @classmethod
    def _device_exists_in_torch(cls, value: str) -> str:
        if value in ("auto", "cpu"):
            return value
        import torch

        try:
            torch.device(value)
        except RuntimeError:
            raise ValueError("must be auto, or a device of torch such as cpu, cuda or cuda:1") from None
        return value

    @field_validator("evaluation", mode="before")
    @classmethod
    def _evaluation_may_be_off(cls, value: Any) -> Any:
        if value is False or value == "off":
            return {"problems": 0}
        if value is True or isinstance(value, str):
            raise ValueError("must be off, or a group: evaluation.problems=200 evaluation.every=10")
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
        named = {name: getattr(self, name) for name in METHODS}
        groups = {"task": dict(self.task), "objective": vars(self.objective)}
        self._code = _user_code.code_of({**named, **groups, "model": self.model})
        if self.revision is not None and self._model_is_here():
            raise ValueError(
                f"revision = {self.revision!r}: only models on the hub have revisions, and model={self.model} is "
                "local; remove revision"
            )
        if self.deterministic and self.rollout.engine == "vllm":
            raise ValueError(
                "deterministic = true with rollout.engine = vllm: vLLM's results depend on which responses it happens "
                "to decode together; use rollout.engine=native, or remove deterministic"
            )
        group = getattr(self.build_algorithm(), "group", self.group)  # the algorithm may set its own group
        if isinstance(group, int) and group < 2 and self.build_advantage().needs_groups:
            raise ValueError(
                f"group = {group}: advantage {self.advantage!r} compares the responses to a prompt with each "
                "other, so there must be at least 2; with one, use advantage reinforce-pp"
            )
        if self.optim.average_over and self.objective.averages_by != TOKEN_MEAN:
            raise ValueError(
                f"optim.average_over = {self.optim.average_over}: it averages tokens, but the objective averages by "
                f"{self.objective.averages_by}; remove one of the two settings"
            )
        if isinstance(group, int) and (responses := self.prompts * group) > MOST_RESPONSES:
            raise ValueError(
                f"prompts × group = {self.prompts:,} × {group:,}: a step samples {responses:,} responses, more than "
                f"{MOST_RESPONSES:,}; lower one of them"
            )
        if self.stop_at is not None and not self.evaluation.problems:
            raise ValueError(f"stop_at = {self.stop_at}: accuracy is not measured with evaluation=off; remove one")
        if self.stop_at is not None and self.evaluation.every == 0:
            raise ValueError(
                f"stop_at = {self.stop_at}: accuracy is measured only before and after training; set evaluation.every"
            )
        return self

    def _model_is_here(self) -> bool:
        from poise.models.location import SHIPPED  # imports torch

        return self.model in SHIPPED or live.is_name(self.model) or expand(self.model).exists()


def load(recipe: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Load a recipe, by name or path, and apply ``key=value`` overrides. Keys are dotted, values are YAML.

    Without a recipe and a model this is the demo. A model that ships with poise gets the settings of its own recipe
    (``RECIPES``). Any other model gets the defaults of ``Config``, which suit pretrained models.
    """
    return complete(recipe, split_overrides(overrides))


def complete(recipe: str | Path | None, changes: Document) -> Config:
    """Return the configuration of a recipe with ``changes`` applied; see ``load``."""
    if recipe is None:
        recipe = default_recipe(changes.get("model"))
    return _validated(merge({} if recipe is None else read(recipe), changes))


def restore(
    document: Document, *, source: str = "this run", trust: bool = False, typed: Document | None = None
) -> Config:
    """Return the configuration of a complete but untrusted document, such as a run's config.json.

    Without ``trust``, code that the document names does not run (docs/security.md), unless ``typed`` also names that
    code. ``typed`` holds the settings that the user typed. ``source`` names the document in messages.
    """
    if trust:
        return _validated(document)
    with _user_code.untrusted(source, (typed or {}).values()):
        return _validated(document)


def dump(config: Config) -> str:
    """Write the complete configuration as YAML that works as a recipe."""
    return to_yaml(config.model_dump(mode="json"))


def _validated(document: Document) -> Config:
    if too_deep(document):
        raise ConfigError(f"the settings have more than {DEEPEST} levels")
    return Config(**{str(name): value for name, value in document.items()})  # YAML allows keys that are not text


def _explained(error: ValidationError, document: Document) -> ConfigError:
    """Return a ConfigError that explains pydantic's error, with one line per problem."""
    problems, known = error.errors(include_url=False), keys(document)
    lines = [
        _no_task() if problem["type"] == "missing" and problem["loc"] in TASK else explain(problem, known)
        for problem in problems[:MOST_PROBLEMS]
    ]
    more = [f"… and {len(problems) - MOST_PROBLEMS} more problems"] if len(problems) > MOST_PROBLEMS else []
    return ConfigError(*lines, *more)


def _no_task() -> str:
    names = ", ".join(tasks.names())
    return (
        f"no task is named: write task.name=NAME ({names}, or your own task, task.name=file.py:Class), "
        "data=FILE reward=NAME, or environment=file.py:Class"
    )


# The known keys, for messages about unknown keys


def keys(document: Document) -> list[str]:
    """Return the dotted keys that a document may have, including its task's settings.

    Settings of the regulator and the algorithm appear as users write them: ``regulator=ar(alpha=…)``.
    """
    return [*_schema_keys(Config, ""), *_task_keys(document), *_method_keys(document)]


def _schema_keys(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Group):
                yield from _schema_keys(kind, f"{prefix}{name}.")
            elif is_dataclass(kind):
                yield from (f"{prefix}{name}.{setting.name}" for setting in fields(kind))


def _task_keys(document: Document) -> list[str]:
    task = document.get("task")
    name = task.get("name") if isinstance(task, dict) else None
    known = isinstance(name, str) and name in tasks.TASKS
    return [f"task.{setting}" for setting in tasks.settings_of(str(name))] if known else []


def _method_keys(document: Document) -> Iterator[str]:
    for kind in ("regulator", "algorithm"):
        text = str(document.get(kind, GRPO))
        if text == GRPO:
            continue  # avoids importing torch
        from poise import regulators
        from poise.sampling import algorithms

        table: Mapping[str, Callable[..., Any]] = regulators.TABLE if kind == "regulator" else algorithms.TABLE
        for name in (part.partition("(")[0].strip() for part in split_outside(text, "|")):
            if name in table:
                yield from (f"{kind}={name}({setting}=…)" for setting in signature(table[name]).parameters)
