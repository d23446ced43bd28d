"""The configurations of docs/scale.md, read by those who will read them: accelerate and TRL. For verl: with_verl."""

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file

pytest.importorskip("trl", reason="TRL is not installed (extra 'trl')")

from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from poise import regulators
from poise.integrations.demands import CannotRegulateError, probe
from poise.integrations.trl_checks import check_config, check_trainer, period
from poise.models.policy import EMBEDDED
from poise.tasks.knights_knaves import KnightsKnaves
from support import scale_command
from support.pages import method_table
from support.processes import launch
from support.trl_runs import config

SCALE = Path(__file__).parents[2] / "examples/scale"
sys.path[:0] = [str(SCALE), str(SCALE.parents[1] / "scripts")]

import rehearse  # noqa: E402
import trl_kk  # noqa: E402


@pytest.mark.parametrize("path", sorted(SCALE.glob("accelerate-*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_it(path):
    found = load_config_from_file(str(path))  # refuses keys that it does not know
    given = yaml.safe_load(path.read_text())
    assert found.num_processes == 8 * found.num_machines
    assert found.distributed_type.value == given["distributed_type"]
    assert found.to_dict().items() >= {k: v for k, v in given.items() if k != "distributed_type"}.items()
    options = {action.dest for action in launch_command_parser()._actions}
    assert set(given.get("fsdp_config", {})) <= options


def parsed(*args):
    config = ["--config", str(SCALE / "trl-8gpu.yaml"), "--use_cpu", "true"]  # bf16 is refused where there is no GPU
    return trl_kk.parser().parse_args_and_config([*config, *args])


def check_method(args, method):
    regulator = regulators.parse(method)
    check_config(args, regulator, probe(regulator), method)


def test_trl_reads_it_and_the_regulator_can_be_had():
    own, args, model = parsed()
    given = yaml.safe_load((SCALE / "trl-8gpu.yaml").read_text())
    assert model.model_name_or_path == given["model_name_or_path"]
    assert {name: getattr(args, name) for name in ("epsilon_high", "delta", "num_iterations", "vllm_mode")} == {
        name: given[name] for name in ("epsilon_high", "delta", "num_iterations", "vllm_mode")
    }
    check_method(args, own.regulator)
    assert period(args) == 4
    # 8 GPUs: the batch of the papers, 64 prompts with 8 responses each
    assert 8 * args.per_device_train_batch_size * args.steps_per_generation == 64 * args.num_generations
    assert own.problems * 5 // 64 * period(args) == args.max_steps
    with pytest.raises(CannotRegulateError, match="num_iterations=2"):
        check_method(parsed("--num_iterations", "1")[1], own.regulator)


@pytest.mark.parametrize("method", sorted(regulators.TABLE))
def test_every_method_can_be_had(method, tmp_path):
    """On the shipped settings and its own number of phases; NTHR knows which puzzles are solved."""
    phases = len(probe(regulators.parse(method)).phases)
    trainer = built(tmp_path, regulator=method, num_iterations=phases)
    assert trainer.regulator == regulators.parse(method)
    task = KnightsKnaves(people="3-7")
    problem = next(task.problems("train", seed=0))
    texts = f"<think>…</think><answer>{task.gold(problem)}</answer>", "<answer></answer>"
    scores = [task.score(problem, text) for text in texts]
    correct = trainer._is_correct(torch.tensor([[score.reward] for score in scores]))
    assert correct.tolist() == [score.correct for score in scores] == [True, False]


ENGINES = {
    "TRL, DDP": {}, "TRL, FSDP2": {"is_fsdp_enabled": True, "fsdp2": True}, "TRL, ZeRO": {"is_deepspeed_enabled": True},
}  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
def test_the_table_of_methods_says_what_poise_does(engine, tmp_path):
    """With a KL term, and whole groups on each process."""
    table = method_table()
    assert table.keys() == regulators.TABLE.keys()
    given = {"is_fsdp_enabled": False, "is_deepspeed_enabled": False, "fsdp2": False} | ENGINES[engine]
    for method, works in table.items():
        regulator = regulators.parse(method)
        wants = probe(regulator)
        args = config(tmp_path, beta=0.05, num_iterations=len(wants.phases))
        trainer = SimpleNamespace(
            args=args, num_generations=4, aux_loss_enabled=False, use_vllm=False, rollout_func=None,
            accelerator=SimpleNamespace(num_processes=2, is_fsdp2=given["fsdp2"]), **given,
        )  # fmt: skip
        with nullcontext() if works[engine] else pytest.raises(CannotRegulateError, match="DeepSpeed"):
            check_method(args, method)
            check_trainer(trainer, regulator, wants, method)


def launches():
    """The `accelerate launch` commands of docs/scale.md, as words."""
    text = (SCALE.parents[1] / "docs/scale.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"(?m)^accelerate launch (.*)$", text)
    return [shlex.split(line.replace("machine_rank N", "machine_rank 3")) for line in lines]


@pytest.mark.parametrize("words", launches(), ids=lambda words: Path(words[1]).stem)
def test_the_commands_of_the_page(words, monkeypatch):
    """Read by accelerate and TRL; poise has nothing against them, and 512 responses are a generation batch."""
    monkeypatch.chdir(SCALE.parents[1])
    command = launch_command_parser().parse_args(words)
    processes = yaml.safe_load(Path(command.config_file).read_text())["num_processes"]
    own, args, _ = trl_kk.parser().parse_args_and_config([*command.training_script_args, "--use_cpu", "true"])
    check_method(args, own.regulator)
    assert processes * args.per_device_train_batch_size * args.steps_per_generation == 64 * args.num_generations
    assert own.problems * 5 // 64 * period(args) == args.max_steps  # five epochs


def on_one_node():
    """The commands that need neither DeepSpeed nor several machines."""
    return [words for words in launches() if "deepspeed" not in words[1] and "cluster" not in words[1]]


@pytest.mark.slow
@pytest.mark.parametrize("words", on_one_node(), ids=lambda words: "-".join([Path(words[1]).stem, *words[5:7]]))
def test_the_commands_of_the_page_train(words, tmp_path, monkeypatch):
    """As written, but in two processes without a GPU, with a small model and few steps."""
    monkeypatch.chdir(SCALE.parents[1])
    given = SMALL | {"output_dir": tmp_path, "logging_steps": 1, "save_strategy": "no"}
    more = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    kind = "sharded" if yaml.safe_load(Path(words[1]).read_text())["distributed_type"] == "FSDP" else "whole"
    launch(scale_command.__file__, tmp_path, kind, *words[words.index("examples/scale/trl_kk.py") + 1 :], *more)
    logged = json.loads((tmp_path / "logged.json").read_text())
    assert [row["step"] for row in logged] == [1, 2, 3, 4]
    assert any(row["grad_norm"] for row in logged)
    assert any(name.startswith("reg/") for name in logged[0])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_rehearsal_changes_settings_that_trl_has(device, tmp_path):
    chosen = rehearse.settings("trl", device, folder=tmp_path, model="m", root="r", steps=4, phases=2)
    words = rehearse.command("trl", "python", "nthr | lopti", chosen)
    words[words.index("--config") + 1] = str(SCALE.parents[1] / "examples/scale/trl-8gpu.yaml")
    own, args, model = trl_kk.parser().parse_args_and_config([*words[2:], "--use_cpu", "true"])
    assert (own.regulator, args.max_steps, model.model_name_or_path) == ("nthr | lopti", 4, "m")
    check_method(args, own.regulator)


def test_the_configurations_that_pages_name_are_there():
    pages = [*(SCALE.parents[1] / "docs").glob("*.md"), *SCALE.iterdir()]
    named = {name for page in pages if page.is_file() for name in re.findall(r"--config-name (\S+)", page.read_text())}
    assert len(named) == 3
    assert all((SCALE / f"{name}.yaml").exists() for name in named)


def test_the_page_installs_a_vllm_that_trl_takes():
    (needed,) = [line for line in metadata.requires("trl") if re.match(r"vllm[<>=].*extra == .vllm.", line)]
    assert set(re.findall(r"=(0\.\d+)", needed)) == {"0.22", "0.31"}
    page = (SCALE.parents[1] / "docs/scale.md").read_text()
    assert "'trl[vllm]'`: TRL 1.16 takes vLLM 0.22 to 0.31" in page


SMALL = {
    "model_name_or_path": EMBEDDED, "people": "2-2", "problems": 8, "max_steps": 4, "use_vllm": False, "bf16": False,
    "use_cpu": True, "per_device_train_batch_size": 8, "num_generations": 8, "temperature": 1.0, "learning_rate": 1e-4,
    "steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_completion_length": 48, "save_steps": 4,
    "gradient_checkpointing": False,
}  # fmt: skip


def small(folder, **more):
    """The configuration as it is, made small enough for a CPU and the embedded model."""
    given = SMALL | {"output_dir": folder} | more
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return ["--config", str(SCALE / "trl-8gpu.yaml"), *words]


@pytest.mark.slow
def test_the_script_trains(tmp_path):
    """As a script; the model that it saves has moved, and not by rounding."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCALE / "trl_kk.py"), *small(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "reg/low/weight_mean" in done.stdout
    before, after = (load_file(folder / "model.safetensors") for folder in (Path(EMBEDDED), tmp_path / "checkpoint-4"))
    assert before.keys() == after.keys()
    assert max((after[name] - before[name].float()).abs().max() for name in before) > 1e-4


def built(*args, **more):
    return trl_kk.build(*trl_kk.parser().parse_args_and_config(small(*args, **more)))


@pytest.mark.slow
def test_the_script_trains_adapters_alone(tmp_path):
    trainer = built(tmp_path, use_peft=True, lora_r=4, lora_dropout=0.0)
    assert trainer.model.peft_config["default"].r == 4
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    assert (tmp_path / "checkpoint-4/adapter_model.safetensors").exists()


def test_the_script_hands_on_how_to_load_the_model(tmp_path):
    trainer = built(tmp_path, dtype="bfloat16", attn_implementation="eager")
    assert trainer.model.dtype == torch.bfloat16
    assert trainer.model.config._attn_implementation == "eager"
    _, args, model = trl_kk.parser().parse_args_and_config(small(tmp_path, load_in_4bit=True, model_revision="v2"))
    given = trl_kk.loading(args, model)
    assert given["quantization_config"].load_in_4bit
    assert args.model_init_kwargs["revision"] == "v2"


@pytest.mark.slow
def test_the_script_resumes(tmp_path, monkeypatch):
    """What the first run has logged, its times included, is in the second one's history."""
    short = {"steps_per_generation": 1, "max_steps": 2, "save_steps": 2, "logging_steps": 1}
    built(tmp_path, **short).train()
    again = small(tmp_path, **short | {"max_steps": 4, "resume_from_checkpoint": tmp_path / "checkpoint-2"})
    monkeypatch.setattr(sys, "argv", ["trl_kk.py", *again])
    trl_kk.main()
    first, second = (
        json.loads((tmp_path / f"checkpoint-{step}/trainer_state.json").read_text())["log_history"] for step in (2, 4)
    )
    assert [row["step"] for row in second] == [1, 2, 3, 4]
    assert second[:2] == first
