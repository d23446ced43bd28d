"""Our surrogates against verl's own losses: the same gradient."""

import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

from poise import Phase, TokenBatch
from poise.objective import Settings, normalizer, policy_loss, survey
from support.batches import fields_of, random_batch

SEQUENCE = "seq-mean-token-mean"


def pairs():
    """(verl's loss, its settings, its average, our surrogate) of the same method."""
    yield "cispo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}, "token-mean", "cispo(low=0.8, high=1.3)"
    for average, ours in (("token-mean", ", sequence_mean=False"), (SEQUENCE, "")):
        bounds = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.06}
        yield "gspo", bounds, average, f"gspo(clip_low=0.05, clip_high=0.06{ours})"
    yield "sapo", {"tau_pos": 1.0, "tau_neg": 1.05}, "token-mean", "sapo"  # verl averages by sequence itself
    for delta, cap, ours in ((0.15, 20.0, "dppo"), (0.05, 1.3, "dppo(delta=0.05, cap=1.3)")):
        bounds = {"clip_ratio_low": delta, "clip_ratio_high": delta, "clip_ratio_c": cap}
        yield "dppo_tv", bounds, "token-mean", ours
    chosen = PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=0.2, ppo_kl_coef=0.3)
    yield "kl_cov", {"policy_loss": chosen}, "token-mean", "kl-cov(share=0.2, coef=0.3)"


@pytest.mark.parametrize(("name", "settings", "average", "text"), pairs())
def test_verls_gradient(name, settings, average, text):
    batch = random_batch(prompts=8)
    batch = TokenBatch(**{
        key: value.nan_to_num(-1.0) if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in fields_of(batch).items()
    })  # fmt: skip # verl multiplies by the mask, so NaN outside it would leak
    g = torch.Generator().manual_seed(0)
    logp = (batch.old_logp + 0.5 * torch.randn(batch.mask.shape, generator=g)).clamp(max=0).requires_grad_()
    config = ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1, **settings)
    theirs, _ = get_policy_loss_fn(name)(
        old_log_prob=batch.old_logp, log_prob=logp, advantages=batch.token_advantages,
        response_mask=batch.mask.double(), loss_agg_mode=average, config=config,
    )  # fmt: skip
    ours = Settings(surrogate=text)
    norm, taken = normalizer(batch, ours), survey(logp, batch, ours)
    mine, _ = policy_loss(logp, batch, Phase.of(batch), ours, normalizer=norm, survey=taken)
    expected, found = (torch.autograd.grad(loss, logp)[0] for loss in (theirs, mine))
    assert expected.norm() > 0
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
