"""The models that comparisons begin with: warm starts on Knights & Knaves, side by side on one machine.

    python experiments/embedded-model/warm_starts.py runs/models                        # on a GPU, about five minutes
    python experiments/embedded-model/warm_starts.py runs/models --only kk-w0,kk-w1
    python experiments/embedded-model/warm_starts.py runs/models --tiny                 # every path, on a CPU, a minute

Each becomes a folder and a ``.tar.gz``; ``warm_starts.json`` has commands and seconds. What still runs at the end of
``--seconds`` is asked to stop, and saves what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

MAKE_MODEL = Path(__file__).parent / "make_model.py"
KK = ["task.name=kk", "style=compact", "device=auto"]
LEARNED = ["noise=0.0", "batch=128", "steps=6000", "max_tokens=256"]  # no planted misreadings; stop_at ends it
WIDER = ["width=320", "layers=6", "heads=8", "lr=1e-3"]  # 8 million parameters

MODELS: dict[str, list[str]] = {
    "embedded": [*KK, "task.people=2-3", "noise=0.2", "wording=1.0", "steps=2500", "batch=256", "workers=5"],
    "kk-w0": [*KK, *LEARNED, "task.people=3", "wording=0.0", "stop_at=0.35"],
    "kk-w05": [*KK, *LEARNED, "task.people=3", "wording=0.5", "stop_at=0.35"],
    "kk-w1": [*KK, *LEARNED, "task.people=3", "wording=1.0", "stop_at=0.35"],
    "kk-wide-w0": [*KK, *LEARNED, *WIDER, "task.people=3", "wording=0.0", "stop_at=0.35"],
    "kk-wide-w1": [*KK, *LEARNED, *WIDER, "task.people=3", "wording=1.0", "stop_at=0.35"],
}
TINY = ["width=32", "layers=1", "heads=2", "steps=2", "batch=4", "workers=0"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", type=Path, help="where the folders go; default: OUT")
    parser.add_argument("--only", help="names, with commas between them")
    parser.add_argument("--workers", type=int, default=2, help="processes that write solutions, for each model")
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    models = options.models or options.out
    for folder in (options.out, models):
        folder.mkdir(parents=True, exist_ok=True)
    chosen = options.only.split(",") if options.only else list(MODELS)
    began = time.monotonic()
    found: dict[str, dict[str, object]] = {}
    running: dict[str, subprocess.Popen[bytes]] = {}
    for name in chosen:
        settings = [f"workers={options.workers}", *MODELS[name], *(TINY if options.tiny else [])]
        settings = [f"{key}={value}" for key, value in dict(item.split("=", 1) for item in settings).items()]
        words = [str(MAKE_MODEL), str(models / name), *settings]
        found[name] = {"command": " ".join(["python", *words])}
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2"}
        with open(options.out / f"{name}.log", "wb") as log:
            running[name] = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, env=environment)
    late = False
    while running:
        time.sleep(0.5)
        if time.monotonic() - began > options.seconds and not late:
            late = True
            for process in running.values():
                process.send_signal(signal.SIGTERM)
        for name, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[name]
            found[name] |= {"exit": process.returncode, "seconds": time.monotonic() - began}
            if process.returncode == 0:
                with tarfile.open(options.out / f"{name}.tar.gz", "w:gz") as packed:
                    packed.add(models / name, name)
            print(name, found[name]["exit"], f"{found[name]['seconds']:.0f} s", flush=True)
            (options.out / "warm_starts.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
