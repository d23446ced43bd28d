"""What seeing costs: recording tokens as a share of a step, poise diagnose, and a report of ten million tokens.

python experiments/performance/report.py record      # a real run of recipe tiny that records every step
python experiments/performance/report.py diagnose    # poise diagnose embedded, with its defaults
python experiments/performance/report.py page        # 10,000 responses × 1,000 tokens in headless Chromium (playwright)
"""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from poise import trainer
from poise.referee.report.html import write_report
from poise.runs.folder import RunFolder
from poise.training import config


def record(folder: Path) -> dict[str, Any]:
    settings = config.load(
        "tiny",
        ["steps=8", "rollouts_every=1", f"run={folder / 'run'}", "evaluation.problems=1", "evaluation.samples=1"],
    )
    trainer.train(settings, quiet=True)
    lines = RunFolder.open(folder / "run", resume=False).metrics()[2:-1]  # 1 and the last print samples too
    shares = [line["time/record"] / line["time/step"] for line in lines]
    files = list((folder / "run/tokens").glob("*")) + list((folder / "run/rollouts").glob("*"))
    return {
        "record_share_median": statistics.median(shares),
        "record_share_largest": max(shares),
        "record_ms": 1000 * statistics.median(line["time/record"] for line in lines),
        "step_s": statistics.median(line["time/step"] for line in lines),
        "kilobytes_per_step": sum(file.stat().st_size for file in files) / 8 / 1000,
    }


def diagnose(folder: Path) -> dict[str, Any]:
    start = time.perf_counter()
    command = [sys.executable, "-m", "poise", "diagnose", "embedded", "--out", str(folder / "out")]
    subprocess.run(command, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime  # tells how much of the time others took
    return {"diagnose_s": time.perf_counter() - start, "cpu_s": cpu, "threads": torch.get_num_threads()}


def page(folder: Path) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    run = made_up(folder / "run", steps=10, responses=1000, length=1000)
    start = time.perf_counter()
    path = write_report([run], folder / "report.html")
    found = {"build_s": time.perf_counter() - start, "megabytes": path.stat().st_size / 1e6}
    watch = (
        "window.slow = []; new PerformanceObserver(l => slow.push(...l.getEntries().map(e => e.duration)))"
        ".observe({ entryTypes: ['longtask'] })"
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        view = browser.new_page()
        view.add_init_script(watch)
        start = time.perf_counter()
        view.goto(f"{path.as_uri()}#responses", timeout=120_000)
        view.wait_for_selector(".tokens span", timeout=120_000)
        found |= {"first_response_s": time.perf_counter() - start, "longest_task_loading_ms": _slowest(view)}
        took = []
        for number in range(40):
            start = time.perf_counter()
            view.keyboard.press("j")
            view.locator(".pane p", has_text=f"response {number + 1} ").wait_for()
            took.append(time.perf_counter() - start)
        found |= {"next_response_ms_median": 1000 * statistics.median(took), "longest_task_browsing_ms": _slowest(view)}
        for top in range(0, 460_000, 9_200):
            view.eval_on_selector("#list", f"l => l.scrollTop = {top}")
            view.wait_for_timeout(16)
        found |= {"longest_task_scrolling_ms": _slowest(view)}
        start = time.perf_counter()
        view.fill("#search", "needle 9999")
        view.locator("#count", has_text="1 of 10,000 responses").filter(has_not_text="searched").wait_for(
            timeout=300_000
        )
        found |= {"search_all_s": time.perf_counter() - start, "longest_task_searching_ms": _slowest(view)}
        browser.close()
    return found


def _slowest(view: Any) -> float:
    view.wait_for_timeout(300)
    found = view.evaluate("window.slow.splice(0)")
    return max(found, default=0.0)


def made_up(path: Path, steps: int, responses: int, length: int) -> Path:
    """A run folder of random tokens."""
    run = RunFolder.create(path, {"model": "made up"})
    g = torch.Generator().manual_seed(0)
    words = {i: f" w{i}" for i in range(5000)}
    for step in range(1, steps + 1):
        count = responses * length
        ids = torch.randint(0, len(words), (count,), generator=g, dtype=torch.int32)
        texts = ["".join(words[i] for i in row) for row in ids.view(responses, length).tolist()]
        records = [
            {"step": step, "problem": f"p{i // 8}", "difficulty": "3", "prompt": f"question {i // 8}", "reward": 1.0,
             "text": f"{text} needle {(step - 1) * responses + i}", "correct": i % 2 == 0, "parts": {},
             "finished": True}
            for i, text in enumerate(texts)
        ]  # fmt: skip
        run.save_rollouts(step, records)
        arrays = {
            "start": torch.arange(responses + 1, dtype=torch.int32) * length,
            "id": ids,
            "logp": -torch.rand(count, generator=g).pow(4) * 8,
            "entropy": torch.rand(count, generator=g),
            "advantage": torch.randn(responses, generator=g).repeat_interleave(length),
            "weight/all": torch.rand(count, generator=g),
        }
        run.save_tokens(step, arrays, words)
        run.log(step, {"reward/mean": step / steps})
    return path


def main() -> None:
    measures = {"record": record, "diagnose": diagnose, "page": page}
    if len(sys.argv) != 2 or sys.argv[1] not in measures:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measures[sys.argv[1]](Path(folder)), indent=1))


if __name__ == "__main__":
    main()
