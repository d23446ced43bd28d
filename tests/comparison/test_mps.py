"""NVIDIA's MPS is started and stopped, and never ends a comparison."""

import os

import pytest

from poise.comparison import processes

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
