"""The process that starts runs, from the other side."""

import signal
import sys

import pytest

from poise.comparison.nursery import STOPPED
from poise.comparison.processes import Ended, Nursery, NurseryError, ending, last_lines
from support.comparisons import make

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


def test_runs_are_not_blamed_for_the_death_of_what_started_them(config, tmp_path):
    nursery = scripted(DIES)
    for number in range(Nursery.MOST_STARTS):
        nursery.start(number, config, tmp_path / "log")
        assert wait(nursery) == [Ended(number, STOPPED)]
    with pytest.raises(NurseryError, match="has ended 3 times"):
        nursery.start(9, config, tmp_path / "log")


def test_how_a_run_ended_in_words(tmp_path):
    assert ending(1) == "exit code 1"
    assert ending(-9) == "killed by SIGKILL (out of memory?)"
    assert ending(-11) == "killed by SIGSEGV"
    assert last_lines(tmp_path / "nowhere") == []
    log = tmp_path / "log"
    log.write_bytes(b"a line\n" * 10_000 + b"\xff last\n\n")
    assert last_lines(log, 2) == ["a line", "� last"]
