"""Do models learn from their own samples? Several studies side by side, each a few commands of poise.

    python experiments/learning/learning.py runs/learning --smollm2 models/smollm2   # on a GPU, five minutes
    python experiments/learning/learning.py runs/learning --tiny                     # every path, on a CPU
    python experiments/learning/learning.py --split SmolLM2.gguf parts               # a large file in parts

``--smollm2`` is a model folder, a ``.gguf`` file, or a folder with the parts of one. The output folder holds
``learning.json`` (commands, evaluations before and after, curves, the best constant answer), rewritten as the studies
go on, ``learning.md`` with tables of them, ``learning.png``, ``learning.log`` and, of the study ``embedded``, the model
in a ``.tar.gz``; the runs themselves are in its folder ``runs``, or where ``--runs`` says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEPT_METRICS = ("step", "reward/accuracy", "rollout/length", "time/step")
PART = 47 << 20  # bytes of a part
ROOT = Path(__file__).resolve().parents[2]
MAKE_MODEL = "experiments/embedded-model/make_model.py"
HELD_OUT = 512
OWN = "task.name=experiments/learning/learning_tasks.py:"

EVALUATION = [f"evaluation.problems={HELD_OUT}", "evaluation.samples=4", "evaluation.every=25"]
KEPT = ["rollouts_every=100", "checkpoint_every=0", "keep_checkpoints=1", "compile=false"]
PRETRAINED = [
    "steps=150", "prompts=32", "group=16", "rollout.max_tokens=16", "rollout.max_prompt=128", "optim.lr=3e-5",
    "optim.warmup_steps=5", *EVALUATION, *KEPT,
]  # fmt: skip
# About five million parameters, trained on worked solutions until it can do something.
SMALL = ["width=256", "layers=6", "heads=8", "batch=256", "lr=1e-3", "steps=3000", "workers=4", "compile=false"]
SMALL_RL = ["steps=200", "group=16", "optim.lr=1e-4", "optim.warmup_steps=5", *EVALUATION, *KEPT]
SUMS = [OWN + "Sums", "task.low=10", "task.high=99", "task.digits=true"]
LAKE = ["task.name=frozenlake", "task.side=4", "task.turns=12"]
EMBEDDED = ["task.name=kk", "task.people=2-3", "style=compact", "noise=0.2", "wording=1.0"]


@dataclass
class Study:
    """Commands one after another, of which the last is the training that is measured."""

    name: str
    train: list[str]
    warmstart: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.train, self.warmstart = _latest(self.train), _latest(self.warmstart)

    @property
    def task(self) -> dict[str, str]:
        """The task's settings, as they were typed."""
        return dict(item.removeprefix("task.").split("=", 1) for item in self.train if item.startswith("task."))


def _latest(settings: list[str]) -> list[str]:
    """Settings of which each stands there once; of several the last counts."""
    return [f"{key}={value}" for key, value in dict(item.split("=", 1) for item in settings).items()]


def studies(smollm2: str) -> list[Study]:
    """What is run on a GPU."""
    short = ["rollout.max_tokens=8", "rollout.max_prompt=64", "prompts=64"]
    return [
        Study("smollm2-largest", [OWN + "Largest", f"model={smollm2}", *PRETRAINED]),
        Study("smollm2-animal", [OWN + "Animal", f"model={smollm2}", *PRETRAINED]),
        Study("smollm2-sums", [OWN + "Sums", f"model={smollm2}", *PRETRAINED, "rollout.temperature=0.7"]),
        Study(
            "small-sums",
            [*SUMS, *SMALL_RL, *short],
            [*SUMS, *SMALL, "vocabulary=300", "stop_at=0.3", "max_tokens=8"],
        ),
        Study(
            "small-frozenlake",
            [*LAKE, *SMALL_RL, "rollout.max_tokens=4", "rollout.max_prompt=256", "prompts=16", "steps=150",
             "evaluation.every=50", "evaluation.samples=2"],
            [*LAKE, *SMALL, "batch=128", "vocabulary=600", "stop_at=0.15", "max_tokens=4", "steps=1200",
             "workers=6"],
        ),
        Study(
            "embedded",
            ["task.name=kk", "task.people=2-3", "steps=50", "rollout.max_tokens=144", "evaluation.problems=300",
             "evaluation.samples=4", "optim.lr=2e-4", "compile=false"],
            [*EMBEDDED, "steps=6000", "batch=256", "workers=15"],
        ),
    ]  # fmt: skip


def tiny(study: Study) -> Study:
    """The same commands with models and numbers that a CPU finishes in seconds."""
    small = ["width=32", "layers=1", "heads=2", "workers=0", "steps=2", "batch=4", "compile=false"]
    few = [
        "steps=2", "prompts=2", "group=2", "evaluation.problems=6", "evaluation.samples=2", "evaluation.every=1",
        "rollout.max_tokens=4", "rollout.max_prompt=512",
    ]  # fmt: skip
    return Study(study.name, [*study.train, *few], [*study.warmstart, *small] if study.warmstart else [])


class Studies:
    """All studies under way, and what is known of them so far."""

    def __init__(self, out: Path, runs: Path, chosen: list[Study], seconds: float) -> None:
        self.out, self.runs, self.chosen = out, runs, chosen
        self.began = time.monotonic()
        self.ends = self.began + seconds
        self.found: dict[str, dict[str, Any]] = {study.name: {"commands": []} for study in chosen}

    def run(self, at_once: int) -> None:
        """All of them, so many at a time."""
        with ThreadPoolExecutor(at_once) as pool:
            futures = [pool.submit(self._study, study) for study in self.chosen]
            while wait(futures, timeout=2).not_done:
                self.write()
        for future in futures:
            future.result()
        self.write()

    def _study(self, study: Study) -> None:
        found, model = self.found[study.name], self.runs / f"{study.name}-start"
        begins = time.monotonic()
        settings = [f"run={self.runs / study.name}", *study.train]
        if study.warmstart:
            self._command(study, ["python", MAKE_MODEL, str(model), *study.warmstart])
            settings.insert(0, f"model={model}")
            found["warmstart_seconds"] = time.monotonic() - begins
            if study.name == "embedded" and model.exists():
                with tarfile.open(self.out / "embedded.tar.gz", "w:gz") as packed:
                    packed.add(model, "kk-tiny")
        begins = time.monotonic()
        self._command(study, ["poise", "train", *settings])
        found["train_seconds"] = time.monotonic() - begins

    def _command(self, study: Study, words: list[str]) -> None:
        """Run a command to its end, or until the time is up; what it says goes to the study's log."""
        found = self.found[study.name]
        if found.get("exit") or time.monotonic() > self.ends:
            return
        found["commands"].append(" ".join(words))
        threads = str(max(1, (os.cpu_count() or 1) // len(self.chosen)))
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads}
        with open(self.runs / f"{study.name}.log", "ab") as log:
            program = [sys.executable, *(["-m", "poise"] if words[0] == "poise" else [])]
            running = subprocess.Popen([*program, *words[1:]], stdout=log, stderr=log, env=environment, cwd=ROOT)
            try:
                found["exit"] = running.wait(max(1.0, self.ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                running.terminate()  # it ends its step and saves
                try:
                    running.wait(20)
                except subprocess.TimeoutExpired:
                    running.kill()
                    running.wait()
                found["exit"] = "out of time"

    def write(self) -> None:
        """What is known so far."""
        for study in self.chosen:
            self.found[study.name] |= read_run(self.runs / study.name, KEPT_METRICS)
        results = {**_environment(), "seconds": time.monotonic() - self.began, "studies": self.found}
        (self.out / "learning.json").write_text(json.dumps(results, indent=1) + "\n")
        logs = {path.name: path.read_text(errors="replace")[-200_000:] for path in self.runs.glob("*.log")}
        (self.out / "learning.log").write_text("".join(f"== {name}\n{log}\n" for name, log in logs.items()))


def read_run(run: Path, kept: Sequence[str], parts: tuple[str, ...] = ("eval/",)) -> dict[str, Any]:
    """Evaluations and curve of a run that may still be under way, with the metrics named or beginning so."""
    found: dict[str, Any] = {}
    try:
        for name in ("before", "summary"):
            if (run / f"{name}.json").exists():
                found[name] = json.loads((run / f"{name}.json").read_text())
        lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
        steps = [json.loads(line) for line in lines]
    except ValueError:  # a line that is being written
        return found
    if "summary" in found:
        found["after"] = found.pop("summary")["after"]
    found["curve"] = [{k: v for k, v in step.items() if k in kept or k.startswith(parts)} for step in steps]
    return found


def _environment() -> dict[str, Any]:
    import torch
    from measure import environment

    return environment("cuda" if torch.cuda.is_available() else "cpu")


def constant_answers(study: Study) -> dict[str, Any]:
    """How many held-out problems differ, and what replies reach that do not look at them."""
    import yaml

    from poise import tasks

    settings = {key: yaml.safe_load(value) for key, value in study.task.items()}
    task = tasks.get(settings.pop("name"), **settings)
    problems = tasks.draw(task, "test", 0, HELD_OUT)
    found: dict[str, Any] = {"held_out": len(problems), "different": len({p.prompt for p in problems})}
    trained = {p.prompt for p in tasks.draw(task, "train", 0, 4 * HELD_OUT)}
    found["also_in_training"] = sum(p.prompt in trained for p in problems)
    if hasattr(task, "constants"):
        found["constant"] = task.constants(problems)
    elif study.task["name"] == "frozenlake":
        found["constant"] = {move: _always(task, problems, move) for move in ("up", "down", "left", "right")}
    return found


def _always(task: Any, problems: list[Any], move: str) -> float:
    """The success of always making the same move."""
    won = 0
    for problem in problems:
        episode = task.episode(problem)
        said = episode.start()
        while said:
            said = episode.step(move)
        won += episode.score().correct
    return won / len(problems)


def picture(out: Path, found: dict[str, dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = {name: study for name, study in found.items() if "before" in study}
    if not shown:
        return
    figure, axes = plt.subplots(1, len(shown), figsize=(3.2 * len(shown), 3), sharey=True, squeeze=False)
    for axis, (name, study) in zip(axes[0], shown.items(), strict=True):
        for measure, label in (("avg@", "sampled"), ("greedy", "greedy")):
            points = [(0, study["before"]["accuracy" if label == "sampled" else "greedy"])]
            for step in study.get("curve", []):
                points += [(step["step"], v) for k, v in step.items() if k.split("/")[-1].startswith(measure)]
            if "after" in study:
                last = study["curve"][-1]["step"] if study.get("curve") else 0
                points.append((last, study["after"]["accuracy" if label == "sampled" else "greedy"]))
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        best = max(study.get("problems", {}).get("constant", {"none": 0.0}).values())
        axis.axhline(best, linestyle=":", color="grey", label="best constant")
        axis.set(title=name, xlabel="step", ylim=(0, 1))
    axes[0][0].set_ylabel("held-out accuracy")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "learning.png", dpi=120)


def tables(out: Path, found: dict[str, dict[str, Any]]) -> None:
    """The results and the commands in Markdown."""
    lines = ["| study | held out | best constant | avg@k | greedy | steps | seconds |", "|---|---|---|---|---|---|---|"]
    for name, study in found.items():
        before, after, problems = study.get("before"), study.get("after"), study["problems"]
        if not before or not after:
            continue
        average, greedy = (
            " → ".join(f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]" for row in rows)
            for rows in (
                [when["table"][f"avg@{when['samples']}"] for when in (before, after)],
                [when["table"]["greedy"] for when in (before, after)],
            )
        )
        constant = max(problems.get("constant", {"": 0.0}).values())
        steps, seconds = study["curve"][-1]["step"], study.get("train_seconds", 0.0)
        lines.append(
            f"| {name} | {problems['different']} | {constant:.3f} | {average} | {greedy} | {steps} | {seconds:.0f} |"
        )
    commands = [command for study in found.values() for command in study["commands"]]
    (out / "learning.md").write_text("\n".join([*lines, "", "```bash", *commands, "```", ""]))


def split(file: Path, folder: Path, size: int = PART) -> list[Path]:
    """A file in parts that are small enough to be carried one by one."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[Path] = []
    with open(file, "rb") as source:
        while piece := source.read(size):
            parts.append(folder / f"{file.name}.part{len(parts)}")
            parts[-1].write_bytes(piece)
    return parts


def join(folder: Path, out: Path) -> Path:
    """The file whose parts are somewhere under the folder."""
    parts = sorted(folder.rglob("*.part*"), key=lambda part: int(part.suffix.removeprefix(".part")))
    file = out / parts[0].name.removesuffix(parts[0].suffix)
    with open(file, "wb") as whole:
        for part in parts:
            whole.write(part.read_bytes())
    return file


def prepared(model: Path, work: Path) -> str:
    """SmolLM2 as an ordinary model folder, whatever it comes as."""
    if (model / "config.json").exists():
        return str(model.resolve())
    made = work / "smollm2"
    if not (made / "config.json").exists():
        from smollm2 import convert

        convert(model if model.is_file() else join(model, work), made)
    return str(made.resolve())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--smollm2", type=Path, help="a model folder, a .gguf file, or a folder with its parts")
    parser.add_argument("--only", help="names of studies, with commas between them")
    parser.add_argument("--set", action="append", default=[], metavar="STUDY:KEY=VALUE", help="change its training")
    parser.add_argument("--seconds", type=float, default=540.0, help="then what still runs is ended")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--runs", type=Path, help="where the runs go; default: OUT/runs")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--prepare", action="store_true", help="only make --smollm2 a model folder, under --runs")
    parser.add_argument("--split", nargs=2, type=Path, metavar=("FILE", "FOLDER"))
    args = parser.parse_args()
    if args.split:
        print(*split(*args.split), sep="\n")
        return
    if args.out is None or not (args.smollm2 or args.tiny or args.only):
        parser.error("an output folder is needed, and --smollm2 or --tiny")
    out, runs = args.out.resolve(), (args.runs or args.out / "runs").resolve()
    out.mkdir(parents=True, exist_ok=True)
    runs.mkdir(parents=True, exist_ok=True)
    smollm2 = args.smollm2 and args.smollm2.resolve()
    os.chdir(ROOT)  # where the tasks' file is found
    began = time.monotonic()
    model = "embedded" if args.tiny or not smollm2 else prepared(smollm2, runs)
    print(f"{model} is ready after {time.monotonic() - began:.0f} s", flush=True)
    if args.prepare:
        return
    chosen = [study for study in studies(model) if not args.only or study.name in args.only.split(",")]
    if not args.only:
        chosen = [study for study in chosen if study.name != "embedded"]  # a GPU's five minutes, and not about learning
    if args.tiny:
        chosen = [tiny(study) for study in chosen]
    for study in chosen:
        changes = [item.partition(":")[2] for item in args.set if item.partition(":")[0] in (study.name, "all")]
        study.train = _latest([*study.train, *changes])
    going = Studies(out, runs, chosen, args.seconds - (time.monotonic() - began))
    for study in chosen:
        going.found[study.name]["problems"] = constant_answers(study)
    going.run(args.at_once)
    picture(out, going.found)
    tables(out, going.found)
    for name, found in going.found.items():
        before, after = found.get("before", {}), found.get("after", {})
        told = [f"{m} {before.get(m, -1):.3f} → {after.get(m, -1):.3f}" for m in ("accuracy", "greedy")]
        print(name, found.get("exit"), *told, found["problems"].get("constant"), sep="   ")
    if any(found.get("exit") for found in going.found.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
