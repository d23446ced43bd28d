"""The command line as people use it, and the mistakes they make."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from poise import tasks, trainer
from poise._lib.errors import how_to_install
from poise.cli import train
from poise.models.loading import load_policy
from poise.models.policy import EMBEDDED
from poise.runs.folder import RunFolder
from poise.runs.lock import owned
from poise.trainer import TrainError
from poise.training import config as configs
from poise.training import evaluation
from poise.training.config.documents import merge, parse
from poise.training.resume import open_to_resume
from support.command_line import SMALL, contents, fails, poise
from support.twice import Twice


def test_help_shows_examples():
    assert "poise train --resume runs/ar` (or `--resume run=runs/ar`)" in train.train.__doc__
    assert "poise train --resume runs/ar" in poise("train", "--help").output
    assert "poise eval embedded" in poise("eval", "--help").output
    for command in ("train", "eval", "tasks"):
        assert command in poise("--help").output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_eval_at_once(tmp_path, monkeypatch, number):
    def interrupted(*_):
        signal.raise_signal(number)
        pytest.fail("the evaluation went on")

    monkeypatch.setattr(evaluation, "held_out", interrupted)
    result = poise("eval", "embedded", "problems=1", "--json", tmp_path / "out.json")
    assert result.exit_code == 130
    assert "stopped before the last problem" in result.output
    assert not (tmp_path / "out.json").exists()


def test_dry_run_prints_the_resolved_config(tmp_path):
    shown = parse(poise("train", "--dry-run", "regulator=ar(alpha=0.3)", "seed=7").output)
    assert shown["regulator"] == "ar(alpha=0.3)"
    assert shown["seed"] == 7
    assert shown["model"] == "embedded-plain"  # plain `poise train` is the demo
    own = tmp_path / "mine.yaml"
    own.write_text("base: lopti\nsteps: 3\n")
    assert parse(poise("train", own, "--dry-run").output)["regulator"].startswith("lopti")


def test_dry_run_tells_the_time_of_steps_like_those_of_its_folder(tmp_path):
    config = configs.load("tiny", [f"run={tmp_path / 'run'}", "steps=5", "device=cpu"])
    folder = RunFolder.create(config.run, config.model_dump(mode="json"))
    settings = [f"run={config.run}", "steps=5", "device=cpu", "--dry-run"]
    assert "# time" not in poise("train", "tiny", *settings).output
    for step, seconds in enumerate((90.0, 30.0, 31.0), 1):
        folder.log(step, {"time/step": seconds, "tokens/total": 1000 * step})
    took = f"# time: a step took 31 s (median of 3 in {config.run})"
    assert f"{took}: 5 steps may take 2:35, " in poise("train", "tiny", *settings).output
    assert f"{took}: 2 steps may take 1:02, " in poise("train", "tiny", *settings, "budget=1500").output
    assert "# time" not in poise("train", "tiny", *settings, "group=2").output
    resumed = ["train", "--resume", f"run={config.run}", "--dry-run"]
    assert f"{took}: 2 steps may take 1:02, without evaluations and checkpoints" in poise(*resumed).output
    assert f"{took}: 1 step may take 0:31, " in poise(*resumed, "steps=9", "budget=3900").output
    assert f"{took}: 0 steps may take 0:00, " in poise(*resumed, "budget=2000").output


@pytest.mark.parametrize("line", ['{"x": 1}\n', '{"step": 4, "time/step": -5}\n', '{"step": 4, "time/step": 1e299}\n'])
def test_dry_run_does_not_depend_on_the_metrics_of_its_folder(tmp_path, line):
    config = configs.load("tiny", [f"run={tmp_path / 'run'}", "device=cpu"])
    (RunFolder.create(config.run, config.model_dump(mode="json")).path / "metrics.jsonl").write_text(line + line)
    result = poise("train", "tiny", f"run={config.run}", "device=cpu", "--dry-run")
    assert result.exit_code == 0
    assert "# time" not in result.output


def test_dry_run_tells_the_memory_of_a_model_that_is_here():
    assert "# memory: at least 23.4 MB (weights 5.84 MB" in poise("train", "--dry-run", "device=cpu").output
    assert "# memory: known after the model is downloaded" in poise("train", "ar", "--dry-run").output


def test_train_writes_a_summary_and_a_curve_and_eval_reads_the_run(trained, tmp_path):
    run = trained
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["before"]["n"] == summary["after"]["n"] == 2
    out = tmp_path / "eval.json"
    shown = poise("eval", run, "task.people=2", "samples=2", "problems=3", "max_tokens=48", "--json", out).output
    assert "pass@2" in shown
    assert "maj@2" in shown
    assert "difficulty" not in shown  # all puzzles have two people
    assert json.loads(out.read_text())["n"] == 3
    several = ["task.people=2-3", "samples=1", "problems=2", "max_tokens=4"]
    assert "avg@1, difficulty 3" in poise("eval", run, *several).output


@pytest.mark.parametrize("command", ["eval", "train"])
def test_samples_are_shown_with_what_the_environment_said(tmp_path, monkeypatch, command):
    monkeypatch.setitem(tasks.TASKS, "twice", Twice)
    if command == "eval":
        few = ["task.name=twice", "problems=2", "samples=2"]
        assert "sample  reward" not in poise("eval", "embedded", *few, "max_tokens=1").output
        shown = poise("eval", "embedded", *few, "max_tokens=12", "--show", 3).output
    else:
        own = [name for name in SMALL if not name.startswith("task.")]
        mine = tmp_path / "mine.yaml"
        mine.write_text("model: embedded\ntask: {name: twice}\n")
        shown = poise("train", mine, *own, f"run={tmp_path / 'run'}").output
    assert shown.count("sample  reward") == 3
    assert shown.count("\n      │  Are you sure? <|end|> \n    ") == 3


@pytest.mark.usefixtures("short_evaluation")
def test_a_lora_run_can_be_measured_and_trained_on(tmp_path):
    run = tmp_path / "run"
    poise("train", "tiny", *SMALL, f"run={run}", "lora.rank=2", "optim.lr=1e-3", "prompts=6", "group=4")
    measured = ["task.people=2", "samples=1", "problems=2", "max_tokens=48"]
    assert "avg@1" in poise("eval", run, *measured).output
    assert poise("train", "tiny", *SMALL, f"run={tmp_path / 'next'}", f"model={run}").exit_code == 0
    merged, base = load_policy(str(run), device="cpu"), load_policy("embedded", device="cpu")
    changed = [n for n, p in merged.model.named_parameters() if not p.equal(dict(base.model.named_parameters())[n])]
    assert changed
    assert all("proj" in name for name in changed)


@pytest.mark.usefixtures("short_evaluation")
def test_a_run_that_never_began_leaves_its_folder_free(tmp_path):
    run = f"run={tmp_path / 'run'}"
    assert "there is no such folder" in fails("train", "tiny", *SMALL, run, "model=/nonexistent/model")
    assert not (tmp_path / "run").exists()
    shown = poise("train", "tiny", *SMALL, run).output
    assert "before" in shown
    assert "difficulty" not in shown  # all puzzles have two people
    assert "already at step 1: nothing to train" in poise("train", "--resume", run).output


def test_what_cannot_be_resumed_is_left_as_it_is(copy):
    before = contents(copy)
    assert "steps=1: the run in" in (shown := fails("train", "--resume", f"run={copy}", "steps=1"))
    assert "is at step 2 already, and nothing was changed" in shown
    for wrong in ("steps=0", "steps=two", "steps=", "steps=[1"):
        assert "steps" in fails("train", "--resume", f"run={copy}", wrong)
    other = configs.restore({**RunFolder(copy).config, "seed": 7})
    with pytest.raises(TrainError, match="a resumed run keeps its settings, but seed differs from"):
        trainer.train(other, resume=True, quiet=True)
    other = configs.restore(merge(RunFolder(copy).config, {"optim": {"lr": 0.5}}))
    with pytest.raises(TrainError, match=r"optim\.lr differs from .*config\.json \(0\.5 instead of 0\.0002\)"):
        open_to_resume(other)
    same = configs.restore({**RunFolder(copy).config, "regulator": "grpo(passes=1)"})  # written otherwise
    assert open_to_resume(same).config["regulator"] == "grpo"
    assert contents(copy) == before
    with owned(copy, make=False):
        for again in (["--resume"], ["tiny"]):
            shown = fails("train", *again, f"run={copy}")
            assert f"is in use: process {os.getpid()} on" in shown
        assert contents(copy).items() >= before.items()
    assert contents(copy) == before


def flip(path):
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 2, len(data) // 2 + 2000):
        data[at] ^= 0x55
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_not_measured_nor_trained_on(copy, tmp_path):
    newest, before = copy / "checkpoints" / "step-000002", copy / "checkpoints" / "step-000001"
    measured = ["task.people=2", "samples=1", "problems=1", "max_tokens=8"]
    flip(newest / "model" / "model.safetensors")
    why = "step-000002 cannot be used: model/model.safetensors is damaged: its SHA-256 differs from the manifest's"
    for args in (
        ["eval", copy, *measured],
        ["eval", newest, *measured],
        ["eval", newest / "model", *measured],
        ["diagnose", copy, "--out", tmp_path / "figures"],
        ["train", "tiny", *SMALL, f"run={tmp_path / 'next'}", f"model={copy}"],
    ):
        assert why in " ".join(fails(*args).split()), args
    assert not (tmp_path / "next").exists()
    assert poise("eval", before, *measured).exit_code == 0
    shutil.move(before, newest.with_name("step-000003"))
    assert "it belongs to step 1, but its folder has another name" in fails("eval", copy, *measured)
    (newest / "manifest.json").unlink()
    assert "manifest.json is missing" in fails("eval", newest / "model", *measured)
    plain = shutil.copytree(copy / "checkpoints" / "step-000003" / "model", tmp_path / "plain")
    assert poise("eval", plain, "task.name=kk", *measured).exit_code == 0  # an ordinary model folder has no manifest


def write(name, text):
    return lambda run: (run / name).write_text(text)


MISTAKES = {  # what was done to a run, and what --resume says
    "config.json cannot be read as JSON: put the file back": write("config.json", '{"seed": '),
    "config.json cannot be read as JSON": write("config.json", "[" * 100_000),
    "config.json does not contain settings": write("config.json", "[1]"),
    "unknown key 'sed'": lambda run: edit(run, {"sed": 1}),
    "seed = 'x'": lambda run: edit(run, {"seed": "x"}),
    "a run with seed 0; this one has seed 5": lambda run: edit(run, {"seed": 5}),
    "undo the changes there": lambda run: edit(run, {"prompts": 3}),
    "it has no config.json": lambda run: (run / "config.json").unlink(),
    "metrics.jsonl, line 1: this is not": write("metrics.jsonl", '{"a": 1}\n{"step": 2}\n'),
    "before.json cannot be read as JSON": write("before.json", ""),
    "before.json does not hold the accuracy": write("before.json", '{"accuracy": 1, "table": {"greedy": 1}}'),
    "before.json is missing": lambda run: (run / "before.json").unlink(),
    "metrics up to step 2, but no checkpoint": lambda run: shutil.rmtree(run / "checkpoints"),
    "was written by poise diagnose": write("diagnose.json", "{}"),
    "metrics.jsonl is not a file": lambda run: ((run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").mkdir()),
    "does not exist": shutil.rmtree,
}


def test_damaged_settings_are_named_by_every_command(copy):
    (copy / "config.json").write_text('{"seed": ')
    for command in (["eval", copy], ["diagnose", copy], ["report", copy], ["train", "tiny", f"model={copy}"]):
        said = fails(*command, *(["run=runs/next"] if command[0] == "train" else []))
        assert "config.json cannot be read as JSON: put the file back" in " ".join(said.split()), command


def edit(run, changes):
    path = run / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_around_a_run_folder_are_explained(copy, message):
    MISTAKES[message](copy)
    assert message in " ".join(fails("train", "--resume", f"run={copy}").split())


def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    message = "tracker 'wandb' cannot be imported"
    assert message in (shown := fails("train", "tiny", *SMALL, f"run={tmp_path / 'run'}", "tracking=wandb"))
    assert how_to_install("wandb") in " ".join(shown.split())
    assert shown.count("\n") < 8


def test_places_that_cannot_be_written_are_explained(trained, tmp_path):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for place, message in {
        tmp_path / "file": "is a file; choose another run=DIR",
        tmp_path / "file" / "x": "file is a file and cannot contain a folder; choose another run=DIR",
        tmp_path / ("x" * 300): "File name too long",
        trained: "is not empty; choose another run=DIR, or continue the run in it: poise train --resume run=",
        trained.parent: "is not empty; choose another run=DIR",
        '"a\\0b"': "must not contain the character NUL",
    }.items():
        assert message in " ".join(fails("train", "tiny", *SMALL, f"run={place}").split())
    for place, message in {
        tmp_path: "is a folder: name a file",
        tmp_path / "pipe": "a pipe or a socket: name a file",
        "/dev/null": "a device",
        tmp_path / "file" / "x.html": "file is not a folder",
    }.items():
        assert message in fails("report", trained, "--out", place)
        assert message in fails("eval", "embedded", "problems=1", "samples=1", "max_tokens=8", "--json", place)
    assert (tmp_path / "pipe").is_fifo()


def test_a_second_run_of_a_recipe_gets_the_next_free_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = tmp_path / "runs/demo"
    first.mkdir(parents=True)
    (first / "config.json").write_text("{}")
    done = poise("train", "demo", *SMALL, "steps=1", "evaluation=off")
    assert "runs/demo already has a run, so this one goes to runs/demo-2" in done.stderr
    assert (tmp_path / "runs/demo-2/summary.json").exists()
    assert [path.name for path in first.iterdir()] == ["config.json"]


def test_the_curves_of_a_run_over_any_axis(trained, tmp_path):
    assert poise("report", trained, trained, "--out", tmp_path / "two.html", "--x", "tokens").exit_code == 0
    refused = poise("report", trained, "--x", "token")
    assert refused.exit_code == 2
    assert "'token' is not one of 'step'" in " ".join(refused.output.split())


def test_the_report_of_a_comparison_is_its_page(tmp_path):
    (tmp_path / "comparison.html").touch()
    assert f"open {tmp_path}/comparison.html" in " ".join(fails("report", tmp_path).split())


def test_the_home_folder_is_expanded_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert f"{tmp_path}/none: there is no such folder" in fails("eval", "~/none")
    assert f"there is no run in {tmp_path}/none" in fails("report", "~/none")
    assert f"there is no run in {tmp_path}/none" in fails("train", "--resume", "run=~/none")
    assert f"{tmp_path}/none" in fails("diagnose", "~/none")
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file is a file" in fails("diagnose", "embedded", "--out=~/file")
    assert f"run: {tmp_path}/x" in poise("train", "--dry-run", "run=~/x").output
    assert not (tmp_path / "~").exists()


def test_tasks():
    assert poise("tasks").output.startswith("kk")
    shown = poise("tasks", "show", "kk", "task.people=4", "seed=0").output
    assert "<think>" in shown
    assert "--- the right answer\n(1) " in shown
    assert shown == poise("tasks", "show", "kk", "task.people=4", "seed=0").output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "stepz=3"], "did you mean 'steps'"),
        (["train", "optim.learning_rate=3"], "did you mean 'optim.lr'"),
        (["train", "optim.zzz=3"], "allowed in optim: average_over, betas, eight_bit, grad_clip, lr"),
        (["train", "group=1"], "group"),
        (["train", "gpro"], "did you mean 'grpo'"),
        (["train", "no/such/file.yaml"], "no/such/file.yaml"),
        (["train", "tiny", "grpo"], "one recipe at a time"),
        (["train", "tiny", "--learning_rate", "1e-6"], "there is no option --learning_rate; settings have no dashes"),
        (["train", "regulator=lopty"], "did you mean 'lopti'"),
        (["train", "task.name=kkk"], "did you mean 'kk'"),
        (["train", "task.peple=3"], "did you mean 'task.people'"),
        (["train", "--resume"], "run=DIR"),
        (["train", "tiny", "--resume", "runs/x"], "--resume takes one run and no recipe, got tiny and runs/x"),
        (["train", "--resume", "run=/nonexistent"], "there is no run in"),
        (["train", "--resume", "/nonexistent"], "there is no run in /nonexistent"),
        (["train", "--resume", "demo", "run=x"], "remove demo"),
        (["train", "--resume", "run=x", "seed=2"], "cannot be changed"),
        (["eval", "/nonexistent/model"], "there is no such folder"),
        (["eval", "embeded"], "embeded: there is no such folder; did you mean 'embedded'?"),
        (["eval", "embedded-plane"], "there is no such folder; did you mean 'embedded-plain'?"),
        (["train", "model=embeded"], "model = 'embeded': there is no such folder; did you mean 'embedded'?"),
        (["train", "model=demo"], "this is a recipe, not a model: poise train demo, or in Python recipe='demo'"),
        (["train", "embedded"], "embedded is a model, not a recipe: write model=embedded"),
        (["eval", "demo"], "demo is a recipe, not a model: name a run of it, such as runs/demo"),
        (["diagnose", "tiny"], "tiny is a recipe, not a model: name a run of it, such as runs/tiny"),
        (["train", "evaluation.samples=4"], "set evaluation.samples=1, or evaluation.temperature=1 to sample"),
        (["eval", "nobody/nothing", "task.name=kk"], "neither a folder here nor a model that could be fetched"),
        (["train", "tracking=wandbb"], "did you mean 'wandb'"),
        (["train", "device=cuda", "run=/proc/nowhere/x"], "nowhere"),
        (["eval", "embedded", "task.name=kq"], "did you mean 'kk'"),
        (["eval", "embedded", "peple=3"], "did you mean 'task.people'"),
        (["tasks", "show", "kk", "task.people=99"], "people must be between"),
        (["tasks", "show", "kk", "split=tset"], "did you mean 'test'"),
        (["eval", "embedded", "task.name=[1,2]"], "task.name = [1, 2]: must be text: the name of a task"),
        (["diagnose", "embedded", "task.name=[1]"], "task.name = [1]: must be text: the name of a task"),
        (["compare", "regulator=grpo; ar", "task.name=[1]"], "task.name = [1]: must be text: the name of a task"),
        (["train", "evaluation=on"], "must be off, or a group: evaluation.problems=200"),
        (["train", "evaluation=off", "stop_at=0.5"], "accuracy is not measured with evaluation=off"),
        (["compare", "evaluation=off", "regulator=ar;grpo"], "a comparison needs held-out accuracy"),
        (["eval", "embedded", "problems=0"], "problems = 0: must be at least 1"),
        (["eval", "a/b/c"], "a/b/c: there is no such folder"),
        (["train", "tiny", *SMALL, "lora.targets=[nothing]", "run=x/y"], "lora.targets = ('nothing',): Target modules"),
        (["train", "steps=["], "override 'steps=[': cannot read the value: it ends too early: a bracket or a quote"),
        (["train", "steps='"], "a bracket or a quote is not closed"),
        (["tasks", "show", "kk", "task.people=[1"], "cannot read the value"),
        (["tasks", "show", "kk", "task.people=!!int x"], "cannot read the value"),
        (["eval", "embedded", "device=gpu"], "must be auto, or a device of torch"),
        (["eval", "embedded", "task.people=[3"], "cannot read the value"),
        (["eval", "embedded", "people"], "write key=value"),
        (["eval", "embedded", "samples=99999999999"], "must be at most 2147483647"),
        (["eval", "embedded", "steps=3"], "unknown key 'steps'"),
        (["eval", "embedded", "regulator=ar"], "unknown key 'regulator'"),
        (["eval", "nobody/nothing"], "no task is named: write task.name=NAME (kk,"),
        (["train", "model=nobody/nothing"], "no task is named: write task.name=NAME (kk,"),
        (["train", "task=kk"], "task.name=kk"),
        (["tasks", "show"], "no task is named"),
        (["tasks", "show", "kk", "sokoban"], "one task at a time, got kk and sokoban"),
        (["tasks", "show", "kk", "people=4"], "unknown key 'people'; did you mean 'task.people'?"),
        (["tasks", "show", "kk", "task.peple=4"], "unknown key 'task.peple'; did you mean 'task.people'?"),
        (["tasks", "show", "kk", "steps=4"], "unknown key 'steps'"),
        (["tasks", "show", "kk", "seed=-1"], "seed = -1: must be at least 0"),
        (["train", "steps=1e999999"], "steps = inf: must be a finite number"),
        (["train", "a." * 9999 + "a=1"], "the key has 10000 levels, more than 20"),
        (["train", "regulator=subprocess.Popen('true')"], "is not a regulator"),
        (["train", "regulator=ar(alpha=" + "(" * 999 + ")"], "cannot read"),
    ],
)
def test_mistakes_are_explained(args, message, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    assert message in " ".join(fails(*args).split())


def test_a_model_is_measured_on_the_task_it_was_made_for(tmp_path):
    shutil.copytree(EMBEDDED, tmp_path / "model")
    (tmp_path / "model" / "warmstart.yaml").write_text("task: kk\ntask_settings: {people: 4}\nsteps: 1\n")
    tiny = ["samples=1", "problems=1", "max_tokens=4"]
    assert "on task kk (people=(4,)" in poise("eval", tmp_path / "model", *tiny).output
    assert "on task kk (people=(2, 3)" in poise("eval", "embedded", *tiny).output
    assert "on task kk (people=(5,)" in poise("eval", "embedded", *tiny, "task.people=5").output


def test_folders_and_files_that_are_something_else(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(trained.parent)
    (tmp_path / "file").touch()
    (tmp_path / "cmp").mkdir()
    (tmp_path / "cmp" / "plan.json").touch()
    for args, message in (
        (["train", "--resume", tmp_path / "cmp"], "is the folder of a comparison; to continue the comparison, run"),
        (["compare", tmp_path / "cmp"], "this folder belongs to a comparison; to continue it, run its command again"),
        (["eval", "."], ".: this folder has no config.json, so it is not a transformers model; runs there: trained"),
        (["eval", "trained/checkpoints"], "this folder has no config.json"),
        (["eval", "trained/checkpoints/step-000009"], "there is no such folder"),
        (["eval", tmp_path / "file"], "file is a file: name the folder of a model, a run, or a hub id"),
        (["report", tmp_path / "file"], "it is a file"),
        (["train", "--resume", "."], "it has no config.json (poise runs DIR lists the runs below a folder)"),
        (["train", "trained"], "is a folder, and a recipe is a YAML file: to continue a run, poise train --resume"),
        (["export", "trained", tmp_path / "file" / "x"], "file is a file and cannot contain a folder"),
    ):
        assert message in " ".join(fails(*args).split()), args


def test_a_run_named_without_its_folder_is_guessed(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "runs/demo")
    for args in (["report", "demo"], ["train", "--resume", "demo"]):
        assert "there is no run in demo: it does not exist; did you mean runs/demo?" in fails(*args)


def test_a_mistyped_run_is_not_asked_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "metrics.jsonl").touch()
    assert "runs/dmo: there is no such folder; runs there: demo" in fails("eval", "runs/dmo")


def test_a_folder_that_is_taken_is_refused_before_the_trainer_is_imported(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    program = f"import sys; from poise.__main__ import main; sys.argv = ['poise', 'train', 'tiny', 'run={tmp_path}']\n"
    program += "try: main()\nfinally: print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr == f"poise: {tmp_path} is not empty; choose another run=DIR\n"
    assert done.stdout == "False\n"


@pytest.mark.parametrize("command", ["diagnose", "eval"])
def test_the_folder_of_a_comparison_is_no_model(command, tmp_path):
    (tmp_path / "plan.json").touch()  # the comparison has no results yet
    assert "holds a comparison, not a run: name one of its runs" in fails(command, tmp_path)
    (tmp_path / "comparison.html").touch()
    (tmp_path / "plan.json").unlink()  # only its results were copied
    assert f"holds a comparison, not a run: open {tmp_path / 'comparison.html'}, or name" in fails(command, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "holds a comparison" not in fails(command, tmp_path)
