"""Two processes that train together."""

import os
import socket
import subprocess
import sys

import torch


def launch(script, folder):
    """Two processes by `accelerate launch --cpu`, which leaves it to MPI to start them: here we do, as MPI would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--mixed_precision", "no"]
    sizes = ["--num_processes", "2", "--num_machines", "1", "--num_cpu_threads_per_process", "1"]
    made = []
    for rank in ("0", "1"):
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_WAIT_POLICY": "passive",
            "WORLD_SIZE": "2",
            "RANK": rank,
            "LOCAL_RANK": rank,
        }
        command = [*accelerate, *sizes, "--main_process_port", port, script, str(folder)]
        made.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    for process in made:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-3000:]


def close(ours, theirs, tolerance=1e-5):
    assert torch.isfinite(theirs).all()
    assert theirs.norm() > 0
    return (ours - theirs).norm() <= tolerance * theirs.norm()
