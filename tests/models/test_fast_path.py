"""A training run through the packed pass and the fused head is the run through padding and all logits.

In float64, where it can be told. How both round in bfloat16 is in test_rounding.py; twenty steps on CUDA, in tests/gpu.
"""

import gc
import weakref

import pytest
import torch

from poise.models.master_weights import MasterWeights
from support import trajectories


def test_two_steps_in_float64_are_the_same():
    made = trajectories.sampled("cpu", steps=2)
    losses, moved = trajectories.fast(made, "cpu", torch.float64, micro_tokens=700)
    expected, reference = trajectories.plain(made, "cpu", torch.float64)
    assert reference.norm() > 0.1
    assert losses == pytest.approx(expected, rel=1e-7, abs=1e-9)
    assert (moved - reference).norm() < 1e-6 * reference.norm()


def layer(dtype):
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8, bias=False).to(dtype)


def test_masters_take_steps_that_bfloat16_would_lose():
    model = layer(torch.bfloat16)
    masters = MasterWeights(model)
    start, optimizer = model.weight.detach().clone(), torch.optim.SGD(masters.parameters.values(), lr=1e-5)
    for _ in range(1000):
        model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()  # the gradient is 1 everywhere
        assert model.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(masters.parameters["weight"], start.float() - 0.01, rtol=0, atol=1e-4)
    assert torch.equal(model.weight, start)
    masters.publish()
    assert torch.equal(model.weight, masters.parameters["weight"].bfloat16())
    assert not torch.equal(model.weight, start)


def test_masters_add_gradients_up_in_float32():
    model = layer(torch.bfloat16)
    masters = MasterWeights(model)
    for size in (1.0, *[2**-9] * 64):
        (model(torch.ones(1, 8, dtype=torch.bfloat16)).sum() * size).backward()
    assert torch.equal(masters.parameters["weight"].grad, torch.full((8, 8), 1 + 64 * 2**-9))


def test_float32_needs_no_masters_and_frozen_weights_get_none():
    model = torch.nn.Sequential(layer(torch.float32), layer(torch.bfloat16).requires_grad_(False))
    masters = MasterWeights(model)
    assert list(masters.parameters) == ["0.weight"]
    assert masters.parameters["0.weight"] is model[0].weight
    assert masters.masters == {}
    masters.publish()


def test_a_gradient_that_finds_no_memory_is_not_left_behind(monkeypatch):
    model = layer(torch.bfloat16)
    masters = MasterWeights(model)
    ones = torch.ones(1, 8, dtype=torch.bfloat16)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "float", full)
        with pytest.raises(torch.OutOfMemoryError):
            model(ones).sum().backward()
    assert model.weight.grad is None
    model(ones).sum().backward()
    assert torch.equal(masters.parameters["weight"].grad, torch.ones(8, 8))


def test_masters_do_not_keep_a_model_alive():
    model = layer(torch.bfloat16)
    masters = MasterWeights(model)
    model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    alive = [weakref.ref(model), weakref.ref(masters), weakref.ref(masters.parameters["weight"])]
    del model, masters
    gc.collect()
    assert [one() for one in alive] == [None, None, None]
