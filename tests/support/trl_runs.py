"""TRL trainers on the embedded model, for test_trl.py; as a script, one of two processes that train together."""

from __future__ import annotations

import os
import sys
from itertools import islice
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is here
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # rollout_func

import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig
from trl.chat_template_utils import qwen3_chat_template

from poise.integrations.trl import RegulatedGRPOTrainer
from poise.models.policy import EMBEDDED
from poise.tasks.knights_knaves import KnightsKnaves

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

PROBLEMS = [problem.prompt for problem in islice(KnightsKnaves().problems("train", 1), 24)]
CALL = '<tool_call>\n{"name": "add", "arguments": {"number": 7}}\n</tool_call>'
DATA = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in PROBLEMS]})


def spread(completions, **_):
    """Every other response is right: every group has a spread."""
    return [float(i % 2) for i in range(len(completions))]


def parity(completion_ids, **_):
    """Of the tokens alone, so that it does not matter which process asks."""
    return [float(sum(ids) % 5) for ids in completion_ids]


def config(folder, **settings):
    return GRPOConfig(
        output_dir=str(folder),
        **{
            "max_steps": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 4,
            "max_completion_length": 12, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "weight_decay": 0.1,
            "bf16": False, "gradient_checkpointing": False, "use_cpu": True, "dataloader_pin_memory": False,
            "disable_tqdm": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1,
        }
        | settings,
    )  # fmt: skip


def build(folder, regulator=None, *, kind=RegulatedGRPOTrainer, reward=spread, correct=None, more=None, **settings):
    """A trainer; without a regulator it is that of ``kind``, TRL's own."""
    own = {} if regulator is None else {"regulator": regulator, "correct": correct}
    trainer = kind(
        model=str(EMBEDDED),
        reward_funcs=reward,
        args=config(folder, **settings),
        train_dataset=DATA,
        **own,
        **(more or {}),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def rollouts(trainer, count=2):
    """One generation batch, as TRL's loop would have it, and a model that has moved on since."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = [DATA[i] for i in range(count) for _ in range(trainer.num_generations)]
    inputs = trainer._generate_and_score_completions(rows)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator) * parameter.std())
    return inputs


def weights(trainer):
    model = trainer.accelerator.unwrap_model(trainer.model)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def injected(prompts, trainer):
    """Rollouts that depend on nothing but the row's number among all processes: pieces of the puzzles' text."""
    first = trainer.accelerator.process_index * len(prompts)
    prompt_ids = [trainer.processing_class(prompt[0]["content"])["input_ids"][:20] for prompt in prompts]
    texts = trainer.processing_class(PROBLEMS)["input_ids"]
    completion_ids = []
    for row in range(first, first + len(prompts)):
        start = (7 * row + trainer.state.global_step) % 30
        completion_ids.append(texts[row % len(texts)][start : start + 5 + row % 8])
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def ragged(prompts, trainer):
    """TRL's own samples, cut to different lengths: the model ends none of them by itself so soon."""
    prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
    completion_ids, _ = trainer._generate_single_turn(prompt_ids, images, fields, trainer.num_generations)
    cut = [ids[: len(ids) - i % 5] for i, ids in enumerate(completion_ids)]
    return {"prompt_ids": prompt_ids, "completion_ids": cut, "logprobs": None}


def holed(prompts, trainer):
    """The same, with tokens in between that are not the model's, as a tool's answer is not: TRL's tool_mask."""
    made = ragged(prompts, trainer)
    masks = [
        [int(not 2 <= place - i % 3 < 4) for place in range(len(ids))] for i, ids in enumerate(made["completion_ids"])
    ]
    return {**made, "env_mask": masks}


def tool_model(folder):
    """The embedded model with a chat template that has tools; it never learned to call them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED)
    tokenizer.chat_template = qwen3_chat_template
    tokenizer.save_pretrained(folder)
    transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED).save_pretrained(folder)
    return str(folder)


def calls_tools(call, answers):
    """Generation by script: every other response begins with the tool call, and ends once the tool has answered."""

    def generate(self, prompt_ids, *_, **__):
        texts = self.processing_class.batch_decode(prompt_ids)
        made = [
            answers[i % len(answers)] if "<tool_response>" in text or i % 2 else call for i, text in enumerate(texts)
        ]
        return self.processing_class(made)["input_ids"], None

    return generate


TOGETHER = {"entropy(quantile=0.5) | lopti(threshold=0.05)": 12, "nthr | lopti(threshold=0.05)": 16}


def train_together(folder, processes):
    """Two generation batches of each method on injected rollouts: how far the weights came, and what was logged.

    Twelve responses in groups of four: with two processes the middle group is split between them.
    """
    found = {}
    for method, rows in TOGETHER.items():
        tokens = folder / f"tokens-{method[:4]}-{processes}.jsonl"
        trainer = build(
            folder, method, reward=parity, correct=lambda rewards: rewards[:, 0] > 1,
            more={"rollout_func": injected, "export": tokens, "export_every": 1},
            per_device_train_batch_size=rows // processes, num_iterations=2, beta=0.05, optim="sgd", max_steps=4,
            weight_decay=0.0, learning_rate=0.5,
        )  # fmt: skip
        assert trainer.accelerator.num_processes == processes
        before = weights(trainer)
        trainer.train()
        logged = [{k: v for k, v in row.items() if k.startswith("reg/")} for row in trainer.state.log_history]
        found[method] = weights(trainer) - before, logged
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    result = train_together(Path(sys.argv[1]), processes=2)
    if os.environ["RANK"] == "0":
        torch.save(result, Path(sys.argv[1]) / "result.pt")
