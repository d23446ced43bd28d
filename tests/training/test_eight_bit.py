"""``optim.eight_bit``: AdamW's moments in 8 bits, by bitsandbytes."""

import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from poise import trainer
from poise.models.footprint import Footprint
from poise.runs.folder import RunFolder
from poise.training.building import build_optimizer
from poise.training.checkpoints import optimizer_tensors, restore_optimizer
from poise.training.config.documents import ConfigError
from poise.training.config.groups import OptimConfig
from support.small_runs import SHORT, make, parameters, run

EIGHT_BIT = OptimConfig(lr=0.01, weight_decay=0.1, eight_bit=True)


def layer_and_optimizer(settings=EIGHT_BIT):
    """A weight of 64 × 80, whose moments take 8 bits each, and a bias, which is too small for it."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 80)
    return layer, build_optimizer([*layer.parameters()], settings)


def train(layer, optimizer, steps, seed=1):
    """With gradients that do not depend on the weights."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        (layer(torch.randn(5, 64, generator=draw)) * torch.randn(5, 80, generator=draw)).sum().backward()
        optimizer.step()


def test_it_follows_adamw_in_float32():
    layer, optimizer = layer_and_optimizer()
    exact, reference = layer_and_optimizer(OptimConfig(lr=0.01, weight_decay=0.1))
    start = layer.weight.detach().clone()
    train(layer, optimizer, 20)
    train(exact, reference, 20)
    assert torch.allclose(layer.bias, exact.bias, atol=1e-6)
    moved = (exact.weight - start).norm()
    assert 0 < (layer.weight - exact.weight).norm() < 0.05 * moved


def test_its_state_continues_bit_for_bit_and_takes_a_quarter(tmp_path):
    layer, optimizer = layer_and_optimizer()
    train(layer, optimizer, 3)
    state = optimizer_tensors(optimizer, layer.named_parameters())
    assert state["state1/weight"].dtype == torch.uint8
    moments = sum(value.nbytes for name, value in state.items() if name.endswith("weight") and "step" not in name)
    assert moments == EIGHT_BIT.moment_bytes * layer.weight.numel()
    save_file(state, tmp_path / "optimizer.safetensors")
    weights = {name: value.clone() for name, value in layer.state_dict().items()}
    train(layer, optimizer, 3, seed=2)

    again, resumed = layer_and_optimizer()
    again.load_state_dict(weights)
    restore_optimizer(resumed, again.named_parameters(), load_file(tmp_path / "optimizer.safetensors"))
    train(again, resumed, 3, seed=2)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])


def test_wrong_tensors_are_named_and_nothing_is_taken():
    layer, optimizer = layer_and_optimizer()
    train(layer, optimizer, 1)
    whole = {name: value.clone() for name, value in optimizer_tensors(optimizer, layer.named_parameters()).items()}
    layer, optimizer = layer_and_optimizer()
    wrong = {
        "incomplete for 'weight'": {n: v for n, v in whole.items() if n != "absmax2/weight"},
        "'exp_avg/bias', which does not fit": whole | {"exp_avg/bias": torch.zeros(80)},
        "'state1/weight', which does not fit": whole | {"state1/weight": torch.zeros(80, 64)},
    }
    for match, tensors in wrong.items():
        with pytest.raises(ValueError, match=match):
            restore_optimizer(optimizer, layer.named_parameters(), tensors)
        assert not optimizer.state


@pytest.mark.slow
def test_a_run_continues_bit_for_bit(tmp_path):
    pytest.importorskip("bitsandbytes")
    whole, _ = run(tmp_path, *SHORT, "optim.eight_bit=true", "evaluation=off")
    trainer.train(make(tmp_path, *SHORT, "optim.eight_bit=true", "evaluation=off", "steps=2", name="cut"), quiet=True)
    trainer.train(make(tmp_path, *SHORT, "optim.eight_bit=true", "evaluation=off", name="cut"), resume=True, quiet=True)
    first, second = parameters(whole), parameters(RunFolder.open(tmp_path / "cut", resume=False))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_forecast_counts_its_bytes():
    exact, small = (
        Footprint.of("embedded", device="cpu", dtype="float32", moments=OptimConfig(eight_bit=each).moment_bytes)
        for each in (False, True)
    )
    assert exact.training == 12 * exact.parameters
    assert small.training == int((4 + 2 + 2 / 64) * exact.parameters)


def test_without_bitsandbytes_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError, match=r"optim.eight_bit=true needs bitsandbytes .*\[bitsandbytes\]"):
        build_optimizer([torch.nn.Parameter(torch.zeros(2))], EIGHT_BIT)
