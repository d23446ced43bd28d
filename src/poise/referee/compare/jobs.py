"""How many runs of a comparison train in parallel, and how they share a GPU's memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

from poise._lib.device import total_bytes
from poise._lib.errors import bytes_text
from poise.models.activations import USABLE_SHARE
from poise.models.loading import resolve_device
from poise.training.config.documents import ConfigError
from poise.training.config.schema import Config
from poise.training.memory import needed_bytes

GPU_JOBS = 16  # runs in parallel on a GPU, at most


def parallel_jobs(configs: Sequence[Config], jobs: int | None, runs: int) -> tuple[int, float | None]:
    """The number of runs in parallel, and the share of the GPU's memory for each; None if they do not share a GPU.

    ``configs`` are the settings of the runs that are left, ``jobs`` is the user's setting, ``runs`` the number of all
    runs. Every run has the same share, so it divides its work into the same passes however many others are running.
    """
    jobs = None if jobs is None else min(jobs, runs)
    if not configs or (device := resolve_device(configs[0].device)).type != "cuda":
        return jobs or min(_cores(), runs), None
    forecasts = [found for config in _different(configs) if (found := needed_bytes(config))]
    room = USABLE_SHARE * total_bytes(device)
    if jobs is None:
        jobs = max(1, min([GPU_JOBS, runs, *(int(room // wanted) for _, wanted in forecasts)]))
    elif forecasts and jobs > 1 and jobs * (least := max(least for least, _ in forecasts)) > room:
        raise ConfigError(
            f"jobs = {jobs}: a run takes at least {bytes_text(least)} of the GPU's memory, of which "
            f"{bytes_text(int(room))} can be used; set jobs={max(1, int(room // least))}"
        )
    return jobs, USABLE_SHARE / jobs if jobs > 1 else None


def _different(configs: Sequence[Config]) -> list[Config]:
    """One config for each combination of the settings that may affect memory.

    Seed, rate, regulator and folder do not.
    """

    def rest(config: Config) -> str:
        optim = config.optim.model_copy(update={"lr": 1.0})
        return config.model_copy(update={"optim": optim, "regulator": "", "seed": 0, "run": ""}).model_dump_json()

    return list({rest(config): config for config in configs}.values())


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
