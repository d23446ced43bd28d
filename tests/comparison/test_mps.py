"""NVIDIA's MPS is started and stopped, and never ends a comparison."""

import os

import pytest

from poise.comparison import mps

CONTROL = """#!/bin/sh
state="{folder}/state"
if [ "$1" = -d ]; then [ -e "{folder}/refuse" ] && exit 1; touch "$state"; exit 0; fi
read command
[ -e "$state" ] || exit 1
case "$command" in
    quit) rm "$state" ;;
    get_server_list) echo 7 ;;
    "get_client_list 7") cat "{folder}/clients" 2>/dev/null ;;
esac
exit 0
"""


@pytest.fixture
def control(tmp_path, monkeypatch):
    """A control program that only remembers whether it was started; its folder, and what was said."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / mps.CONTROL
    program.write_text(CONTROL.format(folder=folder))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(mps, "TRIAL", "")
    return folder


def test_it_is_started_and_stopped(control, tmp_path):
    notes = []
    with mps.served(tmp_path, notes.append):
        assert (control / "state").exists()
        assert (tmp_path / "mps").exists()
    assert not (control / "state").exists()
    assert not (tmp_path / "mps").exists()
    assert notes == []


def test_somebody_elses_stays(control, tmp_path):
    (control / "state").touch()
    with mps.served(tmp_path, print):
        pass
    assert (control / "state").exists()
    (tmp_path / "mps").touch()  # ours, of a comparison that was killed
    with mps.served(tmp_path, print):
        pass
    assert not (control / "state").exists()


def test_it_stays_while_others_use_it(control, tmp_path, monkeypatch):
    monkeypatch.setattr(mps, "PATIENCE", 0.0)
    with mps.served(tmp_path, print):
        (control / "clients").write_text(f"{os.getpid()}\n4711\n")  # another program came
    assert (control / "state").exists()
    (control / "clients").write_text(f"{os.getpid()}\n")  # and went
    with mps.served(tmp_path, print):  # it is still ours
        pass
    assert not (control / "state").exists()
    assert not (tmp_path / "mps").exists()


@pytest.mark.parametrize("trouble", ["refused", "no client", "not installed"])
def test_without_it_runs_go_on(control, tmp_path, monkeypatch, trouble):
    if trouble == "refused":
        (control / "refuse").touch()
    elif trouble == "no client":
        monkeypatch.setattr(mps, "TRIAL", "raise SystemExit(1)")
    else:
        (control / mps.CONTROL).unlink()
        monkeypatch.setattr(mps.shutil, "which", lambda _: None)
    notes = []
    with mps.served(tmp_path, notes.append):
        assert not (control / "state").exists()
    assert [*tmp_path.iterdir()] == [control]
    assert notes == ([] if trouble == "not installed" else [notes[0]])
    assert all("slower" in note for note in notes)
