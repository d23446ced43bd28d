"""What a step takes at the sizes that people train, beside the forecast: seconds and peak memory of each part.

    python benchmarks/real_sizes.py --json out.json --cases 3B 3B-trl 7B-lora 7B-lora-trl --steps 1
    python benchmarks/real_sizes.py --json out.json --cases 3B-eager 3B-deterministic --prompts 16
    python benchmarks/real_sizes.py --json out.json --cases grpo ar-lopti nthr rltr --steps 1 --ends 400
    python benchmarks/real_sizes.py --tiny --trl-engine generate --json out.json       # every case small, on a CPU

A case is a shipped recipe with random weights of a shape, compiled as a long run would be. Responses never end early,
and all have an advantage. With ``--ends N``, 1/N of the vocabulary ends a response, so the mean length is about N.
The cases with the name of a recipe are that recipe as written, with up to 4,096 tokens; those with a limit in their
name may use that much memory. Cases ``…-trl`` train the same recipe with TRL and vLLM (``real_sizes_trl.py``).

Each case is a process with a time limit, and its figures are written after each step. The first step is a warm-up.
"scoring" is all between sampling and the update: log-probabilities and the regulator. Utilisation is (6·N·T, with LoRA
4·N·T, plus attention) FLOP / seconds of the update / 989 TFLOP/s, for N parameters without the input's embedding and T
tokens that run through the model, each prompt once for its group. The floor of sampling reads the weights at each of
its decoding steps, and the keys and values of each response, at 4.8 TB/s.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is here

import torch
import transformers
from measure import environment, in_processes, write

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
MEMORY_SPEED = 4.8e12  # bytes per second of an H200
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "tie_word_embeddings")  # fmt: skip
SHAPES = {
    "3B": (151936, 2048, 11008, 36, 16, 2, True),
    "7B": (152064, 3584, 18944, 28, 28, 4, False),
    "tiny": (1024, 64, 128, 2, 2, 1, True),  # vLLM on a CPU takes heads of 32
}
LONG = ("rollout.max_tokens=1024",)
SMALL = ("prompts=8",)


@dataclass(frozen=True)
class Case:
    """A recipe on a shape. ``most``: bytes of the device that it may use; ``trl``: with TRL instead of poise."""

    shape: str
    recipe: str
    settings: tuple[str, ...] = ()
    most: float | None = None
    trl: bool = False
    four_bits: bool = False


CASES = {
    "3B": Case("3B", "grpo", LONG),
    "3B-trl": Case("3B", "grpo", LONG, trl=True),
    "7B-lora": Case("7B", "grpo", (*LONG, "lora.rank=16", "optim.micro_tokens=8192")),  # by itself: 16,384, 50 GB more
    "7B-lora-trl": Case("7B", "grpo", (*LONG, "lora.rank=16"), trl=True),
    "grpo": Case("3B", "grpo"),
    "ar-lopti": Case("3B", "ar-lopti"),
    "nthr": Case("3B", "nthr"),
    "rltr": Case("3B", "rltr"),
    "3B-nthr": Case("3B", "nthr", LONG),
    "3B-24gb": Case("3B", "grpo-24gb", most=24e9),
    "7B-lora-24gb": Case("7B", "grpo-24gb", (*SMALL, "rollout.max_tokens=512"), most=24e9),
    "7B-lora-80gb": Case("7B", "grpo", (*SMALL, *LONG, "lora.rank=16"), most=80e9),
    "3B-qlora-24gb": Case("3B", "grpo-24gb", SMALL, most=24e9, four_bits=True),
    "7B-eight-bit": Case("7B", "grpo", (*SMALL, *LONG, "optim.mini_batch=0", "optim.eight_bit=true")),
    "3B-eager": Case("3B", "grpo", (*LONG, "compile=false")),
    "3B-deterministic": Case("3B", "grpo", (*LONG, "compile=false", "deterministic=true")),
    "3B-deterministic-compiled": Case("3B", "grpo", (*LONG, "deterministic=true")),
}
LIMIT = 300.0  # seconds of a case, its start included
LIMITS = {"7B-lora": 420.0, "7B-lora-trl": 560.0, "3B-trl": 420.0}
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


def make_folder(shape: str, folder: Path, device: str) -> None:
    """Random weights of this shape and the embedded model's tokenizer, as a transformers folder."""
    sizes = dict(zip(SIZES, SHAPES[shape], strict=True))
    config = transformers.Qwen2Config(**sizes, max_position_embeddings=32768, eos_token_id=None, bos_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(folder)


def quantise(source: Path, folder: Path, device: str) -> None:
    """The same model with 4-bit weights (bitsandbytes)."""
    kind = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    load = transformers.AutoModelForCausalLM.from_pretrained
    load(source, quantization_config=kind, device_map=device, dtype=torch.bfloat16).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(folder)


def model_folder(shape: str, place: Path, device: str, *, four_bits: bool = False) -> Path:
    """The folder of a model. It is made in another process, so that this one's memory is that of the case."""
    folder = place / (f"{shape}-4bit" if four_bits else shape)
    if not (folder / "done").exists():
        source = [str(model_folder(shape, place, device))] if four_bits else []
        subprocess.run([sys.executable, __file__, "--make", shape, str(folder), device, *source], check=True)
        (folder / "done").touch()
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


def sampling_floor(policy: Policy, batch: TokenBatch) -> float:
    """Seconds that the memory needs at least to sample this batch, all responses at once."""
    config, extents = policy.base.config, batch.extents or ()
    width = config.hidden_size // config.num_attention_heads
    token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * width  # bytes of keys and values
    looked_up = 0 if config.tie_word_embeddings else policy.base.get_input_embeddings().weight.numel()
    weights = 2 * (sum(p.numel() for name, p in policy.base.named_parameters() if "lora_" not in name) - looked_up)
    read = sum(e.length * len(e.prompt.tokens) + e.length**2 / 2 for e in extents)
    return float(weights * max(extent.length for extent in extents) + token * read) / MEMORY_SPEED


def enders(vocabulary: int, mean: float) -> list[int]:
    """As many tokens as end a response of random weights after ``mean`` tokens."""
    return sorted(random.Random(0).sample(range(vocabulary), max(1, round(vocabulary / mean))))


def prepared(config: Config, ends: float | None) -> Trainer:
    """The trainer of a run whose responses never end early, or after about ``ends`` tokens."""
    folder = RunFolder.create(config.run, config.model_dump(mode="json"))
    trainer = Trainer(config, folder, build(config, folder, task=Spread(config.task.build())), quiet=True)
    size = trainer.policy.head().vocabulary
    trainer.policy.model.generation_config.eos_token_id = enders(size, ends) if ends else None
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


def settings_of(case: Case, model: Path, place: str, args: argparse.Namespace) -> list[str]:
    """The settings of a case, beyond those of its recipe."""
    ours = set(case.settings) & {"compile=false"} or {"compile=true"}  # as 390 steps would be
    size = [f"prompts={args.prompts}"] if args.prompts else []
    where = ["compile=false", *MINIATURE] if args.tiny else [*ours, "device=cuda"]
    return [
        *case.settings, *size, *where, f"model={model}", f"run={place}/run", f"steps={args.steps + 1}",
        "rollouts_every=0", "evaluation=off",
    ]  # fmt: skip


def measured(case: Case, model: Path, args: argparse.Namespace) -> None:
    """Write the figures of a case, its forecast among them, after every step."""
    if not args.tiny and case.most is not None:
        torch.cuda.set_per_process_memory_fraction(case.most / torch.cuda.get_device_properties(0).total_memory)
    with tempfile.TemporaryDirectory() as place:
        config = load(case.recipe, settings_of(case, model, place, args))
        found: dict[str, Any] = {"recipe": case.recipe, "settings": case.settings, "prompts": config.prompts}
        if case.trl:
            from real_sizes_trl import train

            train(config, Spread(config.task.build()), args, lambda steps: write(args.json, found | steps, quiet=True))
            return
        with repeatable(config):
            trainer, parts = prepared(config, args.ends), Parts("cpu" if args.tiny else "cuda")
            found |= {
                "forecast": forecast(config, trainer), "notes": trainer.notes, "most": case.most,
                "fused_step": getattr(trainer.sampler.engine, "step", None) is not None,
            }  # fmt: skip
            write(args.json, found, quiet=True)
            trainer.make_batch = parts.timed("scoring", trainer.make_batch)
            for function, name in (("collect", "sampling"), ("phases_of", "scoring"), ("update", "update")):
                setattr(loop, function, parts.timed(name, getattr(loop, function)))
            state, each = State(), list[dict[str, Any]]()
            for _ in range(args.steps + 1):
                state, row = step_of(trainer, state, parts)
                each.append(row)
                write(args.json, found | {"warm_up": each[0], "steps": each[1:]}, quiet=True)


def step_of(trainer: Trainer, state: State, parts: Parts) -> tuple[State, dict[str, Any]]:
    """One step: the next state, and its figures."""
    parts.found = {}
    start = time.perf_counter()
    result = trainer.step(state)
    seconds = time.perf_counter() - start
    policy, batch = trainer.policy, result.batch
    assert batch is not None
    flop = needed_flop(policy, batch, lora=bool(trainer.config.lora)) * len(result.phases)
    row = {
        **parts.found, "seconds": seconds, "tokens": int(batch.mask.sum()), "longest": int(batch.lengths.max()),
        "most_tokens": policy.most_tokens, "checkpointed": policy.checkpointing,
        "sampling_floor": sampling_floor(policy, batch), "phases": len(result.phases),
        "utilisation": flop / parts.found["update"]["seconds"] / PEAK,
    }  # fmt: skip
    return result.state, row


def show(case: str, found: dict[str, Any]) -> None:
    """A line for each part, beside the forecast."""
    steps = found.get("steps") or ([found["warm_up"]] if "warm_up" in found else [])
    if found["code"] != 0 or not steps:
        print(f"{case}: not finished ({found['code']}), {len(steps)} steps")
    if not steps:
        return
    seconds = [step["seconds"] for step in steps]
    print(f"{case}: {statistics.median(seconds):.2f} s a step ({min(seconds):.2f}–{max(seconds):.2f})")
    for part in ("sampling", "scoring", "update"):
        seconds = statistics.median(step[part]["seconds"] for step in steps)
        peak = max(step[part]["peak_bytes"] for step in [found["warm_up"], *steps])
        expected = found.get("forecast", {}).get(f"{part}_bytes")
        beside = f" (forecast {expected / 2**30:.1f})" if expected else ""
        print(f"  {part:9s} {seconds:8.2f} s, peak {peak / 2**30:.1f} GiB{beside}")
    if "utilisation" in steps[-1]:
        floor, used = (statistics.median(step[name] for step in steps) for name in ("sampling_floor", "utilisation"))
        print(f"  floor of sampling {floor:.2f} s, utilisation of the update {used:.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each case, after one warm-up")
    parser.add_argument("--prompts", type=int, help="of a step, instead of the recipe's 64")
    parser.add_argument("--ends", type=float, help="tokens after which a response ends, on average (never)")
    parser.add_argument("--limit", type=float, help=f"seconds of a case, its start included ({LIMIT:g}, or {LIMITS})")
    parser.add_argument("--trl-engine", default="vllm", choices=["vllm", "generate"], help="what TRL samples with")
    parser.add_argument("--trl-micro", type=int, default=2, help="responses per pass of TRL's update")
    parser.add_argument("--trl-checkpointing", action="store_true", help="TRL computes activations twice")
    parser.add_argument("--json", type=Path, help="write the figures here, after every case")
    parser.add_argument("--models", type=Path, help="keep the models' folders here")
    parser.add_argument("--tiny", action="store_true", help="a miniature of the cases on a CPU")
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--make", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = "cpu" if args.tiny else "cuda"
    if args.make:
        shape, folder, device, *source = args.make
        if source:
            quantise(Path(source[0]), Path(folder), device)
        else:
            make_folder(shape, Path(folder), device)
        return
    if args.case:
        case = CASES[args.case]
        shape = "tiny" if args.tiny else case.shape
        measured(case, model_folder(shape, args.models, device, four_bits=case.four_bits), args)
        return
    with tempfile.TemporaryDirectory() as place:
        words = [__file__, "--models", str(args.models or place), "--steps", str(args.steps)]
        words += ["--trl-engine", args.trl_engine, "--trl-micro", str(args.trl_micro)]
        words += ["--tiny"] * args.tiny + ["--trl-checkpointing"] * args.trl_checkpointing
        words += [word for key in ("prompts", "ends") if (value := getattr(args, key)) is not None
                  for word in (f"--{key}", str(value))]  # fmt: skip
        commands = {name: [*words, "--case", name] for name in args.cases}
        limits = {name: args.limit or LIMITS.get(name, LIMIT) for name in args.cases}
        head = environment(device)
        head["arguments"] = {k: str(v) for k, v in vars(args).items() if k not in ("json", "models")}
        for name, found in in_processes(commands, limits, args.json, head).items():
            show(name, found)


if __name__ == "__main__":
    main()
