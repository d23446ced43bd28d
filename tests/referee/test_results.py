"""What a comparison reads from run folders: states, curves, scores and cost."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from poise._lib.files import sealed
from poise.referee.compare.results import Arm, Cost, Point, RunResult, result_of
from poise.runs.folder import DamagedError, RunFolder
from poise.trainer import TrainError, train
from support.small_runs import make, run

CONFIG = {"seed": 3, "steps": 4, "prompts": 2, "group": 4, "stop_at": None}


def evaluation(accuracy, samples=4):
    row = {"value": accuracy, "low": 0.0, "high": 1.0}
    table = {f"avg@{samples}": row, "greedy": row | {"value": accuracy / 2}, f"avg@{samples}, difficulty 2": row}
    return {"accuracy": accuracy, "n": 2, "samples": samples, "table": table}


def folder_of_a_run(path, steps=4, config=CONFIG, **files):
    folder = RunFolder.create(path, config)
    folder.write_json("before.json", evaluation(0.25))
    folder.write_json("environment.json", {"parameters": 1000})
    for step in range(1, steps + 1):
        measured = {"eval/rg/x/avg@4": 0.1 * step, "eval/rg/x/avg@4/2": 9.0, "eval/rg/x/greedy": 0.5}
        metrics = {
            "rollout/length": 10.0, "tokens/sampled": 80, "rollout/entropy": math.nan if step == 2 else 1.0,
            "optim/steps": 2.0, "time/step": 1.5, "reward/no_spread": 0.5,
            "reg/low/kl_weight_mean": 1.0, "reg/high/kl_weight_mean": 1.0,
        }  # fmt: skip
        folder.log(step, metrics | (measured if step % 2 == 0 else {}))
    for name, data in files.items():
        folder.write_json(f"{name}.json", data)
    return path


def summary(steps=4, accuracy=0.75):
    return {"steps": steps, "before": evaluation(0.25), "after": evaluation(accuracy)}


def test_a_finished_run(tmp_path):
    found = RunResult.read(folder_of_a_run(tmp_path / "run", summary=summary()))
    assert (found.seed, found.state, found.steps) == (3, "finished", 4)
    assert [(point.step, point.scores["accuracy"]) for point in found.curve] == [(0, 0.25), (2, 0.2), (4, 0.75)]
    assert found.scores == {"accuracy": 0.75, "avg@4": 0.75, "greedy": 0.375}
    assert found.curve[1].scores == {"accuracy": 0.2, "avg@4": 0.2, "greedy": 0.5}
    # 8 responses of 10 tokens a step; two phases over the half of them that carries a gradient
    assert found.cost == Cost(320.0, 8.0, 6.0, 1000 * 4 * (2 * 80 + 6 * 2 * 0.5 * 80))
    assert found.curve[1].cost == Cost(160.0, 4.0, 3.0, found.cost.flop / 2)
    assert found.entropy[0] == 1.0
    assert math.isnan(found.entropy[1])


def test_a_frozen_model_samples_with_its_own_parameters(tmp_path):
    path = folder_of_a_run(tmp_path / "run", steps=0)
    folder = RunFolder.open(path)
    folder.log(
        1, {"rollout/length": 10.0, "tokens/sampled": 200, "tokens/receiver": 120, "reg/all/kl_weight_mean": 1.0}
    )

    def flop(**written):
        folder.write_json("environment.json", written)
        return RunResult.read(path).cost.flop

    assert flop(parameters=1000, parameters_of={"receiver": 50}) == 1000 * (2 * 80 + 6 * 80) + 50 * 2 * 120
    assert flop(parameters_of={"receiver": 50}) is None


def test_all_rows_of_erl_are_trained(tmp_path):
    path = folder_of_a_run(tmp_path / "run", steps=0)
    folder = RunFolder.open(path)
    folder.write_json("environment.json", {"parameters": 1000})
    first, reflections, second, consolidated = 8 * 10, 4 * 5, 4 * 7, 3 * 7  # of eight attempts four are tried again
    line = {"second/retried": 0.5, "reflection/length": 5.0, "consolidated/rows": 3.0, "reg/all/kl_weight_mean": 1.0}
    folder.log(1, line | {"rollout/length": 10.0, "tokens/sampled": first + reflections + second})
    sampled = first + reflections + second
    assert RunResult.read(path).cost.flop == 1000 * (2 * sampled + 6 * (sampled + consolidated))


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_the_estimate_is_near_what_torch_counts(tmp_path, lora):
    """An update of 64 tokens without a prompt, on a model whose embeddings are small."""
    shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=4, vocab_size=32))
    parameters = sum(each.numel() for each in model.parameters())
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    tokens = torch.randint(32, (8, 8))
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens).loss.backward()
    path = folder_of_a_run(tmp_path / "run", steps=0, config=CONFIG | {"lora": lora})
    folder = RunFolder.open(path)
    folder.write_json("environment.json", {"parameters": parameters})
    folder.log(1, {"rollout/length": 8.0, "tokens/sampled": 64, "reg/all/kl_weight_mean": 1.0})
    update = RunResult.read(path).cost.flop - 2 * parameters * 64
    assert update == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_a_diverged_run_has_the_scores_last_measured(tmp_path):
    why = {"step": 4, "why": "the gradient's norm is nan"}
    found = RunResult.read(folder_of_a_run(tmp_path / "run", steps=3, diverged=why))
    assert found.state == "diverged"
    assert found.scores["accuracy"] == 0.2
    assert found.why == "step 4: the gradient's norm is nan"


@pytest.mark.parametrize(
    ("files", "config"),
    [
        ({}, {}),
        ({"summary": summary(3)}, {}),  # the run was extended and is at step 4 of 4, not yet evaluated
        ({"summary": summary()}, {"steps": 6}),  # it is to be extended
        ({"diverged": {"step": 2, "why": "nan"}}, {}),  # resumed, it got past that step
    ],
)
def test_an_unfinished_run_has_no_scores(tmp_path, files, config):
    found = RunResult.read(folder_of_a_run(tmp_path / "run", config=CONFIG | config, **files))
    assert found.state == "unfinished"
    assert found.scores == {}
    assert len(found.curve) == 3


@pytest.mark.parametrize("goal", ["stop_at", "budget"])
def test_a_run_that_reached_its_goal_is_finished(tmp_path, goal):
    found = RunResult.read(
        folder_of_a_run(tmp_path / "run", config=CONFIG | {"steps": 9, goal: 0.5}, summary=summary())
    )
    assert (found.state, found.steps) == ("finished", 4)


@pytest.mark.parametrize("name", ["summary", "before", "diverged"])
def test_damage_is_named(tmp_path, name):
    path = folder_of_a_run(tmp_path / "run", **({"summary": summary()} | {name: [1]}))
    with pytest.raises(ValueError, match=rf"{name}\.json"):
        RunResult.read(path)
    with pytest.raises(DamagedError, match=rf"{name}\.json .*put the file back from a copy, or move .*run away"):
        result_of(path)


@pytest.mark.parametrize("name", ["summary", "before"])
def test_a_number_that_was_changed_is_refused(tmp_path, name):
    path = folder_of_a_run(tmp_path / "run", summary=sealed(summary()), before=sealed(evaluation(0.25)))
    assert RunResult.read(path).sealed
    text = (path / f"{name}.json").read_text()
    (path / f"{name}.json").write_text(text.replace('"accuracy": 0.', '"accuracy": 0.9', 1))
    with pytest.raises(DamagedError, match=rf"{name}\.json was changed .*put the file back from a copy, or move "):
        result_of(path)


def test_results_of_older_versions_are_marked(tmp_path):
    assert not RunResult.read(folder_of_a_run(tmp_path / "run", summary=summary())).sealed


def test_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no run"):
        RunResult.read(tmp_path / "none")


def test_an_arm_lists_the_seeds_that_are_done():
    points = [Point(0, Cost(), {"accuracy": 0.5, "greedy": 0.25})]
    runs = {
        seed: RunResult(seed, state, 0, tuple(points))
        for seed, state in [(2, "diverged"), (1, "unfinished"), (0, "finished")]
    }
    arm = Arm("ar", {}, runs)
    assert list(arm.results().items()) == [(0, 0.5), (2, 0.0)]  # what was measured before training is no result of it
    assert arm.results("greedy") == {0: 0.25, 2: 0.0}
    assert arm.results("maj@4") == {}


def test_a_real_run(tmp_path):
    folder, found = run(tmp_path, "steps=2", "evaluation.every=1", "rollout.max_tokens=12", "regulator=lopti")
    result = RunResult.read(folder.path)
    assert result.state == "finished"
    assert [point.step for point in result.curve] == [0, 1, 2]
    assert result.scores["accuracy"] == found["after"]["accuracy"]
    measured = {"accuracy", "avg@2", "pass@2", "maj@2", "greedy", "cut_off", "unreadable"}
    assert set(result.scores) == measured == set(result.curve[1].scores)
    assert result.sealed
    assert result.problems == found["before"]["problems"] == found["after"]["problems"] != ""
    assert result.cost.flop > 2 * 1e6 * result.cost.tokens > 0


def test_a_real_run_that_diverges(tmp_path):
    config = make(tmp_path, "optim.lr=1e30", "steps=3", "rollout.max_tokens=12", "objective.entropy_coef=0.01")
    with pytest.raises(TrainError):
        train(config, quiet=True)
    result = RunResult.read(config.run)
    assert result.state == "diverged"
    assert result.scores == dict.fromkeys(("accuracy", "avg@2", "pass@2", "maj@2", "greedy"), 0.0)
    assert "norm" in result.why
