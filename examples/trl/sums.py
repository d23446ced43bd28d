"""TRL's GRPOTrainer with a regulator, on sums.

python examples/trl/sums.py [MODEL]
"""

import sys

try:
    from datasets import Dataset
    from trl import GRPOConfig

    from poise.integrations.trl import RegulatedGRPOTrainer
except ImportError as error:
    sys.exit(f"this example needs poise with the extra 'trl' ({error}): docs/install.md has the command")
from poise.models.location import EMBEDDED

ROWS = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(10, 40) for b in range(10, 40)]


def last_number(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 where a completion ends with the right answer."""
    return [float(text.strip(" .").endswith(right)) for text, right in zip(completions, answer, strict=True)]


def train(model: str | None = None) -> RegulatedGRPOTrainer:
    """Train a model; without one, the embedded model for four steps on the CPU."""
    small = {"max_steps": 4, "use_cpu": True, "bf16": False, "max_completion_length": 16}
    settings = {"max_steps": 200, "max_completion_length": 128, "learning_rate": 1e-6} if model else small
    trainer = RegulatedGRPOTrainer(
        model=model or str(EMBEDDED),
        reward_funcs=last_number,
        args=GRPOConfig(
            output_dir="runs/trl-sums", num_iterations=2,  # an iteration for each phase of Lopti
            per_device_train_batch_size=16, num_generations=8, report_to="none", save_strategy="no", **settings,
        ),
        train_dataset=Dataset.from_list(ROWS),
        regulator="ar(alpha=0.3) | lopti(threshold=0.5)",
    )  # fmt: skip
    trainer.train()
    return trainer


if __name__ == "__main__":
    train(*sys.argv[1:2])
