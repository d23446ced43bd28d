"""The card of a trained model: what was trained on what, and held-out accuracy before and after, as Markdown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from poise import __version__
from poise.reports.recorded import read_json, read_metrics
from poise.runs.folder import RunFolder
from poise.runs.subscribers import warnings
from poise.runs.subscribers.results import cell
from poise.training.accuracy import BY_DIFFICULTY, LOST, is_summary, lost_shares

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def card(folder: RunFolder, title: str, step: int) -> str:
    """The card of a run's model after a step. Paths of this machine are left out."""
    config, summary = folder.config, read_json(folder, "summary.json")
    measured = isinstance(summary, dict) and summary.get("steps") == step  # and not the model of another step
    before, after = read_json(folder, "before.json"), summary.get("after") if measured else None
    model = str(config.get("model"))
    base = model if _HUB_ID.fullmatch(model) and not Path(model).exists() else None
    facts = _facts(folder, config, base, step)
    parts = [
        "---", "library_name: transformers", "pipeline_tag: text-generation",
        *([f"base_model: {base}"] if base else []),
        "tags: [poise, rlvr, reinforcement-learning]", "---", "",
        f"# {_plain(title)}", "",
        f"Trained by reinforcement learning with verifiable rewards, with poise {__version__}.", "",
        "| | |", "|---|---|", *(f"| {name} | {_plain(value)} |" for name, value in facts.items()), "",
        "## Held-out accuracy", "", *_accuracy(before, after), "",
    ]  # fmt: skip
    if said := warnings.read(folder):
        parts += ["## What the run warned of", "", *(f"- {_plain(each.what)}" for each in said), ""]
    parts += ["## Use", "", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
              'model = AutoModelForCausalLM.from_pretrained("THIS REPOSITORY OR FOLDER")',
              'tokenizer = AutoTokenizer.from_pretrained("THIS REPOSITORY OR FOLDER")', "```", ""]  # fmt: skip
    return "\n".join(parts)


def _facts(folder: RunFolder, config: dict[str, Any], base: str | None, step: int) -> dict[str, Any]:
    task, lora = config.get("task"), config.get("lora")
    lines = [line for line in read_metrics(folder) if line["step"] <= step]
    facts = {
        "started from": base or "a local model" if config.get("model") != "embedded" else "poise's embedded model",
        "task": task.get("name") if isinstance(task, dict) else None,
        "regulator": config.get("regulator"), "algorithm": config.get("algorithm"),
        "steps": f"{step} of {config.get('steps')}",
        "tokens sampled": f"{lines[-1].get('tokens/total') or 0:,.0f}" if lines else None,
        "prompts × responses per step": f"{config.get('prompts')} × {config.get('group')}",
        "LoRA": f"rank {lora.get('rank')}, merged" if isinstance(lora, dict) else None, "seed": config.get("seed"),
    }  # fmt: skip
    return {name: value for name, value in facts.items() if value is not None}


def _accuracy(before: Any, after: Any) -> list[str]:
    """A table, with 95 % intervals."""
    if not is_summary(before) or not is_summary(after):
        return ["Not measured: the run has no evaluation before training and of this model."]
    names = [name for name in before["table"] if name in after["table"] and BY_DIFFICULTY not in name]
    lost = lost_shares(before), lost_shares(after)
    sampling = f"{after['samples']} samples at temperature {_plain(after.get('temperature'))}"
    return [
        f"{after['n']} problems × {sampling}, with 95 % intervals:",
        "", "| measure | before | after |", "|---|---|---|",
        *(f"| {_plain(name)} | {cell(before['table'][name])} | {cell(after['table'][name])} |" for name in names),
        *(f"| {name.replace('_', ' ')} | {lost[0][name]:.3f} | {lost[1][name]:.3f} |" for name in LOST
          if all(name in shares for shares in lost)),
    ]  # fmt: skip


def _plain(value: Any) -> str:
    """Text that is no markup: settings may be anybody's."""
    text = " ".join(str(value).split())
    return re.sub(r"([\\`*\[\]<>|#])", r"\\\1", text)
