"""Start two processes that train together, and compare what came out."""

import os
import socket
import subprocess
import sys

import torch


def launch(script, folder, *words):
    """Two processes as ``accelerate launch --cpu`` starts one: it leaves the second to MPI, and here there is none.

    Command and environment are accelerate's own. They are made in this process: a launcher for each of the two would
    only import torch once more.
    """
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = ["--cpu", "--mixed_precision", "no", "--dynamo_backend", "no", "--num_processes", "2"]
    options += ["--num_machines", "1", "--num_cpu_threads_per_process", "1", "--main_process_port", port]
    asked = launch_command_parser().parse_args([*options, script, str(folder), *words])
    command, env = prepare_simple_launcher_cmd_env(asked)
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_WAIT_POLICY": "passive", "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            command, env=env | {"RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    for process in started:
        _, errors = process.communicate(timeout=600)  # only so that a test that fails ends
        assert process.returncode == 0, errors[-3000:]


def close(ours, theirs, tolerance=1e-5):
    """Whether two vectors differ by no more than a share of the second one's length."""
    assert torch.isfinite(theirs).all()
    assert theirs.norm() > 0
    return (ours - theirs).norm() <= tolerance * theirs.norm()
