"""How long does `poise train` take until its first step, and where does the time go?

    python benchmarks/start.py                                     # recipe tiny, three times
    python benchmarks/start.py --kept --json start.json model=… task.name=kk

Every run is a process of its own. The first one finds empty caches of Triton and torch.compile, unless --kept leaves
those of the machine in place; the others find what it left. Each part has seconds by the clock and of the processor.
After the first step the trials of the model run once more: what they take then is their own work; what they took
before is mostly the first use of the device, which the first step would pay without them. A last process imports the
trainer with `-X importtime`, and adds the times up by package.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SETTINGS = ("tiny", "steps=1", "evaluation=off")
PARTS = ("interpreter", "settings", "imports", "load_policy", "build_sampler", "preflight", "rest", "first step")
TRIALS = ("head_fits", "passes_agree", "supports")
PACKAGES = 12  # shown


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Marks:
    """Seconds by the clock and of the processor, by part."""

    def __init__(self, begun: float) -> None:
        self.parts: dict[str, list[float]] = {}
        self.begun, self.last = begun, (begun, 0.0)

    def part(self, name: str) -> None:
        """What has passed since the last call belongs to this part."""
        now = time.time(), cpu()
        had = self.parts.get(name, [0.0, 0.0])
        self.parts[name] = [total + b - a for total, a, b in zip(had, self.last, now, strict=True)]
        self.last = now

    def around(self, owner: Any, name: str, *, inside: bool = False) -> None:
        """Time the calls of a function; ``inside`` another part: on top of that one's time."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            before = time.time(), cpu()
            if not inside:
                self.part("rest")
            try:
                return function(*args, **kwargs)
            finally:
                if inside:
                    self.parts[name] = [time.time() - before[0], cpu() - before[1]]
                else:
                    self.part(name)

        setattr(owner, name, timed)


def child(file: Path, begun: float, words: list[str]) -> None:
    """Run the command with clocks in it, and write what they say."""
    marks = Marks(begun)
    marks.part("interpreter")
    from poise.__main__ import main
    from poise.cli import train

    command: Any = train
    starts, watched = command.quick_imports, False

    @contextmanager
    def quick_imports() -> Iterator[None]:
        nonlocal watched
        marks.part("settings")
        with starts():
            yield
        marks.part("imports")
        if "poise.trainer" in sys.modules and not watched:  # the last of the command's imports
            watched = True
            _watch(marks, file)

    command.quick_imports = quick_imports
    sys.argv = ["poise", "train", *words]
    main()


def _watch(marks: Marks, file: Path) -> None:
    """Put clocks around what happens between the imports and the end of the first step."""
    import poise.trainer
    from poise.models import load_checks
    from poise.sampling.native import engine
    from poise.training import building

    trainer: Any = poise.trainer
    files = {
        name: vars(module).get("__cached__")
        for name, module in list(sys.modules.items())
        if hasattr(module, "__dict__")
    }
    missing = [name for name, file in files.items() if isinstance(file, str) and not Path(file).exists()]
    facts: dict[str, Any] = {
        "modules": len(sys.modules),
        "without bytecode": Counter(name.split(".")[0] for name in missing),
        "threads": len(os.listdir("/proc/self/task")) if Path("/proc/self/task").exists() else None,
    }
    plain = [(load_checks, "head_fits"), (load_checks, "passes_agree"), (engine, "supports")]
    functions = [getattr(owner, name) for owner, name in plain]
    for owner, name in plain:
        marks.around(owner, name, inside=True)
    for owner, name in ((building, "load_policy"), (building, "build_sampler"), (trainer, "preflight")):
        marks.around(owner, name)
    step = trainer.Trainer.step

    def timed_step(self: Any, *args: Any) -> Any:
        marks.part("rest")
        facts["until the first step"] = time.time() - marks.begun
        try:
            return step(self, *args)
        finally:
            marks.part("first step")
            for function in functions:
                function(self.policy)
                marks.part(f"{function.__name__}, again")
            file.write_text(json.dumps({"parts": marks.parts, **facts}))

    trainer.Trainer.step = timed_step


def run(words: list[str], environment: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "marks.json"
        command = [sys.executable, __file__, "--child", str(file), str(time.time()), *words, f"run={folder}/run"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not file.exists():
            sys.exit(done.stdout + done.stderr)
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def imports() -> dict[str, float]:
    """Seconds that the modules of each package took to import, without those that they import."""
    command = [sys.executable, "-X", "importtime", "-c", "import poise.trainer"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    taken: Counter[str] = Counter()
    for line in lines:
        first, _, rest = line.removeprefix("import time:").partition("|")
        if first.strip().isdigit():
            taken[rest.split("|")[1].strip().split(".")[0]] += int(first)
    return {name: microseconds / 1e6 for name, microseconds in taken.most_common()}


def show(runs: list[dict[str, Any]]) -> None:
    print(f"{'seconds by the clock / of the processor':40} {'first run':>14} {'later, median':>16}")
    later = runs[1:] or runs
    names = [*PARTS, *TRIALS, *(f"{name}, again" for name in TRIALS)]
    for name in [name for name in names if all(name in run["parts"] for run in runs)]:
        first = runs[0]["parts"][name]
        rest = [statistics.median(run["parts"][name][which] for run in later) for which in (0, 1)]
        inside = "  of these: " if name in TRIALS else ""
        print(f"{inside + name:40} {first[0]:6.2f} / {first[1]:5.2f} {rest[0]:8.2f} / {rest[1]:5.2f}")
    median = statistics.median(run["until the first step"] for run in later)
    print(f"{'until the first step':40} {runs[0]['until the first step']:6.2f} {median:16.2f}")
    last = runs[-1]
    compiled = ", ".join(f"{name} {count}" for name, count in Counter(last["without bytecode"]).most_common(5))
    print(f"{last['modules']} modules; compiled anew, for lack of a file with bytecode: {compiled or 'none'}")
    print(f"{last['threads']} threads after the imports")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs, the first one included")
    parser.add_argument("--kept", action="store_true", help="use the caches of this machine from the first run on")
    parser.add_argument("--json", type=Path, help="write all figures to a file")
    parser.add_argument("settings", nargs="*", help="of poise train, beside steps=1 evaluation=off")
    asked = parser.parse_args()
    words = [*(SETTINGS if not asked.settings else SETTINGS[1:]), *asked.settings]
    with tempfile.TemporaryDirectory() as caches:
        own = {"TRITON_CACHE_DIR": f"{caches}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor"}
        environment = {**os.environ, **({} if asked.kept else own)}
        runs = []
        for _ in range(asked.repeats):
            runs.append(run(words, environment))
            print(f"until the first step: {runs[-1]['until the first step']:.2f} s", flush=True)
    show(runs)
    packages = imports()
    shown = list(packages.items())[:PACKAGES]
    print("imports by package: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in shown))
    if asked.json:
        asked.json.write_text(json.dumps({"command": words, "runs": runs, "imports": packages}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        del sys.path[0]  # the folder of the benchmarks
        child(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    else:
        main()
