"""Knights & Knaves with TRL and a regulator, for one process or many; see docs/scale.md.

accelerate launch --config_file examples/scale/accelerate-fsdp-8gpu.yaml \\
  examples/scale/trl_kk.py --config examples/scale/trl-8gpu.yaml
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, ModelConfig, TrlParser, get_peft_config, get_quantization_config

from poise.integrations.trl import RegulatedGRPOTrainer
from poise.tasks.knights_knaves import KnightsKnaves


@dataclass
class TaskArguments:
    """The settings that belong neither to TRL nor to the model."""

    regulator: str = field(default="grpo", metadata={"help": "The regulator, such as 'ar(alpha=0.2)'."})
    people: str = field(default="3-7", metadata={"help": "How many people a puzzle has, from-to."})
    problems: int = field(default=4500, metadata={"help": "How many puzzles to train on."})


def parser() -> Any:
    """TRL's parser: it reads --config, and the command line overrides it."""
    return TrlParser((TaskArguments, GRPOConfig, ModelConfig))


def loading(args: GRPOConfig, model: ModelConfig) -> dict[str, Any]:
    """The trainer's arguments about the model. TRL takes revision, dtype and attention from ``args``."""
    settings = {
        "revision": model.model_revision,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
    }
    args.model_init_kwargs = settings | (args.model_init_kwargs or {})
    return {
        "model": model.model_name_or_path,
        "peft_config": get_peft_config(model),
        "quantization_config": get_quantization_config(model),
    }


def build(own: TaskArguments, args: GRPOConfig, model: ModelConfig) -> RegulatedGRPOTrainer:
    """TRL's trainer with a regulator, on Knights & Knaves puzzles."""
    task = KnightsKnaves(people=own.people)
    problems = list(islice(task.problems("train", seed=0), own.problems))

    def reward(completions: list[Any], number: list[int], **_: Any) -> list[float]:
        texts = (completion[0]["content"] for completion in completions)
        return [task.score(problems[i], text).reward for i, text in zip(number, texts, strict=True)]

    prompts = [[{"role": "user", "content": problem.prompt}] for problem in problems]
    return RegulatedGRPOTrainer(
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts, "number": list(range(len(problems)))}),
        regulator=own.regulator,
        correct=lambda rewards: rewards[:, 0] == 3,  # the task's highest reward; for nthr
        **loading(args, model),
    )


def main() -> None:
    """Train, or resume from ``resume_from_checkpoint``."""
    own, args, model = parser().parse_args_and_config()
    build(own, args, model).train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
