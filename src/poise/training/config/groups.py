"""Groups of settings: task, sampling, optimizer, evaluation, LoRA. The objective's settings are in the core."""

from __future__ import annotations

import os
from numbers import Number
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from poise import tasks
from poise._lib import live
from poise._lib.errors import short
from poise.sampling import MAX_TOKENS, VLLM_MEMORY, EngineName


def _number(value: Any) -> Any:
    # pydantic would accept true as 1 and "3" as 3.
    if isinstance(value, bool | str):
        raise ValueError("must be a number")
    return value


def _valid_text(value: str) -> str:
    os.fsencode(value)  # most texts are file names
    if "\0" in value:
        raise ValueError("must not contain the character NUL")
    return value


LARGEST = 2**31 - 1  # so that counts and seeds fit into 32 bits
Whole = Annotated[int, BeforeValidator(_number), Field(ge=-LARGEST, le=LARGEST)]
Real = Annotated[float, BeforeValidator(_number)]
TokenCount = Annotated[int, BeforeValidator(_number), Field(ge=1, le=2**53)]  # floats above this are not exact
Count = Annotated[Whole, Field(ge=1)]
CountOrZero = Annotated[Whole, Field(ge=0)]
Text = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_valid_text)]


class Group(BaseModel):
    """A group of settings. Unknown keys are errors. It is immutable after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def lists_for_tuples(value: Any) -> Any:
    """Replace tuples with lists, so that the value survives a round trip through YAML or JSON unchanged."""
    if isinstance(value, dict):
        return {key: lists_for_tuples(part) for key, part in value.items()}
    return [lists_for_tuples(part) for part in value] if isinstance(value, list | tuple) else value


def _is_plain(value: Any) -> bool:
    """Whether a value can be written to a settings file."""
    if isinstance(value, dict | list | tuple):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, str | Number | os.PathLike)


class TaskConfig(Group):
    """A task by name. All other keys are settings of that task: ``task: {name: kk, people: 3-7}``."""

    model_config = ConfigDict(extra="allow")

    name: Text
    """kk, frozenlake, …, or your own task: file.py:Class."""
    prefill: Annotated[str, Field(exclude_if=lambda text: not text)] = ""
    """Text at the beginning of every reply, such as ``<think>``. The model continues after this text. The text is
    scored as part of the reply, but its tokens are not trained. If the chat template opens ``<think>``, you need no
    prefill."""
    _task: tasks.Task = PrivateAttr()  # built once, because a task may contain a whole dataset

    @property
    def settings(self) -> dict[str, Any]:
        """The task settings that the user wrote; all other settings have the task's defaults."""
        return dict(self.model_extra or {})

    def build(self) -> tasks.Task:
        """Return the task."""
        return self._task

    @model_validator(mode="before")
    @classmethod
    def _readable(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(
                f"must be a group of settings, {{key: value}}; for the task of that name: task.name={value}"
            )
        for key, setting in value.items() if isinstance(value, dict) else ():
            if not _is_plain(setting):
                argument = live.ARGUMENTS.get(f"task.{key}", "task")
                raise ValueError(
                    f"{key} = {short(setting)}: settings hold text and numbers; Python objects go to "
                    f"poise.train({argument}=…)"
                )
        return lists_for_tuples(value)

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        try:
            for key in tasks.unknown_settings(self.name, self.settings):
                if key.startswith("reward") and "reward" not in tasks.settings_of(self.name):
                    raise ValueError(
                        f"task {self.name!r} scores responses itself and has no setting {key}; {key}= goes with "
                        "data=FILE or environment=file.py:Class"
                    )
                about = {"key": key, "allowed": tasks.settings_of(self.name), "hint": tasks.settings_hint(self.name)}
                raise PydanticCustomError("unknown_setting", "unknown setting {key}", about)
            self._task = tasks.get(self.name, **self.settings)
        except (TypeError, OSError, tasks.TaskError) as error:  # pydantic reports only a ValueError
            raise ValueError(str(error)) from None
        return self


class RolloutConfig(Group):
    """Sampling."""

    max_tokens: Count = MAX_TOKENS
    """Longest response in tokens; in episodes with several turns, the longest reply."""
    max_episode_tokens: Count | None = None
    """Longest episode in tokens: replies and the environment's text, without the prompt; null: limited by the model's
    positions. An episode that reaches the limit ends there: it is scored, and counts as cut off."""
    temperature: Annotated[Real, Field(ge=1e-6)] = 1.0
    """Divides the logits, in sampling and in the loss."""
    batch: CountOrZero = 0
    """Sequences decoded in parallel; 0: all sequences of a step."""
    max_prompt: Count = 512
    """Longest prompt, in tokens."""
    top_p: Annotated[Real, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1: off. Probability ratios and entropies still use the full distribution."""
    top_k: CountOrZero = 0
    """Sample only from the k most likely tokens; 0: off."""
    engine: EngineName = "auto"
    """auto: native if the model supports it, else transformers; vllm needs the extra "vllm"."""
    vllm_memory: Annotated[Real, Field(gt=0, le=1)] = VLLM_MEMORY
    """Share of the device's memory for vLLM."""
    old_logp: Literal["sampled", "recomputed"] = "sampled"
    """The old policy's log-probabilities: from the sampler, or recomputed by a forward pass of the training model,
    which costs time. Recompute them if the sampler computes differently from the trainer. In half precision they are
    always recomputed for a surrogate with bounds below 0.01 (gspo)."""

    @property
    def longest(self) -> int:
        """The largest number of tokens in a prompt plus its response."""
        return self.max_prompt + max(self.max_tokens, self.max_episode_tokens or 0)

    @model_validator(mode="after")
    def _a_reply_fits_into_its_episode(self) -> Self:
        if self.max_episode_tokens is not None and self.max_episode_tokens < self.max_tokens:
            raise ValueError(
                f"max_episode_tokens = {self.max_episode_tokens} is less than max_tokens = {self.max_tokens}, the "
                "longest reply: lower max_tokens, or raise max_episode_tokens"
            )
        return self


class OptimConfig(Group):
    """AdamW and the batch sizes of the update. The default learning rate suits pretrained models."""

    lr: Annotated[Real, Field(gt=0)] = 1e-6
    """Learning rate, constant after the warmup."""
    weight_decay: Annotated[Real, Field(ge=0)] = 0.01
    """AdamW's weight decay."""
    betas: tuple[Annotated[Real, Field(ge=0, lt=1)], Annotated[Real, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay of AdamW's first and second moments."""
    eight_bit: bool = False
    """Store AdamW's moments in 8 bits, with bitsandbytes: 2 bytes per trained weight instead of 8."""
    grad_clip: Annotated[Real, Field(gt=0)] = 1.0
    """Maximum gradient norm; larger gradients are scaled down."""
    warmup_steps: CountOrZero = 0
    """Steps during which the learning rate rises to lr."""
    mini_batch: CountOrZero = 0
    """Maximum number of responses per optimizer step; a batch is split evenly. 0: one step per batch."""
    same_order: bool = False
    """Use the same mini-batches in the same order in every phase; false: shuffle them for each phase."""
    average_over: CountOrZero = 0
    """For token-mean, average in two stages: over the tokens of each chunk of this many responses, then over the chunks
    of a mini-batch; 0: average over all tokens of the mini-batch."""
    micro_tokens: Count | None = None
    """Maximum tokens per pass. It affects memory and speed, not the result; null: chosen by device and model size."""

    @property
    def moment_bytes(self) -> float:
        """Bytes of Adam's two moments per trained weight. In 8 bits, 256 weights share a float32 scale per moment."""
        return 2 * (1 + 4 / 256) if self.eight_bit else 8.0


HELD_OUT = 1000  # problems in a comparison; see docs/compare.md


class EvaluationConfig(Group):
    """Evaluation on held-out problems: before and after training, and every ``every`` steps. ``off`` disables it."""

    every: CountOrZero = 0
    """Steps between evaluations; 0: only before and after training."""
    problems: CountOrZero = 200
    """Number of held-out problems; 0 or evaluation=off: no evaluation."""
    samples: Count = 1
    """Samples per problem: the k of avg@k, pass@k and maj@k."""
    seed: CountOrZero = 0
    """Seed of the held-out problems."""
    temperature: Annotated[Real, Field(ge=0)] | None = None
    """Sampling temperature; null: the same as in training; 0: greedy."""

    @model_validator(mode="after")
    def _samples_can_differ(self) -> Self:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"samples = {self.samples} at temperature 0: greedy samples are all the same; set "
                "evaluation.samples=1, or evaluation.temperature=1 to sample"
            )
        return self


class LoraConfig(Group):
    """LoRA: train low-rank adapters instead of all weights.

    There is no dropout, because the update must use the policy that sampled.
    """

    rank: Count = 16
    """Rank of each adapter; any setting lora.… turns LoRA on."""
    alpha: Annotated[Real, Field(gt=0)] = 32.0
    """An adapter is multiplied by alpha / rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """Layers with an adapter: all-linear, or a list of module names."""

    @field_validator("targets", mode="before")
    @classmethod
    def _known_targets(cls, value: Any) -> Any:
        names = isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value)
        if value != "all-linear" and not names:
            raise ValueError("must be all-linear, or a list of module names such as [q_proj, v_proj]")
        return value if isinstance(value, str) else tuple(value)
