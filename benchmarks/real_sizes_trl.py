"""The same recipes with TRL and vLLM in its process ("colocate"), for ``real_sizes.py``.

TRL does the same work as poise: KL term, old log-probabilities by a pass of its own, as many optimizer steps, responses
of full length, prompts of the same task and length. It gets float32 weights and computes in bfloat16 (autocast); with
LoRA its frozen weights are bfloat16. TRL merges an adapter before each push to vLLM; it has no other way. Its
correction for vLLM's rounding is off, and its vLLM gets memory for all responses at once. ``--trl-micro`` responses
make a pass; few, since then no activation has to be computed twice, and a pass of 2 × 1,300 tokens keeps the device
busy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
import transformers
import trl
from datasets import Dataset
from step import NEVER, TimedTrainer, now

from poise.tasks import Task
from poise.training.config.schema import Config

BESIDE = 6e9  # bytes of vLLM's graphs and passes
Write = Callable[[dict[str, Any]], None]


class Timed(TimedTrainer):
    """Measures the parts of a generation batch: sampling, scoring and all updates."""

    sampled = 0.0  # seconds of the last sampling
    scored = 0.0  # of the passes after it
    peaks: dict[str, float]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        begin, self.peaks = now(self.args.device.type), {}
        made = super()._generate_and_score_completions(inputs)
        self.scored = now(self.args.device.type) - begin - self.generation_s
        self.peaks["scoring"] = self.peak()
        return made

    def _generate(self, prompts: list[Any]) -> Any:
        made = super()._generate(prompts)
        self.peaks["sampling"] = self.peak()
        return made

    def peak(self) -> float:
        """Bytes at the peak since the last call; vLLM's are in them."""
        if self.args.device.type != "cuda":
            return 0.0
        found = float(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        return found


class Batches(transformers.TrainerCallback):  # type: ignore[misc]
    """Writes the figures of each generation batch; ``updates`` optimizer steps belong to one."""

    def __init__(self, updates: int, write: Write) -> None:
        self.updates, self.write = updates, write
        self.trainer: Timed | None = None
        self.begin, self.rows = 0.0, list[dict[str, Any]]()

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        """Start the clock; what came before, such as vLLM's trial of its memory, belongs to no step."""
        assert self.trainer is not None
        self.trainer.peak()
        self.begin = now(args.device.type)

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """After the last update on a batch, its figures."""
        trainer = self.trainer
        assert trainer is not None
        if state.global_step % self.updates:
            return
        seconds = now(args.device.type) - self.begin
        parts = {"sampling": trainer.generation_s, "scoring": trainer.scored}
        parts["update"] = seconds - sum(parts.values())
        trainer.peaks["update"] = trainer.peak()
        self.rows.append({
            "seconds": seconds, "tokens": sum(trainer.lengths), "prompt_tokens": sum(map(len, trainer.prompt_ids)),
            **trainer.parts, **{k: {"seconds": v, "peak_bytes": trainer.peaks[k]} for k, v in parts.items()},
        })  # fmt: skip
        if args.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            self.rows[-1]["device_bytes"] = total - free
        self.write({"warm_up": self.rows[0], "steps": self.rows[1:]})
        self.on_train_begin(args)


def vllm_share(config: Config, model: Path) -> float:
    """The share of the device's memory that vLLM needs for its weights and for all responses at once."""
    of = transformers.AutoConfig.from_pretrained(model)
    width = of.hidden_size // of.num_attention_heads
    token = 2 * 2 * of.num_hidden_layers * of.num_key_value_heads * width
    rows = config.prompts * (config.rollout.max_prompt + config.group * config.rollout.max_tokens)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return float((weights + rows * token + BESIDE) / torch.cuda.get_device_properties(0).total_memory)


def problems(config: Config, task: Task, tokenizer: Any, count: int) -> list[Any]:
    """The first ``count`` problems whose prompts fit ``rollout.max_prompt``."""
    found: list[Any] = []
    for problem in task.problems("train", config.seed):
        text = tokenizer.apply_chat_template(message(problem), tokenize=False, add_generation_prompt=True)
        if len(tokenizer(text)["input_ids"]) <= config.rollout.max_prompt:
            found.append(problem)
        if len(found) == count:
            break
    return found


def message(problem: Any) -> list[dict[str, str]]:
    return [{"role": "user", "content": problem.prompt}]


def arguments(config: Config, args: Any) -> trl.GRPOConfig:
    """The recipe's settings for TRL, as in examples/scale/trl-8gpu.yaml."""
    responses = config.prompts * config.group
    mini = config.optim.mini_batch or responses
    cuda, micro = config.device != "cpu", min(args.trl_micro, mini)
    engine: dict[str, Any] = {"generation_kwargs": {"eos_token_id": [NEVER]}}
    if args.trl_engine == "vllm":
        engine = {
            "generation_kwargs": {"ignore_eos": True, "detokenize": False}, "use_vllm": True, "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": vllm_share(config, Path(config.model)) if cuda else 0.05,
            "vllm_max_model_length": config.rollout.max_prompt + config.rollout.max_tokens,
            "vllm_importance_sampling_correction": False,
        }  # fmt: skip
    return trl.GRPOConfig(
        output_dir=f"{config.run}-trl", max_steps=config.steps * (responses // mini), num_generations=config.group,
        per_device_train_batch_size=micro, gradient_accumulation_steps=mini // micro,
        steps_per_generation=responses // micro, max_completion_length=config.rollout.max_tokens,
        temperature=config.rollout.temperature, **engine, beta=config.objective.kl_coef, loss_type="dapo",
        epsilon=config.objective.clip_low, epsilon_high=config.objective.clip_high, delta=config.objective.dual_clip,
        learning_rate=config.optim.lr, lr_scheduler_type="constant", weight_decay=config.optim.weight_decay,
        adam_beta1=config.optim.betas[0], adam_beta2=config.optim.betas[1], max_grad_norm=config.optim.grad_clip,
        bf16=cuda, use_cpu=not cuda, dataloader_pin_memory=cuda, gradient_checkpointing=args.trl_checkpointing,
        model_init_kwargs={"dtype": "bfloat16" if cuda and config.lora else "float32"}, shuffle_dataset=False,
        disable_tqdm=True, logging_strategy="no", save_strategy="no", report_to="none",
    )  # fmt: skip


def train(config: Config, task: Task, args: Any, write: Write) -> None:
    """Train, and write the figures of every generation batch."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    asked = problems(config, task, tokenizer, config.prompts * config.steps)
    adapter = None
    if config.lora:
        import peft

        adapter = peft.LoraConfig(
            task_type="CAUSAL_LM", r=config.lora.rank, lora_alpha=config.lora.alpha, lora_dropout=0.0,
            target_modules=config.lora.targets,
        )  # fmt: skip

    def reward(completions: list[Any], number: list[int], **_: Any) -> list[float]:
        return [task.score(asked[i], "").reward for i in number[: len(completions)]]

    given = arguments(config, args)
    batches = Batches(
        config.prompts * config.group // (config.optim.mini_batch or config.prompts * config.group), write
    )
    trainer = Timed(
        model=config.model, reward_funcs=reward, args=given, peft_config=adapter, callbacks=[batches],
        train_dataset=Dataset.from_dict({"prompt": [message(p) for p in asked], "number": list(range(len(asked)))}),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.eos_token_ids = [NEVER]
    batches.trainer = trainer
    trainer.train()
