"""A process that imports the trainer once and forks a child for every run: ``python -m poise.comparison.nursery``.

It reads requests from standard input and writes news to standard output, a JSON object a line:

    {"start": 3, "config": {…}, …}   begin run 3 (``Nursery.start``); when it ends: {"ended": 3, "status": 0}
    {"signal": "SIGTERM"}            send a signal to every run

A run that crashes, or that the system kills, ends alone. When standard input ends, because the comparison was killed,
all runs are killed; when this process is killed, the system kills them.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from poise._lib.imports import quick_imports

DONE, FAILED, STOPPED = 0, 1, 75  # exit codes of a run; a diverged one has failed, and says so in its folder
POLL = 50  # milliseconds between looks at the children
WAIT = 60.0  # seconds to wait for a process of a killed comparison that still trains in the folder
PR_SET_PDEATHSIG = 1
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def main() -> None:
    """Serve requests until standard input ends."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each run that compiles starts one for every core
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent tells the runs
    requests, news = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)  # nothing else may write where news are read
    _preload()
    with suppress(BrokenPipeError):  # the comparison was killed meanwhile
        _tell(news, {"ready": os.getpid()})
        _Nursery(requests, news).serve()


def _preload() -> None:
    """Import what every run needs. Nothing here may start a thread or touch CUDA: a child could not use it."""
    # NumPy and SciPy bring an OpenBLAS each, which starts a thread per core when it is imported.
    os.environ.update(dict.fromkeys(THREADS, "1"))
    # So does the memory allocator of pyarrow, which transformers imports by way of scikit-learn, if it is installed.
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking CUDA whether there is a GPU would touch it
    with quick_imports():
        import torch

        torch.set_num_threads(1)

        import poise.comparison.shared_start
        import poise.runs.plots
        import poise.trainer  # noqa: F401


def _tell(file: int, message: dict[str, Any]) -> None:
    os.write(file, json.dumps(message).encode("ascii") + b"\n")


class _Nursery:
    """The children that are alive."""

    def __init__(self, requests: int, news: int) -> None:
        self.requests, self.news = requests, news
        self.children: dict[int, int] = {}  # process: number of the run

    def serve(self) -> None:
        poll, rest = select.poll(), b""
        poll.register(self.requests, select.POLLIN)
        try:
            while True:
                if poll.poll(POLL):
                    part = os.read(self.requests, 1 << 20)
                    if not part:
                        return
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        self.handle(json.loads(line))
                self.reap()
        except BrokenPipeError:  # nobody reads the news any more
            return
        finally:
            self.send(signal.SIGKILL)
            while self.children:
                self.children.pop(os.wait()[0], None)

    def handle(self, request: dict[str, Any]) -> None:
        if "signal" in request:
            self.send(signal.Signals[request["signal"]])
            return
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            os.close(self.requests)
            os.close(self.news)
            _child(request)
        self.children[pid] = request["start"]

    def send(self, number: signal.Signals) -> None:
        for pid in self.children:
            os.kill(pid, number)  # not reaped yet, so the number is still its own

    def reap(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if pid in self.children:
                _tell(self.news, {"ended": self.children.pop(pid), "status": os.waitstatus_to_exitcode(status)})


def _child(request: dict[str, Any]) -> NoReturn:
    """Carry out one run, in a process that was just forked."""
    code = FAILED
    try:
        _die_with_parent()
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the trainer has a handler of its own
        with suppress(OSError):  # if memory runs out, the system should choose a run, not what watches over them
            Path("/proc/self/oom_score_adj").write_text("500")
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = carry_out(request["config"], threads=request["threads"], before=request["before"], data=request["data"])
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # it has died already
        os._exit(FAILED)


def carry_out(settings: dict[str, Any], *, threads: int, before: str | None = None, data: str | None = None) -> int:
    """Begin the run with these settings, or go on with it; its exit code. What went wrong is printed.

    The file ``before`` has the accuracy before training, if another run has measured it. ``data`` is the fingerprint of
    the data that the comparison was planned with: a run on others could not be compared.
    """
    import torch

    from poise.comparison import shared_start
    from poise.config.schema import restore
    from poise.tasks import TaskError, data_fingerprint

    os.environ.update(dict.fromkeys(THREADS, str(threads)))  # of processes that it starts
    torch.set_num_threads(threads)
    try:
        config = restore(settings, trust=True)  # the user typed them
        if data is not None and data != data_fingerprint(config.task.build()):
            raise TaskError("the data were edited since the comparison began: put them back, or begin another run=DIR")
        _train(config, None if before is None else shared_start.read(Path(before), config))
    except KeyboardInterrupt:
        return STOPPED
    except Exception as error:
        traceback.print_exc()
        why = str(error) or type(error).__name__
        print(f"poise: {why}", file=sys.stderr)  # the last line is what the user is shown
        return FAILED
    return DONE


def _train(config: Any, before: dict[str, Any] | None) -> None:
    from poise import trainer
    from poise.runs.lock import BusyError

    end = time.monotonic() + WAIT
    while True:
        try:
            begun = (Path(config.run) / "config.json").exists()
            trainer.train(config, resume=begun, before=before, renumber=False)
            return
        except BusyError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    with suppress(FileNotFoundError):
        from poise._lib import user_code

        user_code.FOLDERS.append(os.getcwd())
    main()
