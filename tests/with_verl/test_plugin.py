"""As a plugin: what `import verl` brings in by itself, and what `poise doctor verl` says of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
POISE = [str(Path(sys.executable).parent / "poise"), "doctor", "verl"]
MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"  # verl has no default
NAMES = "from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as L; print('poise' in L, end=' ')"
TRAINER = "from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY as T; print('poise_sync' in T)"


def run(command, **environment):
    env = {key: value for key, value in os.environ.items() if key != "VERL_USE_EXTERNAL_PLUGINS"}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env | environment)


@pytest.mark.parametrize(
    "first", ["import verl", "import poise.integrations.verl", "import poise.integrations.verl_trainer"]
)  # fmt: skip
def test_importing_verl_is_enough_in_any_order(first):
    done = run([sys.executable, "-c", f"{first}; {NAMES}; {TRAINER}"])
    assert done.stdout.splitlines()[-1:] == ["True True"], done.stderr


def test_the_doctor_finds_it_live():
    done = run(POISE)
    assert done.returncode == 0, done.stdout
    assert "live: policy loss 'poise' (poise.integrations.verl)" in done.stdout
    assert "live: trainer 'poise_sync' (poise.integrations.verl_trainer)" in done.stdout
    assert "verl           0.9.1" in done.stdout


def test_the_doctor_says_what_verl_does_not(tmp_path):
    off = run(POISE, VERL_USE_EXTERNAL_PLUGINS="none")
    assert off.returncode == 1
    assert "VERL_USE_EXTERNAL_PLUGINS=none excludes the plugin: unset it, or add poise" in off.stdout

    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['poise.integrations.verl'] = None")
    broken = run(POISE, PYTHONPATH=str(tmp_path))
    assert broken.returncode == 1
    assert "importing poise.integrations.verl fails: ModuleNotFoundError" in broken.stdout
    assert "live: trainer" in broken.stdout


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        (["--config-path", "examples/scale", "--config-name", "verl-8gpu"], 0, "by the trainer poise_sync, in 2 phase"),
        ([MICRO], 1, "train without a regulator: trainer_mode is 'sync'"),
        (["--config-path", "examples/scale", "--config-name", "verl-8gpu", "trainer.v1.poise_sync.regulator=nthr"], 0,
         "train with nthr, by the trainer poise_sync, in 1 phase"),
        ([MICRO, "trainer.v1.trainer_mode=poise_sync", "actor_rollout_ref.model.use_fused_kernels=true",
          "+trainer.v1.poise_sync.regulator=nthr"], 1, "REFUSED: nthr reads hidden .*use_fused_kernels=False"),
        (["no.such.key=1"], 1, "REFUSED: .*no.such.key"),
    ],
)  # fmt: skip
def test_the_doctor_checks_settings_before_a_run(settings, code, message):
    done = run(POISE + settings)
    assert done.returncode == code, done.stdout + done.stderr
    assert re.search(message, done.stdout)
