"""Start CUDA in the background."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread


@contextmanager
def cuda_starts(device: str) -> Iterator[None]:
    """Make the context of a CUDA device and load cuBLAS in a thread, while this one imports the trainer.

    ``device`` is the setting of that name. What fails in the thread will fail again where the device is used, and be
    explained there. The thread imports nothing: two threads that import the same packages may see them half made.
    """
    thread = Thread(target=_start, args=("cuda" if device == "auto" else device,))
    if device == "auto" or device.startswith("cuda"):
        thread.start()
    try:
        yield
    finally:
        if thread.ident is not None:  # it was started
            thread.join()


def _start(device: str) -> None:
    import torch  # imported already, to check the settings

    with suppress(Exception):
        if torch.cuda.is_available():
            square = torch.ones((16, 16), dtype=torch.bfloat16, device=device)
            torch.mm(square, square)
            torch.cuda.synchronize(device)
