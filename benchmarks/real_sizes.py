"""What a step takes at the sizes that people train, beside the forecast: seconds and peak memory of each part.

    python benchmarks/real_sizes.py --json out.json                       # all cases, on CUDA
    python benchmarks/real_sizes.py --json out.json --cases 3B 7B-lora --steps 2
    python benchmarks/real_sizes.py --tiny --json out.json                # a miniature of every case, on a CPU

A case is a shipped recipe with random weights of a shape, compiled as a long run would be; responses never end early,
and all have an advantage. Each runs in a process of its own, and the JSON is written after each. The first step is a
warm-up. "scoring" is all between sampling and the update: log-probabilities and the regulator. Utilisation is (6·N·T,
with LoRA 4·N·T, plus attention) FLOP / seconds of the update / 989 TFLOP/s, for N parameters without the input's
embedding and T tokens that run through the model, each prompt once for its group.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is here

import torch
import transformers
from measure import environment, write

from poise import trainer as loop
from poise.batch import TokenBatch
from poise.models.policy import EMBEDDED, Policy
from poise.runs.folder import RunFolder
from poise.sampling.native.graphs import CACHE_SHARE
from poise.tasks import Problem, Score, Split, Task
from poise.trainer import Trainer
from poise.training.building import build
from poise.training.config.schema import Config, load
from poise.training.memory import footprint, repeatable
from poise.training.steps import State

PEAK = 989e12  # bfloat16 FLOP per second of an H100 or H200
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "tie_word_embeddings")  # fmt: skip
SHAPES = {
    "3B": (151936, 2048, 11008, 36, 16, 2, True),
    "7B": (152064, 3584, 18944, 28, 28, 4, False),
    "tiny": (1024, 64, 128, 2, 4, 2, True),
}
CASES: dict[str, tuple[str, str, list[str]]] = {  # shape, recipe, settings
    "3B": ("3B", "grpo", ["rollout.max_tokens=1024"]),
    "3B-nthr": ("3B", "nthr", ["rollout.max_tokens=1024"]),
    "7B-lora": ("7B", "grpo", ["rollout.max_tokens=1024", "lora.rank=16"]),
    "3B-24gb": ("3B", "grpo-24gb", []),
    "3B-eager": ("3B", "grpo", ["rollout.max_tokens=1024", "compile=false"]),
    "3B-deterministic": ("3B", "grpo", ["rollout.max_tokens=1024", "deterministic=true"]),
    "3B-4096": ("3B", "grpo", []),
}
LIMITS = {"3B-24gb": 24e9}  # bytes of the device that a case may use
MINIATURE = ["prompts=2", "group=4", "rollout.max_tokens=16", "optim.mini_batch=4", "optim.average_over=0",
             "device=cpu"]  # fmt: skip


class Spread:
    """A task whose responses differ within each group: every other one counts as correct."""

    def __init__(self, task: Task) -> None:
        self.task, self.name, self.scored = task, task.name, 0

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Those of the task."""
        return self.task.problems(split, seed)

    def score(self, problem: Problem, text: str) -> Score:  # noqa: ARG002
        """Without a look at the text, which is noise."""
        self.scored += 1
        return Score(float(self.scored % 2), self.scored % 2 == 1)


class Parts:
    """Seconds and peak memory of the parts of a step."""

    def __init__(self, device: str) -> None:
        self.cuda, self.found = device == "cuda", dict[str, dict[str, float]]()

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The function, measured as a part of that name."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            made = work(*args, **kwargs)
            if self.cuda:
                torch.cuda.synchronize()
            part = self.found.setdefault(name, {"seconds": 0.0, "peak_bytes": 0.0})
            part["seconds"] += time.perf_counter() - start
            part["peak_bytes"] = max(part["peak_bytes"], torch.cuda.max_memory_allocated() if self.cuda else 0)
            return made

        return run


def model_folder(shape: str, folder: Path, device: str) -> Path:
    """Random weights of this shape and the embedded model's tokenizer, as a transformers folder."""
    sizes = dict(zip(SIZES, SHAPES[shape], strict=True))
    config = transformers.Qwen2Config(**sizes, max_position_embeddings=32768, eos_token_id=None, bos_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(folder)
    return folder


def needed_flop(policy: Policy, batch: TokenBatch, *, lora: bool) -> float:
    """FLOP that the gradient of this batch needs, without what is computed twice."""
    config, extents = policy.base.config, batch.extents or ()
    looked_up = 0 if config.tie_word_embeddings else policy.base.get_input_embeddings().weight.numel()
    own = sum(p.numel() for name, p in policy.base.named_parameters() if "lora_" not in name) - looked_up
    prompts = {extent.prompt for extent in extents}
    tokens = sum(len(prompt.tokens) for prompt in prompts) + sum(extent.length for extent in extents)
    pairs = sum(len(prompt.tokens) ** 2 / 2 for prompt in prompts)
    pairs += sum(e.length**2 / 2 + e.length * len(e.prompt.tokens) for e in extents)
    return float((4 if lora else 6) * own * tokens) + 3 * 4 * int(config.num_hidden_layers * config.hidden_size) * pairs


def prepared(config: Config) -> Trainer:
    """The trainer of a run whose responses never end early."""
    folder = RunFolder.create(config.run, config.model_dump(mode="json"))
    trainer = Trainer(config, folder, build(config, folder, task=Spread(config.task.build())), quiet=True)
    trainer.policy.model.generation_config.eos_token_id = None
    trainer.policy.tokenizer.eos_token = None
    return trainer


def forecast(config: Config, trainer: Trainer) -> dict[str, float]:
    """What was expected of the memory, with the passes that were chosen before the first."""
    of, policy = footprint(config, config.model, passes=True), trainer.policy
    if of is None or of.activations is None or of.rows is None:
        return {}
    tokens, checkpointed = policy.budget(config.optim.micro_tokens), policy.checkpointing
    cache = of.rows.count * of.rows.longest * of.activations.cache
    room = CACHE_SHARE * of.room(policy.device) if policy.device.type == "cuda" else cache
    return {
        "held_bytes": of.total, "pass_tokens": tokens, "checkpointed": checkpointed,
        "update_bytes": of.total + of.activations.peak(tokens, checkpointed=checkpointed),
        "sampling_bytes": of.total + min(cache, room), "cache_bytes": cache,
    }  # fmt: skip


def measured(case: str, model: Path, steps: int, *, tiny: bool) -> dict[str, Any]:
    """The figures of a case: its forecast, and every step after the warm-up."""
    _, recipe, settings = CASES[case]
    device = "cpu" if tiny else "cuda"
    compiled = [] if tiny or "deterministic=true" in settings else ["compile=true"]  # as 390 steps would be
    if not tiny and case in LIMITS:
        torch.cuda.set_per_process_memory_fraction(LIMITS[case] / torch.cuda.get_device_properties(0).total_memory)
    with tempfile.TemporaryDirectory() as place:
        config = load(
            recipe,
            [
                *compiled, *settings, *(MINIATURE if tiny else [f"device={device}"]), f"model={model}",
                f"run={place}/run", f"steps={steps + 1}", "rollouts_every=0", "evaluation=off",
            ],
        )  # fmt: skip
        with repeatable(config):
            trainer, parts = prepared(config), Parts(device)
            expected = forecast(config, trainer)
            trainer.make_batch = parts.timed("scoring", trainer.make_batch)
            for function, name in (("collect", "sampling"), ("phases_of", "scoring"), ("update", "update")):
                setattr(loop, function, parts.timed(name, getattr(loop, function)))
            state, each = State(), []
            for _ in range(steps + 1):
                parts.found = {}
                start = time.perf_counter()
                result = trainer.step(state)
                assert result.batch is not None
                state, flop = result.state, needed_flop(trainer.policy, result.batch, lora=bool(config.lora))
                each.append({
                    **parts.found, "seconds": time.perf_counter() - start, "tokens": int(result.batch.mask.sum()),
                    "most_tokens": trainer.policy.most_tokens, "checkpointed": trainer.policy.checkpointing,
                    "utilisation": flop * len(result.phases) / parts.found["update"]["seconds"] / PEAK,
                })  # fmt: skip
    return {
        "recipe": recipe, "settings": settings, "forecast": expected, "warm_up": each[0], "steps": each[1:],
        "fused_step": getattr(trainer.sampler.engine, "step", None) is not None, "notes": trainer.notes,
    }  # fmt: skip


def show(case: str, found: dict[str, Any]) -> None:
    """A line for each part, beside the forecast."""
    if "error" in found:
        print(f"{case}: {found['error'][-2000:]}", flush=True)
        return
    seconds, utilisation = (statistics.median(step[k] for step in found["steps"]) for k in ("seconds", "utilisation"))
    print(f"{case}: {seconds:.2f} s a step, utilisation of the update {utilisation:.1%}")
    for part in ("sampling", "scoring", "update"):
        seconds = statistics.median(step[part]["seconds"] for step in found["steps"])
        peak = max(step[part]["peak_bytes"] for step in [found["warm_up"], *found["steps"]])
        expected = found["forecast"].get(f"{part}_bytes")
        beside = f" (forecast {expected / 2**30:.1f})" if expected else ""
        print(f"  {part:9s} {seconds:8.2f} s, peak {peak / 2**30:.1f} GiB{beside}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each case, after one warm-up")
    parser.add_argument("--limit", type=float, default=420, help="seconds of a case, its start included")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a miniature of the cases on a CPU")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # a case, the model's folder, a file: in its process
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if args.one:
        case, model, out = args.one
        write(Path(out), measured(case, Path(model), args.steps, tiny=args.tiny), quiet=True)
        return
    device = "cpu" if args.tiny else "cuda"
    results: dict[str, Any] = {**environment(device), "cases": {}}
    with tempfile.TemporaryDirectory() as place:
        for case in args.cases:
            shape = "tiny" if args.tiny else CASES[case][0]
            model, out = Path(place) / shape, Path(place) / f"{case}.json"
            if not model.exists():
                model_folder(shape, model, device)
                torch.cuda.empty_cache()  # does nothing where there is no CUDA
            command = [sys.executable, __file__, "--one", case, str(model), str(out), "--steps", str(args.steps)]
            command += ["--tiny"] * args.tiny
            try:
                done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=args.limit)
                found = json.loads(out.read_text()) if done.returncode == 0 else {"error": done.stderr}
            except subprocess.TimeoutExpired:
                found = {"error": f"it took more than {args.limit:g} s"}
            results["cases"][case] = found
            write(args.json, results, quiet=True)
            show(case, found)


if __name__ == "__main__":
    main()
