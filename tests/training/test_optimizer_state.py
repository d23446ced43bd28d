"""The optimizer's state: to named tensors and back without losing a bit."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from poise.training.optimizer_state import optimizer_tensors, restore_optimizer


def model_and_optimizer(dtype, amsgrad=False):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({n: torch.nn.Linear(4, 3, dtype=dtype) for n in ("a", "frozen", "unused")})
    model["frozen"].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained[::-1], lr=0.1, amsgrad=amsgrad)


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model["a"](torch.randn(5, 4, dtype=model["a"].weight.dtype)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizer_goes_on_bit_for_bit(tmp_path, dtype, amsgrad):
    model, optimizer = model_and_optimizer(dtype, amsgrad)
    train(model, optimizer, 3)
    save_file(optimizer_tensors(optimizer, model.named_parameters()), tmp_path / "optimizer.safetensors")
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(1)
    train(model, optimizer, 3)

    again, resumed = model_and_optimizer(dtype, amsgrad)
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
    named = dict(model.named_parameters())

    def refused(tensors, match):
        with pytest.raises(ValueError, match=match):
            restore_optimizer(optimizer, named.items(), tensors)
        assert not optimizer.state

    for name in whole:
        refused({n: t for n, t in whole.items() if n != name}, f"'{name}' (is|and 2 more names are) missing")
    refused(
        whole | {"exp_avg/b.weight": torch.zeros(3)},
        r"1 unexpected tensors: unknown name 'exp_avg/b.weight'; did you mean",
    )
    refused(whole | {"exp_avg/a.weight": torch.zeros(4, 3)}, r"'exp_avg/a.weight' must be \(3, 4\) torch.float32, got")
    refused(whole | {"exp_avg/a.bias": torch.zeros(3, dtype=torch.bfloat16)}, "torch.float32, got .* torch.bfloat16")
    with pytest.raises(ValueError, match="that has no name"):
        optimizer_tensors(optimizer, [])
    sgd = torch.optim.SGD([named["a.weight"]], lr=0.1, momentum=0.9)
    named["a.weight"].grad = torch.ones(3, 4)
    sgd.step()
    with pytest.raises(ValueError, match="not AdamW's"):
        optimizer_tensors(sgd, named.items())
