"""The processes of runs, and the server that forks them."""

import ast
import os
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

import poise
from poise.referee.compare import processes
from poise.referee.compare.processes import Processes, RunExit, ending, last_lines
from poise.referee.compare.worker import FAILED, STOPPED, THREADS, Job, carry_out
from poise.tasks import data_fingerprint
from poise.training.config.schema import load
from poise.training.resume import TrainError
from support.comparisons import make, write_rows
from support.process_table import alive, session, wait_until

linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at processes as Linux shows them")


@pytest.fixture
def runs():
    runs = Processes()
    yield runs
    runs.close()


@pytest.fixture
def config(tmp_path):
    """A run that fails at once: its folder is a file."""
    (tmp_path / "file").touch()
    return make(tmp_path).arms[0].variants[0].config.model_copy(update={"run": str(tmp_path / "file")})


@pytest.fixture
def endless(tmp_path):
    """A run that evaluates for minutes."""
    config = make(tmp_path, "evaluation.problems=20000").arms[0].variants[0].config
    return config.model_copy(update={"run": str(tmp_path / "run")})


def wait(runs):
    end = time.monotonic() + 120
    while not (ended := runs.wait(1)):
        assert time.monotonic() < end
    return ended


@linux
def test_the_comparison_may_be_process_1_as_in_a_container():
    apart = ["unshare", "--map-root-user", "--pid", "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs Linux namespaces")
    server_starts = f"{sys.executable} -c 'import poise.referee.compare.preload'; exit $?"
    subprocess.run([*apart, "sh", "-c", server_starts], check=True)


def server():
    return forkserver._forkserver._forkserver_pid


def test_a_run_that_fails_says_why_in_its_log(runs, config, tmp_path):
    assert runs.wait(0) == []
    runs.start(config, tmp_path / "logs" / "one.log")
    assert wait(runs) == [RunExit(Path(config.run), FAILED)]
    assert last_lines(tmp_path / "logs" / "one.log")[-1].startswith("poise: ")
    assert "is a file" in (tmp_path / "logs" / "one.log").read_text()


@pytest.mark.slow
def test_a_run_that_is_killed_ends_alone(runs, endless, tmp_path):
    runs.start(endless, tmp_path / "one")
    other = tmp_path / "other"
    runs.start(endless.model_copy(update={"run": str(other)}), tmp_path / "two")
    os.kill(runs._running[Path(endless.run)].pid, signal.SIGKILL)
    assert wait(runs) == [RunExit(Path(endless.run), -9)]
    wait_until(lambda: "evaluating" in (tmp_path / "two").read_text())
    runs.stop()
    assert wait(runs) == [RunExit(other, STOPPED)]


@linux
@pytest.mark.slow
def test_runs_are_not_blamed_for_the_death_of_their_server(runs, endless, tmp_path):
    for _ in range(1, processes.MOST_LOSSES):
        runs.start(endless, tmp_path / "log")
        family = session(server())
        os.kill(server(), signal.SIGKILL)
        assert wait(runs) == [RunExit(Path(endless.run), STOPPED)]
        wait_until(lambda family=family: not alive(family))  # the run was killed too
    runs.start(endless, tmp_path / "log")
    os.kill(server(), signal.SIGKILL)
    with pytest.raises(TrainError, match="has ended 3 times"):
        wait(runs)


class Refused:
    """A process whose server refuses the first connections."""

    tries = 0

    def start(self):
        self.tries += 1
        if self.tries < 3:
            raise ConnectionRefusedError


def test_a_server_that_has_just_died_is_waited_for(monkeypatch):
    monkeypatch.setattr(processes.time, "sleep", lambda _: None)
    process = Refused()
    processes._start(process)
    assert process.tries == 3
    monkeypatch.setattr(processes, "TRIES", 1)
    with pytest.raises(ConnectionRefusedError):
        processes._start(Refused())


@linux
@pytest.mark.slow
def test_runs_are_forked_from_a_process_of_one_thread(runs, config, tmp_path):
    """Python 3.12 and newer warn otherwise: a lock that another thread holds stays held in the child for ever."""
    runs.start(config, tmp_path / "log")
    wait(runs)
    assert len(os.listdir(f"/proc/{server()}/task")) == 1


PRELOAD = """
import os
import poise.referee.compare.preload
import pyarrow  # as transformers does, if scikit-learn is installed
names = [open(f"/proc/self/task/{number}/comm").read().strip() for number in os.listdir("/proc/self/task")]
print(names)
"""


@linux
@pytest.mark.slow
def test_what_every_run_imports_starts_no_thread_however_the_process_was_started():
    env = os.environ | {"OPENBLAS_NUM_THREADS": "16", "OMP_NUM_THREADS": "16", "MKL_NUM_THREADS": "16"}
    done = subprocess.run([sys.executable, "-c", PRELOAD], env=env, capture_output=True, text=True, check=True)
    assert len(ast.literal_eval(done.stdout)) == 1


SHADOWED = """
import sys
from pathlib import Path
from poise.referee.compare.processes import Processes
from poise.training.config.schema import load
from poise.training.resume import TrainError
if __name__ == "__main__":
    Path("file").touch()
    config = load("tiny", ["device=cpu", "run=file"])
    runs = Processes()
    runs.start(config, Path("log"))
    while not (ended := runs.wait(60)):
        pass
    print(ended[0].status)
"""


@pytest.mark.slow
def test_a_file_in_the_current_folder_does_not_stand_for_a_library(tmp_path):
    (tmp_path / "selectors.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "torch.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "script").mkdir()
    script = tmp_path / "script" / "main.py"
    script.write_text(SHADOWED)
    env = os.environ | {"PYTHONPATH": str(Path(poise.__file__).parents[1])}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(FAILED), done.stderr
    assert "is a file" in (tmp_path / "log").read_text()


def test_a_run_on_data_that_were_edited_meanwhile_does_not_begin(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    for name in THREADS:
        monkeypatch.setenv(name, "1")
    rows = write_rows(tmp_path / "rows.jsonl")
    config = load(None, ["model=embedded", f"data={rows}", "reward=math", "device=cpu", f"run={tmp_path / 'run'}"])
    data = data_fingerprint(config.task.build())
    rows.write_text(rows.read_text().replace("3 + 1?", "4 + 0?"))
    assert carry_out(Job(config.model_dump(mode="json"), data=data)) == FAILED
    assert "the data were edited since the comparison started" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_with_code_that_was_edited_meanwhile_does_not_begin(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.chdir(tmp_path)
    for name in THREADS:
        monkeypatch.setenv(name, "1")
    (tmp_path / "softer.py").write_text("import poise\n\n@poise.regulator\ndef softer(batch): ...\n")
    config = load("tiny", ["regulator=softer.py:softer", "device=cpu", f"run={tmp_path / 'run'}"])
    with (tmp_path / "softer.py").open("a") as file:
        file.write("# edited\n")
    assert carry_out(Job(config.model_dump(mode="json"), code=config.code)) == FAILED
    assert "softer.py was edited since the comparison started" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_how_a_run_ended_in_words(tmp_path):
    assert ending(1) == "exit code 1"
    assert ending(-9) == "killed by SIGKILL (out of memory?)"
    assert ending(-11) == "killed by SIGSEGV"
    assert last_lines(tmp_path / "nowhere") == []
    log = tmp_path / "log"
    log.write_bytes(b"a line\n" * 10_000 + b"\xff last\n\n")
    assert last_lines(log)[-2:] == ["a line", "� last"]


# NVIDIA's MPS is started and stopped, and never ends a comparison


CONTROL = """#!/bin/sh
state="{folder}/state"
if [ "$1" = -d ]; then [ -e "{folder}/refuse" ] && exit 1; touch "$state"; exit 0; fi
read command
[ -e "$state" ] || exit 1
[ "$command" != quit ] || rm "$state"
exit 0
"""


@pytest.fixture
def control(tmp_path, monkeypatch):
    """The folder of a control program that only remembers whether it was started."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / processes.CONTROL
    program.write_text(CONTROL.format(folder=folder))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(processes, "TRIAL", "")
    return folder


def test_it_is_started_and_stopped(control):
    notes = []
    with processes.mps(notes.append):
        assert (control / "state").exists()
    assert not (control / "state").exists()
    assert notes == []


def test_somebody_elses_stays(control):
    (control / "state").touch()
    with processes.mps(print):
        pass
    assert (control / "state").exists()


@pytest.mark.parametrize("trouble", ["refused", "no client", "not installed"])
def test_without_it_runs_go_on(control, monkeypatch, trouble):
    if trouble == "refused":
        (control / "refuse").touch()
    elif trouble == "no client":
        monkeypatch.setattr(processes, "TRIAL", "raise SystemExit(1)")
    else:
        (control / processes.CONTROL).unlink()
        monkeypatch.setattr(processes.shutil, "which", lambda _: None)
    notes = []
    with processes.mps(notes.append):
        assert not (control / "state").exists()
    assert len(notes) == (trouble != "not installed")
    assert all("slower" in note for note in notes)
