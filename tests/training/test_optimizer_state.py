"""The optimizer's state: to named tensors and back without losing a bit."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from poise.training.checkpoints import optimizer_tensors, restore_optimizer


def model_and_optimizer(dtype):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({n: torch.nn.Linear(4, 3, dtype=dtype) for n in ("a", "frozen", "unused")})
    model["frozen"].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained[::-1], lr=0.1)


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model["a"](torch.randn(5, 4, dtype=model["a"].weight.dtype)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizer_goes_on_bit_for_bit(tmp_path, dtype):
    model, optimizer = model_and_optimizer(dtype)
    train(model, optimizer, 3)
    save_file(optimizer_tensors(optimizer, model.named_parameters()), tmp_path / "optimizer.safetensors")
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(1)
    train(model, optimizer, 3)

    again, resumed = model_and_optimizer(dtype)
    again.load_state_dict(weights)
    train(again, resumed, 0)
    restore_optimizer(resumed, again.named_parameters(), load_file(tmp_path / "optimizer.safetensors"))
    assert len(resumed.state) == 2  # "unused" never had a gradient
    torch.manual_seed(1)
    train(again, resumed, 3)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    one, other = (optimizer_tensors(o, m.named_parameters()) for o, m in ((optimizer, model), (resumed, again)))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)


def test_wrong_optimizer_tensors_are_named_and_nothing_is_taken():
    model, optimizer = model_and_optimizer(torch.float32)
    train(model, optimizer, 1)
    whole = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, model.named_parameters()).items()}
    model, optimizer = model_and_optimizer(torch.float32)

    def refused(tensors, match):
        with pytest.raises(ValueError, match=match):
            restore_optimizer(optimizer, model.named_parameters(), tensors)
        assert not optimizer.state

    for name in whole:
        refused({n: t for n, t in whole.items() if n != name}, f"incomplete for '{name.partition('/')[2]}'")
    refused(whole | {"exp_avg/b.weight": torch.zeros(3)}, "'exp_avg/b.weight', which does not fit")
    refused(whole | {"exp_avg/a.weight": torch.zeros(4, 3)}, "'exp_avg/a.weight', which does not fit")
    refused(whole | {"exp_avg/a.bias": torch.zeros(3, dtype=torch.bfloat16)}, "'exp_avg/a.bias', which does not fit")
