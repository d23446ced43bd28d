"""Does a reward that transfers help? RLTR against GRPO on Knights & Knaves, over seeds, side by side on one GPU.

    python experiments/rltr/rltr.py runs/rltr           # on a GPU, about six minutes
    python experiments/rltr/rltr.py runs/rltr --tiny    # every path, on a CPU, about a minute
    python experiments/rltr/rltr.py runs/rltr --read    # only the tables and the figure, from runs/rltr/rltr.json

All arms are RLTR on the embedded model: the baseline has transfer=0, which is GRPO bit for bit, but shows what the
receiver makes of its reasoning. A right answer is worth 3.5 more than a wrong one (2 and -1.5), so transfer=3.5 weighs
the receiver as much as the answer. First one GRPO run makes a stronger receiver. Then `poise compare` trains all arms
with the same seeds, problems and number of policy samples; what the receiver samples comes on top, and curves over
tokens count it, except for the baseline, which would train the same without it.

The output folder holds `rltr.json` (commands, curves and transfer of every run, rewritten as they go on; in the end,
differences over seeds), `rltr.md`, `rltr.png` and `rltr.log`. If the time is up before the last step, arms are compared
at the last evaluation that all of them have. `--read` does the statistics again, which need scipy.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from poise.referee.compare.analysis import analyse
from poise.referee.compare.arms import PlannedArm
from poise.referee.compare.plan import Plan, read_plan
from poise.referee.compare.results import ACCURACY, Arm, Cost, Point, RunResult
from poise.referee.compare.statistics import difference, student_interval
from poise.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
PAUSE = 5.0  # seconds between two looks at the runs
PATIENCE = 30.0  # seconds that runs have to end their step and save
LAST = 20  # steps over which transfer is averaged
WEIGHTS = (0.5, 3.5)
SEEDS = 8  # three comparisons with Holm's correction need seven
TRAINING = ["task.people=2-3", "steps=80", "prompts=16", "group=8", "optim.lr=2e-4"]
SETTINGS = [
    *TRAINING, "evaluation.problems=512", "evaluation.samples=16", "evaluation.every=20", "checkpoint_every=0",
    "keep_checkpoints=1", "rollouts_every=0", "compile=false",
]  # fmt: skip
RECEIVER = [*TRAINING, "seed=9000", "evaluation.problems=256", "evaluation.samples=4", "compile=false"]
TINY = [
    "steps=2", "prompts=2", "group=2", "task.people=2", "evaluation.problems=4", "evaluation.samples=2",
    "rollout.max_tokens=64", "device=cpu",
]  # fmt: skip
KINDS = ("mean", "after_right", "after_wrong", "cut/0.25", "cut/0.5", "cut/0.75", "cut/1", "uncut")
METRICS = (
    *(f"transfer/{kind}" for kind in KINDS),
    *("tokens/sampled", "tokens/receiver", "time/transfer", "time/step"),
    *("reward/accuracy", "reward/no_spread", "rollout/length", "rollout/entropy"),
)


@dataclass
class Study:
    """The commands of a study, and what is known of its runs."""

    out: Path
    runs: Path
    ends: float  # by time.monotonic
    settings: list[str]
    receiver: list[str]  # settings of the run that makes the stronger receiver
    weights: Sequence[float] = WEIGHTS
    seeds: int = SEEDS
    jobs: int = SEEDS * 4

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.commands: list[str] = []

    @property
    def strong(self) -> Path:
        """The run folder of the stronger receiver."""
        return self.runs / "receiver"

    @property
    def overrides(self) -> list[str]:
        """What `poise compare tiny` is given."""
        arms = [f"rltr(transfer={weight:g})" for weight in (0.0, *self.weights)]
        arms.append(f"rltr(transfer={self.weights[-1]:g}, receiver={str(self.strong)!r})")
        own = [f"seeds={self.seeds}", f"jobs={self.jobs}", f"run={self.runs / 'compare'}"]
        return ["algorithm=" + "; ".join(arms), *own, *self.settings]

    def _shown(self, arm: str) -> str:
        return arm.removeprefix("algorithm=").replace(repr(str(self.strong)), "strong")

    def run(self) -> int:
        """The stronger receiver, then all arms; the exit code. What is done already is not done again."""
        strong = ["train", "tiny", f"run={self.strong}", *self.receiver, "--quiet"]
        code = 0 if (self.strong / "summary.json").exists() else self._command(strong)
        return code or self._command(["compare", "tiny", *self.overrides, "--quiet"])

    def _command(self, words: list[str]) -> int:
        """Run a command of poise to its end, or until the time is up, and write what is known meanwhile."""
        self.commands.append(shlex.join(["poise", *words]))
        with open(self.out / "rltr.log", "ab") as log:
            running = subprocess.Popen(
                [sys.executable, "-m", "poise", *words], stdout=log, stderr=log, cwd=ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
            try:
                while running.poll() is None and time.monotonic() < self.ends:
                    self.write()
                    _wait(running, min(PAUSE, max(0.1, self.ends - time.monotonic())))
                if running.poll() is None:
                    running.send_signal(signal.SIGTERM)  # runs end their step and save
                    _wait(running, PATIENCE)
            finally:
                if running.poll() is None:
                    running.kill()
                    running.wait()
        self.write()
        return 0 if time.monotonic() >= self.ends else running.returncode

    def write(self) -> None:
        """Write what is known so far."""
        found: dict[str, Any] = {**_environment(), "seconds": time.monotonic() - self.began, "commands": self.commands}
        if (self.strong / "summary.json").exists():
            found["receiver"] = json.loads((self.strong / "summary.json").read_text())
        if (self.runs / "compare" / "arms").exists():
            plan = read_plan("tiny", self.overrides)
            found["samples"] = plan.baseline.variants[0].config.evaluation.samples
            found["runs"] = {self._shown(arm.name): raw(plan, arm) for arm in plan.arms}
        (self.out / "rltr.json").write_text(json.dumps(found).replace(str(self.runs), "runs") + "\n")


def latest(settings: Sequence[str]) -> list[str]:
    """Settings of which each stands there once; of several the last counts."""
    return [f"{key}={value}" for key, value in dict(item.split("=", 1) for item in settings).items()]


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def raw(plan: Plan, arm: PlannedArm) -> dict[int, dict[str, Any]]:
    """What is known of an arm's runs so far, by seed."""
    found = {}
    for seed in plan.seeds:
        folder = plan.run(arm, arm.variants[0], seed).folder
        with suppress(OSError, ValueError):  # not begun, or a file that is being written
            run, lines = RunResult.read(folder), RunFolder.open(folder, resume=False).metrics()
            metrics = {name: [line.get(name) for line in lines] for name in METRICS}
            curve = [[point.step, point.cost.tokens, point.cost.seconds, dict(point.scores)] for point in run.curve]
            found[seed] = {"state": run.state, "steps": run.steps, "curve": curve, "metrics": metrics}
    return found


def analysed(found: dict[str, Any]) -> dict[str, Any]:
    """What was found, with the comparison at the last evaluation that all arms have."""
    runs = {name: {int(seed): run for seed, run in arm.items()} for name, arm in found.get("runs", {}).items()}
    step = common_step([{s: [p[0] for p in run["curve"]] for s, run in arm.items()} for arm in runs.values()])
    if step is None:
        raise SystemExit("there is no evaluation that all arms have: see rltr.log")
    arms = [Arm(name, {}, upto(arm, step, observed=number == 0)) for number, (name, arm) in enumerate(runs.items())]
    scores = {f"avg@{found['samples']}": ACCURACY, f"maj@{found['samples']}": f"maj@{found['samples']}"}
    documents = {name: analyse(arms, arms[0].name, score=key) for name, key in {**scores, "greedy": "greedy"}.items()}
    return {**found, "step": step, "scores": documents, "transfer": transfer(runs, arms, step)}


def common_step(arms: Sequence[Mapping[int, Sequence[int]]]) -> int | None:
    """The last step of training at which the most seeds have an evaluation in every arm, given their steps by seed."""
    seeds = set.intersection(*(set(arm) for arm in arms)) if arms else set()
    measured = [set.intersection(*(set(arm[seed]) for arm in arms)) for seed in sorted(seeds)]
    steps = {step for each in measured for step in each if step > 0}
    return max(steps, key=lambda step: (sum(step in each for each in measured), step), default=None)


def upto(runs: Mapping[int, Mapping[str, Any]], step: int, *, observed: bool = False) -> dict[int, RunResult]:
    """The runs as if they had ended at a step; those that were not measured there are left out.

    ``observed``: the receiver only looked on. Training without it would be the same, so that its cost is left out.
    """
    found = {}
    for seed, run in runs.items():
        curve = []
        for at, tokens, seconds, scores in run["curve"]:
            extra = [sum(filter(None, run["metrics"][name][:at])) for name in ("tokens/receiver", "time/transfer")]
            cost = Cost(tokens - observed * extra[0], 0.0, seconds - observed * extra[1])
            curve += [Point(at, cost, scores)] if at <= step else []
        if curve and curve[-1].step == step:
            found[seed] = RunResult(seed, "finished", step, tuple(curve), curve[-1].cost)
    return found


def transfer(runs: Mapping[str, Mapping[int, Any]], arms: Sequence[Arm], step: int) -> dict[str, Any]:
    """What the receiver made of the arms' reasoning in the last steps, and in the first ones, with differences."""

    def means(arm: Arm, name: str, after: int, until: int) -> dict[int, float]:
        values = {seed: runs[arm.name][seed]["metrics"][name][after:until] for seed in arm.runs}
        known = {seed: [value for value in found if value is not None] for seed, found in values.items()}
        return {seed: fmean(found) for seed, found in known.items() if found}

    found: dict[str, Any] = {arm.name: {} for arm in arms}
    for arm in arms:
        for name in METRICS:
            first, last = means(arm, name, 0, LAST // 2), means(arm, name, max(0, step - LAST), step)
            if not last:
                continue
            against = None if arm is arms[0] else difference(last, means(arms[0], name, max(0, step - LAST), step))
            found[arm.name][name] = {
                "first": fmean(first.values()),
                "mean": fmean(last.values()),
                "interval": student_interval(list(last.values())),
                "difference": against and {"mean": against.mean, "interval": against.interval, "p": against.p},
            }
    return found


def _environment() -> dict[str, Any]:
    import torch
    from measure import environment

    return environment("cuda" if torch.cuda.is_available() else "cpu")


def tables(out: Path, found: Mapping[str, Any]) -> None:
    """The results in Markdown."""
    scores = list(found["scores"])
    main = found["scores"][scores[0]]
    head = ["arm", "seeds", *scores, "sampled tokens"]
    lines = [f"After {found['step']} steps:", "", _row(head), _row(["---"] * len(head))]
    for number, arm in enumerate(main["arms"]):
        cells = [f"`{arm['name']}`", str(len(arm["seeds"]))]
        for score in scores:
            own = found["scores"][score]["arms"][number]
            cells.append(_value(own["accuracy"], own["interval"], own["difference"]))
        lines.append(_row([*cells, f"{arm['cost']['tokens']:,.0f}"]))
    names = list(dict.fromkeys(name for rows in found["transfer"].values() for name in rows))
    lines += ["", _row(["over the last steps", *(f"`{arm}`" for arm in found["transfer"])])]
    lines.append(_row(["---"] * (1 + len(found["transfer"]))))
    for name in names:
        row = [rows.get(name) for rows in found["transfer"].values()]
        lines.append(
            _row([name, *("" if each is None else _value(each["mean"], None, each["difference"]) for each in row)])
        )
    lines += ["", *main["verdict"], "", "```bash", *found["commands"], "```", ""]
    (out / "rltr.md").write_text("\n".join(lines))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _value(mean: float | None, interval: Sequence[float] | None, against: Mapping[str, Any] | None) -> str:
    text = "" if mean is None else f"{mean:.4g}" if abs(mean) >= 10 else f"{mean:.3f}"
    text += f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
    if against and against["mean"] is not None:
        ends = against["interval"]
        text += f", {against['mean']:+.3f}" + (f" [{ends[0]:+.3f}, {ends[1]:+.3f}]" if ends else "")
    return text


def picture(out: Path, found: Mapping[str, Any]) -> None:
    """Accuracy over steps and tokens, and transfer by cut and by correctness."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    average, majority, *_ = found["scores"]
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5))
    panels = [(axes[0][0], average, "steps"), (axes[0][1], average, "tokens"), (axes[1][0], majority, "tokens")]
    for axis, score, x in panels:
        for arm in found["scores"][score]["arms"]:
            band = arm["curve"]
            (line,) = axis.plot(band[x], band["mean"], marker="o", markersize=3, label=arm["name"])
            if None not in band["low"]:
                axis.fill_between(band[x], band["low"], band["high"], alpha=0.15, color=line.get_color())
        axis.set(
            xlabel="steps (equal policy samples)" if x == "steps" else "sampled tokens, the receiver's where it rewards"
        )
        axis.set_ylabel(f"held-out {score}")
    bars = ["cut/0.25", "cut/0.5", "cut/0.75", "cut/1", "after_right", "after_wrong"]
    count = len(found["transfer"])
    for number, (name, rows) in enumerate(found["transfer"].items()):
        heights = [(rows.get(f"transfer/{kind}") or {}).get("mean", 0.0) for kind in bars]
        places = [place + (number - (count - 1) / 2) * 0.8 / count for place in range(len(bars))]
        axes[1][1].bar(places, heights, 0.8 / count, label=name)
    axes[1][1].set_xticks(range(len(bars)), ["≤ ¼", "≤ ½", "≤ ¾", "≤ 1", "right\nresponse", "wrong\nresponse"])
    axes[1][1].set(xlabel="share of the reasoning that the receiver saw", ylabel="receiver right, last steps")
    axes[0][0].legend(fontsize=8)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(out / "rltr.png", dpi=120)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=Path, help="where the runs go; default: OUT/runs")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=SEEDS * 4, help="runs side by side; default: all of them")
    parser.add_argument("--transfer", type=float, nargs="+", default=WEIGHTS, help="weights besides 0")
    parser.add_argument("--seconds", type=float, default=360.0, help="then what still runs is ended")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of all runs")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--read", action="store_true", help="only the tables and the figure of what is there")
    args = parser.parse_args()
    out, runs = args.out.resolve(), (args.runs or args.out / "runs").resolve()
    for folder in (out, runs):
        folder.mkdir(parents=True, exist_ok=True)
    more = [*(TINY if args.tiny else []), *args.set]
    settings = latest([*SETTINGS, *(["evaluation.every=1"] if args.tiny else []), *more])
    seeds, jobs = (2, 2) if args.tiny else (args.seeds, args.jobs)
    ends = time.monotonic() + args.seconds
    study = Study(out, runs, ends, settings, latest([*RECEIVER, *more]), args.transfer, seeds, jobs)
    code = 0 if args.read else study.run()
    found = analysed(json.loads((out / "rltr.json").read_text()))
    (out / "rltr.json").write_text(json.dumps(found) + "\n")
    tables(out, found)
    picture(out, found)
    print((out / "rltr.md").read_text())
    sys.exit(code)


if __name__ == "__main__":
    main()
