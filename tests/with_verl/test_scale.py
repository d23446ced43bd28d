"""The configurations of docs/scale.md for verl, read by hydra and verl's own dataclasses; its data and reward."""

import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, get_trainer_cls
from verl.utils.config import omega_conf_to_dataclass, validate_config

from poise import regulators
from poise.integrations import doctor
from poise.integrations.demands import CannotRegulateError, probe
from poise.integrations.verl import RegulatedPolicyLoss
from poise.integrations.verl_checks import check_config, check_policy_loss, correct_at
from poise.integrations.verl_trainer import RegulatedTrainer
from support import verl_cpu
from support.pages import method_table

SCALE = Path(__file__).parents[2] / "examples/scale"
LOSS = "actor_rollout_ref.actor.policy_loss"
sys.path[:0] = [str(SCALE), str(SCALE.parents[1] / "scripts")]

import rehearse  # noqa: E402
import verl_kk  # noqa: E402


def load(name):
    with initialize_config_dir(str(SCALE), version_base=None):
        return compose(name)


@pytest.mark.parametrize("name", [path.stem for path in sorted(SCALE.glob("verl-*.yaml"))])
def test_verl_reads_it(name):
    config = load(name)
    validate_config(config, need_reference_policy(config), need_critic(config))  # what main_ppo does first
    for part in ("actor", "rollout"):
        omega_conf_to_dataclass(config.actor_rollout_ref[part])
    assert config.trainer.n_gpus_per_node == 8
    assert config.data.train_batch_size == 2 * config.actor_rollout_ref.actor.ppo_mini_batch_size
    OmegaConf.to_container(config, resolve=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_rehearsal_changes_settings_that_verl_has(device, tmp_path):
    chosen = rehearse.settings("verl", device, folder=tmp_path, model="m", root="r", steps=2, phases=2)
    *_, place, name = words = rehearse.command("verl", "python", "nthr | lopti", {})[:5]
    assert (place, name) == (f"--config-path={SCALE}", "--config-name=verl-8gpu"), words
    with initialize_config_dir(str(SCALE), version_base=None):
        config = compose("verl-8gpu", rehearse.command("verl", "python", "nthr | lopti", chosen)[5:])
    assert config.trainer.v1.poise_sync.regulator == "nthr | lopti"
    validate_config(config, need_reference_policy(config), need_critic(config))
    regulator = regulators.parse("nthr | lopti")
    check_config(config, regulator, probe(regulator), "nthr | lopti")


@pytest.mark.parametrize("method", ["stock", "loss: tr-grpo(kl_weighted=False)"])
def test_the_rehearsal_of_verls_own_trainer(method, tmp_path):
    chosen = rehearse.settings("verl", "cuda", folder=tmp_path, model="m", root="r", steps=2, phases=1)
    words = rehearse.command("verl", "python", method, chosen)
    with initialize_config_dir(str(SCALE), version_base=None):
        config = compose(words[4].partition("=")[2], words[5:])
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert config.trainer.v1.trainer_mode == "sync"
    assert "poise_sync" not in config.trainer.v1
    loss = omega_conf_to_dataclass(config.actor_rollout_ref.actor).policy_loss
    if method == rehearse.STOCK:
        assert loss.loss_mode == "vanilla"
    else:
        assert (loss.loss_mode, loss.regulator, loss.base_loss) == ("poise", "tr-grpo(kl_weighted=False)", "vanilla")


@pytest.mark.parametrize("name", ["verl-8gpu", "verl-70b-64gpu"])
def test_the_trainer_can_be_had(name):
    config = load(name)
    assert config.trainer.v1.trainer_mode == "poise_sync"
    text = config.trainer.v1.poise_sync.regulator
    regulator = regulators.parse(text)
    check_config(config, regulator, probe(regulator), text)


@pytest.mark.parametrize("method", sorted(regulators.TABLE))
def test_every_method_can_be_had(method):
    """On the shipped settings, but for what docs/verl.md says of the method; NTHR knows what verl_kk.py pays."""
    config = load("verl-8gpu")
    method = {"tr-grpo": "tr-grpo(kl_weighted=False)"}.get(method, method)
    regulator = regulators.parse(method)
    check_config(config, regulator, probe(regulator), method)
    problem = next(verl_kk.TASK.problems("train", seed=0))
    right = verl_kk.TASK.score(problem, f"<think>…</think><answer>{verl_kk.TASK.gold(problem)}</answer>")
    assert right.reward == correct_at(config) == 3


@pytest.mark.parametrize("method", sorted(regulators.TABLE))
def test_the_table_of_methods_says_what_poise_does(method):
    """On verl's own settings: there is no KL and no entropy term in the loss."""
    works, regulator = method_table()[method], regulators.parse(method)
    with nullcontext() if works["verl, trainer"] else pytest.raises(CannotRegulateError):
        check_config(verl_cpu.config(method), regulator, probe(regulator), method)
    with (
        nullcontext() if works["verl, loss"] else pytest.raises(CannotRegulateError, match=r"poise's trainer|kl_weight")
    ):
        check_policy_loss(method, "vanilla")
    for mode in ("separate_async", "colocate_async"):
        said = []
        settings = [f"trainer.v1.trainer_mode={mode}", f"{LOSS}.regulator={method}"]
        assert doctor._check_settings(said.append, settings, SCALE, "verl-ar-loss") is works["verl, async"], said
        settings = [f"trainer.v1.trainer_mode={mode}", f"+trainer.v1.{mode}.regulator={method}"]
        assert not doctor._check_settings(said.append, settings, SCALE, "verl-8gpu")  # verl's own knows no regulator
        assert "these settings train without a regulator" in said[-1]


def test_the_loss_can_be_had():
    actor = omega_conf_to_dataclass(load("verl-ar-loss").actor_rollout_ref.actor)
    assert isinstance(actor.policy_loss, RegulatedPolicyLoss)
    assert actor.policy_loss.regulator == "ar(alpha=0.2)"


def test_data_and_reward(tmp_path, monkeypatch):
    """Rows through a parquet file and verl's own reading of it; the worked solution gets the highest reward."""
    import pandas
    from verl.utils.import_utils import load_extern_object
    from verl.utils.reward_score import default_compute_score  # the contract's signature

    monkeypatch.setattr(sys, "argv", ["verl_kk.py", str(tmp_path), "--train", "3", "--test", "2"])
    verl_kk.main()
    train, test = (pandas.read_parquet(tmp_path / f"{split}.parquet") for split in ("train", "test"))
    assert (len(train), len(test)) == (3, 2)
    assert {"data_source", "prompt", "reward_model", "extra_info"} <= set(train.columns)
    assert default_compute_score.__code__.co_varnames[:4] == verl_kk.compute_score.__code__.co_varnames[:4]
    score = load_extern_object(str(SCALE / "verl_kk.py"), "compute_score")
    problem = next(verl_kk.TASK.problems("train", seed=0))
    row = train.iloc[0]
    assert row["prompt"][0]["content"] == problem.prompt
    truth = row["reward_model"]["ground_truth"]
    solution = f"<think>…</think><answer>{verl_kk.TASK.gold(problem)}</answer>"
    assert score("kk", solution, truth, row["extra_info"]) == {"score": 3.0, "acc": 1.0}
    assert score("kk", "no idea", truth, row["extra_info"])["score"] < 0


def test_the_page_shows_what_verl_takes():
    """docs/verl.md: its YAML, put on top of verl's own configuration and checked; its Python, run."""
    text = (SCALE.parents[1] / "docs/verl.md").read_text()
    loss, trainer = (OmegaConf.create(block) for block in re.findall(r"(?ms)^```yaml\n(.*?)^```", text))
    base = verl_cpu.config()
    OmegaConf.set_struct(base, False)
    with_loss = OmegaConf.merge(base, loss)
    assert isinstance(omega_conf_to_dataclass(with_loss.actor_rollout_ref.actor).policy_loss, RegulatedPolicyLoss)
    with_trainer = OmegaConf.merge(base, trainer)
    made = RegulatedTrainer(with_trainer)
    assert made.trainer_mode == "sync"
    assert made.regulator == regulators.parse(trainer.trainer.v1.poise_sync.regulator)
    (code,) = re.findall(r"(?ms)^```python\n(.*?)^```", text)
    namespace = {"__name__": "snippets"}
    exec(compile(code, "docs/verl.md", "exec"), namespace)
    mine = OmegaConf.merge(base, {"trainer": {"v1": {"trainer_mode": "mine", "mine": {"regulator": "lopti"}}}})
    assert get_trainer_cls("mine")(mine).regulator == regulators.parse("lopti")
    assert issubclass(namespace["MyRegulatedTrainer"], namespace["MyTrainer"])
    TRAINER_REGISTRY.pop("mine")  # other tests do not know it
