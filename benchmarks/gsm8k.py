"""Trains a model on GSM8K with poise, or with TRL for a given time, and measures the result in the same way.

    python benchmarks/gsm8k.py poise MODEL DATA --seed 0 --out runs/gsm8k-0 --json out/poise-0.json
    python benchmarks/gsm8k.py poise MODEL DATA --steps 40 --lora 16 --rate 3e-5 --json out/lora.json
    python benchmarks/gsm8k.py trl MODEL DATA --seconds 95 --out runs/trl --json out/trl.json
    poise eval runs/trl/trl-model task.name=math data=DATA problems=500 samples=1 max_tokens=512 --json trl-eval.json

MODEL is a folder, DATA a file with the columns question and answer; a tenth of it is held out. Both trainers get the
same prompts, rewards, learning rate, clipping, optimizer settings and batch (64 problems × 8 responses), and both start
from float32 weights and compute in bfloat16. TRL stops at the end of the first step that ends after ``--seconds``,
counted like poise's time: training alone, without start, evaluation and saving. Its other settings are the fastest that
``step.py`` found. The accuracy of both is poise's evaluation on the same held-out problems.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")

import torch
from measure import environment, since_start, write

import poise
from poise import rewards
from poise.tasks.data import Math

GROUP, RATE = 8, 3e-6
CUDA = torch.cuda.is_available()


def with_poise(args: argparse.Namespace) -> dict[str, Any]:
    """Train with poise: accuracy over the steps, seconds and peak memory."""
    result = poise.train(
        model=args.model, data=args.data, task="math", steps=args.steps, prompts=args.prompts, group=GROUP,
        seed=args.seed, run=f"{args.out}/run", checkpoint_every=0,
        rollout={"max_tokens": args.max_tokens}, optim={"lr": args.rate},
        lora={"rank": args.lora} if args.lora else None,
        evaluation={"every": args.steps // 6, "problems": args.problems, "samples": 1}, rollouts_every=0,
    )  # fmt: skip
    rows = result.curves
    rows = rows if isinstance(rows, list) else rows.to_dict("records")
    names = ("reward/accuracy", "rollout/length", "rollout/finished", "time/step", "time/rollout", "time/update")
    return {
        "before": result.summary["before"],
        "after": result.summary["after"],
        "curve": [_evaluation(row) for row in rows if row.get("eval/math/greedy", -1) >= 0],  # not if NaN
        "steps": [{name: row[name] for name in names} for row in rows],
        "train_s": sum(row["time/step"] for row in rows),
    }


def _evaluation(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name == "step" or name.startswith("eval/math/")}


def with_trl(args: argparse.Namespace) -> dict[str, Any]:
    """Train with TRL until the time is up, then save its model."""
    import transformers
    import trl
    from datasets import Dataset

    task = Math(args.data)
    problems = list(islice(task.problems("train", args.seed), args.steps * args.prompts))
    prompts = [[{"role": "user", "content": problem.prompt}] for problem in problems]
    answers = [problem.data["row"]["answer"] for problem in problems]
    steps: list[dict[str, float]] = []

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = _now()

        def on_step_end(self, _args: Any, _state: Any, control: Any, **__: Any) -> None:
            steps.append({"time/step": _now() - self.began})
            if sum(step["time/step"] for step in steps) >= args.seconds:
                control.should_training_stop = True

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if steps and "reward" in logs:
                kept = ("reward", "completions/mean_length", "completions/clipped_ratio")
                steps[-1] |= {name: logs[name] for name in kept if name in logs}

    engine: dict[str, Any] = {}
    if args.engine == "vllm":
        engine = {
            "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3,
            "vllm_max_model_length": 512 + args.max_tokens, "vllm_importance_sampling_correction": False,
        }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=args.model,
            reward_funcs=rewards.get("math"),
            args=trl.GRPOConfig(
                output_dir=folder, seed=args.seed, max_steps=args.steps, per_device_train_batch_size=args.micro,
                gradient_accumulation_steps=args.prompts * GROUP // args.micro, num_generations=GROUP,
                max_completion_length=args.max_tokens, **engine, shuffle_dataset=False, beta=0.0, loss_type="dapo",
                epsilon=0.2, epsilon_high=0.24, learning_rate=args.rate, lr_scheduler_type="constant",
                weight_decay=0.01, max_grad_norm=1.0, bf16=CUDA, use_cpu=not CUDA, gradient_checkpointing=False,
                disable_tqdm=True, logging_steps=1, save_strategy="no", report_to="none",
                model_init_kwargs={"dtype": "float32"},
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts, "answer": answers}),
            callbacks=[Watch()],
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        memory = _memory()  # before the evaluation
        model = Path(args.out) / "trl-model"
        trainer.model.to(torch.bfloat16).save_pretrained(model)
        trainer.processing_class.save_pretrained(model)
    print(f"TRL's model is in {model}: evaluate it in another process, since vLLM keeps its memory in this one")
    return {"steps": steps, "train_s": sum(step["time/step"] for step in steps), "model": model.name} | memory


def _now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def _memory() -> dict[str, float]:
    if not CUDA:
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "in_use_at_the_end_gib": (total - free) / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["poise", "trl"])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=60, help="for TRL the most")
    parser.add_argument("--prompts", type=int, default=64, help="problems of a step")
    parser.add_argument("--rate", type=float, default=RATE, help="learning rate")
    parser.add_argument("--lora", type=int, help="rank of an adapter (poise; otherwise all weights are trained)")
    parser.add_argument("--seconds", type=float, default=120, help="of TRL's training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--problems", type=int, default=500, help="held-out problems of an evaluation")
    parser.add_argument("--engine", default="vllm", choices=["vllm", "generate"], help="what TRL samples with")
    parser.add_argument("--micro", type=int, default=32, help="responses per pass of TRL's update")
    parser.add_argument("--out", default="runs/gsm8k", help="folder of the run, or of TRL's model")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    if args.lora and args.which == "trl":
        parser.error("--lora: only with poise")
    found = (with_poise if args.which == "poise" else with_trl)(args)
    whole = {"process_s": since_start()} | ({} if args.which == "trl" else _memory())
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "json")}
    settings |= {name: Path(settings[name]).name for name in ("model", "data")}
    write(args.json, {"which": args.which, "settings": settings} | found | whole
          | {"environment": environment("cuda" if CUDA else "cpu")})  # fmt: skip


if __name__ == "__main__":
    main()
