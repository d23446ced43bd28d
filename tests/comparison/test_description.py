"""What is said of a comparison before it runs."""

import pytest

from poise.comparison import command, description
from poise.comparison.arms import shown_rate
from poise.comparison.forecast import Forecast, update_lengths
from poise.comparison.processes import Ended
from poise.comparison.trial import TrialError, measure, whole
from poise.models.errors import ModelError
from poise.runs.folder import RunFolder
from support.comparisons import finish, make


def test_the_plan_in_words(tmp_path):
    lines = description.heading(make(tmp_path, "optim.lr=1e-4,2e-4", "tune=2"))
    assert lines[:3] == [f"2 arms × 3 seeds (0 to 2) in {tmp_path / 'cmp'}:", "  grpo (baseline)", "  ar"]
    assert "among 1e-4, 2e-4 with seeds 10000 to 10001 on other held-out problems: 8 runs more" in lines[3]
    assert lines[4].startswith("2 held-out problems × 1 samples, and greedily, fewer than the 1,000")
    assert description.heading(make(tmp_path, "evaluation.problems=1000"))[-1].endswith("greedily")


def test_tuning_runs_that_are_done_are_told_apart(tmp_path):
    plan = make(tmp_path, "optim.lr=1e-4,2e-4", "tune=2")
    finish(plan.tuning_runs()[0])
    assert description.heading(plan)[3].endswith("problems: 8 runs, 1 of them done")


@pytest.mark.parametrize(("rate", "text"), [(5e-5, "5e-5"), (1e-4, "1e-4"), (2.5e-6, "2.5e-6"), (0.05, "0.05")])
def test_a_rate_is_shown_as_it_is_typed(rate, text):
    assert shown_rate(rate) == text


def test_the_cost_of_a_run_from_two_steps(tmp_path):
    config = make(tmp_path, "steps=10", "evaluation.problems=8", "evaluation.every=4").arms[0].variants[0].config
    step = {"time/step": 3.0, "time/rollout": 2.0, "time/update": 0.5, "tokens/sampled": 50.0}
    seconds, tokens = whole(config, step, 4, start=5.0)
    # Four evaluations (before, after, steps 4 and 8) of 8 × 2 responses; a step has 4.
    assert seconds == 5 + 10 * 3 + 4 * 4 * 2
    assert tokens == 500
    shorter = config.model_copy(update={"budget": 120})  # reached in the third step
    assert whole(shorter, step, 4, 5.0) == (5 + 9 + 16, 150)
    assert whole(shorter, step, 4, 5.0, update=3.0) == (5 + 9 + 3 * 2 * 0.5 + 16, 150)
    larger = config.model_copy(update={"prompts": 6})  # three times the responses; evaluations are the same
    assert whole(larger, step, 4, 5.0) == (5 + 10 * 9 + 4 * 4 * 2, 1500)


def test_what_fits_into_a_budget(tmp_path):
    forecast = Forecast((60.0, 1000.0))
    (line,) = description.cost(make(tmp_path), forecast, jobs=2, done=2, spent=2000.0)
    assert line.startswith("6 runs (2 done), 2 side by side: about 2:00, 4,000 tokens sampled for training")
    assert "room for all" in description.cost(make(tmp_path, "hours=1"), forecast, 2, 0, 0.0)[1]
    plan = make(tmp_path, "seeds=100", "hours=0.5")  # 30 minutes of two runs a minute
    assert (
        description.cost(plan, forecast, 2, 0, 0.0)[1]
        == "the budget hours=0.5 has room for about 60 runs, 30 of 100 seeds"
    )
    assert (
        "4 runs beside the 1 that are done, 2 of 3"
        in description.cost(make(tmp_path, "tokens=5500"), forecast, 2, 1, 1000.0)[1]
    )
    former = description.cost(make(tmp_path, "tokens=5500"), forecast, 2, 1, 2000.0)  # one more, at a former rate
    assert "3 runs beside the 1 that are done, 2 of 3" in former[1]
    assert "5 runs, 2 of 3 seeds" in description.cost(make(tmp_path, "tokens=5500"), forecast, 2, 0, 0.0)[1]
    assert "too few to compare anything" in description.cost(make(tmp_path, "tokens=2500"), forecast, 2, 0, 0.0)[1]


def test_a_forecast_says_which_arm_it_measured(tmp_path):
    plan = make(tmp_path, "algorithm=grpo; erl", regulator="grpo")
    lines = description.cost(plan, Forecast((60.0, 1000.0)), 2, 0, 0.0)
    assert lines[1] == "measured for algorithm=grpo; others may sample more or less"
    sizes = make(tmp_path, "steps=10,20", regulator="grpo")
    assert len(description.cost(sizes, Forecast((60.0, 1000.0)), 2, 0, 0.0)) == 1  # counted, so nothing to say


def test_a_forecast_multiplies_updates_by_phases(tmp_path):
    plan = make(tmp_path, regulator="grpo; grpo(passes=2); ar; nthr; lopti; ar | lopti; grpo(passes=3)")
    lengths = update_lengths(plan)
    assert list(lengths.values()) == [1, 2, 1, 1, 2, 2, 3]
    (line,) = description.cost(plan, Forecast((60.0, 1000.0)), 2, 0, 0.0)[1:]
    assert line == (
        "measured for grpo; updates of grpo(passes=2), lopti and ar | lopti are taken to last 2 times as long, by "
        "their phases; updates of grpo(passes=3) are taken to last 3 times as long, by their phases"
    )
    assert update_lengths(make(tmp_path, regulator="lopti; grpo")) == {"lopti": 1, "grpo": 0.5}


class Trial:
    """Processes that take two steps at once, of which an update takes 100 seconds."""

    def start(self, _, config, log):
        del log
        folder = RunFolder.create(config.run, {})
        for step in (1, 2):
            folder.log(step, {"time/step": 0.0, "time/update": 100.0, "time/rollout": 0.0, "tokens/sampled": 7.0})

    def wait(self, _):
        return [Ended(0, 0)]


class Failing(Trial):
    """A run that ends with these words."""

    def __init__(self, *words):
        self.words = words

    def start(self, _, config, log):
        del config
        log.write_text("".join(f"{line}\n" for line in self.words))

    def wait(self, _):
        return [Ended(0, 1)]


def test_a_trial_that_fails_says_why(tmp_path):
    plan, trace = make(tmp_path), ["Traceback (most recent call last):", "poise.models.errors.ModelError: no head"]
    for words, said in (
        ([*trace, "poise: no head"], "the trial run failed: no head"),
        (trace, "the trial run failed:\n" + "\n".join(trace)),
    ):
        with pytest.raises(TrialError) as caught:
            measure(plan, Failing(*words))
        assert str(caught.value) == said


def test_a_trial_tells_what_a_run_takes_on_average(tmp_path):
    one, two = (measure(make(tmp_path, "steps=10", regulator=arms), Trial()) for arms in ("grpo; ar", "grpo; lopti"))
    assert one == (pytest.approx(0, abs=50), 70)
    assert two == (pytest.approx(10 * 50, abs=50), 70)
    sizes = make(tmp_path, "steps=10,30", regulator="grpo")
    assert measure(sizes, Trial())[1] == 20 * 7
    sizes = make(tmp_path, "steps=10", "prompts=2,8", regulator="grpo")
    assert measure(sizes, Trial())[1] == 10 * 2.5 * 7


def test_a_dry_run_counts_what_is_spent(tmp_path, monkeypatch, capsys):
    plan = make(tmp_path, regulator="grpo; ar")
    monkeypatch.setattr(command.trial, "measure", lambda *_: (60.0, 100.0))
    for run in plan.seed_runs(0, lambda arm: arm.variants[0]):
        finish(run)
    half = plan.run(plan.arms[0], plan.arms[0].variants[0], 1)  # goes on, so that only its whole counts
    RunFolder.create(half.folder, half.config.model_dump(mode="json")).log(1, {"tokens/sampled": 50.0})
    for budget, room in ((600, "all of them"), (550, "about 3 runs beside the 2 that are done, 2 of 3 seeds")):
        command._foretell(make(tmp_path, f"tokens={budget}"))
        assert f"the budget tokens={budget} has room for {room}" in capsys.readouterr().out


def test_the_smallest_difference_that_can_be_found(tmp_path):
    (few,) = description.power(make(tmp_path))
    assert few.startswith("3 seeds cannot make any difference significant: 1 comparison at the level 0.05 with")
    assert few.endswith("needs 6")
    (enough,) = description.power(make(tmp_path, "seeds=10"))
    assert enough.startswith("smallest difference that 10 seeds find with a chance of 80%: ")


def test_a_rate_at_the_end_of_the_range_is_pointed_out():
    def told(chosen, first=0.4):
        means = {1e-4: first, 2e-4: 0.5, 4e-4: 0.5}
        rates = [{"rate": rate, "mean": mean, "scores": [mean], "diverged": 0} for rate, mean in means.items()]
        return description.tuned([{"arm": "ar", "chosen": chosen, "rates": rates}])[0]

    assert told(2e-4) == "ar: learning rate 2e-4 (points by rate: 1e-4: 40.0, 2e-4: 50.0, 4e-4: 50.0)"
    assert "another one may be better" in told(4e-4)
    assert told(1e-4, first=0.5).endswith("; all rates did equally well, so this says nothing")
    assert told(None) == "ar: no learning rate is chosen yet"


@pytest.mark.parametrize(
    ("other", "diverged", "close"),
    [
        ([0.69, 0.695], 0, False),  # 0.5 points behind with each seed
        ([0.67, 0.72], 0, True),  # behind with one seed, ahead with the other
        ([0.67, 0.72], 1, False),  # it would not be chosen, however good
        ([0.70], 0, False),  # one seed has no spread
        ([0.695, 0.70], 0, True),  # the same
    ],
)
def test_a_rate_that_may_be_as_good_is_pointed_out(other, diverged, close):
    chosen = {"rate": 1e-4, "mean": 0.705, "scores": [0.695, 0.70][: len(other)], "diverged": 0}
    rates = [chosen, {"rate": 2e-4, "mean": 0.7, "scores": other, "diverged": diverged}]
    (line,) = description.tuned([{"arm": "ar", "chosen": 1e-4, "rates": rates}])
    assert line.endswith("; 2e-4 may be as good, within a standard error: more tuning seeds would tell") == close


def test_only_runs_that_are_left_need_their_model(tmp_path):
    plan = make(tmp_path, "model=./gone", "optim.lr=1e-4,2e-4", "tune=1")
    for run in plan.tuning_runs():
        finish(run)
    with pytest.raises(ModelError, match=r"\./gone: there is no such folder"):
        command._check_models(plan)
    for run in plan.all_runs():
        finish(run)
    command._check_models(plan)
