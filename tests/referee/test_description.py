"""What is said of a comparison before it runs."""

from pathlib import Path

import pytest

from poise.models.location import ModelError
from poise.referee.compare import command, description
from poise.referee.compare.arms import rate_text
from poise.referee.compare.description import measure_trial, run_seconds
from poise.referee.compare.processes import RunExit
from poise.runs.folder import RunFolder
from poise.training.resume import TrainError
from support.comparisons import finish, make


def test_the_plan_in_words(tmp_path):
    said = "\n".join(description.heading(make(tmp_path, "optim.lr=1e-4,2e-4", "tune=2")))
    for words in (
        "2 arms × 3 seeds",
        "grpo (baseline)",
        "among 1e-4, 2e-4",
        "8 tuning runs",
        "a fair comparison needs at least 1,000",
    ):
        assert words in said
    assert "held-out problems, greedily;" in "\n".join(description.heading(make(tmp_path, "evaluation.temperature=0")))
    assert "a fair comparison needs" not in "\n".join(description.heading(make(tmp_path, "evaluation.problems=1000")))


@pytest.mark.parametrize(("rate", "text"), [(5e-5, "5e-5"), (1e-4, "1e-4"), (2.5e-6, "2.5e-6"), (0.05, "0.05")])
def test_a_rate_is_shown_as_it_is_typed(rate, text):
    assert rate_text(rate) == text


def test_the_time_of_a_run_from_two_steps(tmp_path):
    def seconds(changes=(), regulator="grpo; lopti", arm=0, settings=()):
        few = ["steps=10", "evaluation.problems=8", "evaluation.every=4", *settings]
        plan = make(tmp_path, *few, regulator=regulator)
        tried = plan.baseline.variants[0].config
        step = {"time/step": 3.0, "time/rollout": 2.0, "time/update": 0.5, "tokens/sampled": 50.0}
        return run_seconds(plan.arms[arm].variants[0].config.model_copy(update=dict(changes)), tried, step, start=5.0)

    # Four evaluations (before, after, steps 4 and 8) of 8 × 2 responses; a step has 4.
    assert seconds() == 5 + 10 * 3 + 4 * 4 * 2
    assert seconds(settings=["evaluation.temperature=0"]) == 5 + 10 * 3 + 4 * 2 * 2  # the sample is the greedy response
    assert seconds({"budget": 120}) == 5 + 9 + 16  # reached in the third step
    assert seconds({"prompts": 6}) == 5 + 10 * 9 + 4 * 4 * 2  # three times the responses; evaluations are the same
    assert seconds(arm=1) == seconds() + 10 * 0.5  # two phases
    assert seconds(regulator="lopti; grpo", arm=1) == seconds() - 10 * 0.25


def test_the_forecast(tmp_path):
    said = description.forecast(make(tmp_path), 60.0, jobs=2, done=2)
    assert "6 runs (2 done), 2 in parallel: about 2:00" in said
    assert "about 1:00" in description.forecast(make(tmp_path), 60.0, jobs=16, done=5)
    assert "about 0:00" in description.forecast(make(tmp_path), 60.0, jobs=2, done=6)


class Trial:
    """Processes that take two steps at once, of which an update takes 100 seconds."""

    def start(self, config, log):
        del log
        folder = RunFolder.create(config.run, {})
        for step in (1, 2):
            folder.log(step, {"time/step": 0.0, "time/update": 100.0, "time/rollout": 0.0, "tokens/sampled": 7.0})

    def wait(self, _):
        return [RunExit(Path("run"), 0)]

    def close(self):
        pass


class Failing(Trial):
    """A run that ends with these words."""

    def __init__(self, *words):
        self.words = words

    def start(self, config, log):
        del config
        log.write_text("".join(f"{line}\n" for line in self.words))

    def wait(self, _):
        return [RunExit(Path("run"), 1)]


def test_a_trial_that_fails_says_why(tmp_path):
    plan, trace = make(tmp_path), ["Traceback (most recent call last):", "poise.models.location.ModelError: no head"]
    for words, said in (
        ([*trace, "poise: no head"], "the trial run failed: no head"),
        (trace, "the trial run failed:\n" + "\n".join(trace)),
    ):
        with pytest.raises(TrainError) as caught:
            measure_trial(plan, Failing(*words))
        assert str(caught.value) == said


def test_a_trial_tells_how_long_a_run_takes_on_average(tmp_path):
    one, two = (
        measure_trial(make(tmp_path, "steps=10", regulator=arms), Trial()) for arms in ("grpo; ar", "grpo; lopti")
    )
    assert one == pytest.approx(0, abs=50)
    assert two == pytest.approx(10 * 50, abs=50)


def test_a_dry_run_counts_what_is_done(tmp_path, monkeypatch, capsys):
    plan = make(tmp_path)
    monkeypatch.setattr(command, "Processes", lambda _: Trial())
    for arm in plan.arms:
        finish(plan.run(arm, arm.variants[0], 0))
    command._forecast(plan, 2)
    said = capsys.readouterr().out
    assert "6 runs (2 done)" in said
    assert "3 seeds cannot show a significant difference" in said


def test_the_smallest_difference_that_can_be_found(tmp_path):
    assert "3 seeds cannot show a significant difference; 6 can" in description.power(make(tmp_path))
    assert "10 seeds find with a chance of 80 %" in description.power(make(tmp_path, "seeds=10"))


def test_a_rate_at_the_end_of_the_range_is_pointed_out():
    def told(chosen):
        means = {1e-4: 0.4, 2e-4: 0.5, 4e-4: 0.5}
        rates = [{"rate": rate, "mean": mean, "scores": [mean], "diverged": 0} for rate, mean in means.items()]
        return description.tuning_lines([{"arm": "ar", "chosen": chosen, "rates": rates}])[0]

    assert "learning rate 2e-4" in told(2e-4)
    assert "1e-4: 40.0, 2e-4: 50.0, 4e-4: 50.0" in told(2e-4)
    assert "a rate beyond it may be better" in told(4e-4)
    assert "a rate beyond" not in told(2e-4)
    assert "no learning rate yet" in told(None)


def test_only_runs_that_are_left_need_their_model(tmp_path):
    plan = make(tmp_path, "model=./gone", "optim.lr=1e-4,2e-4", "tune=1")
    for run in plan.tuning_runs():
        finish(run)
    with pytest.raises(ModelError, match=r"\./gone: there is no such folder"):
        command._check_models(plan)
    for run in plan.all_runs():
        finish(run)
    command._check_models(plan)
