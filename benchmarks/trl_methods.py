"""What a regulator costs TRL with vLLM in its process ("colocate"): stock TRL and methods, step by step, on one GPU.

    python benchmarks/trl_methods.py --model Qwen/Qwen2.5-0.5B-Instruct --json trl-methods.json   # 5 runs of 40 steps
    python benchmarks/trl_methods.py --model FOLDER --data gsm8k_train.jsonl.gz --json trl-methods.json    # GSM8K
    python benchmarks/trl_methods.py --model FOLDER --arms stock nthr --modes token_truncate --steps 5
    python benchmarks/trl_methods.py --model FOLDER --device cpu --tiny        # whether it all runs

A run is examples/scale/trl_kk.py with trl-8gpu.yaml, made smaller (see ``settings``), on Knights & Knaves or, with
``--data``, on a file of questions and answers. A step is a generation batch with all updates on it, of which Lopti
needs twice as many; the first is left out of the medians. With ``--same-length`` no response ends early: then all runs
do the same work, but rewards mean little. ``--modes`` are TRL's corrections for vLLM's rounding: ``sequence_mask``, its
default, drops whole responses, ``token_truncate`` caps the ratio of each token. A run trains ``--steps`` steps with
each of them, one after the other. Every run is a process with a time limit of its own, and the figures are written
after each step: its seconds, all that TRL and poise have logged, and memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
import transformers
from measure import environment, in_processes, median, spread, write

from poise import rewards
from poise.integrations.demands import probe
from poise.regulators import parse
from poise.tasks.data import Math

ROOT = Path(__file__).parents[1]
ARMS = {
    "stock": "grpo", "ar": "ar(alpha=0.2)", "ar-lopti": "ar(alpha=0.3) | lopti(threshold=0.5)", "nthr": "nthr",
    "tr-grpo": "tr-grpo",
}  # fmt: skip
MODES = ("sequence_mask", "token_truncate")


def settings(args: argparse.Namespace, phases: int, folder: str) -> dict[str, Any]:
    """What is changed in trl-8gpu.yaml; 16 prompts × 8 responses, in one update for each phase."""
    responses, micro = (16, 8) if args.tiny else (128, 16)
    chosen = {
        "model_name_or_path": args.model, "output_dir": folder, "people": "2-3", "problems": 10 * responses,
        "max_steps": args.steps * phases * len(args.modes), "num_iterations": phases,
        "per_device_train_batch_size": micro, "gradient_accumulation_steps": responses // micro,
        "steps_per_generation": responses // micro,
        "max_completion_length": args.length, "temperature": 1.0, "beta": args.beta,
        "vllm_importance_sampling_mode": args.modes[0], "vllm_tensor_parallel_size": 1,
        "vllm_gpu_memory_utilization": args.memory, "vllm_max_model_length": args.length + 512,
        "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    if args.device == "cpu":
        chosen |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    return chosen


class Clock(transformers.TrainerCallback):  # type: ignore[misc]
    """The time of each generation batch; the next correction after ``steps`` batches; figures as they come."""

    def __init__(self, trainer: Any, phases: int, args: argparse.Namespace) -> None:
        self.trainer, self.phases, self.args = trainer, phases, args
        self.found: dict[str, dict[str, Any]] = {mode: {"seconds": [], "logged": []} for mode in args.modes}
        self.begin = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.begin = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:  # noqa: ARG002
        """Keep what TRL and poise say of an optimizer step."""
        if "loss" in logs:
            self.mode(state.global_step)["logged"].append(logs)
            self.write()

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """After all updates on a generation batch, read the clock."""
        if state.global_step % self.phases:
            return
        before = self.begin
        self.on_train_begin()
        self.mode(state.global_step)["seconds"].append(self.begin - before)
        if state.global_step < args.max_steps:
            of = self.args.modes[state.global_step // (self.args.steps * self.phases)]
            self.trainer.vllm_importance_sampling_mode = of  # of the next batch

    def mode(self, step: int) -> dict[str, Any]:
        """The figures of the correction that an optimizer step had."""
        return self.found[self.args.modes[(step - 1) // (self.args.steps * self.phases)]]

    def write(self) -> None:
        """Write all figures so far."""
        regulator = None if self.args.arm == "stock" else ARMS[self.args.arm]
        whole: dict[str, Any] = {"regulator": regulator, "phases": self.phases, "modes": self.found}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            whole |= {"peak_bytes": torch.cuda.max_memory_allocated(), "device_bytes": total - free}
        write(self.args.json, whole, quiet=True)


def stock(regulator: str, correct: Any, **given: Any) -> Any:  # noqa: ARG001
    """TRL's own trainer, where the script asks for poise's."""
    from trl import GRPOTrainer

    return GRPOTrainer(**given)


def on_questions(own: Any, config: Any, model: Any, data: str) -> Any:
    """What trl_kk.build does, with questions and answers from a file."""
    import trl_kk
    from datasets import Dataset

    problems = list(islice(Math(data).problems("train", seed=0), own.problems))
    prompts = [[{"role": "user", "content": problem.prompt}] for problem in problems]
    made = trl_kk.RegulatedGRPOTrainer  # type: ignore[attr-defined]  # poise's or TRL's
    return made(
        reward_funcs=rewards.get("math"), args=config, regulator=own.regulator, correct=lambda found: found[:, 0] >= 1,
        train_dataset=Dataset.from_dict({"prompt": prompts, "answer": [p.data["row"]["answer"] for p in problems]}),
        **trl_kk.loading(config, model),
    )  # fmt: skip


def child(args: argparse.Namespace) -> None:
    """One run; its figures."""
    sys.path.insert(0, str(ROOT / "examples/scale"))
    import trl_kk

    phases = len(probe(parse(ARMS[args.arm])).phases)
    with tempfile.TemporaryDirectory() as folder:
        chosen = {"regulator": ARMS[args.arm], **settings(args, phases, folder)}
        words = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
        own, config, model = trl_kk.parser().parse_args_and_config(
            ["--config", str(ROOT / "examples/scale/trl-8gpu.yaml"), *words]
        )
        if args.same_length:
            config.generation_kwargs = {"ignore_eos": True}
        if args.arm == "stock":
            trl_kk.RegulatedGRPOTrainer = stock  # type: ignore[attr-defined, assignment]
        build = partial(on_questions, data=args.data) if args.data else trl_kk.build
        trainer = build(own, config, model)
        trainer.add_callback(Clock(trainer, phases, args))
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        trainer.train()


def show(results: dict[str, Any]) -> None:
    """Medians beside those of stock TRL with the same correction, and what TRL's correction dropped."""
    for name, run in results.items():
        if run["code"] != 0:
            print(f"{name}: not finished ({run['code']})")
        for mode, found in run.get("modes", {}).items():
            if not found["seconds"]:
                continue
            seconds = found["seconds"][1:] or found["seconds"]
            beside = results.get("stock", {}).get("modes", {}).get(mode, {}).get("seconds")
            ratio = f", {median(seconds) / median(beside[1:] or beside):.2f} × stock" if beside else ""
            dropped = [row["reg/dropped_share"] for row in found["logged"] if "reg/dropped_share" in row]
            share = f", {sum(dropped) / len(dropped):.1%} of tokens dropped" if dropped else ""
            norms = [float(row["grad_norm"]) for row in found["logged"] if "grad_norm" in row]
            peak = f", peak {run['device_bytes'] / 2**30:.0f} GiB" if "device_bytes" in run else ""
            print(f"{name:9s} {mode:16s} {spread(seconds, 1)} s, gradient {spread(norms, 1)}{ratio}{share}{peak}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a name on the hub or a folder")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--data", help="a file with the columns question and answer, such as GSM8K's")
    parser.add_argument("--steps", type=int, default=20, help="generation batches with each correction")
    parser.add_argument("--length", type=int, default=256, help="tokens of a response at most")
    parser.add_argument("--same-length", action="store_true", help="no response ends early")
    parser.add_argument("--beta", type=float, default=0.0, help="of the KL term, whose tokens tr-grpo weights")
    parser.add_argument("--memory", type=float, default=0.3, help="vLLM's share of the device's memory")
    parser.add_argument("--limit", type=float, default=240, help="seconds of a run's process")
    parser.add_argument("--tiny", action="store_true", help="3 steps of 16 responses of 16 tokens")
    parser.add_argument("--json", type=Path, help="write the figures here, after every run")
    parser.add_argument("--arm", choices=list(ARMS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.length = 3, 16
    if args.arm:
        child(args)
        return
    words = [__file__, "--model", args.model, "--device", args.device, "--steps", args.steps, "--length", args.length]
    words += ["--beta", args.beta, "--memory", args.memory, *(["--tiny"] if args.tiny else [])]
    words += (["--same-length"] if args.same_length else []) + (["--data", args.data] if args.data else [])
    commands = {arm: [*map(str, words), "--modes", *args.modes, "--arm", arm] for arm in args.arms}
    head = {**environment(args.device), "arguments": {k: str(v) for k, v in vars(args).items() if k != "json"}}
    show(in_processes(commands, dict.fromkeys(commands, args.limit), args.json, head))


if __name__ == "__main__":
    main()
