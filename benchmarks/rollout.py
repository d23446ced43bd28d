"""What sampling takes: the native engine, the one on transformers' cache, vLLM, and transformers' own ``generate``.

    OMP_WAIT_POLICY=passive python benchmarks/rollout.py                      # the embedded model, two minutes on a CPU
    python benchmarks/rollout.py --device cuda --shape 135M --json out.json   # 512 responses of 256 tokens
    python benchmarks/rollout.py --device cuda --shape 135M --uneven          # ... of very uneven length, up to 1,024
    python benchmarks/rollout.py --device cuda --growth --json growth.json    # the native engine alone
    python benchmarks/rollout.py --device cuda --profile --json kernels.json  # which kernels take its time
    python benchmarks/rollout.py --device cuda --long --json long.json        # few rows with 4,096 tokens each

They take turns, in one process, on the same prompts. With the embedded model, responses to Knights & Knaves end where
the model ends them. A ``--shape`` has random weights and prompts of 128 random tokens, and lengths are given: all the
same, or (``--uneven``) most of them short and a few long. ``generate`` cannot be given a length per response: it
decodes all of them until the longest has ended, as it does in training. It gets a model of its own, as transformers
makes it, with "sdpa" attention. "static" is ``generate`` with a static cache, for which transformers compiles the
model's forward pass. "vllm" is poise's engine on vLLM, its push of the weights and its scoring included
(``--ways native vllm``); ``beside_vllm.py`` measures vLLM alone, from one response to 2,048. "own" is the native engine
through transformers' model code, which shows what its fused step gains (``--ways native own --no-compile``). ``--long``
compares three kinds of attention: keys split between several programs, one program per row and key head, and torch's
flash kernel. It measures whole rollouts of a group, and the attention of a step alone, against the bytes that it reads;
the latter also with other numbers of programs per processor (2, 4), and with splits of 128 keys.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from measure import environment, extra_memory, in_turns, median, spread, write
from update import SHAPES, model_of, uneven

from poise.batch import Prompt
from poise.models.loading import load_policy
from poise.models.policy import EMBEDDED, Policy, pad_left
from poise.sampling.cached_engine import CachedEngine
from poise.sampling.draws import Sampling
from poise.sampling.native.engine import NativeEngine
from poise.sampling.native.slot_cache import Rotation, SlotCache
from poise.sampling.requests import Engine, Request, repeated
from poise.sampling.vllm_engine import VllmEngine
from poise.tasks import get

NEVER = 1_000_000  # an end token that no vocabulary has
PROMPT = 128  # tokens
BATCHES = (1, 8, 32, 128, 512, 2048)
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
GROWTH = ("size", "rows", "length")
FEW, LONG_PROMPT = (1, 8, 32), 4096  # rows and prompt tokens of --long
BY_SIZE = ("14M", "135M", "360M", "1.1B", "1.7B")


def random_policy(shape: str, device: str, dtype: torch.dtype | None = None, *, compiled: bool = True) -> Policy:
    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED)
    compiled = device == "cuda" and dtype is None and compiled
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    return Policy(model_of(shape, device, dtype).eval(), tokenizer, compiled=compiled)


def random_requests(shape: str, prompts: int, group: int, lengths: list[int], prompt: int = PROMPT) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(1, SHAPES[shape][-1], (prompts, prompt), generator=generator).tolist()
    return [Request(Prompt(tuple(texts[i // group])), length) for i, length in enumerate(lengths)]


def real_requests(policy: Policy, prompts: int, group: int, longest: int) -> list[Request]:
    problems = islice(get("kk", people="2-3").problems("train", 1), prompts)
    asked = [policy.encode(problem.prompt) for problem in problems]
    return repeated(asked, group, longest, policy.end_tokens)


def sampled(engine: Engine, requests: list[Request]) -> Callable[[int], int]:
    return lambda seed: sum(len(each.tokens) for each in engine.sample(requests, Sampling(1.0), seed))


def own_code(engine: NativeEngine) -> NativeEngine:
    """The engine through transformers' model code, without a fused step."""
    engine.step = None
    return engine


def generate(model: Any, requests: list[Request], **more: Any) -> Callable[[int], int]:
    """transformers' own sampling; the number of response tokens."""
    ids, seen = pad_left([list(request.prompt.tokens) for request in requests], model.device)
    limits = torch.tensor([r.max_tokens for r in requests], device=model.device)
    ends = torch.tensor([*requests[0].stop, -1], device=model.device)

    @torch.no_grad()
    def run(seed: int) -> int:
        torch.manual_seed(seed)
        out = model.generate(
            ids, attention_mask=seen, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=int(limits.max()),
            pad_token_id=0, eos_token_id=list(requests[0].stop) or [NEVER], **more,
        )[:, ids.shape[1] :]  # fmt: skip
        ending = torch.isin(out, ends).long()
        inside = (ending.cumsum(1) - ending == 0) & (torch.arange(out.shape[1], device=out.device) < limits[:, None])
        return int(inside.sum())

    return run


def compare(args: argparse.Namespace) -> dict[str, Any]:
    count = args.prompts * args.group
    if args.shape:
        torch.manual_seed(0)
        policy = random_policy(args.shape, args.device, compiled=args.compile)
        lengths = uneven(count, args.max_tokens) if args.uneven else [args.max_tokens] * count
        requests = random_requests(args.shape, args.prompts, args.group, lengths)
        policy.model.generation_config.eos_token_id, policy.tokenizer.eos_token = NEVER, None
        peer = model_of(args.shape, args.device, policy.head().weight.dtype).eval()
    else:
        policy = load_policy(args.model, device=args.device, dtype=args.dtype)
        requests = real_requests(policy, args.prompts, args.group, args.max_tokens)
        peer = policy.model
    every: dict[str, Callable[[], Callable[[int], int]]] = {
        "native": lambda: sampled(NativeEngine(policy, args.batch), requests),
        "own": lambda: sampled(own_code(NativeEngine(policy, args.batch)), requests),
        "cached": lambda: sampled(CachedEngine(policy), requests),
        "vllm": lambda: sampled(VllmEngine(policy), requests),
        "generate": lambda: generate(peer, requests),
        "static": lambda: generate(peer, requests, cache_implementation="static"),
    }
    made = {name: every[name]() for name in args.ways}
    used: dict[str, list[tuple[int, float]]] = {name: [] for name in made}

    def way(name: str) -> Callable[[], None]:
        def run() -> None:
            begin = time.process_time()
            tokens = made[name](len(used[name]))
            used[name].append((tokens, time.process_time() - begin))

        return run

    ways = {name: way(name) for name in made}
    memory = {}  # what the first call adds at its peak, and all that there is then
    for name, run in ways.items():
        extra = extra_memory(run, args.device)
        memory[name] = (extra, None if extra is None else torch.cuda.max_memory_allocated())
    times = in_turns(ways, args.device, repeats=args.repeats, warmup=args.warm_up)
    kind = f"of very uneven length, at most {args.max_tokens}" if args.uneven else f"of at most {args.max_tokens}"
    title = f"{args.shape or args.model}, {args.prompts} × {args.group} responses {kind} tokens"
    print(f"{title} on {environment(args.device)['device']}: medians of {args.repeats} (lowest–highest)")
    rows = []
    for name in ways:
        rounds = used[name][-args.repeats :]
        tokens = sum(count for count, _ in rounds) / len(rounds)
        extra, total = memory[name]
        row = {"way": name, "wall_s": times[name], "cpu_s": [cpu for _, cpu in rounds], "tokens": tokens}
        rows.append({**row, "extra_bytes": extra, "peak_bytes": total})
        ratio = median(times[name]) / median(times["native"]) if "native" in times else float("nan")
        rate, cpu = tokens / median(times[name]), median([seconds for _, seconds in rounds])
        line = (
            f"  {name:9s} {spread(times[name], 1):>20} s = {ratio:5.2f} × native {rate:9,.0f} tokens/s, cpu {cpu:.2f} s"
        )
        more = f", {extra / 2**30:.2f} GiB, {total / 2**30:.2f} in all" if extra is not None and total else ""
        print(line + more, flush=True)
    return {"case": title, "rows": rows}


def growth(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Tokens per second of the native engine by rows, by length and by model size."""
    rows: list[dict[str, Any]] = []

    def measure(kind: str, shape: str, engine: NativeEngine, count: int, length: int) -> None:
        group = min(count, 8)
        requests = random_requests(shape, count // group, group, [length] * count)
        seconds = []
        for seed in range(2):  # the first records graphs
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            engine.sample(requests, Sampling(1.0), seed)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
            if length >= 2048:  # beside which that is little
                break
        found, peak = min(seconds[1:] or seconds), torch.cuda.max_memory_allocated()
        parameters = sum(p.numel() for p in engine.policy.model.parameters())
        row = {"kind": kind, "shape": shape, "rows": count, "length": length, "parameters": parameters}
        rows.append(row | {"seconds": found, "tokens_per_s": count * length / found, "peak_bytes": peak})
        print(
            f"{kind:7s} {shape:>5s} {count:5d} × {length:5d} tokens: {found:7.3f} s {count * length / found:10,.0f} "
            f"tokens/s {peak / 2**30:6.1f} GiB", flush=True,
        )  # fmt: skip
        engine.release()

    for shape in args.shapes or BY_SIZE:
        policy = random_policy(shape, args.device)
        engine = NativeEngine(policy)
        if "size" in args.growth:
            measure("size", shape, engine, 512, 256)
        if shape == "135M":
            for count in BATCHES if "rows" in args.growth else ():
                measure("rows", shape, engine, count, 256)
            for length in LENGTHS if "length" in args.growth else ():
                measure("length", shape, engine, 128, length)
        del policy, engine
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        yield rows


def profile(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The kernels of one call of the native engine by time, beside the clock."""
    for shape in args.shapes or ("135M", "1.5B"):
        engine = NativeEngine(random_policy(shape, args.device))
        requests = random_requests(shape, args.prompts, args.group, [args.max_tokens] * args.prompts * args.group)
        seconds = []
        for seed in range(3):  # the first records graphs
            torch.cuda.synchronize()
            begin = time.perf_counter()
            engine.sample(requests, Sampling(1.0), seed)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            engine.sample(requests, Sampling(1.0), 3)
            torch.cuda.synchronize()
        kernels = [
            {"kernel": event.key, "calls": event.count, "ms": event.self_device_time_total / 1e3}
            for event in sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
        ]
        busy = sum(kernel["ms"] for kernel in kernels) / 1e3
        print(f"{shape}: {min(seconds[1:]):.3f} s by the clock, kernels {busy:.3f} s")
        for kernel in kernels[:16]:
            print(f"  {kernel['ms']:8.1f} ms {kernel['calls']:7d} calls  {kernel['kernel'][:90]}", flush=True)
        yield {"shape": shape, "seconds": seconds[1:], "kernel_s": busy, "kernels": kernels[:60]}
        engine.release()
        del engine
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def long_contexts(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Few rows with long prompts: the native engine, and the attention of its steps, with and without splits."""
    from poise.sampling.native import kernels

    kinds: dict[str, dict[str, Any]] = {
        "split": {"PROGRAMS": kernels.PROGRAMS}, "flash": {"suits": lambda *_: False},
        "whole": {"split_count": lambda *_: 1}, "split, 2": {"PROGRAMS": 2}, "split, 4": {"PROGRAMS": 4},
        "split, 128": {"LEAST": 128},
    }  # fmt: skip
    rows: list[dict[str, Any]] = []

    def rollout(policy: Policy, requests: list[Request], change: dict[str, Any]) -> Callable[[], None]:
        engine = NativeEngine(policy)

        def run() -> None:
            with patch.multiple(kernels, **change):
                engine.sample(requests, Sampling(1.0), 0)

        return run

    for shape in args.shapes or ("135M", "3B"):
        policy = random_policy(shape, args.device, compiled=False)
        for count in FEW:
            requests = random_requests(shape, 1, count, [args.max_tokens] * count, LONG_PROMPT)
            ways = {name: rollout(policy, requests, kinds[name]) for name in ("split", "flash")}
            times = in_turns(ways, args.device, repeats=args.repeats, warmup=1)
            cache = long_cache(shape, count, LONG_PROMPT + args.max_tokens)
            steps = {name: attention(cache, SHAPES[shape], change) for name, change in kinds.items()}
            alone = in_turns(steps, args.device, repeats=9, lead=100_000)
            step_bytes = cache.nbytes * (LONG_PROMPT + args.max_tokens // 2) / cache.length
            for name in kinds:
                rate = step_bytes / median(alone[name])
                row = {"shape": shape, "rows": count, "way": name, "rollout_s": times.get(name)}
                rows.append({**row, "attention_s": alone[name], "bytes": step_bytes, "bytes_per_s": rate})
                whole = f"{spread(times[name], 1)} s, " if name in times else ""
                print(
                    f"{shape:>5s} {count:3d} rows {name:9s} {whole}attention of a step {spread(alone[name])} ms = "
                    f"{rate / 1e12:.2f} TB/s", flush=True,
                )  # fmt: skip
            yield rows
            del ways, steps, cache
        del policy
        torch.cuda.empty_cache()


def long_cache(shape: str, rows: int, length: int) -> SlotCache:
    """Slots with random keys and values, that are filled except for half of the response."""
    width, layers, heads, shared = SHAPES[shape][:4]
    head = width // heads
    like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    cache = SlotCache([(shared, head, head)] * layers, rows, length, width, like)
    for store in (*cache.keys, *cache.values):
        store.normal_()
    cache.set_lengths([LONG_PROMPT] * rows, [(length - LONG_PROMPT) // 2] * rows, [length - LONG_PROMPT] * rows)
    cache.begin_step()
    return cache


def attention(cache: SlotCache, shape: tuple[int, ...], change: dict[str, Any]) -> Callable[[], None]:
    """A graph of the attention in all layers of a step, after ``change`` to the module of kernels."""
    from poise.sampling.native import kernels

    rows, (width, layers, heads, shared) = cache.n, shape[:4]
    query, key, value = (
        torch.randn(rows, count, width // heads, dtype=torch.bfloat16, device="cuda")
        for count in (heads, shared, shared)
    )
    angles = torch.randn(rows, width // heads, device="cuda")
    rotation = Rotation(angles.cos().bfloat16(), angles.sin().bfloat16())

    def step() -> None:
        for layer in range(layers):
            cache.attend(layer, query, key, value, None, None, rotation)

    with patch.multiple(kernels, **change):
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of this shape instead of a model")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument(
        "--uneven", action="store_true", help="lengths of a --shape: most short, a few as long as allowed"
    )
    parser.add_argument("--batch", type=int, default=0, help="rows of the native engine; 0: all")
    parser.add_argument("--ways", nargs="+", choices=["native", "own", "cached", "vllm", "generate", "static"])
    parser.add_argument(
        "--growth", nargs="*", choices=GROWTH, help="the native engine alone, by rows, length and model size (all)"
    )
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="the layers of a --shape, on CUDA"
    )
    parser.add_argument("--profile", action="store_true", help="the native engine alone: its kernels by time")
    parser.add_argument(
        "--long", action="store_true", help="the native engine alone: few rows with long prompts, by kind of attention"
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), help="of --growth, --profile and --long")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--warm-up", type=int, default=1, help="calls before those that are timed, besides one")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    gpu = args.device == "cuda"
    args.prompts = args.prompts or (64 if args.shape or args.profile else 16)
    random = args.shape or args.profile or args.long
    args.max_tokens = args.max_tokens or (1024 if args.uneven else 256 if random else 112)
    args.ways = args.ways or (["native", "generate", "static"] if gpu else ["native", "cached", "generate"])
    args.repeats = args.repeats or (3 if gpu else 7)
    transformers.logging.set_verbosity_error()
    head = {**environment(args.device), "arguments": {k: str(v) for k, v in vars(args).items() if k != "json"}}
    if args.growth is not None:
        args.growth = args.growth or GROWTH
        for rows in growth(args):  # written after every shape: nothing is lost
            write(args.json, {**head, "rows": rows})
    elif args.long:
        for rows in long_contexts(args):
            write(args.json, {**head, "rows": rows})
    elif args.profile:
        every = []
        for found in profile(args):
            every.append(found)
            write(args.json, {**head, "shapes": every})
    else:
        write(args.json, {**head, **compare(args)})


if __name__ == "__main__":
    main()
