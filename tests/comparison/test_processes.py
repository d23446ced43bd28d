"""The process that starts runs, from the other side."""

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from poise.comparison.nursery import FAILED, STOPPED, THREADS, carry_out
from poise.comparison.processes import Ended, Nursery, NurseryError, ending, last_lines
from poise.config.schema import load
from support.comparisons import make, write_rows

DIES = "print('{}', flush=True); input()"  # with its first request
ANSWERS = """
import json, sys
print('{}', flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "start" in request:
        status = 0 if request["config"]["seed"] == 0 else -9
        print(json.dumps({"ended": request["start"], "status": status}), flush=True)
"""


@pytest.fixture
def config(tmp_path):
    return make(tmp_path).arms[0].variants[0].config


def scripted(script):
    nursery = Nursery()
    nursery.COMMAND = (sys.executable, "-c", script)
    return nursery


def wait(nursery):
    ended = []
    while not ended:
        ended = nursery.wait(60)
    return ended


def test_runs_end_with_their_exit_codes(config, tmp_path):
    nursery = scripted(ANSWERS)
    assert nursery.wait(0) == []
    nursery.start(1, config, tmp_path / "logs" / "one.log")
    assert wait(nursery) == [Ended(1, 0)]
    nursery.start(2, config.model_copy(update={"seed": 1}), tmp_path / "logs" / "two.log")
    nursery.signal(signal.SIGTERM)
    assert wait(nursery) == [Ended(2, -9)]
    nursery.close()
    nursery.close()


def test_a_run_on_data_that_were_edited_meanwhile_does_not_begin(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    for name in THREADS:
        monkeypatch.setenv(name, "1")
    rows = write_rows(tmp_path / "rows.jsonl")
    config = load(None, ["model=embedded", f"data={rows}", "reward=math", "device=cpu", f"run={tmp_path / 'run'}"])
    sent = []
    nursery = Nursery()
    nursery._send = sent.append
    nursery.start(1, config, tmp_path / "log")
    rows.write_text(rows.read_text().replace("3 + 1?", "4 + 0?"))
    assert carry_out(sent[0]["config"], threads=1, data=sent[0]["data"]) == FAILED
    assert "the data were edited since the comparison began" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_runs_are_not_blamed_for_the_death_of_what_started_them(config, tmp_path):
    nursery = scripted(DIES)
    for number in range(Nursery.MOST_STARTS):
        nursery.start(number, config, tmp_path / "log")
        assert wait(nursery) == [Ended(number, STOPPED)]
    with pytest.raises(NurseryError, match="has ended 3 times"):
        nursery.start(9, config, tmp_path / "log")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux does")
def test_runs_are_forked_from_a_process_of_one_thread(config, tmp_path, monkeypatch):
    """Python 3.12 and newer warn otherwise: a lock that another thread holds stays held in the child for ever."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "16")  # NumPy and SciPy would each start one per core, up to so many
    nursery = Nursery(threads=3)
    nursery._launch()
    threads = Path(f"/proc/{nursery._process.pid}/task")
    assert len(list(threads.iterdir())) == 1
    (tmp_path / "run").touch()
    nursery.start(1, config.model_copy(update={"run": str(tmp_path / "run")}), tmp_path / "log")
    assert wait(nursery) == [Ended(1, FAILED)]  # a file is no run folder
    assert "is a file" in (tmp_path / "log").read_text()
    assert len(list(threads.iterdir())) == 1
    nursery.close()


PRELOAD = """
import os
from poise.comparison import nursery
nursery._preload()
import pyarrow  # as transformers does, if scikit-learn is installed
names = [open(f"/proc/self/task/{number}/comm").read().strip() for number in os.listdir("/proc/self/task")]
print(names)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux does")
def test_what_every_run_imports_starts_no_thread_however_the_process_was_started():
    env = os.environ | {"OPENBLAS_NUM_THREADS": "16", "OMP_NUM_THREADS": "16", "MKL_NUM_THREADS": "16"}
    done = subprocess.run([sys.executable, "-c", PRELOAD], env=env, capture_output=True, text=True, check=True)
    assert len(ast.literal_eval(done.stdout)) == 1


def test_how_a_run_ended_in_words(tmp_path):
    assert ending(1) == "exit code 1"
    assert ending(-9) == "killed by SIGKILL (out of memory?)"
    assert ending(-11) == "killed by SIGSEGV"
    assert last_lines(tmp_path / "nowhere") == []
    log = tmp_path / "log"
    log.write_bytes(b"a line\n" * 10_000 + b"\xff last\n\n")
    assert last_lines(log, 2) == ["a line", "� last"]
