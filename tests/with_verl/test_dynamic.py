"""Micro-batches by token count (use_dynamic_bsz) on packed rows (use_remove_padding): the shipped settings."""

import pytest
import torch
from verl.workers.engine.fsdp import transformer_impl

from support import verl_cpu
from support.verl_cpu import assembled, rollouts, shipped, step, trainer
from support.verl_runs import close, gradients

DYNAMIC = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 226}
FIXED = {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 2}


@pytest.fixture(autouse=True, scope="module")
def _queue():
    with verl_cpu.queue():
        yield


@pytest.fixture
def sizes(monkeypatch):
    """How many rows each micro-batch has, those without gradients included."""
    made, prepare = [], transformer_impl.prepare_micro_batches

    def noted(**given):
        pieces, order = prepare(**given)
        made.append([len(piece) for piece in pieces])
        return pieces, order

    monkeypatch.setattr(transformer_impl, "prepare_micro_batches", noted)
    return made


@pytest.mark.parametrize("name", ["verl-8gpu", "verl-ar-loss"])
def test_the_shipped_configurations_train(name, sizes):
    config = shipped(name)
    assert config.actor_rollout_ref.actor.use_dynamic_bsz
    assert config.actor_rollout_ref.model.use_remove_padding
    built = assembled(config)
    before = built.actor_rollout_wg.engine.parameters()
    metrics = step(built, rollouts())
    assert not torch.equal(before, built.actor_rollout_wg.engine.parameters())
    assert any(len(set(pieces)) > 1 for pieces in sizes)  # uneven micro-batches
    weight = "reg/low/weight_mean" if name == "verl-8gpu" else "actor/reg/weight_mean"
    assert 0 < metrics[weight] < 1


@pytest.mark.parametrize("name", ["verl-8gpu", "verl-ar-loss"])
def test_the_gradient_does_not_depend_on_micro_batches(name):
    """The fixed ones of the other tests are held against poise.objective there."""
    found = []
    for settings in ({}, FIXED):
        built = assembled(shipped(name, optim__lr=0.0, **settings))
        step(built, rollouts())
        found.append(gradients(built))
    dynamic, fixed = found
    assert len(dynamic) == len(fixed) == (4 if name == "verl-8gpu" else 2)
    assert all(close(ours, theirs) for ours, theirs in zip(dynamic, fixed, strict=True))


@pytest.mark.parametrize("method", ["entropy(quantile=0.5)", "clip-cov(share=0.3, low=0.0) | lopti(threshold=0.5)"])
def test_methods_that_look_at_the_whole_batch(method):
    """Old log-probabilities and entropies come back in the order of the batch, whatever verl packs together."""
    found = []
    for settings in (DYNAMIC, FIXED):
        built = trainer(method, optim__lr=0.0, **settings)
        step(built, rollouts())
        found.append(gradients(built))
    assert all(close(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_grpo_is_stock_verl_bit_for_bit(sizes):
    found = []
    for regulator in (None, "grpo"):
        built = trainer(regulator, optim__lr=1e-3, use_kl_loss=True, entropy_coeff=0.1, **DYNAMIC)
        before = built.actor_rollout_wg.engine.parameters()
        for _ in range(2):
            step(built, rollouts())
        found.append(built.actor_rollout_wg.engine.parameters())
    assert not torch.equal(before, found[0])
    assert torch.equal(*found)
    assert any(len(set(pieces)) > 1 for pieces in sizes)
