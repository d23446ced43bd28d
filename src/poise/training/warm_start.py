"""A tiny model that can almost do a task: supervised training on worked solutions with misreadings in them.

This is how the embedded model is made. The demonstrations are noisy on purpose: a policy that imitates them solves
part of the problems and has something left for reinforcement learning to improve. Everything is fixed by the seed and
the settings; each batch is made from the seed and its number, so that the count of worker processes does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from poise import tasks
from poise._lib.errors import check_range
from poise.models.policy import Policy, resolve_device
from poise.models.prompts import plain
from poise.tasks import Demonstrates, Task

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
SPECIAL = {"pad_token": "<|pad|>", "eos_token": "<|end|>"}
TURNS = ["<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|user|>' if message.role == 'user' else '<|assistant|>' }}{{ message.content }}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Warmstart:
    """Settings. The defaults are those that made the embedded model."""

    task: str = "kk"
    task_settings: dict[str, Any] = field(default_factory=lambda: {"people": "2-3", "style": "compact", "noise": 0.2})
    width: int = 160
    layers: int = 4
    heads: int = 4
    vocabulary: int = 1024
    steps: int = 9_000
    batch: int = 512
    lr: float = 2e-3
    seed: int = 0
    workers: int = 0

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "vocabulary", "steps", "batch", "seed", "workers"):
            value, least = getattr(self, name), {"vocabulary": 300, "seed": 0, "workers": 0}.get(name, 1)
            check_range("warmstart", name, value, least, 2**31 - 1)
            if not isinstance(value, int):
                raise TypeError(f"warmstart: {name} must be a whole number, got {value!r}")
        check_range("warmstart", "lr", self.lr, 1e-12, 1e3)
        if self.width % self.heads:
            raise ValueError(f"warmstart: width = {self.width} must be a multiple of heads = {self.heads}")

    def build_task(self) -> Task:
        """The task with these settings."""
        return tasks.get(self.task, **self.task_settings)


def build_tokenizer(task: Task, vocabulary: int, seed: int = 0, problems: int = 5000) -> Any:
    """A byte-level BPE of the task's own texts: nearly every word is one token, and any text can be written."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts = [text for problem in islice(task.problems("train", seed), problems) for text in _texts(task, problem)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [*SPECIAL.values(), *TURNS]
    tokenizer.train_from_iterator(
        (piece for text in texts for piece in _untag(text)),
        trainers.BpeTrainer(
            vocab_size=vocabulary - len(TAGS),
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL, extra_special_tokens=TURNS)
    made.chat_template = TEMPLATE
    return made


def _texts(task: Task, problem: tasks.Problem) -> list[str]:
    assert isinstance(task, Demonstrates)
    return [problem.prompt, task.demonstration(problem)]


def _untag(text: str) -> list[str]:
    for tag in TAGS:
        text = text.replace(tag, "\0")
    return text.split("\0")


def build_model(settings: Warmstart, tokenizer: Any) -> Any:
    """An ordinary, tiny Llama with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.width,
        intermediate_size=3 * settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.seed)  # torch.manual_seed would touch the generators of all GPUs
        return LlamaForCausalLM(config)


class Demonstrations(Dataset[tuple[Tensor, Tensor]]):
    """Batch number i: token ids (B, L) and labels, −100 where nothing is to be learned (prompt and padding)."""

    def __init__(self, settings: Warmstart, policy_encode: Callable[[str], list[int]], tokenizer: Any) -> None:
        self.settings, self.encode, self.tokenizer = settings, policy_encode, tokenizer
        self.task = settings.build_task()

    def __len__(self) -> int:
        return self.settings.steps

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        assert isinstance(self.task, Demonstrates)
        ids, labels = [], []
        seed = self.settings.seed * 1_000_003 + index
        for number, problem in enumerate(islice(self.task.problems("train", seed + 1), self.settings.batch)):
            prompt = self.encode(problem.prompt)
            answer = self.task.demonstration(problem, seed=seed * 10_007 + number)
            response = [*plain(self.tokenizer, answer), self.tokenizer.eos_token_id]
            ids.append(torch.tensor(prompt + response))
            labels.append(torch.tensor([-100] * len(prompt) + response))
        pad = torch.nn.utils.rnn.pad_sequence
        return pad(ids, batch_first=True, padding_value=0), pad(labels, batch_first=True, padding_value=-100)


def train(
    settings: Warmstart, out: Path, *, device: str = "auto", say: Callable[[int, dict[str, float]], None] | None = None
) -> Policy:
    """Make a tokenizer and a model, train it, and save both to ``out``, in half precision, with the settings."""
    where = resolve_device(device)
    task = settings.build_task()
    tokenizer = build_tokenizer(task, settings.vocabulary, settings.seed)
    model = build_model(settings, tokenizer).to(where)
    policy = Policy(model, tokenizer)
    data = DataLoader(
        Demonstrations(settings, policy.encode, tokenizer), batch_size=None, num_workers=settings.workers,
        prefetch_factor=4 if settings.workers else None,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings.steps))
    model.train()
    for step, (ids, labels) in enumerate(data):
        ids, labels = ids.to(where, non_blocking=True), labels.to(where, non_blocking=True)
        with torch.autocast(where.type, torch.bfloat16, enabled=where.type == "cuda"):
            # Padding is on the right, where causal attention never looks from a token that counts.
            logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if say and (step % 100 == 99 or step + 1 == settings.steps):
            say(step + 1, {"loss": loss.item()})
    model.eval()
    model.to(torch.float16)
    policy.save(out)
    (out / "warmstart.yaml").write_text(yaml.safe_dump(asdict(settings), sort_keys=False))
    model.to(torch.float32)
    return policy


def _rate(step: int, steps: int) -> float:
    """Linear warm-up over 2 % of the steps, then a cosine down to a tenth."""
    warm = max(steps // 50, 1)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(steps - warm, 1)))
