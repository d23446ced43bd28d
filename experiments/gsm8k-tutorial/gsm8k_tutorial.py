"""Tables and figure of the tutorial's runs: python experiments/gsm8k-tutorial/gsm8k_tutorial.py writes them.

The table of results is also in docs/tutorials/gsm8k.md and examples/gsm8k/README.md; a test compares them.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

HERE = Path(__file__).parent
SEEDS = {0: "tab:blue", 1: "tab:orange", 2: "tab:green"}


def load(name: str) -> dict[str, Any]:
    """A raw file."""
    found: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
    return found


def runs() -> list[dict[str, Any]]:
    """poise's runs, by seed."""
    return [load(f"poise-{seed}") for seed in SEEDS]


def evaluations(run: dict[str, Any]) -> list[tuple[int, float, float]]:
    """Step, sampled and greedy accuracy of each evaluation."""
    middle = [(row["step"], row["eval/math/avg@1"], row["eval/math/greedy"]) for row in run["curve"]]
    before, after = ((run[when]["accuracy"], run[when]["greedy"]) for when in ("before", "after"))
    return [(0, *before), *middle, (len(run["steps"]), *after)]


def ends(run: dict[str, Any]) -> list[float]:
    """Seconds of training at the end of each step; 0 first."""
    return [0.0, *accumulate(step["time/step"] for step in run["steps"])]


def results() -> str:
    """Accuracy and cut-off answers, before and after, by seed."""
    before, after = runs()[0]["before"], [run["after"] for run in runs()]
    assert all(run["before"] == before for run in runs())
    lines = [
        f"| | before | after 60 steps: {' | '.join(f'seed {seed}' for seed in SEEDS)} |",
        "|---|---|" + "---|" * len(after),
    ]
    for label, name in (("sampled, temperature 1", "accuracy"), ("greedy", "greedy")):
        lines.append(f"| {label} | {' | '.join(fraction(each[name]) for each in (before, *after))} |")
    for label, name in (("sampled, cut off at 512 tokens", "cut_off"), ("greedy, cut off", "greedy_cut_off")):
        shares = [100 * each[name] / each["n"] for each in (before, *after)]
        lines.append(f"| {label} | {' | '.join(f'{share:.1f} %' for share in shares)} |")
    return "\n".join(lines)


def beside_trl() -> str:
    """poise, seed 0, and TRL, after the seconds that TRL trained."""
    ours, theirs, their_accuracy = load("poise-0"), load("trl"), load("trl-eval")
    done = sum(end <= theirs["train_s"] for end in ends(ours)) - 1
    step, sampled, greedy = [row for row in evaluations(ours) if row[0] <= done][-1]
    at = f" (step {step}, at {ends(ours)[step]:.0f} s)"
    both = [[row["time/step"] for row in run["steps"]] for run in (ours, theirs)]
    versions = theirs["environment"]["versions"]
    rows = {
        f"steps in {theirs['train_s']:.1f} s of training": [str(done), str(len(theirs["steps"]))],
        "sampled accuracy": [fraction(sampled) + at, fraction(their_accuracy["accuracy"])],
        "greedy accuracy": [fraction(greedy) + at, fraction(their_accuracy["greedy"])],
        "first step": [f"{times[0]:.1f} s" for times in both],
        "steps 2 to 5": [f"{min(times[1:5]):.1f} to {max(times[1:5]):.1f} s" for times in both],
        "median of all steps": [f"{median(times):.2f} s" for times in both],
        "peak memory allocated": [f"{run['peak_allocated_gib']:.1f} GiB" for run in (ours, theirs)],
        "peak memory reserved": [f"{run['peak_reserved_gib']:.1f} GiB" for run in (ours, theirs)],
    }
    head = [f"| | poise, seed 0 | TRL {versions['trl']} with vLLM {versions['vllm']} |", "|---|---|---|"]
    return "\n".join(head + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()])


def fraction(value: float) -> str:
    """An accuracy as the pages write it: .396."""
    return f"{value:.3f}".removeprefix("0")


def written(page: str) -> str:
    """The page with these tables."""
    for name, table in (("results", results()), ("beside TRL", beside_trl())):
        page = re.sub(rf"(?s)(<!-- {name}[^\n]*\n).*?(<!-- end -->)", rf"\1{table}\n\2", page)
    return page


def picture(path: Path) -> None:
    """Accuracy over steps, three seeds; and over seconds of training, beside TRL's."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for (seed, colour), run in zip(SEEDS.items(), runs(), strict=True):
        steps, sampled, greedy = zip(*evaluations(run), strict=True)
        by_step.plot(steps, sampled, "o-", color=colour, label=f"seed {seed}, sampled")
        by_step.plot(steps, greedy, "o--", markerfacecolor="white", color=colour, label=f"seed {seed}, greedy")
        if seed == 0:  # the only one that ran alone
            seconds = [ends(run)[step] for step in steps]
            by_time.plot(seconds, sampled, "o-", color=colour, label="poise, seed 0, sampled")
            by_time.plot(seconds, greedy, "o--", markerfacecolor="white", color=colour, label="poise, seed 0, greedy")
    start, theirs, measured = runs()[0]["before"], load("trl"), load("trl-eval")
    for name, line, fill in (("accuracy", "s-", "tab:red"), ("greedy", "s--", "white")):
        places, values = (0, theirs["train_s"]), (start[name], measured[name])
        label = f"TRL, {len(theirs['steps'])} steps, {'greedy' if name == 'greedy' else 'sampled'}"
        by_time.plot(places, values, line, color="tab:red", markerfacecolor=fill, label=label)
    by_step.set(xlabel="steps of 64 × 8 answers", ylabel=f"accuracy on {start['n']} held-out problems")
    by_time.set(xlabel="seconds of training on one H200")
    for axes in (by_step, by_time):
        axes.legend(fontsize="small", handlelength=3, loc="lower right" if axes is by_step else "upper left")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    readme = HERE / "README.md"
    readme.write_text(written(readme.read_text()))
    print(results(), beside_trl(), sep="\n\n")
    picture(HERE / "gsm8k.png")
