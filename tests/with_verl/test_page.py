"""docs/verl.md trains: its YAML on top of verl's own configuration, and the trainer of its Python."""

import re

import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from support import verl_cpu

PAGE = (verl_cpu.SCALE.parents[1] / "docs/verl.md").read_text()
LOSS, TRAINER = (OmegaConf.create(block) for block in re.findall(r"(?ms)^```yaml\n(.*?)^```", PAGE))


@pytest.fixture(autouse=True, scope="module")
def _queue():
    with verl_cpu.queue():
        yield


@pytest.fixture(autouse=True)
def _forget():
    """The trainer that the page registers is not there for other tests."""
    yield
    TRAINER_REGISTRY.pop("mine", None)


@pytest.mark.parametrize("name", ["loss", "trainer", "mine"])
def test_the_page_trains(name):
    base = verl_cpu.config(optim__lr=1e-4)
    OmegaConf.set_struct(base, False)
    if name == "mine":
        (code,) = re.findall(r"(?ms)^```python\n(.*?)^```", PAGE)
        exec(compile(code, "docs/verl.md", "exec"), {"__name__": "snippets"})
        added = OmegaConf.create({"trainer": {"v1": {"trainer_mode": "mine", "mine": {"regulator": "lopti"}}}})
    else:
        added = {"loss": LOSS, "trainer": TRAINER}[name]
    config = OmegaConf.merge(base, added)
    built = verl_cpu.assembled(config)
    before = built.actor_rollout_wg.engine.parameters()
    metrics = verl_cpu.step(built, verl_cpu.rollouts())
    assert not torch.equal(before, built.actor_rollout_wg.engine.parameters())
    weight = "actor/reg/weight_mean" if name == "loss" else "reg/low/weight_mean"
    assert 0 < metrics[weight] < 1
