"""Runs that go on, runs that are finished, and runs without any evaluation."""

import json
import re

import pytest

from poise import trainer
from poise.runs.folder import RunFolder
from poise.runs.subscribers import evaluation_schedule
from poise.training.config.run_settings import to_evaluate
from support.command_line import SMALL, contents, fails, poise


def test_a_folder_with_an_equals_sign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    poise("train", "tiny", *SMALL, "run='lr=1e-4'")
    assert "already at step" in poise("train", "--resume", "lr=1e-4").output


def test_a_finished_run_is_shown_again_and_nothing_is_computed(copy, monkeypatch):
    before = contents(copy)
    monkeypatch.setattr(trainer, "build", lambda *_, **__: pytest.fail("a model was loaded"))
    shown = poise("train", "--resume", copy).output
    assert "already at step 2: nothing to train; to continue, raise steps=" in shown
    assert "greedy" in shown
    assert "evaluating" not in shown
    changed = {str(path) for path, data in contents(copy).items() if before.get(path) != data}
    assert changed <= {"curve.png", "config.json"}  # which has the path of the copy


def changed(path):
    """Another number in the file, which is read as before."""
    path.write_text(re.sub(r'"accuracy": [\d.]+', '"accuracy": 0.123', path.read_text(), count=1))


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_text("{"), changed])
def test_a_finished_run_without_its_result_is_measured_again(copy, damage):
    expected = json.loads((copy / "summary.json").read_text())
    damage(copy / "summary.json")
    shown = poise("train", "--resume", copy).output
    assert json.loads((copy / "summary.json").read_text()) == expected | {"run": str(copy)}
    assert ("summary.json was changed after the run wrote it" in " ".join(shown.split())) == (damage is changed)


@pytest.mark.usefixtures("short_evaluation")
def test_a_changed_result_does_not_enter_the_metrics_of_a_run_that_goes_on(copy):
    """The final evaluation of a run that goes on is the evaluation after that step."""
    table = re.compile(r'"value": [\d.]+')
    summary = copy / "summary.json"
    summary.write_text(table.sub('"value": 0.123', summary.read_text()))
    shown = poise("train", "--resume", copy, "steps=3").output
    assert "summary.json was changed after the run wrote it" in " ".join(shown.split())
    assert 0.123 not in RunFolder(copy).metrics()[1].values()


def test_a_changed_accuracy_before_training_is_refused(copy):
    (copy / "summary.json").unlink()
    changed(copy / "before.json")
    assert "before.json does not hold the accuracy before training as poise wrote" in fails("train", "--resume", copy)


def test_a_run_without_any_evaluation(tmp_path, monkeypatch):
    run, few = tmp_path / "run", [item for item in SMALL if not item.startswith("evaluation")]
    monkeypatch.setattr(evaluation_schedule, "held_out", lambda *_: pytest.fail("evaluated"))
    shown = poise("train", "tiny", *few, "evaluation=off", f"run={run}").output
    assert "accuracy was not measured (evaluation=off); measure the model with poise eval" in " ".join(shown.split())
    assert not (run / "before.json").exists()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["before"], summary["after"]) == (None, None)
    assert (run / "curve.png").exists()
    assert "already at step 1" in poise("train", "--resume", run).output
    assert poise("train", "--resume", run, "steps=2", "--quiet").exit_code == 0
    assert not any(key.startswith("eval/") for line in RunFolder(run).metrics() for key in line)
    assert poise("report", run).exit_code == 0
    assert "– → –" in poise("runs", run).output
    monkeypatch.undo()
    assert "1 problems × 8 samples" in poise("eval", run, "max_tokens=1", "problems=1").output
    settings = RunFolder(run).config
    settings["evaluation"] |= {"samples": 3, "seed": 5}  # evaluation.problems=0 leaves the others as they are
    RunFolder(run).write_config(settings)
    evaluation = to_evaluate(str(run), []).evaluation
    assert (evaluation.problems, evaluation.samples, evaluation.seed) == (200, 3, 5)


@pytest.mark.usefixtures("short_evaluation")
def test_more_steps_are_kept_for_the_next_resume(copy):
    for steps, spelling in ((3, "run={}"), (4, "{}")):
        poise("train", "--resume", spelling.format(copy), f"steps={steps}", "--quiet")
        assert json.loads((copy / "config.json").read_text())["steps"] == steps == len(RunFolder(copy).metrics())
