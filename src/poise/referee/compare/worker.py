"""Trains one run in its own forked process."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

DONE, FAILED, STOPPED = 0, 1, 75  # exit codes; a diverged run fails too, and its folder records the divergence
WAIT = 60.0  # seconds to wait until a killed comparison's process releases the folder
PR_SET_PDEATHSIG = 1
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Job(NamedTuple):
    """What a process needs to train a run.

    ``data`` and ``code`` are the fingerprints of the data and the user's code at the start of the comparison. If they
    have changed, runs would not be comparable.
    """

    settings: dict[str, Any]
    threads: int = 1  # on a CPU
    before: Path | None = None  # a file with the accuracy before training, if another run has measured it
    data: str | None = None
    code: Any = None
    share: float | None = None  # of the GPU's memory, if other runs use the GPU too


def main(job: Job, log: Path) -> NoReturn:
    """Train a run, append its output to ``log``, and end the process."""
    from poise._lib import user_code

    status = FAILED
    try:
        die_with_parent()
        if os.getppid() == 1:  # the server has already died
            os._exit(FAILED)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the trainer installs its own handler
        with suppress(OSError):  # if memory runs out, the system should kill a run, not the comparison
            Path("/proc/self/oom_score_adj").write_text("500")
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        user_code.FOLDERS.append(os.getcwd())
        status = carry_out(job)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def die_with_parent() -> None:
    """Let the system kill this process when its parent dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def carry_out(job: Job) -> int:
    """Start or resume a run, print errors, and return the exit code."""
    import torch

    from poise._lib.determinism import fix_workspace
    from poise._lib.device import limit_memory
    from poise._lib.user_code import edited
    from poise.models.loading import resolve_device
    from poise.referee.compare import shared_start
    from poise.tasks import TaskError, data_fingerprint
    from poise.training.config.schema import restore

    os.environ.update(dict.fromkeys(THREADS, str(job.threads)))  # for child processes
    torch.set_num_threads(job.threads)
    try:
        config = restore(job.settings, trust=True)  # the user typed these settings
        if job.data is not None and job.data != data_fingerprint(config.task.build()):
            raise TaskError("the data were edited since the comparison started: restore them, or start another run=DIR")
        if files := edited(job.code or config.code, config.code):
            raise TaskError(
                f"{', '.join(files)} was edited since the comparison started: restore it, or start another run=DIR"
            )
        device = resolve_device(config.device)
        if config.deterministic and device.type == "cuda":
            fix_workspace()  # before the calls below start CUDA
        if job.share is not None:
            limit_memory(device, job.share)
        _train(config, None if job.before is None else shared_start.read(job.before, config))
    except KeyboardInterrupt:
        return STOPPED
    except Exception as error:
        traceback.print_exc()
        why = str(error) or type(error).__name__
        print(f"poise: {why}", file=sys.stderr)  # the comparison shows the last line
        return FAILED
    return DONE


def _train(config: Any, before: dict[str, Any] | None) -> None:
    from poise import trainer
    from poise.runs.lock import BusyError

    end = time.monotonic() + WAIT
    while True:
        try:
            resume = (Path(config.run) / "config.json").exists()
            # The comparison has checked the folder and the code.
            trainer.train(config, resume=resume, before=before, renumber=False, trust_changed=True)
            return
        except BusyError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
