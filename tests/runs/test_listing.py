"""Which folders are runs, and what ``poise runs`` says of them."""

import json
import os
import re
import shutil

from poise._lib.files import sealed
from poise.runs.listing import find_runs, is_run
from poise.runs.lock import owned
from support.command_line import fails, poise
from support.run_folders import make_run

SETTINGS = {"rollout": {}, "steps": 4, "task": {"name": "kk"}}


def finish(folder, steps, before=0.25, after=0.5):
    folder.write_json("before.json", {"accuracy": before})
    folder.write_json("summary.json", {"steps": steps, "after": {"accuracy": after}})


def states(place):
    return {run.folder.name: run.state for run in find_runs(place)}


def test_the_state_of_each_run(tmp_path):
    finish(make_run(tmp_path / "finished", steps=(1, 2), config=SETTINGS), 2)
    finish(make_run(tmp_path / "longer", steps=(1, 2, 3), config=SETTINGS), 2)  # resumed with more steps, and stopped
    make_run(tmp_path / "stopped", config=SETTINGS)
    make_run(tmp_path / "diverged", config=SETTINGS).write_json("diverged.json", {"step": 3, "why": "inf"})
    make_run(tmp_path / "past", config=SETTINGS).write_json("diverged.json", {"step": 2, "why": "inf"})
    make_run(tmp_path / "deep" / "arms" / "grpo" / "seed-0", config=SETTINGS)
    (make_run(tmp_path / "broken", config=SETTINGS).path / "config.json").write_text("{")
    (make_run(tmp_path / "garbled", config=SETTINGS).path / "metrics.jsonl").write_bytes(b"\xff\n")
    make_run(tmp_path / "figures", config=SETTINGS).write_json("diagnose.json", {})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    expected = {
        "finished": "finished", "longer": "stopped", "stopped": "stopped", "diverged": "diverged", "past": "stopped",
        "seed-0": "stopped", "broken": "damaged", "garbled": "damaged",
    }  # fmt: skip
    assert states(tmp_path) == expected
    assert is_run(tmp_path / "broken")
    assert not is_run(tmp_path / "model")
    with owned(tmp_path / "stopped", make=False):
        assert states(tmp_path)["stopped"] == "training"
    assert states(tmp_path) == expected


def test_numbers_that_are_none(tmp_path):
    (make_run(tmp_path / "endless", config=SETTINGS).path / "metrics.jsonl").write_text('{"step": 1e999}\n')
    (make_run(tmp_path / "huge", config=SETTINGS).path / "before.json").write_text(f'{{"accuracy": 1{"0" * 400}}}')
    assert states(tmp_path) == {"endless": "damaged", "huge": "stopped"}


def test_a_run_on_another_disk_is_listed_where_its_link_is(tmp_path):
    make_run(tmp_path / "disk" / "run", config=SETTINGS)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "disk" / "run")
    (tmp_path / "runs" / "above").symlink_to(tmp_path)  # no way round in a circle
    assert states(tmp_path / "runs") == {"linked": "stopped"}


def test_a_torn_last_line_is_not_a_step(tmp_path):
    folder = make_run(tmp_path, steps=(1, 2), config=SETTINGS)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "lo')
    (run,) = find_runs(folder.path)
    assert (run.steps, run.planned, run.state) == (2, 4, "stopped")


def test_the_list_begins_with_the_newest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, time in (("old", 1_000_000), ("new", 2_000_000)):
        folder = make_run(tmp_path / "runs" / name, config={**SETTINGS, "algorithm": "erl"})
        finish(folder, 2)
        for path in folder.path.iterdir():
            os.utime(path, (time, time))
    lines = poise("runs").output.splitlines()
    assert lines[0].split() == ["run", "state", "steps", "held-out", "model", "task", "regulator", "algorithm", "when"]
    assert lines[1].split()[:10] == ["runs/new", "finished", "2/4", "0.250", "→", "0.500", "tiny", "kk", "grpo", "erl"]
    assert lines[2].startswith("runs/old")


def test_accuracy_that_was_edited_is_marked(tmp_path):
    for name in ("plain", "before", "summary"):
        folder = make_run(tmp_path / name, config=SETTINGS)
        folder.write_json("before.json", sealed({"accuracy": 0.25}))
        folder.write_json("summary.json", sealed({"steps": 2, "after": {"accuracy": 0.5}}))
        if name != "plain":
            path = folder.path / f"{name}.json"
            path.write_text(re.sub(r"0\.\d+", "0.75", path.read_text(), count=1))
    finish(make_run(tmp_path / "old", config=SETTINGS), 2)  # older versions wrote no checksums
    (tmp_path / "moved").mkdir()
    shutil.move(tmp_path / "plain", tmp_path / "moved" / "plain")
    assert {run.folder.name: run.edited for run in find_runs(tmp_path)} == {
        "plain": False, "before": True, "summary": True, "old": False,
    }  # fmt: skip
    assert "0.250 → 0.750 (edited)" in poise("runs", tmp_path / "summary").output
    assert "(edited)" not in poise("runs", tmp_path / "moved").output


def test_hostile_names_are_shown_as_text(tmp_path):
    make_run(tmp_path / "run", config=SETTINGS | {"model": "\x1b[2Jgone\n", "task": ["kk"], "steps": "many"})
    assert "\x1b" not in poise("runs", tmp_path).output


def test_where_there_are_no_runs(tmp_path):
    assert "there is no such folder; name the folder" in fails("runs", tmp_path / "none")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    shown = poise("runs", tmp_path)
    assert "start one with: poise train run=" in " ".join(shown.output.split())
    assert shown.exit_code == 0
