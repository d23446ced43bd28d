"""``poise diagnose`` and ``poise report``, as a person calls them."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from poise import regulators
from poise.batch import Phase
from poise.cli.app import app
from poise.diagnostics import ForwardLoop, Intervals, gradient_of
from poise.models.loading import load_policy
from poise.models.master_weights import MasterWeights
from poise.referee.diagnose import PolicyLoop, diagnose, sample, verdict
from poise.runs.folder import RunFolder
from poise.sampling.cached_engine import CachedEngine
from poise.sampling.sampler import Sampler
from poise.training import config
from support.heads import SURROGATES
from support.run_folders import make_run
from support.twice import Twice

SMALL = ["prompts=3", "group=4", "rollout.max_tokens=60"]


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("command", ["diagnose", "report"])
def test_help_shows_examples(command):
    assert command in call("--help").output
    assert f"poise {command} " in call(command, "--help").output


@pytest.fixture(scope="module")
def embedded():
    policy = load_policy("embedded", device="cpu")
    policy.master_weights = MasterWeights(policy.model)
    settings = config.load("tiny", SMALL)
    return (
        policy,
        settings,
        sample(
            Sampler(policy, CachedEngine(policy), settings.task.build(), max_tokens=settings.rollout.max_tokens),
            settings,
            2,
        ),
    )


def test_responses_are_first_attempts_whatever_else_the_algorithm_samples(tmp_path):
    retries = ("prompts=1", "group=3", "rollout.max_tokens=8", "algorithm=erl(reflection_tokens=8)", "device=cpu")
    done = call("diagnose", "embedded", "--batches", 1, *retries, "--out", tmp_path / "out")
    assert "cut off at 8 tokens: 3 of 3 responses" in done.output
    roles = [record.get("role") for record in RunFolder.open(tmp_path / "out", resume=False).rollouts(1)]
    assert roles == [None] * 3 + ["reflection"] * 3 + ["second"] * 3 + ["consolidated"] * 3


@pytest.mark.parametrize("text", SURROGATES.values())
def test_the_surrogate_is_the_configs(embedded, text):
    """Off policy, where surrogates differ: the gradient that diagnose measures is that of the objective."""
    policy, settings, sampled = embedded
    objective = replace(settings.objective, surrogate=text)
    g = torch.Generator().manual_seed(0)
    old = sampled.batch.old_logp + 0.3 * torch.randn(sampled.batch.mask.shape, generator=g)
    batch = replace(sampled.batch, old_logp=old.clamp(max=0), min_p_logp=sampled.batch.old_logp + 0.3)
    loop = PolicyLoop(policy, settings.model_copy(update={"objective": objective}), batch)
    plain = ForwardLoop(batch, loop.parameters, lambda: policy.score(sampled.batch)[0], loop.settings)
    phase = Phase.of(batch)
    for ours, expected in zip(gradient_of(loop, phase), gradient_of(plain, phase), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-6)


def test_lp_reg_gets_its_filtered_policy(embedded):
    policy, settings, _ = embedded
    objective = replace(settings.objective, surrogate="lp-reg(min_p=0.3)")
    changed = settings.model_copy(update={"objective": objective})
    sampler = Sampler(policy, CachedEngine(policy), settings.task.build(), max_tokens=20)
    batch = sample(sampler, changed, 2).batch
    kept = batch.mask & batch.min_p_logp.isfinite()
    assert (batch.mask & ~kept).any()
    assert (batch.min_p_logp[kept] >= batch.old_logp[kept] - 1e-5).all()


def test_the_trainers_gradient_is_that_of_the_objective(embedded):
    policy, settings, sampled = embedded
    loop = PolicyLoop(policy, settings, sampled.batch)
    plain = ForwardLoop(sampled.batch, loop.parameters, lambda: policy.score(sampled.batch)[0], loop.settings)
    mask = Intervals().masks(sampled.batch)[0]
    assert mask.any()
    for phase in (Phase.of(sampled.batch), Phase.of(sampled.batch, mask), *regulators.parse("tr-grpo")(sampled.batch)):
        for ours, expected in zip(gradient_of(loop, phase), gradient_of(plain, phase), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(loop.logp(), plain.logp(), rtol=0, atol=1e-4)


def test_diagnose_says_what_it_found_and_leaves_the_model_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = load_policy("embedded", device="cpu").model.state_dict()
    arguments = ("--regulator", "grpo", "--regulator", "lopti", "--regulator", "nthr", "--batches", 2, "--warmup", 1)
    done = call("diagnose", "embedded", *arguments, "--intervals", "0.5,0.9", *SMALL, "prompts=2")
    assert done.exit_code == 0, done.output
    folder = RunFolder.open("runs/diagnose-embedded", resume=False)
    found = folder.read_json("diagnose.json")
    assert found["intervals"] == ["0–0.5", "0.5–0.9", "0.9–1"]
    assert "p in 0–0.5: " in done.output
    assert all(name in done.output for name in ("grpo", "lopti", "nthr"))
    assert [sentence in done.output for sentence in found["verdict"]] == [True] * len(found["verdict"])
    for each in (found["mean"], *found["batches"]):
        assert sum(each["token_share"]) == pytest.approx(1)
        for pulls in each["regulators"].values():
            assert sum(pulls["share"]) == pytest.approx(1, abs=1e-4)
            assert pulls["residual"] < 1e-4
            assert len(pulls["influence"]) == 4
        assert (
            max(filter(None, each["noise"]["again"]), default=0) < 1e-5 < max(filter(None, each["noise"]["bfloat16"]))
        )
    assert "noise floor of |Δp|" in done.output
    arrays, _ = folder.tokens(1)
    assert {"size", "nthr", "change"} <= arrays.keys()
    p = arrays["logp"].exp()
    assert (arrays["size"] >= 1 - p - 1e-5).all()
    assert (arrays["size"] <= 2**0.5 * (1 - p) + 1e-5).all()
    assert "diagnose-embedded" in (folder.path / "report.html").read_text()
    after = load_policy("embedded", device="cpu").model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    again = call("diagnose", "embedded", "--out", "runs/diagnose-embedded")
    assert again.exit_code == 1
    assert "is not empty" in again.output + again.stderr
    again = call("diagnose", "embedded", "--regulator", "grpo", "--batches", 1, *SMALL, "prompts=2")
    assert "runs/diagnose-embedded already has a diagnosis, so this one goes to" in again.output + again.stderr
    assert (RunFolder.open("runs/diagnose-embedded-2", resume=False).path / "report.html").exists()


def test_the_weights_in_memory_are_left_alone_too(tmp_path, embedded, monkeypatch):
    policy, settings, _ = embedded
    monkeypatch.setattr("poise.referee.diagnose.load_policy", lambda *_, **__: policy)
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    folder = RunFolder.create(tmp_path / "out", settings.model_dump(mode="json"))
    diagnose(settings, folder, methods=["grpo"], batches=1, warmup=1)
    assert all(torch.equal(value, before[name]) for name, value in policy.model.state_dict().items())


def test_a_diagnosis_of_dialogues_tells_turns_apart(tmp_path, embedded, monkeypatch):
    policy, _, _ = embedded
    monkeypatch.setattr("poise.referee.diagnose.load_policy", lambda *_, **__: policy)
    settings = config.load("tiny", [*SMALL[:2], "rollout.max_tokens=20", "seed=1"])
    folder = RunFolder.create(tmp_path / "out", settings.model_dump(mode="json"))
    found = diagnose(settings, folder, task=Twice(), methods=["grpo", "nthr"], batches=1, warmup=1)
    records, (arrays, _) = folder.rollouts(1), folder.tokens(1)
    assert all("Are you sure?" in text for record in records for _, text in record["environment"])
    later = 0
    for suspect in found["suspects"]:
        begin, end = arrays["start"][suspect["row"] : suspect["row"] + 2].tolist()
        own = arrays["nthr"][begin:end]
        assert own[suspect["column"]] == pytest.approx(suspect["score"])  # a place among the model's own tokens
        (spoke, _), at = records[suspect["row"]]["environment"][0], suspect["column"]
        later += at >= spoke
        first = max(spoke if at >= spoke else 0, at - 12)
        assert suspect["before"] == policy.decode(arrays["id"][begin + first : begin + at].tolist())
    assert later


def test_steps_have_no_momentum_and_do_not_shrink_with_the_warm_up(tmp_path, embedded, monkeypatch):
    """Else a second phase would carry the first one's tokens, and every step a factor that nobody asked for."""
    policy, settings, _ = embedded
    monkeypatch.setattr("poise.referee.diagnose.load_policy", lambda *_, **__: policy)

    def moments(loop, _, optimizer, **__):
        parameter = loop.parameters[0]
        before = parameter.detach().clone()
        parameter.grad = torch.randn_like(parameter, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        state, group = optimizer.state[parameter], optimizer.param_groups[0]
        scale = (state["exp_avg_sq"] / (1 - group["betas"][1] ** state["step"])).sqrt() + group["eps"]
        expected = before * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * parameter.grad / scale
        torch.testing.assert_close(parameter.detach(), expected)
        assert state["step"] == 3
        with torch.no_grad():
            parameter.copy_(before)
        raise KeyboardInterrupt

    monkeypatch.setattr("poise.referee.diagnose.dominance", moments)
    folder = RunFolder.create(tmp_path / "out", settings.model_dump(mode="json"))
    with pytest.raises(KeyboardInterrupt):
        diagnose(settings, folder, methods=["grpo"], batches=1, warmup=2)


def test_a_diagnosis_that_was_stopped_leaves_nothing_in_the_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def stopped(*_):
        assert list((tmp_path / "out/tokens").iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr("poise.referee.diagnose.combine", stopped)
    arguments = ("--regulator", "grpo", "--batches", 1, "--out", "out", *SMALL, "rollout.max_tokens=8")
    assert call("diagnose", "embedded", *arguments).exit_code == 130
    assert not (tmp_path / "out").exists()


def test_mistakes_with_folders_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    settings = config.load("tiny", SMALL).model_dump(mode="json")
    RunFolder.create(tmp_path / "early", settings)  # stopped before its first checkpoint
    damaged = make_run(tmp_path / "damaged")
    damaged.tokens_path(2).write_bytes(b"half")
    (tmp_path / "damaged/rollouts/step-000001.jsonl.gz").write_bytes(b"\x1f\x8b")
    for arguments, said in (
        (("diagnose", "embedded", "--out", "file"), "file is a file"),
        (("diagnose", "early"), "early has no checkpoint yet"),
        (("eval", "early"), "early has no checkpoint yet; continue with: poise train --resume"),
        (("train", "tiny", *SMALL, "model=early", "run=next"), "early has no checkpoint yet"),
        (("report", "damaged", "--out", "early"), "--out early is a folder"),
        (("report", "damaged"), "a file of the run is damaged"),
    ):
        done = call(*arguments)
        assert done.exit_code == 1, done.output
        assert said in done.output + done.stderr
    assert call("report", "early").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--intervals", "0.5,0.2"], "rise from 0 to 1"),
        (["--regulator", "lopty"], "did you mean 'lopti'"),
        (["task.name=kx"], "unknown task 'kx'"),
        (["regulator=ar"], "with --regulator"),
        (["batches=2"], "batches= is an option: --batches 2"),
        (["promps=3"], "promps"),
    ],
)
def test_diagnose_says_what_is_wrong(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    done = call("diagnose", "embedded", *arguments)
    assert done.exit_code == 1
    assert said in done.output + done.stderr
    assert not (tmp_path / "runs/diagnose-embedded/config.json").exists()


def test_reports_of_one_run_and_of_two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        make_run(tmp_path / name)
    assert call("report", "one").exit_code == 0
    page = (tmp_path / "one/report.html").read_text()
    assert page.count('<script type="text/plain"') == 12
    assert call("report", "one", "two").exit_code == 0
    assert (tmp_path / "report.html").read_text().count('<script type="text/plain"') == 24
    missing = call("report", "nowhere")
    assert missing.exit_code == 1
    assert "there is no run in nowhere" in missing.output + missing.stderr


# The verdict


NAMES = ("[0, 0.25]", "(0.25, 1]")


def method(share, moved):
    return {
        "share": share, "norm": [2.0, 1.0], "full": 2.0, "per_token": [3.0, 1.0],
        "influence": [{"moved": row} for row in moved], "displacement": None,
    }  # fmt: skip


def said(share=(0.6, 0.4), error=(0.1, 0.1), off=0.1, batches=8):
    mean = {"with_gradient": 5, "tokens": [5, 5], "token_share": [0.2, 0.8]}
    mean["regulators"] = {"grpo": method(list(share), [[1.0, 1.8], [0.5, 1.0], [1.0, 1.0]])}
    errors = {"regulators": {"grpo": method(list(error), [[off, off]] * 3)}}
    return " ".join(verdict(mean, errors, NAMES, batches))


def test_a_conclusion_follows_from_figures_that_are_surer_than_their_errors():
    assert "a step on [0, 0.25] alone moves (0.25, 1] 1.8 times as far as a step on (0.25, 1], and" in said()
    assert "(0.25, 1] alone moves [0, 0.25] 0.5 times as far as a step on [0, 0.25]: the unlikely" in said()
    assert "the unlikely tokens dominate" in said(error=(None, None), off=None, batches=1)  # no error


@pytest.mark.parametrize("settings", [{"share": (0.35, 0.65), "error": (0.35, 0.35)}, {"off": 0.5}])
def test_nothing_follows_where_an_error_is_as_large_as_its_value(settings):
    assert "dominate" not in said(**settings)
    assert "a value is no larger than its error, so this shows nothing: measure more" in said(**settings)


def test_few_batches_know_little_of_their_own_error():
    assert "60 ± 23.6 % of the gradient of grpo (95 % interval over 8 batches)" in said()
    assert "60 ± 127 % of the gradient of grpo (95 % interval over 2 batches)" in said(batches=2)
    assert "so this shows nothing" in said(batches=2)
