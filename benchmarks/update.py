"""The update alone, poise against TRL: the same responses of very uneven length, the same model, one optimizer step.

    pip install -c constraints.txt -e '.[train,bench]'
    python benchmarks/update.py --json update.json                    # CUDA
    python benchmarks/update.py --growth --json growth.json           # poise alone: by response length and model size
    python benchmarks/update.py --device cpu                          # the embedded model's shape

Models are Llamas of the named shapes with random weights: what is measured does not depend on them. Both compute in
bfloat16 with float32 weights for the optimizer on CUDA, in float32 on a CPU, without gradient checkpointing and KL, and
clip, normalise and step alike. TRL's update is its own ``_compute_loss``, ``backward`` and fused AdamW, at its fastest
number of responses per pass of those tried; poise's is ``training.update``. Utilisation counts the FLOP that poise
needs, each prompt once for its group and the head for response tokens only, against 989 TFLOP/s (H200, dense bfloat16).
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from measure import environment, extra_memory, in_turns, median, spread, write
from transformers import LlamaConfig, LlamaForCausalLM

from poise import TokenBatch, regulators
from poise.batch import Prompt, padded_batch
from poise.models.master_weights import MasterWeights
from poise.models.policy import EMBEDDED, Policy
from poise.objective import Settings
from poise.training.update import UpdatePlan, update

PEAK = 989e12  # FLOP/s
SHAPES = {  # hidden, layers, heads, key heads, intermediate, vocabulary
    "1M": (160, 4, 5, 5, 480, 796),
    "14M": (256, 8, 4, 2, 768, 32000),
    "135M": (576, 30, 9, 3, 1536, 49152),
    "360M": (960, 32, 15, 5, 2560, 49152),
    "1.1B": (2048, 16, 32, 8, 8192, 49152),
    "1.5B": (1536, 28, 12, 2, 8960, 151936),
    "1.7B": (2048, 24, 32, 32, 8192, 49152),
    "3B": (2048, 36, 16, 2, 11008, 151936),
}
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
BY_LENGTH = ("1M", "135M", "1.1B")
SETTINGS = Settings(clip_low=0.2, clip_high=0.2, dual_clip=None)


def model_of(shape: str, device: str, dtype: torch.dtype) -> Any:
    width, layers, heads, key_heads, middle, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=key_heads,
        intermediate_size=middle, vocab_size=vocabulary, max_position_embeddings=16384, tie_word_embeddings=True,
        attn_implementation="sdpa", eos_token_id=0, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype)


def responses(shape: str, device: str, prompts: int, group: int, prompt: int, lengths: Sequence[int]) -> TokenBatch:
    """Random tokens."""
    generator = torch.Generator().manual_seed(0)
    vocabulary, count = SHAPES[shape][-1], prompts * group
    texts = torch.randint(1, vocabulary, (prompts, prompt), generator=generator).tolist()
    wide = max(lengths)
    tokens = torch.randint(1, vocabulary, (count, wide), generator=generator)
    rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    logp = torch.full((count, wide), -10.0, device=device)
    asked = [Prompt(tuple(texts[i // group])) for i in range(count)]
    advantages = torch.linspace(-1, 1, count, device=device) + 0.01
    return padded_batch(asked, rows, torch.device(device), old_logp=logp, entropy=logp.abs(), advantages=advantages)


def uneven(count: int, longest: int) -> list[int]:
    """Lengths as training has them: most responses short, a few as long as allowed; on average two fifths of that."""
    draw = torch.distributions.Exponential(2.5).sample((count,))
    return [max(8, min(longest, int(x * longest))) for x in draw.tolist()]


class Ours:
    """poise's update."""

    def __init__(self, shape: str, device: str, micro_tokens: int, compiled: bool) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED)
        self.policy = Policy(model_of(shape, device, dtype).eval(), tokenizer, compiled=compiled)
        self.policy.master_weights = MasterWeights(self.policy.model)
        self.optimizer = torch.optim.AdamW(self.policy.master_weights.parameters.values(), lr=1e-6, fused=True)
        self.policy.master_weights.serve(self.optimizer)
        self.micro_tokens = micro_tokens

    def prepare(self, batch: TokenBatch, regulator: str = "grpo") -> Callable[[], object]:
        """A call that runs the whole update."""
        regulate, plan = regulators.parse(regulator), UpdatePlan(SETTINGS, micro_tokens=self.micro_tokens)
        return lambda: update(self.policy, self.optimizer, batch, regulate(batch), plan)


class Theirs:
    """TRL's update: what ``GRPOTrainer`` does with a batch once it is generated and scored."""

    def __init__(self, shape: str, device: str, micro: int) -> None:
        import trl
        from datasets import Dataset

        self.folder = tempfile.TemporaryDirectory()
        config = trl.GRPOConfig(
            output_dir=self.folder.name, per_device_train_batch_size=micro, num_generations=2, beta=0.0,
            loss_type="dapo", epsilon=0.2, bf16=device == "cuda", gradient_checkpointing=False, learning_rate=1e-6,
            use_cpu=device == "cpu", report_to="none", max_grad_norm=1.0,
        )  # fmt: skip
        self.trainer = trl.GRPOTrainer(
            model=model_of(shape, device, torch.float32), reward_funcs=lambda **_: [0.0], args=config,
            train_dataset=Dataset.from_dict({"prompt": ["a"]}),
            processing_class=transformers.AutoTokenizer.from_pretrained(EMBEDDED),
        )  # fmt: skip
        self.micro = micro
        self.trainer.create_optimizer()
        self.trainer.model.train()

    def prepare(self, batch: TokenBatch) -> Callable[[], object]:
        """A call that runs the whole update, on the batch as TRL lays it out: padded to the longest."""
        trainer, count = self.trainer, len(batch.mask)
        assert batch.targets is not None
        prompt = torch.tensor([extent.prompt.tokens for extent in batch.extents or ()], device=batch.mask.device)
        trainer.current_gradient_accumulation_steps = -(-count // self.micro)
        parts = [
            {
                "prompt_ids": prompt[i : i + self.micro],
                "prompt_mask": torch.ones_like(prompt[i : i + self.micro]),
                "completion_ids": batch.targets[i : i + self.micro],
                "completion_mask": batch.mask[i : i + self.micro].long(),
                "advantages": batch.advantages[i : i + self.micro],
                "num_items_in_batch": batch.mask.sum(),
            }
            for i in range(0, count, self.micro)
        ]

        def run() -> None:
            for part in parts:
                trainer.accelerator.backward(trainer._compute_loss(trainer.model, part))
            trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()

        return run


def needed_flop(shape: str, batch: TokenBatch) -> float:
    """FLOP of an update, forward and backward: each prompt once, the head for response tokens only."""
    width, layers, heads, key_heads, middle, vocabulary = SHAPES[shape]
    linear = layers * (2 * width * width + 2 * width * width * key_heads // heads + 3 * width * middle)
    extents = batch.extents or ()
    prompts, lengths = {extent.prompt for extent in extents}, [extent.length for extent in extents]
    tokens = sum(len(prompt.tokens) for prompt in prompts) + sum(lengths)
    pairs = sum(len(prompt.tokens) ** 2 / 2 for prompt in prompts)
    pairs += sum(n * n / 2 + n * len(prompt.tokens) for prompt, n, _ in extents)
    return float(6.0 * (linear * tokens + width * vocabulary * sum(lengths)) + 3 * 4.0 * layers * width * pairs)


def row_of(
    shape: str, batch: TokenBatch, name: str, times: list[float], memory: int | None, **more: Any
) -> dict[str, Any]:
    tokens, flop = int(batch.mask.sum()), needed_flop(shape, batch)
    seconds = median(times)
    row = {
        "shape": shape, "way": name, "responses": len(batch.mask), "tokens": tokens, "seconds": times,
        "longest": batch.mask.shape[1], "peak_bytes": memory, "tokens_per_s": tokens / seconds,
        "utilisation": flop / seconds / PEAK, **more,
    }  # fmt: skip
    peak = f"{memory / 2**30:6.1f} GiB" if memory else ""
    print(
        f"{shape:>6} {name:24}{spread(times):>28} ms {tokens / seconds / 1e3:9.1f} k tokens/s"
        f"   {100 * row['utilisation']:5.1f} %  {peak}",
        flush=True,
    )
    return row


def peak(way: Callable[[], object], device: str) -> int | None:
    """All memory at the peak of a call: weights and optimizer state are part of what an update needs."""
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    extra = extra_memory(way, device)
    return None if extra is None else before + extra


def clean(device: str) -> None:
    gc.collect()
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()


def beside_trl(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    rows = []
    for shape in args.shapes:
        torch.manual_seed(0)
        count = args.prompts * args.group
        batch = responses(shape, args.device, args.prompts, args.group, args.prompt, uneven(count, args.longest))
        best: tuple[float, int] | None = None
        for micro in args.trl_micro:
            try:
                run = Theirs(shape, args.device, micro).prepare(batch)
                found = median(in_turns({"trl": run}, args.device, repeats=2, warmup=1)["trl"])
            except torch.OutOfMemoryError:
                print(f"TRL with {micro} responses per pass: out of memory")
                continue
            finally:
                run = None  # type: ignore[assignment]
                clean(args.device)
            print(f"TRL with {micro} responses per pass: {found:.3f} s", flush=True)
            best = min(best or (found, micro), (found, micro))
        assert best is not None
        ours = Ours(shape, args.device, args.micro_tokens, args.compile)
        theirs = Theirs(shape, args.device, best[1])
        ways = {"poise": ours.prepare(batch), f"trl, {best[1]} per pass": theirs.prepare(batch)}
        for regulator in args.regulators:
            ways[f"poise, {regulator}"] = ours.prepare(batch, regulator)
        times = in_turns(ways, args.device, repeats=args.repeats)
        for name, values in times.items():
            rows.append(row_of(shape, batch, name, values, peak(ways[name], args.device)))
        trl_seconds = next(median(v) for k, v in times.items() if k.startswith("trl"))
        print(f"{shape:>6} TRL / poise: {trl_seconds / median(times['poise']):.2f}\n")
        del ours, theirs, ways
        clean(args.device)
        yield rows


def growth(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Time and memory of poise by model size, and for two of them by response length, at 32 responses."""
    rows = []
    for shape in args.shapes:
        ours = Ours(shape, args.device, args.micro_tokens, args.compile)
        parameters = sum(p.numel() for p in ours.policy.model.parameters())
        for length in LENGTHS if shape in BY_LENGTH else LENGTHS[1:2]:
            batch = responses(shape, args.device, 4, 8, args.prompt, [length] * 32)
            run = ours.prepare(batch)
            times = in_turns({"poise": run}, args.device, repeats=2 if length > 2048 else 3, warmup=1)["poise"]
            more = {"parameters": parameters, "length": length}
            rows.append(row_of(shape, batch, f"32 × {length}", times, peak(run, args.device), **more))
        del ours, run
        clean(args.device)
        yield rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--growth", action="store_true", help="poise alone, by response length and model size")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--longest", type=int, help="tokens of the longest response")
    parser.add_argument("--micro-tokens", type=int, help="poise's tokens per pass")
    parser.add_argument("--trl-micro", type=int, nargs="+", help="TRL's responses per pass; the fastest is compared")
    parser.add_argument("--regulators", nargs="*", default=["ar", "tr-grpo", "lopti"])
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="compile the layers (on CUDA by default)"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    gpu = args.device == "cuda"
    args.compile = gpu if args.compile is None else args.compile
    default = [shape for shape in SHAPES if shape not in ("1M", "1.5B")] if args.growth else ["135M", "1.1B"]
    args.shapes = args.shapes or (default if gpu else ["1M"])
    args.prompts = args.prompts or (64 if gpu else 4)
    args.longest = args.longest or (1024 if gpu else 96)
    args.micro_tokens = args.micro_tokens or (65536 if gpu else 16384)
    args.trl_micro = args.trl_micro or ([16, 32, 64] if gpu else [8, 16])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    given = {name: str(value) for name, value in vars(args).items() if name != "json"}
    for rows in growth(args) if args.growth else beside_trl(args):  # written after every shape: nothing is lost
        write(args.json, {**environment(args.device), "arguments": given, "rows": rows})


if __name__ == "__main__":
    main()
