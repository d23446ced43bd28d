"""What scripts/rehearse.py puts into TRL's process and into all of verl's, so that they run on a CPU.

verl's processes load this file when they import verl (``VERL_USE_EXTERNAL_MODULES=rehearsed``), and take their reward
from it. For TRL it is the script: examples/scale/trl_kk.py with another reward, and vLLM in float32.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from poise.tasks import Problem, Score
from poise.tasks.knights_knaves import KnightsKnaves

ROOT = Path(__file__).parents[1]


class Vowels(KnightsKnaves):
    """The puzzles, with a reward that even random weights get half of the time: an odd number of vowels."""

    def score(self, problem: Problem, text: str) -> Score:  # noqa: ARG002
        """3 or 0, so that the examples' settings know which responses are correct."""
        odd = sum(letter in "aeiou" for letter in text) % 2 == 1
        return Score(3.0 * odd, odd)


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:  # noqa: ARG001
    """The same reward with verl's signature."""
    return Vowels().score(Problem("", "", "", {}), solution_str).reward


def verl_on_a_cpu() -> None:
    """Give verl a CPU for a device, gloo for a backend, and its own sharded engine on it."""
    sys.path.insert(0, str(ROOT / "tests"))
    verl_cpu, verl_two = (import_module(f"support.{name}") for name in ("verl_cpu", "verl_two"))
    from verl.plugin.platform.platform_manager import set_platform
    from verl.workers import engine_workers
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead

    class Platform(verl_cpu.PlatformCPU):  # type: ignore[misc, name-defined]
        """What a whole run asks of a device beyond the tests' steps."""

        def is_available(self) -> bool:
            return True

        def is_ipc_supported(self) -> bool:
            return False

        def set_allocator_settings(self, settings: str) -> None:
            """Nothing to set."""

        def empty_cache(self) -> None:
            """Nothing to empty."""

        def synchronize(self, device_index: int | None = None) -> None:
            """Nothing to wait for."""

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        manual_seed_all = manual_seed

    set_platform(Platform())
    for method in ("_build_fsdp_module", "optimizer_step"):  # verl's own again
        setattr(verl_cpu.CPUEngine, method, getattr(FSDPEngineWithLMHead, method))
    engine_workers.initialize_global_process_group_ray = verl_two.gloo


def train_with_trl() -> None:
    """trl_kk.py, with the arguments of this command."""
    sys.path.insert(0, str(ROOT / "examples/scale"))
    import trl_kk
    from trl.generation import vllm_generation

    if not torch.cuda.is_available():
        vllm_generation.LLM = partial(vllm_generation.LLM, dtype="float32")  # "auto" would be bfloat16
    trl_kk.KnightsKnaves = Vowels  # type: ignore[attr-defined]
    trl_kk.main()


if __name__ == "__main__":
    train_with_trl()
elif __name__ == "rehearsed":
    verl_on_a_cpu()
