"""What a regulator costs TRL with vLLM in its process ("colocate"): stock TRL and methods, step by step, on one GPU.

    python benchmarks/trl_methods.py --model Qwen/Qwen2.5-0.5B-Instruct --json trl-methods.json   # 10 runs of 20 steps
    python benchmarks/trl_methods.py --model FOLDER --arms stock nthr --modes token_truncate --steps 5
    python benchmarks/trl_methods.py --model FOLDER --device cpu --tiny        # whether it all runs

A run is examples/scale/trl_kk.py with trl-8gpu.yaml, made smaller (see ``settings``). A step is a generation batch
with all updates on it, of which Lopti needs twice as many; the first is left out of the medians. With ``--same-length``
no response ends early: then all runs do the same work, but rewards mean little. ``--modes`` are TRL's corrections for
vLLM's rounding: ``sequence_mask``, its default, drops whole responses, ``token_truncate`` caps the ratio of each token.
Every run is a process with a time limit of its own, and the figures are written after each: seconds of every step, all
that TRL and poise have logged, and memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
import transformers
from measure import environment, in_processes, median, spread, write

from poise.integrations.demands import probe
from poise.regulators import parse

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
        "max_steps": args.steps * phases, "num_iterations": phases, "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": responses // micro, "steps_per_generation": responses // micro,
        "max_completion_length": args.length, "temperature": 1.0, "beta": args.beta,
        "vllm_importance_sampling_mode": args.mode, "vllm_tensor_parallel_size": 1,
        "vllm_gpu_memory_utilization": args.memory, "vllm_max_model_length": args.length + 512,
        "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    if args.device == "cpu":
        chosen |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    return chosen


class Clock(transformers.TrainerCallback):  # type: ignore[misc]
    """The time at the start of training and after each optimizer step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self.on_step_end()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Wait for the device, and read the clock."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def stock(regulator: str, correct: Any, **given: Any) -> Any:  # noqa: ARG001
    """TRL's own trainer, where the script asks for poise's."""
    from trl import GRPOTrainer

    return GRPOTrainer(**given)


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
        trainer, clock = trl_kk.build(own, config, model), Clock()
        trainer.add_callback(clock)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    ends = clock.times[::phases]
    found: dict[str, Any] = {
        "regulator": None if args.arm == "stock" else ARMS[args.arm], "mode": args.mode, "phases": phases,
        "seconds": [end - begin for begin, end in pairwise(ends)],
        "logged": trainer.state.log_history[:-1],
    }  # fmt: skip
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found |= {"peak_bytes": torch.cuda.max_memory_allocated(), "device_bytes": total - free}
    write(args.json, found, quiet=True)


def show(results: dict[str, Any]) -> None:
    """Medians beside those of stock TRL with the same correction, and what TRL's correction dropped."""
    for name, found in results.items():
        if "seconds" not in found:
            print(f"{name}: not finished ({found['code']})")
            continue
        seconds = found["seconds"][1:] or found["seconds"]
        beside = results.get(f"stock-{found['mode']}", {}).get("seconds")
        ratio = f", {median(seconds) / median(beside[1:] or beside):.2f} × stock" if beside else ""
        dropped = [row["reg/dropped_share"] for row in found["logged"] if "reg/dropped_share" in row]
        share = f", {sum(dropped) / len(dropped):.1%} of tokens dropped" if dropped else ""
        norms = [float(row["grad_norm"]) for row in found["logged"] if "grad_norm" in row]
        peak = f", peak {found['device_bytes'] / 2**30:.0f} GiB" if "device_bytes" in found else ""
        print(f"{name:24s} {spread(seconds, 1)} s, gradient {spread(norms, 1)}{ratio}{share}{peak}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a name on the hub or a folder")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, default=20, help="generation batches of a run")
    parser.add_argument("--length", type=int, default=256, help="tokens of a response at most")
    parser.add_argument("--same-length", action="store_true", help="no response ends early")
    parser.add_argument("--beta", type=float, default=0.0, help="of the KL term, whose tokens tr-grpo weights")
    parser.add_argument("--memory", type=float, default=0.3, help="vLLM's share of the device's memory")
    parser.add_argument("--limit", type=float, default=240, help="seconds of a run's process")
    parser.add_argument("--tiny", action="store_true", help="3 steps of 16 responses of 16 tokens")
    parser.add_argument("--json", type=Path, help="write the figures here, after every run")
    parser.add_argument("--arm", choices=list(ARMS), help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.length = 3, 16
    if args.arm:
        child(args)
        return
    words = [__file__, "--model", args.model, "--device", args.device, "--steps", args.steps, "--length", args.length]
    words += ["--beta", args.beta, "--memory", args.memory, *(["--tiny"] if args.tiny else [])]
    words += ["--same-length"] if args.same_length else []
    commands = {
        f"{arm}-{mode}": [*map(str, words), "--arm", arm, "--mode", mode] for mode in args.modes for arm in args.arms
    }
    head = {**environment(args.device), "arguments": {k: str(v) for k, v in vars(args).items() if k != "json"}}
    show(in_processes(commands, dict.fromkeys(commands, args.limit), args.json, head))


if __name__ == "__main__":
    main()
