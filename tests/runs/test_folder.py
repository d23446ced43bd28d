"""The run folder: what is refused, what a torn line or half a file does, and what a resumed run finds."""

import json
import math
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poise._lib import files as _files
from poise.runs.folder import DamagedError, RunFolder
from support.checkpoint_files import flip, load, names, read, save, write


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "runs" / "first", {"seed": 3, "clip": math.inf})


# Creating and opening


def test_a_run_that_never_began_leaves_nothing(run):
    run.write_json("data.json", {"fingerprint": "x"})
    run.discard()
    assert not run.path.exists()


def test_create_refuses_what_is_there_and_says_how_to_go_on(run, tmp_path):
    assert run.config == {"seed": 3, "clip": math.inf}
    with pytest.raises(FileExistsError, match=r"choose another run=DIR.*poise train --resume run=\S*first"):
        RunFolder.create(run.path, {})
    other = tmp_path / "notes"
    other.mkdir()
    (other / "todo.txt").touch()
    with pytest.raises(FileExistsError, match=r"notes is not empty; choose another run=DIR$"):
        RunFolder.create(other, {})
    with pytest.raises(FileExistsError, match="is a file"):
        RunFolder.create(other / "todo.txt", {})
    with pytest.raises(ValueError, match="keep must be between 1"):
        RunFolder.create(tmp_path / "new", {}, keep=0)


def test_a_folder_in_which_create_was_killed_is_as_good_as_empty(tmp_path):
    (tmp_path / ".tmp-config.json").write_text('{"se')
    assert RunFolder.create(tmp_path, {"seed": 1}).config == {"seed": 1}
    assert names(tmp_path) == ["config.json"]


def test_open_wants_a_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no run in .*absent: it does not exist"):
        RunFolder.open(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"has no config.json \(poise runs DIR .*; begin one without --resume"):
        RunFolder.open(tmp_path)


def test_open_clears_what_a_killed_run_left_but_looking_on_touches_nothing(run):
    save(run, 1, write(1))
    checkpoints = run.path / "checkpoints"
    half = checkpoints / ".tmp-step-000002"
    half.mkdir()
    (half / "state.json").touch()
    os.replace(checkpoints / "step-000001", checkpoints / ".old-step-000001")  # killed between the two renames
    RunFolder.open(run.path, resume=False)
    assert names(checkpoints) == [".old-step-000001", ".tmp-step-000002"]
    RunFolder.open(run.path)
    assert names(checkpoints) == ["step-000001"]
    assert load(run, read) == (1, 1)


def test_the_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunFolder("~/x").path == tmp_path / "x"
    with pytest.raises(FileNotFoundError, match="no user 'nobody-here'"):
        RunFolder("~nobody-here/x")


# Files


def test_only_regular_files_are_replaced(tmp_path):
    def put(path):
        with _files.replacing(path) as file:
            file.write(b"new")

    pipe, folder, link, target = (tmp_path / name for name in ("pipe", "folder", "link", "target"))
    os.mkfifo(pipe)
    folder.mkdir()
    for path, what in ((pipe, "a pipe"), (folder, "a folder"), (link, "a pipe")):
        if path is link:
            link.symlink_to(pipe)
        with pytest.raises(FileExistsError, match=what):
            put(path)
    assert pipe.is_fifo()
    link.unlink()
    link.symlink_to(target)
    for _ in range(2):  # a link to nothing yet, then to a file
        put(link)
        assert link.is_symlink()
        assert target.read_bytes() == b"new"
    assert names(tmp_path) == ["folder", "link", "pipe", "target"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "environment.json", "curve.png", "checkpoints", "rollouts"])
def test_a_run_is_not_resumed_through_a_link(run, tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious") if "." in name else elsewhere.mkdir()
    (run.path / name).symlink_to(elsewhere)
    with pytest.raises(FileExistsError, match=f"{name} is a link.*link its whole folder"):
        RunFolder.open(run.path)
    RunFolder.open(run.path, resume=False)
    assert elsewhere.is_dir() or elsewhere.read_text() == "precious"


def test_a_run_may_be_reached_through_a_link(run, tmp_path):
    (tmp_path / "link").symlink_to(run.path)
    assert RunFolder.open(tmp_path / "link").config["seed"] == 3


def test_a_pipe_in_place_of_a_file_does_not_hold_a_run_up(run):
    os.mkfifo(run.path / "before.json")
    with pytest.raises(OSError, match=r"before.json is not a file"):
        run.read_json("before.json")
    with pytest.raises(FileExistsError, match=r"before.json is a link, a pipe or a device"):
        RunFolder.open(run.path)


# Metrics, rollouts


def test_metrics_are_valid_json(run):
    run.log(1, {"a": math.nan, "b": -math.inf, "c": torch.tensor(0.5), "d": 7})
    line = (run.path / "metrics.jsonl").read_text()
    assert line == '{"step": 1, "a": null, "b": null, "c": 0.5, "d": 7}\n'
    assert run.metrics() == [json.loads(line)]
    with pytest.raises(ValueError, match="'step' is reserved"):
        run.log(2, {"step": 2.0})


def test_metrics_that_lack_a_step_or_have_one_twice_are_noticed(run):
    said = []
    for step in (1, 2, 3):
        run.log(step, {"a": step})
    run.rewind(3, say=said.append)
    assert said == []
    path = run.path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0])
    run.rewind(3, say=said.append)
    assert "metrics.jsonl has no line for 2 steps, the first is 2: training continues" in said[0]
    path.write_bytes(lines[0] + lines[2] + lines[1])
    run.rewind(3, say=said.append)
    assert "has repeated or unordered steps" in said[1]


@pytest.mark.parametrize("torn", [b'{"step": 3, "a"', b'{"step": 3}', b"\0\0\0\n", b"{}\n"])
def test_a_torn_last_line_is_ignored_and_gone_once_resumed(run, torn):
    for step in (1, 2):
        run.log(step, {"a": step})
    path = run.path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert [record["step"] for record in run.metrics()] == [1, 2]
    RunFolder.open(run.path).log(3, {"a": 3})
    assert [record["step"] for record in run.metrics()] == [1, 2, 3]


@pytest.mark.parametrize("line", ['{"st', '{"step": 2, "a": ' + "[" * 100_000, '{"step": Infinity}'])
def test_a_broken_line_in_the_middle_is_an_error(run, line):
    (run.path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: this is not a JSON object"):
        run.metrics()


@pytest.mark.parametrize("step", [-1, 10**12])
def test_a_step_out_of_range_is_an_error_in_the_last_line_too(run, step):
    (run.path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{{"step": {step}}}\n')
    with pytest.raises(DamagedError, match=r"metrics.jsonl, line 2: the step is not between 0 and 999,999,999,999"):
        run.metrics()


def test_half_a_line_is_taken_back_when_the_disk_is_full(run):
    resource = pytest.importorskip("resource")  # the one real way to make a write fail: a limit on the size of files
    run.log(1, {"a": 1.0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            run.log(2, {"a": 2.0, "b": 3.0, "c": 4.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    run.log(2, {"a": 2.5})
    assert run.metrics() == [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.5}]


@given(
    st.text(st.characters(exclude_categories=())).filter(
        lambda t: t == t.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    )
)
def test_any_text_survives_json(text):
    assert json.loads(_files.dumps({"completion": text})) == {"completion": text}


def test_rollouts(run):
    records = [
        {"completion": "\ud800 \0 \x1b[2J \u2028 \n é 😀", "reward": 1.5},
        {"completion": "", "reward": math.nan},
    ]
    path = run.save_rollouts(10, iter(records))
    assert path.name == "step-000010.jsonl.gz"
    assert run.rollouts(10) == [records[0], {"completion": "", "reward": None}]
    first = path.read_bytes()
    run.save_rollouts(10, records)
    assert path.read_bytes() == first

    def failing():
        yield records[0]
        raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        run.save_rollouts(10, failing())
    assert path.read_bytes() == first
    assert names(path.parent) == [path.name]


def test_responses_that_unpack_without_end_are_refused(run, monkeypatch):
    run.save_rollouts(10, [{"completion": "a" * 10_000}])
    assert len(run.rollouts(10)) == 1
    monkeypatch.setattr("poise.runs.folder.LARGEST_ROLLOUTS", 9_999)
    with pytest.raises(DamagedError, match="step 10 unpack to more than 9,999 bytes"):
        run.rollouts(10)


def test_tokens(run):
    arrays = {"start": torch.tensor([0, 2, 3]), "id": torch.tensor([7, 8, 7]), "logp": torch.tensor([-0.5, -1e-9, 0.0])}
    texts = {7: "\ud800 </script>", 8: "\0\u202e"}
    path = run.save_tokens(10, arrays, texts)
    assert path.name == "step-000010.safetensors"
    found, read_texts = run.tokens(10)
    assert read_texts == texts
    assert found.keys() == arrays.keys()
    assert all(torch.equal(found[name], values) for name, values in arrays.items())
    assert run.tokens(11) is None
    assert run.recorded() == []


def test_rewind_leaves_what_an_uninterrupted_run_would_have(run):
    for step in (1, 2, 3, 4):
        run.log(step, {"a": step / 3})
        run.save_rollouts(step, [{"step": step}])
        run.save_tokens(step, {"id": torch.tensor([step])}, {step: "a"})
        if step == 2:
            save(run, 2, write(2))
            expected = (run.path / "metrics.jsonl").read_bytes()
    flip(save(run, 4, write(4)))
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "a')
    resumed = RunFolder.open(run.path)
    step, _ = load(resumed, read, say=lambda _: None)
    resumed.rewind(step)
    assert (run.path / "metrics.jsonl").read_bytes() == expected
    assert names(run.path / "rollouts") == ["step-000001.jsonl.gz", "step-000002.jsonl.gz"]
    assert names(run.path / "tokens") == ["step-000001.safetensors", "step-000002.safetensors"]
    assert resumed.recorded() == [1, 2]
    assert names(run.path / "checkpoints") == ["set-aside-step-000004", "step-000002"]
    resumed.write_json("summary.json", {"best": math.nan})
    assert json.loads((run.path / "summary.json").read_text()) == {"best": None}
