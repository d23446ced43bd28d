"""The configurations of docs/scale.md, read by those who will read them: accelerate and TRL. For verl: with_verl."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("trl", reason="TRL is not installed (extra 'trl')")

from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from poise import regulators
from poise.integrations.probe import CannotRegulateError, probe
from poise.integrations.trl_checks import check_config, period
from poise.policy import EMBEDDED

SCALE = Path(__file__).parent.parent / "examples/scale"
sys.path.insert(0, str(SCALE))

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


def test_trl_reads_it_and_the_regulator_can_be_had():
    own, args, model = parsed()
    given = yaml.safe_load((SCALE / "trl-8gpu.yaml").read_text())
    assert model.model_name_or_path == given["model_name_or_path"]
    assert {name: getattr(args, name) for name in ("epsilon_high", "delta", "num_iterations", "vllm_mode")} == {
        name: given[name] for name in ("epsilon_high", "delta", "num_iterations", "vllm_mode")
    }
    check_config(args, probe(regulators.parse(own.regulator)), own.regulator)
    assert period(args) == 4
    # 8 GPUs: the batch of the papers, 64 prompts with 8 responses each
    assert 8 * args.per_device_train_batch_size * args.steps_per_generation == 64 * args.num_generations
    assert own.problems * 5 // 64 * period(args) == args.max_steps
    with pytest.raises(CannotRegulateError, match="num_iterations=2"):
        check_config(parsed("--num_iterations", "1")[1], probe(regulators.parse(own.regulator)), own.regulator)


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
    check_config(args, probe(regulators.parse(own.regulator)), own.regulator)
    assert processes * args.per_device_train_batch_size * args.steps_per_generation == 64 * args.num_generations
    assert own.problems * 5 // 64 * period(args) == args.max_steps  # five epochs


def test_the_configurations_that_pages_name_are_there():
    pages = [*(SCALE.parents[1] / "docs").glob("*.md"), *SCALE.iterdir()]
    named = {name for page in pages if page.is_file() for name in re.findall(r"--config-name (\S+)", page.read_text())}
    assert len(named) == 3
    assert all((SCALE / f"{name}.yaml").exists() for name in named)


def test_the_script_trains(tmp_path):
    """With the configuration as it is, made small: on a CPU, with the embedded model."""
    small = {
        "model_name_or_path": EMBEDDED, "people": "2-2", "problems": 8, "max_steps": 4, "use_vllm": False,
        "bf16": False, "use_cpu": True, "per_device_train_batch_size": 4, "num_generations": 4, "temperature": 3.0,
        "steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_completion_length": 24,
        "gradient_checkpointing": False, "save_strategy": "no", "output_dir": tmp_path,
    }  # fmt: skip
    command = [sys.executable, str(SCALE / "trl_kk.py"), "--config", str(SCALE / "trl-8gpu.yaml")]
    command += [word for name, value in small.items() for word in (f"--{name}", str(value))]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "reg/low/weight_mean" in done.stdout
