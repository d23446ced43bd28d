"""Checkpoints: what a kill, a full disk or a flipped bit leaves behind."""

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from safetensors import SafetensorError

from poise.runs.checkpoint_files import CheckpointFiles
from poise.runs.folder import CheckpointError, RunFolder
from support.checkpoint_files import flip, load, names, read, save, write


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "run", {"seed": 3})


def test_the_newest_are_kept(run):
    assert load(run, read) is None
    for step in (5, 10, 15):
        assert save(run, step, write(step)) == run.path / "checkpoints" / f"step-{step:06d}"
    assert run.checkpoints() == [10, 15]
    assert load(run, read) == (15, 15)
    save(run, 15, write(99))  # saved twice: the later one counts
    assert load(run, read) == (15, 99)
    assert names(run.path / "checkpoints") == ["step-000010", "step-000015"]
    only = RunFolder(run.path, keep=1)
    save(only, 1_000_000, write(7))
    assert only.checkpoints() == [1_000_000]
    with pytest.raises(ValueError, match=r"poise writes manifest.json here"):
        save(run, 1_000_001, lambda folder: (folder / "manifest.json").touch())
    assert names(run.path / "checkpoints") == ["step-1000000"]


def manifest(text):
    return lambda folder: (folder / "manifest.json").write_text(text)


DAMAGE = {
    "SHA-256": flip,
    "state.json is missing": lambda folder: (folder / "state.json").unlink(),
    "instead of": lambda folder: (folder / "state.json").write_text("20000"),
    "manifest.json is missing": lambda folder: (folder / "manifest.json").unlink(),
    "manifest.json is damaged": manifest("[1]"),
    "json is damaged": manifest("[" * 100_000),
    "is damaged": manifest('{"files": {"model/model.safetensors": {"size": Infinity, "sha256": ""}}}'),
    "manifest.json does not name model/model.safetensors": manifest('{"files": {}}'),
}


@pytest.mark.parametrize("why", DAMAGE)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_used(run, why, capsys):
    save(run, 10, write(10))
    DAMAGE[why](save(run, 20, write(20)))
    said = []
    assert load(run, read, say=said.append) == (10, 10)
    assert len(said) == 1
    assert "step-000020 cannot be read" in said[0]
    assert why in said[0]
    assert "continuing from the checkpoint of step 10" in said[0]
    assert load(run, read) == (10, 10)
    assert capsys.readouterr().err.strip() == said[0]
    DAMAGE[why](run.path / "checkpoints" / "step-000010")
    with pytest.raises(CheckpointError, match=r"(?s)step-000020 .*step-000010 .*begin again in another run=DIR"):
        load(run, read, say=said.append)


def test_a_bit_flipped_anywhere_in_the_manifest_is_noticed(tmp_path):
    """Also in the name of a setting without a value. Flips in the name of the checksum change nothing that is read."""
    run = RunFolder.create(tmp_path / "run", {"seed": 3, "optim": {"micro": 1}, "rollout": {"min_p": None, "batch": 8}})
    path = save(run, 10, write(10)) / "manifest.json"
    whole = path.read_bytes()
    own = range(start := whole.find(b'"checksum"') + 1, start + len("checksum"))
    unseen = []
    for place in range(len(whole.rstrip())):
        for bit in range(8):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            try:
                CheckpointFiles(run).verify(10)
                unseen.append(place)
            except (ValueError, OSError):
                pass
    assert set(unseen) <= {*own}


def test_what_a_manifest_says_is_shown_as_text(run, capsys):
    save(run, 10, write(10))
    manifest(r'{"files": {}, "step": "\u001b[31m"}')(save(run, 20, write(20, weights=False)))
    assert load(run, read) == (10, 10)
    assert r"it belongs to step \x1b[31m" in capsys.readouterr().err


def test_a_checkpoint_that_read_cannot_make_sense_of_counts_as_damaged(run):
    save(run, 10, write(10))
    save(run, 20, lambda folder: (folder / "other").touch())
    said = []
    assert load(run, read, say=said.append) == (10, 10)
    assert "No such file" in said[0]


def test_a_checkpoint_of_another_step_or_run_is_not_taken(run, tmp_path):
    save(run, 10, write(10))
    save(run, 20, write(20))
    checkpoints = run.path / "checkpoints"
    others = {
        "it belongs to step 20, but its folder has another name": RunFolder(run.path),
        "a run with seed 4; this one has seed 3": RunFolder.create(tmp_path / "seed", {"seed": 4}),
        "settings other than those in config.json": RunFolder.create(tmp_path / "lr", {"seed": 3, "optim": {"lr": 1}}),
    }
    for why, other in others.items():
        if other.path != run.path:
            save(other, 30, write(30))
        shutil.copytree(other.newest(), checkpoints / "step-000030")
        said = []
        assert load(run, read, say=said.append) == (20, 20)
        assert why in said[0]
        shutil.rmtree(checkpoints / "step-000030")
    run.write_config({"seed": 3, "run": "moved", "steps": 7})  # these may change
    assert load(RunFolder.open(run.path), read) == (20, 20)
    manifest = json.loads((run.newest() / "manifest.json").read_text())
    assert (manifest["step"], manifest["seed"]) == (20, 3)
    (run.newest() / "manifest.json").write_text(json.dumps({"files": manifest["files"]}))  # as they once were
    assert load(run, read) == (20, 20)


def test_a_kill_while_a_checkpoint_is_removed_leaves_none_that_is_torn(run, monkeypatch):
    save(run, 10, write(10))

    def killed(path, **_):
        if path.exists():
            (path / "state.json").unlink()
            raise KeyboardInterrupt

    save(run, 20, write(20))
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            save(run, 30, write(30))
    assert names(run.path / "checkpoints") == [".tmp-removed-step-000010", "step-000020", "step-000030"]
    RunFolder.open(run.path)
    assert names(run.path / "checkpoints") == ["step-000020", "step-000030"]


def fail(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["write", "fsync", "replace", "mkdir", "safetensors", "tokenizers"])
def test_a_full_disk(run, monkeypatch, where):
    save(run, 10, write(10))
    filling = write(20)
    with monkeypatch.context() as patch:
        if where == "write":
            filling = fail
        elif where == "safetensors":

            def filling(_):
                raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

        elif where == "tokenizers":

            def filling(_):
                raise Exception("No space left on device (os error 28)")

        elif where == "mkdir":
            patch.setattr("pathlib.Path.mkdir", fail)
        else:
            patch.setattr(os, where, fail)
        with pytest.raises(CheckpointError) as caught:
            save(run, 20, filling)
    for part in ("step 20", "No space left", "step 10 is intact", "free some space, then poise train --resume run="):
        assert part in str(caught.value)
    assert names(run.path / "checkpoints") == ["step-000010"]
    assert load(run, read) == (10, 10)
    save(run, 20, write(20))
    assert load(run, read) == (20, 20)


def test_a_full_disk_at_the_last_rename_of_a_second_save_puts_the_first_back(run, monkeypatch):
    save(run, 10, write(10))
    replace = os.replace

    def once(source, target):
        if str(source).endswith(".tmp-step-000010"):
            fail()
        replace(source, target)

    monkeypatch.setattr(os, "replace", once)
    with pytest.raises(CheckpointError, match="there is no earlier one"):
        save(run, 10, write(11))
    assert load(run, read) == (10, 10)


def test_other_errors_pass_through_and_leave_nothing(run):
    def filling(folder):
        (folder / "half").touch()
        raise KeyError("a bug of ours")

    with pytest.raises(KeyError):
        save(run, 10, filling)
    assert names(run.path / "checkpoints") == []


def test_denied_is_not_called_a_full_disk(run):
    def filling(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(CheckpointError, match=r"Permission denied; there is no earlier one\. fix the cause, then"):
        save(run, 10, filling)


def test_pruning_never_drops_the_one_just_written(run):
    for step in (10, 20, 30):
        save(run, step, write(step))
    save(run, 15, write(15))  # resumed before two damaged ones, and not rewound
    assert 15 in run.checkpoints()


# Kills. One process forks many that save without pause, and kills each after a while that differs.
KILLS = textwrap.dedent("""
    import json, os, random, signal, sys, time
    from pathlib import Path
    from poise.runs.checkpoint_files import CheckpointFiles
    from poise.runs.folder import RunFolder

    def write(folder, step):
        for i in range(4):
            time.sleep(0.001)
            with (folder / f"part-{i}").open("w") as file:
                file.write(str(step)); file.flush(); time.sleep(0.001); file.write(" " * 5000)

    def read(folder):
        values = {int((folder / f"part-{i}").read_text()) for i in range(4)}
        assert values == {int(folder.name[-6:])}, values
        return values

    run = RunFolder.create(sys.argv[1], {})
    random.seed(0)
    result = {"kills": 0, "halves": 0, "steps": [0], "said": []}
    span = 0.08
    while result["kills"] < 20 or result["steps"][-1] <= 5 or result["halves"] < 3:  # until some did hit the writing
        start = result["steps"][-1]
        child = os.fork()
        if not child:
            step = start
            while True:
                step += 1
                run.log(step, {"a": 1.0})
                with CheckpointFiles(run).writing(step) as folder:
                    write(folder, step)
        time.sleep(random.uniform(0.0, span))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        result["kills"] += 1
        result["halves"] += any(p.name.startswith(".") for p in Path(sys.argv[1], "checkpoints").glob("*"))
        run = RunFolder.open(sys.argv[1])
        loaded = CheckpointFiles(run).load(read, say=result["said"].append)
        step = loaded[0] if loaded else 0
        assert step >= start, (step, start)
        span = 0.08 if step > start else 1.5 * span  # a slow disk gets more time
        run.rewind(step)
        assert [m["step"] for m in run.metrics()] == list(range(1, step + 1))
        assert not list(Path(sys.argv[1]).rglob(".*"))
        result["steps"].append(step)
    print(json.dumps(result))
""")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path / "run")], capture_output=True, text=True, timeout=600
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["kills"] >= 20
    assert result["said"] == []  # what a kill leaves is never a checkpoint in place that cannot be read
