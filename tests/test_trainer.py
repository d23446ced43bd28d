"""The trainer, end to end, with the embedded model on the CPU."""

import json
import os
import signal
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch

from poise import advantages, regulators, surrogates, tasks, trainer
from poise.models.loading import load_policy
from poise.models.policy import ModelError
from poise.runs.folder import CheckpointError, RunFolder
from poise.runs.lock import free_folder
from poise.tasks.knights_knaves import KnightsKnaves
from poise.trainer import Trainer, TrainError
from poise.training import config as configs
from poise.training.config.schema import LoraConfig
from poise.training.evaluation import Evaluation
from support.batches import random_batch
from support.command_line import poise
from support.small_runs import SHORT, SMALL, killed_at, make, parameters, run


@dataclass
class TwoPuzzles(KnightsKnaves):
    """The same two puzzles in every step: their reward rises within a few steps, and by far more than chance."""

    name = "two-puzzles"

    def problems(self, split, seed):  # noqa: ARG002 (the protocol has it)
        return cycle([*islice(super().problems(split, seed=0), 2)])


@pytest.mark.usefixtures("short_evaluation")
def test_reward_goes_up(tmp_path, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "two-puzzles", TwoPuzzles)
    folder, _ = run(
        tmp_path, "task.name=two-puzzles", "steps=8", "prompts=2", "group=16", "optim.lr=1e-3", "rollouts_every=0"
    )
    rewards = [line["reward/mean"] for line in folder.metrics()]
    assert len(rewards) == 8
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 1.0  # on average 0.5 more, of the 3.5 between wrong and right


@pytest.mark.usefixtures("short_evaluation")
def test_the_run_folder_tells_everything(tmp_path):
    folder, summary = run(tmp_path, "regulator=ar(alpha=0.3) | lopti(threshold=0.5)", "steps=2", "evaluation.every=1")
    assert json.loads((folder.path / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert {"accuracy", "n", "greedy", "interval"} <= summary["before"].keys() & summary["after"].keys()
    lines = folder.metrics()
    assert [line["step"] for line in lines] == [1, 2]
    for name in (
        "reward/mean",
        "reward/accuracy",
        "reward/format",
        "optim/loss",
        "optim/grad_norm",
        "reg/low/weight_mean",
    ):
        assert all(name in line for line in lines), name
    assert {"eval/kk/avg@2", "eval/kk/greedy"} <= lines[0].keys()
    assert {f"time/{part}" for part in ("problems", "rollout", "score", "regulate", "record", "update")} <= set(
        lines[0]
    )
    records = folder.rollouts(2)
    assert len(records) == 16
    assert all(record["gold"].startswith("(1) ") for record in records)
    tokens, texts = folder.tokens(2)
    begin, end = tokens["start"][:2].tolist()
    assert len(tokens["start"]) == 17
    assert "".join(texts[i] for i in tokens["id"][begin:end].tolist()).startswith(records[0]["text"][:10])
    assert len({len(values) for name, values in tokens.items() if name != "start"}) == 1
    low, high, p = tokens["weight/low"], tokens["weight/high"], tokens["logp"].exp()
    torch.testing.assert_close(low + high, 0.3 * p + 0.7)
    assert torch.equal(low > 0, p < 0.5)
    assert {"poise", "torch", "device"} <= folder.read_json("environment.json").keys()
    model = load_policy(str(folder.newest() / "model"), device="cpu")  # a checkpoint is an ordinary model folder
    assert model.encode("hello")


@pytest.fixture(scope="module")
def embedded():
    """The weights that training starts from."""
    model = load_policy("embedded", device="cpu").model
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def moved(folder, start):
    """Whether every weight matrix of a run has left the one it started from."""
    found = {name: value for name, value in parameters(folder).items() if value.dim() > 1}
    if adapters := [value for name, value in found.items() if "lora_B" in name]:  # they begin at 0
        return all(value.any() for value in adapters)
    return all(not torch.equal(value, start[name]) for name, value in found.items())


@pytest.mark.parametrize("name", [*regulators.TABLE])
def test_every_regulator_trains(tmp_path, name, embedded):
    folder, _ = run(tmp_path, f"regulator={name}", "steps=1", "rollouts_every=1", "evaluation=off")
    assert moved(folder, embedded)
    (line,), (tokens, _) = folder.metrics(), folder.tokens(1)
    weights = {name.removeprefix("weight/"): values for name, values in tokens.items() if name.startswith("weight/")}
    assert len(weights) == len(regulators.get(name)(random_batch()))  # one for each of its phases
    assert line["optim/steps"] <= len(weights)
    for phase, values in weights.items():
        assert line[f"reg/{phase}/weight_mean"] == pytest.approx(values.mean().item(), rel=1e-5)


@pytest.mark.parametrize("name", [*surrogates.TABLE])
def test_every_surrogate_trains_with_lopti(tmp_path, name, embedded):
    """Two phases of two mini-batches: from the second step on the ratio is not 1."""
    settings = {"kl-cov": "(share=0.1)", "lp-reg": "(share=0.3)"}.get(name, "")
    folder, _ = run(
        tmp_path, f"objective.surrogate={name}{settings}", "regulator=lopti(threshold=0.9)", "steps=1",
        "optim.mini_batch=8", "optim.lr=1e-3", "evaluation=off",
    )  # fmt: skip
    assert moved(folder, embedded)
    (line,) = folder.metrics()
    assert line["optim/steps"] == 4
    assert line["optim/drift"] > 0
    assert bool(line.get("optim/chosen")) == bool(settings)
    assert folder.config["objective"]["surrogate"] == name + settings


ADVANTAGES = {
    "group-zscore": lambda r, g, _: advantages.group_zscore(r, g),
    "group-centered": lambda r, g, _: advantages.group_centered(r, g),
    "leave-one-out": lambda r, g, _: advantages.leave_one_out(r, g),
    "reinforce-pp": lambda r, _g, _m: advantages.reinforce_pp(r),
    "reinforce-pp-tokens": lambda r, _, mask: advantages.reinforce_pp(r, mask=mask),
    "reinforce-pp-baseline": lambda r, g, _: advantages.reinforce_pp(r, g),
    "reinforce-pp-baseline-tokens": lambda r, g, mask: advantages.reinforce_pp(r, g, mask=mask),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_trains(tmp_path, name, embedded):
    group = 4 if advantages.get(name).needs_groups else 1
    folder, _ = run(
        tmp_path, f"advantage={name}", f"group={group}", f"prompts={16 // group}", "steps=1", "rollouts_every=1",
        "evaluation=off",
    )  # fmt: skip
    rewards = torch.tensor([record["reward"] for record in folder.rollouts(1)])
    tokens, _ = folder.tokens(1)
    lengths = tokens["start"].diff()
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    expected = ADVANTAGES[name](rewards, torch.arange(16) // group, mask)
    assert expected.any()
    torch.testing.assert_close(tokens["advantage"], expected.repeat_interleave(lengths))
    assert moved(folder, embedded)


@pytest.mark.usefixtures("short_evaluation")
def test_groups_without_spread_may_be_dropped(tmp_path):
    """They leave the denominator: the gradient grows by all tokens over the tokens that are left."""
    settings = ("steps=1", "rollouts_every=1", "prompts=6", "regulator=ar", "evaluation=off")
    kept, _ = run(tmp_path, *settings, name="kept")
    dropped, _ = run(tmp_path, *settings, "drop_equal_groups=true", name="dropped")
    rewards = torch.tensor([record["reward"] for record in dropped.rollouts(1)]).view(6, 4)
    equal = rewards.min(1).values == rewards.max(1).values
    assert 0 < equal.sum() < 6
    (before,), (after,) = kept.metrics(), dropped.metrics()
    assert after["reward/dropped_groups"] == equal.sum()
    assert "reward/dropped_groups" not in before
    assert after["reward/mean"] == before["reward/mean"]
    tokens, _ = dropped.tokens(1)
    lengths = tokens["start"].diff()
    is_left = (~equal).repeat_interleave(4).repeat_interleave(lengths)
    assert torch.equal(tokens["weight/all"] > 0, is_left)
    assert torch.equal(tokens["logp"], kept.tokens(1)[0]["logp"])  # all are recorded
    grown = before["optim/grad_norm"] * len(is_left) / int(is_left.sum())
    assert after["optim/grad_norm"] == pytest.approx(grown, rel=1e-4)


@pytest.mark.usefixtures("short_evaluation")
def test_a_step_without_any_spread_takes_no_optimizer_step(tmp_path, embedded):
    folder, _ = run(
        tmp_path, *SHORT, "steps=1", "rollouts_every=1", "drop_equal_groups=true", "regulator=lopti | nthr",
        "objective.kl_coef=0.1",
    )  # fmt: skip # replies too short to be right: without the drop, KL and entropy would move the weights
    (line,) = folder.metrics()
    assert line["reward/dropped_groups"] == 4
    assert line["optim/steps"] == 0
    assert all(torch.equal(value, embedded[name]) for name, value in parameters(folder).items())
    assert not folder.tokens(1)[0]["weight/all"].any()


def test_every_advantage_is_tested():
    assert {*ADVANTAGES} == {*advantages.TABLE}


class TestSameUpdate:
    """What must not change the result: how it is cut, and whether it was interrupted."""

    @pytest.mark.usefixtures("short_evaluation")
    def test_two_sizes_of_micro_batch(self, tmp_path):
        # Plain SGD in effect: Adam would blow rounding up where gradients are next to nothing.
        settings = ("steps=2", "prompts=2", "objective.kl_coef=0.05", "evaluation=off")
        small, _ = run(tmp_path, "optim.micro_tokens=300", *settings, name="small")
        large, _ = run(tmp_path, "optim.micro_tokens=100000", *settings, name="large")
        start = dict(load_policy("embedded", device="cpu").model.named_parameters())
        for name, value in parameters(small).items():
            other = parameters(large)[name]
            moved = (other - start[name]).norm()
            assert moved > 0
            assert (value - other).norm() < 2e-3 * moved, name

    @pytest.mark.usefixtures("short_evaluation")
    def test_old_log_probabilities_may_be_recomputed(self, tmp_path):
        settings = ("steps=1", "prompts=2", "evaluation=off")
        sampled, _ = run(tmp_path, "rollout.old_logp=sampled", *settings, name="a")
        again, _ = run(tmp_path, "rollout.old_logp=recomputed", *settings, name="b")
        first, second = sampled.metrics()[0], again.metrics()[0]
        assert second["rollout/importance"] == pytest.approx(1.0, abs=1e-4)
        assert second["rollout/mismatch"] < 1e-4
        assert first["optim/grad_norm"] == pytest.approx(second["optim/grad_norm"], rel=1e-3)

    @pytest.mark.long
    @pytest.mark.slow
    @pytest.mark.parametrize(("function", "logged"), [("writing", 2), ("log", 1)])
    def test_resuming_a_killed_run_is_exact(self, tmp_path, function, logged):
        """Killed in a process of its own: between the log and the checkpoint of step 2, or before it is logged."""
        settings = ("steps=3", "evaluation.problems=1", "checkpoint_every=1", "regulator=lopti(threshold=0.9)")
        small = [*SMALL, *SHORT, *settings]
        assert poise("train", "tiny", *small, f"run={tmp_path / 'whole'}").exit_code == 0
        killed = f"run={tmp_path / 'killed'}"
        with killed_at(function, 2, "train", "tiny", *small, killed) as process:
            shown = process.stdout.read()
            assert process.wait() == -signal.SIGKILL, shown
        folder = RunFolder.open(tmp_path / "killed", resume=False)
        assert folder.checkpoints() == [1]
        assert len(folder.metrics()) == logged
        assert poise("train", "--resume", killed).exit_code == 0
        a, b = (RunFolder.open(tmp_path / name, resume=False) for name in ("whole", "killed"))
        for name, value in parameters(a).items():
            assert torch.equal(value, parameters(b)[name]), name
        assert all(line["optim/grad_norm"] > 0 for line in a.metrics())
        strip = lambda line: {k: v for k, v in line.items() if not k.startswith("time/")}  # noqa: E731
        assert [strip(line) for line in a.metrics()] == [strip(line) for line in b.metrics()]
        assert a.read_json("summary.json")["after"] == b.read_json("summary.json")["after"]

    @pytest.mark.usefixtures("short_evaluation")
    def test_more_steps_may_be_asked_for(self, tmp_path):
        long, _ = run(tmp_path, *SHORT, "steps=2", "evaluation=off", name="long")
        short, _ = run(tmp_path, *SHORT, "steps=1", "evaluation=off", name="short")
        config = configs.restore({**short.config, "steps": 2})
        trainer.train(config, resume=True, quiet=True)
        for name, value in parameters(long).items():
            assert torch.equal(value, parameters(short)[name])


@pytest.mark.usefixtures("short_evaluation")
class TestLora:
    def test_only_the_adapter_is_trained_and_the_reference_is_the_model_without_it(self, tmp_path):
        folder, _ = run(
            tmp_path,
            "lora.rank=4",
            "lora.alpha=8",
            "objective.kl_coef=0.1",
            "optim.lr=1e-3",
            "steps=3",
            "evaluation=off",
        )
        saved = parameters(folder)
        assert saved
        assert all("lora_" in name for name in saved)
        first, *_, last = folder.metrics()
        assert first["optim/kl"] == pytest.approx(0, abs=1e-6)  # the adapter begins as nothing
        assert last["optim/kl"] > 1e-7

    def test_the_adapter_comes_from_the_seed_and_leaves_other_random_numbers_alone(self):
        def adapter(seed, others):
            torch.manual_seed(others)
            policy = load_policy("embedded", device="cpu", lora=LoraConfig(rank=4), seed=seed)
            after = torch.random.get_rng_state()
            torch.manual_seed(others)
            assert torch.equal(after, torch.random.get_rng_state())
            return torch.cat([p.flatten() for p in policy.model.parameters() if p.requires_grad])

        assert torch.equal(adapter(3, others=0), adapter(3, others=1))
        assert not torch.equal(adapter(3, others=0), adapter(4, others=0))

    def test_a_run_is_its_seed_and_resumes_bit_for_bit(self, tmp_path):
        lora = (*SHORT, "lora.rank=4", "seed=3", "optim.lr=1e-3", "checkpoint_every=1", "evaluation=off")
        torch.manual_seed(0)
        whole, _ = run(tmp_path, *lora, "steps=2", name="whole")
        torch.manual_seed(1)
        run(tmp_path, *lora, "steps=1", name="cut")
        trainer.train(make(tmp_path, *lora, "steps=2", name="cut"), resume=True, quiet=True)
        assert all(line["optim/grad_norm"] > 0 for line in whole.metrics())
        first, second = parameters(whole), parameters(RunFolder.open(tmp_path / "cut", resume=False))
        assert first.keys() == second.keys()
        assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.usefixtures("short_evaluation")
class TestMistakes:
    def test_an_existing_run_folder(self, trained):
        with pytest.raises(FileExistsError, match="--resume run="):
            trainer.train(make(trained.parent, name=trained.name), quiet=True, renumber=False)

    def test_a_group_of_one(self, tmp_path):
        with pytest.raises(configs.ConfigError, match="group"):
            make(tmp_path, "group=1")

    def test_a_model_folder_without_a_tokenizer(self, tmp_path):
        load_policy("embedded", device="cpu").model.save_pretrained(tmp_path / "bare")
        with pytest.raises(ModelError, match="has no tokenizer"):
            load_policy(str(tmp_path / "bare"))

    def test_a_folder_that_is_no_model(self, tmp_path):
        with pytest.raises(ModelError, match=r"no config\.json"):
            load_policy(str(tmp_path))

    def test_prompts_that_are_all_longer_than_the_limit(self, tmp_path):
        with pytest.raises(ModelError, match=r"more than rollout.max_prompt=20: raise it"):
            run(tmp_path, "rollout.max_prompt=20")

    @pytest.mark.parametrize(("bad", "message"), [("raise", "raised ZeroDivisionError"), ("nan", "is nan")])
    def test_a_reward_that_raises_or_is_nan_loses_nothing(self, tmp_path, monkeypatch, bad, message):
        config = make(tmp_path, *SHORT, "steps=3", "checkpoint_every=100")
        held = Trainer(config, RunFolder.create(config.run, config.model_dump(mode="json")), quiet=True)
        calls, real = iter(range(10**9)), type(held.sampler.task).score

        def score(task, problem, text):
            if next(calls) < 30:  # one step, the evaluation before it, and some of the second step
                return real(task, problem, text)
            return 1 / 0 if bad == "raise" else tasks.Score(float("nan"), False, {})

        monkeypatch.setattr(type(held.sampler.task), "score", score)
        with pytest.raises(tasks.RewardError, match=message):
            held.run()
        folder = RunFolder.open(config.run)
        assert folder.checkpoints() == [1] == [line["step"] for line in folder.metrics()]  # what was learned until then
        monkeypatch.undo()
        trainer.train(config, resume=True, quiet=True)
        assert len(folder.metrics()) == 3

    def test_a_gradient_that_is_not_finite_stops_before_the_step(self, tmp_path):
        config = make(tmp_path)
        held = Trainer(config, RunFolder.create(config.run, config.model_dump(mode="json")), quiet=True)
        before = {n: p.detach().clone() for n, p in held.checkpoints.master_weights.parameters.items()}
        next(iter(held.checkpoints.master_weights.parameters.values())).register_hook(lambda g: g * torch.nan)
        with pytest.raises(TrainError, match=r"lower optim\.lr"):
            held.run()
        for name, value in held.checkpoints.master_weights.parameters.items():
            assert torch.equal(value, before[name])

    @pytest.mark.usefixtures("short_evaluation")
    def test_probabilities_that_are_not_finite_are_a_divergence_too(self, tmp_path):
        config = make(tmp_path, *SHORT)
        held = Trainer(config, RunFolder.create(config.run, config.model_dump(mode="json")), quiet=True)
        with torch.no_grad():  # as after a step that was too large
            next(held.policy.model.parameters()).fill_(torch.nan)
        with pytest.raises(TrainError, match=r"the model's probabilities are not finite: lower optim\.lr"):
            held.run()
        assert held.folder.read_json("diverged.json")["step"] == 1

    def test_an_unreadable_checkpoint_gives_way_to_the_one_before(self, tmp_path, capsys):
        folder, _ = run(tmp_path, *SHORT, "steps=2", "checkpoint_every=1")
        expected = parameters(folder)
        damaged = folder.newest() / "parameters.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-100])
        trainer.train(configs.restore(folder.config), resume=True, quiet=True)
        assert "continuing from the checkpoint of step 1" in capsys.readouterr().err
        for name, value in expected.items():
            assert torch.equal(value, parameters(folder)[name])

    def test_a_full_disk_while_checkpointing(self, tmp_path, monkeypatch):
        config = make(tmp_path, *SHORT, "steps=2", "checkpoint_every=1")
        held = Trainer(config, RunFolder.create(config.run, config.model_dump(mode="json")), quiet=True)
        real = os.fsync

        def full(fd):
            if list((held.folder.path / "checkpoints").glob("*step-000002")):
                raise OSError(28, "No space left on device")
            real(fd)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"step 1 is intact. free some space, then poise train --resume"):
            held.run()
        monkeypatch.undo()
        trainer.train(config, resume=True, quiet=True)
        assert len(held.folder.metrics()) == 2


@pytest.mark.usefixtures("short_evaluation")
def test_zero_is_only_at_the_end_or_never(tmp_path):
    never = ("checkpoint_every=0", "evaluation.every=0", "rollouts_every=0", "optim.warmup_steps=0", "rollout.batch=0")
    folder, summary = run(tmp_path, *SHORT, "steps=2", "optim.mini_batch=0", "rollout.top_k=0", *never)
    assert summary["steps"] == 2
    assert folder.checkpoints() == [2]
    assert folder.recorded() == []


def test_early_stop(tmp_path):
    folder, summary = run(tmp_path, "evaluation.every=1", "evaluation.problems=12", "stop_at=0.01", "steps=9")
    assert summary["steps"] == 1 == len(folder.metrics())


@pytest.mark.usefixtures("short_evaluation")
def test_what_stops_a_run_is_not_what_it_reports(tmp_path, monkeypatch):
    """The accuracy that reaches ``stop_at`` is high by chance: before and after have other problems than it."""
    seen = []

    def noted(self):
        seen.append(self.problems)
        return {"eval/kk/avg@2": 1.0}

    monkeypatch.setattr(Evaluation, "metrics", noted)
    _, summary = run(tmp_path, *SHORT, "evaluation.every=1", "stop_at=0.5", "steps=3")
    assert summary["steps"] == 1
    assert summary["before"]["problems"] == summary["after"]["problems"]
    (watched,) = seen
    assert watched != summary["after"]["problems"]
    assert summary["change"]["avg@2"].keys() == {"value", "low", "high"}


@pytest.mark.usefixtures("short_evaluation")
def test_tensorboard(tmp_path):
    folder, _ = run(tmp_path, *SHORT, "tracking=tensorboard", "steps=1")
    assert list(Path(folder.path).rglob("events.out.tfevents*"))


@pytest.mark.usefixtures("short_evaluation")
def test_the_console_shows_samples_and_plain_lines(tmp_path, capsys):
    trainer.train(make(tmp_path, "steps=1"), quiet=False)
    shown = capsys.readouterr().out
    assert "1/1  reward" in shown
    assert "<think>" in shown
    assert "\x1b" not in shown


@pytest.mark.usefixtures("short_evaluation")
def test_from_python_the_result_is_shown_and_drawn_as_by_the_command(tmp_path, capsys):
    config = make(tmp_path, *SHORT, "steps=1")
    trainer.train(config)
    shown = capsys.readouterr().out
    assert "avg@2" in shown
    assert f"curve: {tmp_path / 'run'}/curve.png" in shown
    assert (tmp_path / "run/curve.png").read_bytes().startswith(b"\x89PNG")
    first = (tmp_path / "run/metrics.jsonl").read_bytes()
    again = [trainer.train(config, quiet=True)["run"] for _ in range(2)]  # a cell of a notebook is run twice
    assert again == [str(tmp_path / f"run-{number}") for number in (2, 3)]
    assert capsys.readouterr().out == ""
    assert json.loads((tmp_path / "run-2/config.json").read_text())["run"] == again[0]
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == first
    with pytest.raises(FileExistsError, match="choose another run=DIR, or continue"):
        trainer.train(config, renumber=False)
    trainer.train(config, resume=True)
    assert "already at step 1" in capsys.readouterr().out


def test_the_next_free_folder_of_one_without_a_name(tmp_path, monkeypatch):
    (tmp_path / "here" / "x").mkdir(parents=True)
    (tmp_path / "here" / "config.json").touch()
    (tmp_path / "here-2").symlink_to(tmp_path / "gone")
    monkeypatch.chdir(tmp_path / "here")
    for name in (".", "../here/x/.."):
        assert free_folder(name, print) == str(tmp_path / "here-3")


@pytest.mark.usefixtures("short_evaluation")
@pytest.mark.parametrize("name", configs.recipes())
def test_recipes_are_runnable_with_the_embedded_model(tmp_path, name, embedded):
    small = ["steps=1", "model=embedded", "optim.mini_batch=0", "evaluation.samples=1", "rollout.temperature=1"]
    if name == "erl":  # a game, which the embedded model does not know: only the entropy term moves it
        small += [
            "rollout.max_prompt=512",
            "rollout.max_episode_tokens=200",
            "algorithm=erl(reflection_tokens=12)",
            "prompts=2",
            "group=2",
            "evaluation=off",
            *SHORT,
        ]
    folder, summary = run(tmp_path, *small, recipe=name)
    assert summary["steps"] == 1
    assert moved(folder, embedded)
    assert folder.config["regulator"] == configs.load(name).regulator
