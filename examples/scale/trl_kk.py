"""Knights & Knaves with TRL and a regulator, for one process or many; see docs/scale.md.

accelerate launch --config_file examples/scale/accelerate-fsdp-8gpu.yaml \\
  examples/scale/trl_kk.py --config examples/scale/trl-8gpu.yaml
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, ModelConfig, TrlParser

from poise.integrations.trl import RegulatedGRPOTrainer
from poise.tasks.knights_knaves import KnightsKnaves


@dataclass
class TaskArguments:
    """What is neither TRL's nor the model's."""

    regulator: str = field(default="grpo", metadata={"help": "In its text form, such as 'ar(alpha=0.2)'."})
    people: str = field(default="3-7", metadata={"help": "How many, from-to."})
    problems: int = field(default=4500, metadata={"help": "How many puzzles to train on."})


def parser() -> Any:
    """TRL's own: settings come from --config, and from the command line on top of it."""
    return TrlParser((TaskArguments, GRPOConfig, ModelConfig))


def main() -> None:
    """Train."""
    own, args, model = parser().parse_args_and_config()
    task = KnightsKnaves(people=own.people)
    problems = list(islice(task.problems("train", seed=0), own.problems))

    def reward(completions: list[Any], number: list[int], **_: Any) -> list[float]:
        texts = (completion[0]["content"] for completion in completions)
        return [task.score(problems[i], text).reward for i, text in zip(number, texts, strict=True)]

    prompts = [[{"role": "user", "content": problem.prompt}] for problem in problems]
    trainer = RegulatedGRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts, "number": list(range(len(problems)))}),
        regulator=own.regulator,
    )
    trainer.train()


if __name__ == "__main__":
    main()
