"""The model card of a run as Markdown: model, task, method, and held-out accuracy before and after training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from poise import __version__
from poise.models.location import SHIPPED
from poise.runs.folder import RunFolder
from poise.runs.subscribers import warnings
from poise.runs.subscribers.summary import accuracy_rows
from poise.training.accuracy import BY_DIFFICULTY, is_summary

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HEADER = """\
---
library_name: transformers
pipeline_tag: text-generation
{base}tags: [poise, rlvr, reinforcement-learning]
---
"""
USE = """\
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("THIS REPOSITORY OR FOLDER")
tokenizer = AutoTokenizer.from_pretrained("THIS REPOSITORY OR FOLDER")
```
"""


def card(folder: RunFolder, title: str, step: int) -> str:
    """The model card of a run after ``step`` steps. The card contains no local paths."""
    config, summary = folder.config, folder.read_json("summary.json")
    is_final = isinstance(summary, dict) and summary.get("steps") == step  # the summary describes this model
    before, after = folder.read_json("before.json"), summary.get("after") if is_final else None
    model = str(config.get("model"))
    base = model if _HUB_ID.fullmatch(model) and not Path(model).exists() else None
    facts = _facts(folder, config, base, step)
    rows = "\n".join(f"| {name} | {_plain(value)} |" for name, value in facts.items())
    parts = [
        HEADER.format(base=f"base_model: {base}\n" if base else ""),
        f"# {_plain(title)}\n",
        f"Trained by reinforcement learning with verifiable rewards, with poise {__version__}.\n",
        f"| | |\n|---|---|\n{rows}\n",
        f"## Held-out accuracy\n\n{_accuracy(before, after)}\n",
    ]
    if warned := "\n".join(f"- {_plain(each.what)}" for each in warnings.read(folder)):
        parts.append(f"## Warnings of the run\n\n{warned}\n")
    return "\n".join([*parts, USE])


def _facts(folder: RunFolder, config: dict[str, Any], base: str | None, step: int) -> dict[str, Any]:
    model, task, lora = config.get("model"), config.get("task"), config.get("lora")
    lines = [line for line in folder.metrics() if line["step"] <= step]
    facts = {
        "started from": base or "a local model" if model not in SHIPPED else f"poise's model {model}",
        "task": task.get("name") if isinstance(task, dict) else None,
        "regulator": config.get("regulator"),
        "algorithm": config.get("algorithm"),
        "steps": f"{step} of {config.get('steps')}",
        "tokens sampled": f"{lines[-1].get('tokens/total') or 0:,.0f}" if lines else None,
        "prompts × responses per step": f"{config.get('prompts')} × {config.get('group')}",
        "LoRA": f"rank {lora.get('rank')}, merged" if isinstance(lora, dict) else None,
        "seed": config.get("seed"),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _accuracy(before: Any, after: Any) -> str:
    """A table of held-out accuracy with 95 % intervals."""
    if not is_summary(before) or not is_summary(after):
        return "Not measured: the run has no evaluation before training, or no evaluation of this model."
    temperature = after.get("temperature")
    sampled = (
        f" × {after['samples']} samples at temperature {_plain(temperature)}" if temperature != 0 else ", greedily"
    )
    rows = [row for row in accuracy_rows({"before": before, "after": after}) if BY_DIFFICULTY not in row[""]]
    lines = [f"| {_plain(row[''])} | {row['before']} | {row['after']} |" for row in rows]
    title = f"{after['n']} problems{sampled}, with 95 % intervals:\n"
    return "\n".join([title, "| measure | before | after |", "|---|---|---|", *lines])


def _plain(value: Any) -> str:
    """The value as text with markup escaped, because the settings are untrusted."""
    text = " ".join(str(value).split())
    return re.sub(r"([\\`*\[\]<>|#])", r"\\\1", text)
