"""A small model that can almost do a task: supervised training on worked solutions, with misreadings in them.

``make_model.py`` runs it; the embedded model was made so. The demonstrations are noisy on purpose: a policy that
imitates them solves part of the problems and has something left for reinforcement learning to improve. Everything is
fixed by the seed and the settings. Passes are packed and logits never whole, as in the trainer's update.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from demonstrations import Demonstrations, Row, as_batch, check_shows, dialogue, turn_end
from torch import Tensor
from torch.utils.data import DataLoader
from worked import WorkedKnights

from poise import tasks
from poise._lib.errors import check_range
from poise.batch import TokenBatch
from poise.head.loss import LARGE_CHUNK, token_logp
from poise.models.layers import can_compile
from poise.models.loading import load_policy, resolve_device
from poise.models.master_weights import MasterWeights
from poise.models.packing import own_tokens
from poise.models.policy import EMBEDDED, Policy
from poise.sampling.choose import choose
from poise.sampling.sampler import Sampler
from poise.tasks import Problem, Task
from poise.training.interrupts import SIGNALS, Stopper
from poise.training.update import within_memory

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
SPECIAL = {"pad_token": "<|pad|>", "eos_token": "<|end|>"}
TURNS = ["<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|assistant|>' if message.role == 'assistant' else '<|user|>' }}"
    "{{ message.content }}{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


MEASURED = 256  # problems at each look at the accuracy for stop_at
NEW_MODEL = ("width", "layers", "heads", "vocabulary")  # settings of a model that is made here
SOLUTIONS = ("style", "noise", "wording")  # settings of Knights & Knaves' solutions


@dataclass(frozen=True)
class Warmstart:
    """Settings. ``embedded`` has those that made the embedded model.

    ``model`` is a folder, a run or a hub id to start from; without one a new tokenizer and model are made.
    """

    task: str  # one that has worked solutions
    task_settings: dict[str, Any] = field(default_factory=dict)
    style: str = "sentences"  # of the solutions of Knights & Knaves, as noise and wording: see worked.py
    noise: float = 0.0
    wording: float = 0.0
    model: str | None = None
    width: int = 160
    layers: int = 4
    heads: int = 4
    vocabulary: int = 1024
    steps: int = 9_000
    batch: int = 512
    lr: float = 2e-3
    seed: int = 0
    workers: int = 0
    compile: bool | None = None  # None: on CUDA
    stop_at: float | None = None  # accuracy on fresh problems, sampled, that is enough
    measure_every: int = 50  # steps between two looks at it
    max_tokens: int = 256  # of a reply, where the accuracy is measured

    def __post_init__(self) -> None:
        for name in (*NEW_MODEL, "steps", "batch", "seed", "workers", "measure_every", "max_tokens"):
            value, least = getattr(self, name), {"vocabulary": 300, "seed": 0, "workers": 0}.get(name, 1)
            check_range("warmstart", name, value, least, 2**31 - 1)
            if not isinstance(value, int):
                raise TypeError(f"warmstart: {name} must be a whole number, got {value!r}")
        check_range("warmstart", "lr", self.lr, 1e-12, 1e3)
        if self.stop_at is not None:
            check_range("warmstart", "stop_at", self.stop_at, 0.0, 1.0)
        if self.width % self.heads:
            raise ValueError(f"warmstart: width = {self.width} must be a multiple of heads = {self.heads}")
        if self.model is not None:
            for own in fields(self):
                if own.name in NEW_MODEL and getattr(self, own.name) != own.default:
                    raise ValueError(f"warmstart: {own.name} is of a new model, and this starts from {self.model}")

    def build_task(self) -> Task:
        """The task with these settings; Knights & Knaves with worked solutions."""
        solutions = {name: getattr(self, name) for name in SOLUTIONS}
        if self.task == "kk":
            return WorkedKnights(**self.task_settings, **solutions)
        for own in fields(self):
            if own.name in SOLUTIONS and solutions[own.name] != own.default:
                raise ValueError(f"warmstart: {own.name} is of task.name=kk, and this is {self.task}")
        task = tasks.get(self.task, **self.task_settings)
        check_shows(task)
        return task


def embedded() -> Warmstart:
    """The settings that made the embedded model, as they were saved with it."""
    return Warmstart(**yaml.safe_load((EMBEDDED / "warmstart.yaml").read_text()))


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


def _texts(task: Task, problem: Problem) -> list[str]:
    turns = dialogue(task, problem, seed=0)
    return [text for said, reply in turns for text in (*(message["content"] for message in said), reply)]


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


def train(
    settings: Warmstart,
    out: Path,
    *,
    device: str = "auto",
    say: Callable[[int, dict[str, float]], None] | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Policy:
    """Train a model, new or that of ``settings.model``, and save it to ``out`` with its tokenizer and the settings.

    A new model is saved in half precision, another in float32, as nobody knows what its weights need. A signal to stop,
    such as Ctrl-C, ends the training early, and saves what it has.
    """
    task = settings.build_task()
    policy = _policy(settings, task, device)
    masters = policy.master_weights = MasterWeights(policy.model)
    parameters = list(masters.parameters.values())
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    masters.serve(optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings.steps))
    rows = Demonstrations(task, policy, batches=settings.steps, batch=settings.batch, seed=settings.seed)
    data = DataLoader(
        rows, batch_size=None, num_workers=settings.workers, collate_fn=_as_they_are,
        prefetch_factor=4 if settings.workers else None, worker_init_fn=_leave_signals_to_the_parent,
    )  # fmt: skip
    goal = None if settings.stop_at is None else _Goal(settings, policy, task)
    with Stopper(note) as stopper:
        for step, batch in enumerate(data, 1):
            loss = gradient(policy, as_batch(batch, policy.device))
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            if say and (step % 100 == 0 or step == settings.steps):
                say(step, {"loss": loss.item(), **_memory(policy.device)})
            if goal and step % settings.measure_every == 0 and goal.reached(step, say):
                break
            if stopper.requested:
                note(
                    f"stopped after step {step} of {settings.steps}, at a learning rate that had not come down yet; "
                    f"make_model.py OTHER model={out} goes on from there"
                )
                break
    _save(policy, masters, settings, out)
    return policy


def _leave_signals_to_the_parent(_worker: int) -> None:
    """Signals to a terminal or a job reach its workers too: the batches of the step under way must still come.

    A second SIGTERM ends a worker, since Python ends those that are left with one.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


class _Goal:
    """The accuracy that is enough, so that something is left for reinforcement learning to improve."""

    def __init__(self, settings: Warmstart, policy: Policy, task: Task) -> None:
        self.settings = settings
        engine = choose(policy, "auto", 0, lambda _: None)
        self.sampler = Sampler(policy, engine, task, max_tokens=settings.max_tokens)

    def reached(self, step: int, say: Callable[[int, dict[str, float]], None] | None) -> bool:
        """Measure on fresh problems, none of them held out, and on the same ones every time."""
        problems = tasks.draw(self.sampler.task, "train", self.settings.seed + (1 << 40), MEASURED)
        with torch.no_grad():
            samples = self.sampler.play(problems, seed=step)
        accuracy = sum(sample.score.correct for sample in samples) / len(samples)
        if say:
            say(step, {"reward/accuracy": accuracy})
        return accuracy >= (self.settings.stop_at or 0.0)


def gradient(policy: Policy, batch: TokenBatch, micro_tokens: int | None = None) -> Tensor:
    """Leave the gradient of the mean cross-entropy of the rows' own tokens at the parameters; returns the mean."""
    count = sum(extent.own for extent in batch.extents or ())

    def run(rows: list[int]) -> dict[str, Tensor]:
        part = batch.rows(rows)
        assert part.targets is not None
        places = own_tokens(part)
        targets = part.targets.flatten()[places]
        memory = LARGE_CHUNK if targets.is_cuda else None
        loss = -token_logp(policy.hidden(part, places), targets, policy.head(), memory=memory)[0].sum() / count
        loss.backward()
        return {"loss": loss.detach()}

    every = list(range(len(batch.mask)))
    return within_memory(policy, batch, every, micro_tokens, run)["loss"]


def _policy(settings: Warmstart, task: Task, device: str) -> Policy:
    """What is trained: bfloat16 on CUDA, float32 elsewhere."""
    if settings.model is not None:
        policy = load_policy(settings.model, device=device, compiled=_compiled(settings, resolve_device(device)))
        end = turn_end(policy.tokenizer, policy.end_tokens)[-1]
        if end not in policy.end_tokens:  # the model learns to write it, so its replies must end there
            policy.model.generation_config.eos_token_id = [*policy.end_tokens, end]
        return policy
    where = resolve_device(device)
    tokenizer = build_tokenizer(task, settings.vocabulary, settings.seed)
    model = build_model(settings, tokenizer).to(where, torch.bfloat16 if where.type == "cuda" else torch.float32)
    return Policy(model, tokenizer, compiled=_compiled(settings, where))


def _compiled(settings: Warmstart, where: torch.device) -> bool:
    return can_compile(where) if settings.compile is None else settings.compile


def _memory(device: torch.device) -> dict[str, float]:
    """GiB at the peak, where that is known."""
    return {"memory": torch.cuda.max_memory_allocated(device) / 2**30} if device.type == "cuda" else {}


def _as_they_are(rows: list[Row]) -> list[Row]:
    """In place of torch's collation, which would look at every token."""
    return rows


def _save(policy: Policy, masters: MasterWeights, settings: Warmstart, out: Path) -> None:
    policy.model.to(torch.float32)
    masters.publish()
    policy.master_weights = None
    if settings.model is None:
        policy.model.to(torch.float16)
    policy.save(out)
    (out / "warmstart.yaml").write_text(yaml.safe_dump(asdict(settings), sort_keys=False))
    policy.model.to(torch.float32)


def _rate(step: int, steps: int) -> float:
    """Linear warm-up over 2 % of the steps, then a cosine down to a tenth."""
    warm = max(steps // 50, 1)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(steps - warm, 1)))
