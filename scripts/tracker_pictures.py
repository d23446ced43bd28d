"""Pictures of a run in TensorBoard and trackio, for the docs: python scripts/tracker_pictures.py RUN TRACKER PICTURE

    python scripts/tracker_pictures.py runs/puzzles tensorboard docs/images/tensorboard.png
    python scripts/tracker_pictures.py runs/puzzles trackio docs/images/trackio.png

Sends four of the run's metrics to the tracker through ``poise.runs.trackers``, as training does, and photographs its
page. Needs playwright (extra dev), a Chromium, and the extra of the tracker.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from poise.runs.folder import RunFolder
from poise.runs.trackers import PROJECT, tracking

SERVERS = {  # how each shows what it has, given its data folder and a port
    "tensorboard": ["-m", "tensorboard.main", "--logdir", "{folder}", "--port", "{port}", "--load_fast=false"],
    "trackio": [
        "-c",
        "import trackio; trackio.show('{project}', block_thread=True, open_browser=False, server_port={port})",
    ],
}
SHOWN = ("reward/mean", "reward/accuracy", "rollout/length", "rollout/entropy")  # a picture has room for four


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("tracker", choices=sorted(SERVERS))
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        os.environ["TRACKIO_DIR"] = place
        _send(args.run, args.tracker, Path(place))
        with _served(args.tracker, Path(place)) as address:
            _photograph(address, args.picture)


def _send(run: Path, tracker: str, place: Path) -> None:
    folder = RunFolder.open(run, resume=False)
    with tracking([tracker], place, folder.config) as (opened,):
        for line in folder.metrics():
            opened.log(line.pop("step"), {name: line[name] for name in SHOWN})


@contextmanager
def _served(tracker: str, place: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.format(folder=place, port=port, project=PROJECT) for word in SERVERS[tracker]]
    server = subprocess.Popen([sys.executable, *words], env=os.environ | {"GRADIO_ANALYTICS_ENABLED": "0"})
    try:
        for _ in range(300):
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def _photograph(address: str, picture: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 760})
        page.set_default_timeout(120_000)
        page.goto(address)
        page.wait_for_timeout(15_000)  # charts are drawn bit by bit
        picture.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main()
