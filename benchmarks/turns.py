"""Dialogues of several turns: keys and values kept between turns, against reading the dialogue again every turn.

    OMP_WAIT_POLICY=passive python benchmarks/turns.py                      # a small shape, on a CPU
    python benchmarks/turns.py --device cuda --shape 135M --json turns.json # 64 episodes of 8 turns

Weights are random. Every turn the environment says ``--said`` random tokens (the first time they are the prompt), and
the model replies with ``--reply`` tokens, greedily. The ways take turns in one process, on the same dialogues:

- ``anew``: a call of ``NativeEngine.sample`` per turn, which reads the whole dialogue. On CUDA every turn needs longer
  slots, so its graphs are recorded again, as they are without a session.
- ``reserved``: the same with slots for the whole dialogue from the first turn on: what reading alone costs.
- ``kept``: ``NativeEngine.session``.

Greedy tokens are compared in float64, episode by episode: they must be the same. In half precision two tokens of random
weights are often equally likely to the last bit, and which one is taken depends on the kernel. There it is reported how
many episodes are the same, how many tokens agree before the first difference, and the mean distance of the last turn's
log-probabilities from a forward pass of the policy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from measure import environment, in_turns, median, spread, write
from rollout import random_policy
from update import SHAPES

from poise.batch import Prompt, padded_batch
from poise.models.policy import Policy
from poise.sampling.draws import Sampling
from poise.sampling.native.engine import NativeEngine
from poise.sampling.requests import Completion, Request

GREEDY = Sampling(temperature=0.0)
WAYS = ("anew", "reserved", "kept")


def play(
    engine: NativeEngine, way: str, texts: list[list[list[int]]], reply: int
) -> tuple[list[list[int]], list[Request], list[Completion]]:
    """Play all episodes; their replies, and what the last turn asked and got. ``texts``: by turn, then by episode."""
    longest = sum(len(turn[0]) + reply for turn in texts)
    dialogues: list[list[int]] = [[] for _ in texts[0]]
    replies: list[list[int]] = [[] for _ in texts[0]]
    with engine.session(longest) if way == "kept" else nullcontext() as session:
        for turn, said in enumerate(texts):
            for dialogue, text in zip(dialogues, said, strict=True):
                dialogue += text
            keep = session is not None and turn + 1 < len(texts)
            requests = [
                Request(
                    Prompt(tuple(dialogue)), reply, keep=keep, continues=i if session is not None and turn else None
                )
                for i, dialogue in enumerate(dialogues)
            ]
            if session is not None:
                out = session.sample(requests, GREEDY, turn)
            elif way == "reserved":
                out = engine.run(requests, GREEDY, turn, least=(len(requests), longest))
            else:
                out = engine.sample(requests, GREEDY, turn)
            for i, completion in enumerate(out):
                dialogues[i] += completion.tokens.tolist()
                replies[i] += completion.tokens.tolist()
    if session is not None and session.reread:
        print(f"{session.reread} of {session.reread + session.continued} turns did not fit, and were read again")
    return replies, requests, out


def random_texts(shape: str, episodes: int, turns: int, said: int) -> list[list[list[int]]]:
    generator = torch.Generator().manual_seed(0)
    texts: list[list[list[int]]] = torch.randint(
        1, SHAPES[shape][-1], (turns, episodes, said), generator=generator
    ).tolist()
    return texts


def compare_tokens(policy: Policy, texts: list[list[list[int]]], reply: int) -> dict[str, Any]:
    """How many episodes have the same tokens, and how close the log-probabilities of the last turn are."""
    outs = {way: play(NativeEngine(policy), way, texts, reply) for way in ("anew", "kept")}
    pairs = list(zip(outs["anew"][0], outs["kept"][0], strict=True))
    agreeing = [next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) for a, b in pairs]
    dtype = str(policy.head().weight.dtype).removeprefix("torch.")
    found: dict[str, Any] = {
        "dtype": dtype,
        "same_episodes": sum(a == b for a, b in pairs),
        "agreeing_tokens": agreeing,
    }
    print(f"greedy tokens in {dtype}: {found['same_episodes']} of {len(pairs)} episodes are the same; "
          f"{sum(agreeing)} of {sum(len(a) for a, _ in pairs)} tokens come before the first difference")  # fmt: skip
    for way, (_, asked, out) in outs.items():
        prompts = [request.prompt for request in asked]
        batch = padded_batch(
            prompts, [each.tokens for each in out], policy.device, old_logp=[each.logp for each in out]
        )
        with torch.no_grad():
            logp, _ = policy.score(batch)
        found[f"gap_{way}"] = float((logp - batch.old_logp)[batch.mask].abs().mean())
        print(f"  mean distance of log-probabilities from the policy's, {way}: {found[f'gap_{way}']:.2g}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=list(SHAPES), default="1M")
    parser.add_argument("--episodes", type=int)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--said", type=int, default=64, help="tokens of the environment per turn")
    parser.add_argument("--reply", type=int, help="tokens of the model per turn")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--ways", nargs="+", choices=WAYS)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    gpu = args.device == "cuda"
    args.episodes = args.episodes or (64 if gpu else 8)
    args.reply = args.reply or (64 if gpu else 32)
    args.repeats = args.repeats or (5 if gpu else 3)
    args.ways = args.ways or (WAYS if gpu else ("anew", "kept"))  # a CPU has no slots to reserve
    transformers.logging.set_verbosity_error()
    texts = random_texts(args.shape, args.episodes, args.turns, args.said)
    tokens = [compare_tokens(random_policy(args.shape, args.device, torch.float64), texts, args.reply)]
    policy = random_policy(args.shape, args.device)
    tokens += [compare_tokens(policy, texts, args.reply)]
    engines = {way: NativeEngine(policy) for way in args.ways}

    def way(name: str) -> Callable[[], object]:
        return lambda: play(engines[name], name, texts, args.reply)

    times = in_turns({name: way(name) for name in args.ways}, args.device, repeats=args.repeats, warmup=1)
    title = f"{args.shape}, {args.episodes} episodes of {args.turns} turns, {args.said} + {args.reply} tokens each"
    print(f"{title} on {environment(args.device)['device']}: medians of {args.repeats} (lowest–highest)")
    for name in args.ways:
        print(f"  {name:9s} {spread(times[name], 1):>20} s = {median(times[name]) / median(times['kept']):5.2f} × kept")
    arguments = {k: str(v) for k, v in vars(args).items() if k != "json"}
    write(
        args.json,
        {**environment(args.device), "arguments": arguments, "case": title, "tokens": tokens, "wall_s": times},
    )
    sys.exit(tokens[0]["same_episodes"] != args.episodes)


if __name__ == "__main__":
    main()
