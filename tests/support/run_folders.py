"""Run folders without a training run, and a browser to open their reports."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from poise.runs.folder import RunFolder

HOSTILE = (
    "<script>window.hacked=1</script><img src=x onerror='window.hacked=2'></script><!-- <svg onload=window.hacked=3>"
    "\0\x1b[2J\u202e evil \u2066\u2028 \ud800 \ufeff \" onmouseover='window.hacked=4' javascript:window.hacked=5 "
    "{{script}}"
)
WORDS = {0: "alpha", 1: " beta", 2: "\n", 3: " gamma", 4: "<|end|>"}


def response(step, number, **changes):
    """The record of a response; every other one is right."""
    right = number % 2 == 0
    record = {
        "step": step, "problem": f"p/{number // 2}", "difficulty": "2" if number % 4 < 2 else "3",
        "prompt": f"question {number // 2}", "text": f"alpha beta answer{step}x{number}",
        "reward": 3.0 if right else -0.5, "correct": right,
        "parts": {"format": 1.0, "answer": 2.0 if right else -1.5}, "finished": True,
    }  # fmt: skip
    return record | changes


def arrays(responses, length=4, seed=0):
    """Random values for the tokens of some responses, as ``RunFolder.save_tokens`` takes them."""
    g = torch.Generator().manual_seed(seed)
    count = responses * length
    return {
        "start": torch.arange(responses + 1, dtype=torch.int32) * length,
        "id": torch.randint(0, len(WORDS), (count,), generator=g, dtype=torch.int32),
        "logp": -3 * torch.rand(count, generator=g),
        "entropy": torch.rand(count, generator=g),
        "advantage": torch.randn(responses, generator=g).repeat_interleave(length),
        "weight/low": torch.rand(count, generator=g),
        "weight/high": torch.rand(count, generator=g),
        "nthr": torch.where(torch.rand(count, generator=g) < 0.5, torch.nan, torch.randn(count, generator=g)),
    }


def make_run(path, steps=(1, 2), responses=6, config=None, records=None, texts=WORDS, **fields):
    """A run folder with some recorded steps."""
    folder = RunFolder.create(path, {"model": "tiny", "regulator": "grpo", "optim": {"lr": 1e-6}, **(config or {})})
    folder.write_json("environment.json", {"torch": "2", "device": "cpu"})
    for step in steps:
        add_step(folder, step, responses, records, texts, **fields)
    return folder


def add_step(folder, step, responses=6, records=None, texts=WORDS, **fields):
    """Record one more step, as a run under way does."""
    folder.save_rollouts(step, records or [response(step, i) for i in range(responses)])
    count = len(records) if records else responses
    folder.save_tokens(step, arrays(count, seed=step, **fields), texts)
    folder.log(
        step,
        {
            "reward/mean": step / 10,
            "reward/accuracy/2": 0.5,
            "reward/accuracy/3": 0.4,
            "rollout/length": 40 + step,
            "time/step": 2.0,
        },
    )


def chromium():
    """The browser's path. Skips where there is none, unless POISE_CHROMIUM=required says that there must be."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        why = "no Chromium on this machine: apt-get install chromium, and these tests run"
        (pytest.fail if os.environ.get("POISE_CHROMIUM") == "required" else pytest.skip)(why)
    return found


def look(page, tmp_path, *folders, tab="responses"):
    """Write the report of some runs and open it at a tab."""
    from poise.referee.report.html import write_report

    path = write_report([folder.path for folder in folders], tmp_path / "report.html")
    page.goto(f"{path.as_uri()}#{tab}")
    page.wait_for_selector("#main :not(p)")
    return path


def see(page, selector, text, whole=False):
    """Wait until an element shows a text. (Not wait_for_function: the page's policy forbids its eval.)

    The time limit is there so that a test that fails ends; playwright's own is too short for a busy machine.
    """
    from playwright.sync_api import expect

    found = expect(page.locator(selector).first)
    (found.to_have_text if whole else found.to_contain_text)(text, timeout=60_000)


def next_frame(page):
    """Wait until the page has drawn, and done what it does before and after."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
