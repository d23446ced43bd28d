"""Are an engine's responses drawn alike, and apart from each other? python experiments/demo/independence.py native

Samples 8 responses to each of 48 Knights & Knaves puzzles from the embedded model, with 24 seeds, and prints the
accuracy; how much the number of right answers to a puzzle varies from seed to seed, against a binomial (χ² should be
near its degrees of freedom); and the correlation of neighbours in a group (should be 0). About four minutes on a CPU.
"""

from __future__ import annotations

import argparse
from itertools import islice

import torch

from poise.models.loading import load_policy
from poise.sampling.choose import choose
from poise.sampling.draws import Sampling
from poise.sampling.requests import repeated
from poise.tasks import get

GROUP = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["native", "transformers"])
    parser.add_argument("--puzzles", type=int, default=48)
    parser.add_argument("--seeds", type=int, default=24)
    args = parser.parse_args()
    policy, task = load_policy("embedded", device="cpu"), get("kk", people="2-3")
    engine = choose(policy, args.engine)
    problems = list(islice(task.problems("test", 0), args.puzzles))
    prompts = [policy.encode(problem.prompt) for problem in problems]
    rounds = []
    for seed in range(1000, 1000 + args.seeds):
        made = engine.sample(repeated(prompts, GROUP, 112, policy.end_tokens), Sampling(), seed)
        texts = [policy.tokenizer.decode(each.tokens.tolist()) for each in made]
        scores = [task.score(problems[i // GROUP], text).correct for i, text in enumerate(texts)]
        rounds.append(torch.tensor(scores, dtype=torch.float64).view(-1, GROUP))
    right = torch.stack(rounds)  # seeds, puzzles, group
    share = right.mean((0, 2))
    error = float((share * (1 - share) / (GROUP * args.seeds)).sum().sqrt()) / args.puzzles
    print(f"{args.engine}: accuracy {float(share.mean()):.4f} ± {error:.4f}")
    open_ones = (share > 0.02) & (share < 0.98)  # the others vary too little to say anything
    right, share = right[:, open_ones], share[open_ones]
    variance = share * (1 - share)
    chi = float(((right.sum(2) - GROUP * share) ** 2 / (GROUP * variance)).sum())
    print(f"  χ² {chi:.0f}, degrees of freedom {(args.seeds - 1) * len(share)}")
    off = right - share[:, None]
    together = float(((off[..., 1:] * off[..., :-1]).mean((0, 2)) / variance).mean())
    print(f"  correlation of neighbours {together:+.4f} ± {(args.seeds * (GROUP - 1) * len(share)) ** -0.5:.4f}")


if __name__ == "__main__":
    main()
