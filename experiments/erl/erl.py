"""Does ERL learn more than plain RLVR from the same number of sampled tokens? FrozenLake with the rules withheld.

    python experiments/erl/erl.py runs/erl            # on a GPU, about eight minutes
    python experiments/erl/erl.py runs/erl --tiny     # every path, on a CPU, a few minutes

One warm start (erl_tasks.py), then all arms and seeds as processes side by side: ``grpo``, which is ERL
without reflection; ``erl``; ERL without consolidation; ERL with memory. Each run ends after ``--budget`` sampled
tokens; evaluations, always of the plain policy, do not count. The output folder holds ``erl.json`` (commands, curves
over tokens, evaluations, and differences to ``grpo`` at equal tokens), rewritten as the runs go on, ``erl.png`` and
``erl.log``. At the end of ``--seconds`` what still runs is asked to stop.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from erl_tasks import ASK, RECALL
from learning import _latest, read_run

from poise.referee.compare.processes import mps
from poise.referee.compare.sign_flip import interval, p_value

ROOT = Path(__file__).resolve().parents[2]
MAKE_MODEL = "experiments/embedded-model/make_model.py"
LAKE = ["task.side=4", "task.turns=3", "task.actions=3", "task.rules=withheld"]
SHORT = ["rollout.max_tokens=8", "rollout.max_prompt=256", "rollout.max_episode_tokens=384"]
WARMSTART = [
    "task.name=experiments/erl/erl_tasks.py:Lessons", *LAKE, "width=256", "layers=6", "heads=8", "vocabulary=340",
    "batch=128", "lr=1e-3", "steps=2000", "workers=14", "stop_at=0.6", "max_tokens=32", "compile=false",
]  # fmt: skip
TRAIN = [
    "task.name=frozenlake", *LAKE, *SHORT, "steps=5000", "prompts=16", "optim.lr=1e-4", "optim.warmup_steps=5",
    "evaluation.problems=512", "evaluation.samples=2", "rollouts_every=50", "checkpoint_every=0", "keep_checkpoints=1",
    "compile=false",
]  # fmt: skip


def erl(**settings: str) -> list[str]:
    """ERL with half of GRPO's attempts in a group: a failure costs a reflection and another attempt."""
    given = {"reflection_tokens": "32", "ask": repr(ASK), "recall": repr(RECALL), **settings}
    text = ", ".join(f"{key}={value}" for key, value in given.items())
    return [f"algorithm=erl({text})", "group=8", "evaluation.every=10"]


ARMS = {
    "grpo": ["group=16", "evaluation.every=20"],
    "erl": erl(),
    "erl, no consolidation": erl(consolidation="false"),
    "erl, memory": erl(memory="true"),
}
BASELINE = "grpo"
TINY_START = ["width=32", "layers=1", "heads=2", "workers=0", "steps=2", "batch=4", "stop_at=1"]
TINY = [
    "prompts=2", "group=2", "evaluation.problems=6", "evaluation.every=1", "rollouts_every=1", "device=cpu",
    "steps=3",
]  # fmt: skip
KEPT = ("step", "tokens/total", "tokens/sampled", "reward/accuracy", "time/step", "rollout/length")
KEPT_PARTS = ("first/", "second/", "reflection/", "consolidated/", "eval/")


@dataclass
class Run:
    """One arm with one seed."""

    arm: str
    seed: int
    settings: list[str]
    folder: Path
    command: str = ""
    seconds: float = 0.0
    exit: int | str | None = None
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    began: float = 0.0

    def start(self, threads: int) -> None:
        """Begin, in a process of its own."""
        words = ["poise", "train", f"run={self.folder}", f"seed={self.seed}", *self.settings]
        self.command, self.began = shown(words), time.monotonic()
        self.process = launch(words, self.folder.with_suffix(".log"), threads)

    def ended(self) -> bool:
        """Whether it is over; then its exit status is known."""
        assert self.process is not None
        if self.process.poll() is None:
            return False
        self.seconds, self.exit = time.monotonic() - self.began, self.exit or self.process.returncode
        return True

    def result(self) -> dict[str, Any]:
        """What is known of it so far."""
        return {"command": self.command, "exit": self.exit, "seconds": self.seconds, **read(self.folder)}


def shown(words: list[str]) -> str:
    """A command as one would type it."""
    quoted = [f"'{word}'" if any(sign in word for sign in " (\\") and "'" not in word else word for word in words]
    return " ".join([*(json.dumps(word) if "'" in word[1:-1] else word for word in quoted)])


def launch(words: list[str], log: Path, threads: int) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}
    with open(log, "ab") as out:
        program = [sys.executable, *(["-m", "poise"] if words[0] == "poise" else [])]
        return subprocess.Popen([*program, *words[1:]], stdout=out, stderr=out, env=environment, cwd=ROOT)


def read(run: Path) -> dict[str, Any]:
    """Evaluations and curves of a run that may still be under way."""
    found = read_run(run, KEPT, KEPT_PARTS)
    return found | {"held_out": success(found)} if "curve" in found else found


def success(found: dict[str, Any]) -> list[tuple[float, float]]:
    """Sampled tokens, and the held-out success of the plain policy after them."""
    points = [(0.0, float(found["before"]["accuracy"]))] if "before" in found else []
    for step in found["curve"]:
        values = [v for k, v in step.items() if k.startswith("eval/") and k.split("/")[-1].startswith("avg@")]
        if values and "tokens/total" in step:
            points.append((float(step["tokens/total"]), float(values[0])))
    if "after" in found and found["curve"] and "tokens/total" in found["curve"][-1]:
        points.append((float(found["curve"][-1]["tokens/total"]), float(found["after"]["accuracy"])))
    return points


def at(points: Sequence[tuple[float, float]], tokens: Any) -> Any:
    """The curve through these points, after so many tokens."""
    return np.interp(tokens, [x for x, _ in points], [y for _, y in points])


def summary(arms: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Held-out success at equal tokens, arm by arm, and the difference to the baseline, seed by seed."""
    curves = {arm: {int(s): run["held_out"] for s, run in runs.items()} for arm, runs in arms.items()}
    curves = {arm: {s: c for s, c in seeds.items() if len(c) > 1} for arm, seeds in curves.items()}
    ends = [points[-1][0] for seeds in curves.values() for points in seeds.values()]
    if not ends or not curves.get(BASELINE):
        return {}
    tokens = min(ends)
    scores = {
        arm: {seed: float(at(points, [tokens])[0]) for seed, points in seeds.items()}
        for arm, seeds in curves.items() if seeds
    }  # fmt: skip
    found: dict[str, Any] = {"tokens": tokens}
    for arm, seeds in scores.items():
        last = [run["curve"][-1] for run in arms[arm].values() if run.get("curve")]
        found[arm] = {
            "before": fmean(points[0][1] for points in curves[arm].values()),
            "success": fmean(seeds.values()),
            "by_seed": seeds,
            "steps": fmean(step["step"] for step in last),
            **{name: fmean(shares) for name in ("reflection/readable", "second/success", "first/success")
               if (shares := [step[name] for step in last if name in step])},
        }  # fmt: skip
        if arm != BASELINE:
            found[arm]["against_baseline"] = against(seeds, scores[BASELINE])
    return found


def against(arm: dict[int, float], baseline: dict[int, float]) -> dict[str, Any]:
    """The differences seed by seed, and the sign-flip test of them."""
    gains = [arm[seed] - baseline[seed] for seed in sorted(arm.keys() & baseline.keys())]
    if not gains:
        return {}
    ends = [end if abs(end) < 1 else None for end in interval(gains)]  # None: so few seeds exclude nothing
    return {"seeds": len(gains), "mean": fmean(gains), "values": gains, "interval": ends, "p": p_value(gains)}


def picture(out: Path, arms: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Held-out success, and what became of reflections, over sampled tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4))
    titles = ("held-out success of the plain policy", "reflections that can be read", "success of second attempts")
    for colour, (arm, runs) in enumerate(arms.items()):
        series = [
            [run["held_out"] for run in runs.values()],
            *([over_tokens(run, name) for run in runs.values()] for name in ("reflection/readable", "second/success")),
        ]
        for axis, lines in zip(axes, series, strict=True):
            _band(axis, [line for line in lines if len(line) > 1], f"C{colour}", arm)
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="sampled tokens", ylim=(0, None))
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "erl.png", dpi=120)
    plt.close(figure)


def over_tokens(run: dict[str, Any], name: str) -> list[tuple[float, float]]:
    """A metric of the training steps."""
    return [(s["tokens/total"], s[name]) for s in run.get("curve", []) if name in s and "tokens/total" in s]


def _band(axis: Any, lines: list[list[tuple[float, float]]], colour: str, label: str) -> None:
    """Thin lines for the seeds, a thick one for their mean, as far as all of them go."""
    if not lines:
        return
    for line in lines:
        axis.plot(*zip(*line, strict=True), color=colour, linewidth=0.5, alpha=0.5)
    grid = np.linspace(max(line[0][0] for line in lines), min(line[-1][0] for line in lines), 60)
    mean = np.mean([at(line, grid) for line in lines], axis=0)
    axis.plot(grid, mean, color=colour, linewidth=2, label=f"{label} ({len(lines)} seeds)")


class Study:
    """The warm start and all runs, and what is known of them so far."""

    def __init__(self, out: Path, runs: Path, seconds: float) -> None:
        self.out, self.folder, self.began = out, runs, time.monotonic()
        self.ends = self.began + seconds
        self.warmstart: dict[str, Any] = {}
        self.runs: list[Run] = []

    def warm_start(self, settings: list[str], seconds: float) -> Path:
        """The model that all runs start from."""
        model, began = self.folder / "start", time.monotonic()
        words = ["python", MAKE_MODEL, str(model), *settings]
        process = launch(words, self.folder / "start.log", os.cpu_count() or 1)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # it saves what it has
            process.wait(30)
        self.warmstart = {
            "command": shown(words), "exit": process.returncode, "seconds": time.monotonic() - began,
            "log": (self.folder / "start.log").read_text(errors="replace")[-5000:],
        }  # fmt: skip
        self.write()
        if not (model / "config.json").exists():
            sys.exit(f"the warm start saved no model:\n{self.warmstart['log']}")
        return model

    def run(self, at_once: int) -> None:
        """All runs in their order, so many at a time."""
        waiting = list(self.runs)
        going: list[Run] = []
        threads = max(1, (os.cpu_count() or 1) // at_once)
        written = 0.0
        while waiting or going:
            late = time.monotonic() > self.ends
            while waiting and not late and len(going) < at_once:
                going.append(waiting.pop(0))
                going[-1].start(threads)
            if late:
                waiting = []
                for run in going:
                    self._stop(run)
            going = [run for run in going if not run.ended()]
            if time.monotonic() - written > 5:
                self.write()
                written = time.monotonic()
            time.sleep(0.2)
        self.write()

    def _stop(self, run: Run) -> None:
        """Ask once, and end it if that does not help."""
        assert run.process is not None
        if run.exit is None:
            run.process.send_signal(signal.SIGTERM)  # it ends its step and saves
        elif time.monotonic() > self.ends + 15:
            run.process.kill()
        run.exit = "out of time"

    def kill(self) -> None:
        """End what still runs, should the script itself fail."""
        for run in self.runs:
            if run.process is not None and run.process.poll() is None:
                run.process.kill()

    def write(self) -> dict[str, Any]:
        """What is known so far."""
        import torch
        from measure import environment

        arms: dict[str, dict[str, dict[str, Any]]] = {}
        for run in self.runs:
            arms.setdefault(run.arm, {})[str(run.seed)] = {"held_out": [], **run.result()}
        found = {
            **environment("cuda" if torch.cuda.is_available() else "cpu"),
            "seconds": time.monotonic() - self.began, "warmstart": self.warmstart, "summary": summary(arms),
            "arms": arms,
        }  # fmt: skip
        (self.out / "erl.json").write_text(json.dumps(found, indent=1) + "\n")
        logs = {path.name: path.read_text(errors="replace")[-20_000:] for path in sorted(self.folder.glob("*.log"))}
        (self.out / "erl.log").write_text("".join(f"== {name}\n{log}\n" for name, log in logs.items()))
        return found


def planned(options: argparse.Namespace, model: Path, runs: Path) -> list[Run]:
    """The runs, the seeds of the two main arms first."""
    made = []
    for arm, settings in ARMS.items():
        if options.only and arm not in options.only.split(";"):
            continue
        seeds = options.seeds if arm in (BASELINE, "erl") else options.ablation_seeds
        for seed in range(seeds):
            tiny = TINY if options.tiny else []
            given = _latest([f"model={model}", *TRAIN, *settings, f"budget={options.budget}", *tiny, *options.set])
            made.append(Run(arm, seed, given, runs / f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}"))
    order = list(ARMS)
    return sorted(made, key=lambda run: (order.index(run.arm) >= 2, run.seed, order.index(run.arm)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=Path, help="where the runs go; default: OUT/runs")
    parser.add_argument("--budget", type=int, default=240_000, help="sampled tokens of a run")
    parser.add_argument("--seeds", type=int, default=6, help="of grpo and erl")
    parser.add_argument("--ablation-seeds", type=int, default=3)
    parser.add_argument("--only", help="names of arms, with semicolons between them")
    parser.add_argument("--at-once", type=int, default=18)
    parser.add_argument("--seconds", type=float, default=480.0, help="then what still runs is ended")
    parser.add_argument("--warmstart-seconds", type=float, default=90.0)
    parser.add_argument("--start", type=Path, help="a model of an earlier warm start, RUNS/start")
    parser.add_argument("--warm", action="append", default=[], metavar="KEY=VALUE", help="change the warm start")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change every run")
    parser.add_argument("--only-warmstart", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.budget, options.seeds, options.ablation_seeds, options.at_once = 10**6, 1, 1, 2
        options.warmstart_seconds = options.seconds
    out, runs = options.out.resolve(), (options.runs or options.out / "runs").resolve()
    for folder in (out, runs):
        folder.mkdir(parents=True, exist_ok=True)
    options.start = options.start and options.start.resolve()
    os.chdir(ROOT)  # where the task's file is found
    start = [*WARMSTART, *(TINY_START if options.tiny else []), *options.warm]
    with mps(print):
        study = Study(out, runs, options.seconds)
        model = options.start or study.warm_start(_latest(start), options.warmstart_seconds)
        if not options.only_warmstart:
            study.runs = planned(options, model, runs)
            try:
                study.run(options.at_once)
            finally:
                study.kill()
    found = study.write()
    picture(out, found["arms"])
    for arm, told in found["summary"].items():
        print(arm, json.dumps(told) if not isinstance(told, float) else told, sep="   ")
    sys.exit(any(run.exit for run in study.runs))


if __name__ == "__main__":
    main()
