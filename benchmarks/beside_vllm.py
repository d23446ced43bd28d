"""The native engine against vLLM, and a whole step of poise against TRL with vLLM in its process ("colocate").

    python benchmarks/beside_vllm.py --json vllm.json                       # rollout and step
    python benchmarks/beside_vllm.py --only rollout-135M --json vllm.json   # what begins with that
    python benchmarks/beside_vllm.py --only extra --json more.json          # what it does not do otherwise
    python benchmarks/beside_vllm.py --device cpu --tiny --shapes 14M       # whether it all runs

Every measurement is a process with a time limit of its own, so that one that fails takes no other with it, and its
figures are written as they come. Models have random weights, in bfloat16 on CUDA. Responses have the lengths given:
no response ends early.

- ``native``: ``NativeEngine``, with the log-probabilities and entropies that it returns.
- ``vllm``: vLLM's ``generate`` alone, in this process, without log-probabilities and seeds (its fastest), CUDA graphs
  and prefix caching on, cached prompts dropped before each call, as in training, where the weights have changed. Then
  ``rollout.engine=vllm`` on the same vLLM: weights pushed, seeds, log-probabilities, and the policy's scoring pass.
- ``step-…``: ``step.py`` with one trainer each: poise, and TRL with vLLM at the fastest setting that we tried. The
  first of thirteen steps is left out.
- ``extra-…``: the same ``generate`` with vLLM's engine in a process of its own, as vLLM does by default; what it takes
  vLLM to give text and log-probabilities, too; poise's step with ``rollout.engine=vllm``; TRL without vLLM's text,
  which it does not use, and with torch.compile; and TRL's default, which scores the responses again to correct for
  vLLM's rounding.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")

import torch
import transformers
from measure import environment, in_processes, in_turns, median, since_start, spread, write
from rollout import random_policy, random_requests, sampled
from update import SHAPES, model_of, uneven

from poise.batch import Prompt
from poise.models.policy import EMBEDDED
from poise.sampling.draws import Sampling
from poise.sampling.native.engine import NativeEngine
from poise.sampling.requests import Request
from poise.sampling.vllm_engine import VllmEngine

HERE = Path(__file__).parent
CASES = {  # responses, tokens of a prompt, longest response, uneven
    "512 × 256": (512, 128, 256, False),
    "uneven": (512, 128, 1024, True),
    "long prompts": (512, 1024, 256, False),
    "1 × 256": (1, 128, 256, False),
    "8 × 256": (8, 128, 256, False),
    "32 × 256": (32, 128, 256, False),
    "128 × 256": (128, 128, 256, False),
    "2048 × 256": (2048, 128, 256, False),
}
THROUGH_POISE = ("512 × 256", "uneven")
ASKED: dict[str, dict[str, Any]] = {  # of vLLM beyond tokens; TRL asks for both
    "nothing else": {"detokenize": False},
    "text": {"detokenize": True},
    "log-probabilities": {"detokenize": False, "logprobs": 0},
    "both": {"detokenize": True, "logprobs": 0},
}
LIMITS = {"rollout": 240, "step": 420, "extra": 420}  # seconds of a process
TRL_MICRO = {"135M": 128}  # responses per pass of TRL's update, the most that we tried; for larger shapes 32
STEPS = 12  # after the first, so that a trend would be seen


def requests_of(case: str, shape: str, tiny: bool) -> list[Request]:
    rows, prompt, longest, mixed = CASES[case]
    if tiny:
        rows, prompt, longest = min(rows, 16), prompt // 8, longest // 16
    torch.manual_seed(0)
    lengths = uneven(rows, longest) if mixed else [longest] * rows
    group = min(rows, 8)
    return random_requests(shape, rows // group, group, lengths, prompt)


def bare(llm: Any, requests: list[Request], more: str = "nothing else") -> Callable[[int], int]:
    """vLLM's own ``generate``; the number of response tokens."""
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": list(request.prompt.tokens)} for request in requests]
    wanted = [
        SamplingParams(temperature=1.0, max_tokens=request.max_tokens, ignore_eos=True, **ASKED[more])
        for request in requests
    ]

    def run(_: int) -> int:
        llm.reset_prefix_cache()
        return sum(len(answer.outputs[0].token_ids) for answer in llm.generate(asked, wanted, use_tqdm=False))

    return run


def timed(run: Callable[[int], int], device: str, repeats: int) -> dict[str, Any]:
    """Seconds of each call after the first, which records graphs; the tokens of one, and memory at the peak."""
    seconds, tokens, first = [], 0, 0.0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for call in range(repeats + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        tokens = run(call)
        if device == "cuda":
            torch.cuda.synchronize()
        taken = time.perf_counter() - begin
        if call:
            seconds.append(taken)
        else:
            first = taken
    found = {"first_s": first, "seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / median(seconds)}
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found |= {"peak_bytes": torch.cuda.max_memory_allocated(), "device_bytes": total - free}
    return found


def native(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the native engine."""
    engine = NativeEngine(random_policy(args.shape, args.device))
    ready = since_start()
    for case in args.cases:
        found = timed(sampled(engine, requests_of(case, args.shape, args.tiny)), args.device, args.repeats)
        yield {"case": case, "ready_s": ready, "first_rollout_s": since_start() - sum(found["seconds"]), **found}
        engine.release()


def vllm(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of vLLM alone, then of poise's engine on it, and what a push of the weights takes."""
    policy = random_policy(args.shape, args.device)
    engine = VllmEngine(policy, memory=args.memory)
    engine.sample([Request(Prompt((1, 2, 3)), 4)], Sampling(1.0), 0)  # starts vLLM
    ready = since_start()
    for case in args.cases:
        found = timed(bare(engine._llm, requests_of(case, args.shape, args.tiny)), args.device, args.repeats)
        yield {"case": case, "ready_s": ready, "first_rollout_s": since_start() - sum(found["seconds"]), **found}
    for case in args.cases:
        if case not in THROUGH_POISE:
            continue
        requests = requests_of(case, args.shape, args.tiny)
        found = timed(sampled(engine, requests), args.device, args.repeats)
        made = engine.sample(requests, Sampling(1.0), 0)
        gaps = [each.logp - each.sampler_logp for each in made if each.sampler_logp is not None]
        mismatch = float(torch.cat(gaps).abs().mean())
        yield {"engine": "rollout.engine=vllm", "case": case, "mismatch": mismatch, **found}

    def push(_: int) -> int:
        engine._push()
        return sum(parameter.numel() for parameter in policy.model.parameters())

    yield {"engine": "rollout.engine=vllm", "case": "push the weights", **timed(push, args.device, 5)}


def vllm_process(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of vLLM with its engine in a process of its own."""
    llm = started(args)
    ready = since_start()
    for case in args.cases[:2]:
        run = bare(llm, requests_of(case, args.shape, args.tiny))
        found = timed(run, "cpu", args.repeats)  # generate returns when all is done
        yield {"case": case, "ready_s": ready, "first_rollout_s": since_start() - sum(found["seconds"]), **found}


def vllm_asked(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of vLLM, in this process, that is asked for text, log-probabilities, or both, in turns."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    llm, case = started(args), args.cases[0]
    requests = requests_of(case, args.shape, args.tiny)
    ways = {more: partial(bare(llm, requests, more), 0) for more in ASKED}
    tokens = sum(request.max_tokens for request in requests)
    for more, seconds in in_turns(ways, args.device, repeats=args.repeats, warmup=1).items():
        yield {
            "case": f"{case}, {more}",
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_s": tokens / median(seconds),
        }


def started(args: argparse.Namespace) -> Any:
    """A vLLM with random weights and the embedded model's tokenizer."""
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        config = model_of(args.shape, "meta", torch.bfloat16).config
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(folder)
        return LLM(
            model=folder, load_format="dummy", gpu_memory_utilization=args.memory, logprobs_mode="processed_logprobs",
            dtype="bfloat16" if args.device == "cuda" else "float32", enforce_eager=args.device == "cpu",
        )  # fmt: skip


ENGINES = {"native": native, "vllm": vllm, "vllm-process": vllm_process, "vllm-asked": vllm_asked}


def child(args: argparse.Namespace) -> None:
    transformers.logging.set_verbosity_error()
    rows: list[dict[str, Any]] = []
    for row in ENGINES[args.engine](args):
        rows.append({"engine": args.engine, "shape": args.shape, **row})
        write(args.json, {"rows": rows}, quiet=True)
        last = rows[-1]
        peak = f", peak {last['peak_bytes'] / 2**30:.1f} GiB" if "peak_bytes" in last else ""
        print(
            f"{args.shape:>5} {last['engine']:20s} {last['case']:16s} {spread(last['seconds'], 1):>20} s "
            f"{last['tokens_per_s']:12,.0f} tokens/s{peak}, process {since_start():.0f} s", flush=True,
        )  # fmt: skip


def jobs(args: argparse.Namespace) -> dict[str, list[str]]:
    """Every measurement by name: the words of its command."""
    found: dict[str, list[str]] = {}
    rollout = [str(HERE / "beside_vllm.py"), "--device", args.device, "--memory", str(args.memory)]
    rollout += ["--repeats", str(args.repeats), "--cases", *args.cases, *(["--tiny"] if args.tiny else [])]
    step = [str(HERE / "step.py"), "--device", args.device, "--only-fixed", "--warm-up", "1"]
    step += ["--steps", "2" if args.tiny else str(STEPS), "--trl-memory", str(args.trl_memory)]
    step += ["--prompts", "2", "--fixed-length", "8"] if args.tiny else []
    for shape in args.shapes:
        for engine in ("native", "vllm"):
            found[f"rollout-{shape}-{engine}"] = [*rollout, "--child", engine, "--shape", shape]

    def trl(shape: str) -> list[str]:
        micro = 8 if args.tiny else TRL_MICRO.get(shape, 32)
        return [*step, "--shape", shape, "--which", "trl", "--trl-engine", "vllm", "--trl-micro", str(micro)]

    for shape in args.shapes:
        found[f"step-{shape}-poise"] = [*step, "--shape", shape, "--which", "poise"]
        found[f"step-{shape}-trl-vllm"] = trl(shape)
    first = args.shapes[0]
    found[f"extra-{first}-vllm-process"] = [*rollout, "--child", "vllm-process", "--shape", first]
    found[f"extra-{first}-vllm-asked"] = [*rollout, "--child", "vllm-asked", "--shape", first]
    found[f"extra-{first}-poise-vllm"] = [*step, "--shape", first, "--which", "poise", "--engine", "vllm"]
    found[f"extra-{first}-trl-vllm-no-text"] = [*trl(first), "--trl-no-text"]
    found[f"extra-{first}-trl-vllm-compiled"] = [*trl(first), "--trl-compile"]
    found[f"extra-{first}-trl-vllm-default"] = [*trl(first), "--trl-correction"]
    return {name: words for name, words in found.items() if any(name.startswith(only) for only in args.only)}


def parent(args: argparse.Namespace) -> None:
    """Run the measurements one after the other; write what they found after each."""
    head = {**environment(args.device), "arguments": {k: str(v) for k, v in vars(args).items() if k != "json"}}
    commands = jobs(args)
    limits = {name: args.limit or LIMITS[name.partition("-")[0]] for name in commands}
    results = in_processes(commands, limits, args.json, head)
    show(results)


def show(results: dict[str, Any]) -> None:
    """Each case of vLLM beside the native engine, each step of TRL beside poise's, and what was not finished."""
    for name, found in results.items():
        if found["code"] != 0:
            print(f"{name}: not finished ({found['code']}); what it had measured until then is in the file")
    rows = [row for found in results.values() for row in found.get("rows", [])]
    ours = {(row["shape"], row["case"]): median(row["seconds"]) for row in rows if row["engine"] == "native"}
    for row in rows:
        if (key := (row["shape"], row["case"])) in ours and row["engine"] != "native":
            print(
                f"{key[0]:>5} {key[1]:16s} {row['engine']:20s} {median(row['seconds']) / ours[key]:6.2f} times native's"
            )
    steps = {name: found["fixed"] for name, found in results.items() if "fixed" in found}
    for name, found in steps.items():
        trainer = "poise" if "poise" in found else "trl"
        seconds = found[trainer]["step_s"]["median"]
        beside = steps.get(f"step-{name.split('-')[1]}-poise")
        ratio = f", {seconds / beside['poise']['step_s']['median']:.2f} × poise's time" if beside else ""
        print(f"{name}: {seconds:.2f} s, peak {found[trainer]['peak_gib']['high']:.1f} GiB{ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["135M", "1.5B"])
    parser.add_argument(
        "--only", nargs="+", default=["rollout", "step"], metavar="NAME", help="measurements whose name begins so"
    )
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), default=list(CASES),
        help="of rollouts; vllm-process takes the first two, vllm-asked the first",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--memory", type=float, default=0.5, help="vLLM's share of the device's memory when it is alone"
    )
    parser.add_argument("--trl-memory", type=float, default=0.3, help="vLLM's share beside TRL")
    parser.add_argument("--limit", type=float, help=f"seconds of a measurement's process (otherwise {LIMITS})")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try whether everything runs")
    parser.add_argument("--json", type=Path, help="write the figures here, after every measurement")
    parser.add_argument("--child", choices=list(ENGINES), dest="engine", help=argparse.SUPPRESS)
    parser.add_argument("--shape", choices=list(SHAPES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        child(args)
    else:
        parent(args)


if __name__ == "__main__":
    main()
