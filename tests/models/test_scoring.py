"""How many tokens a pass takes by default."""

from types import SimpleNamespace

import pytest
import torch

from poise.models.scoring import BUSY_TOKENS, default_micro_tokens


@pytest.mark.parametrize(
    ("device", "parameters", "tokens"),
    [
        ("cpu", 1_000_000, BUSY_TOKENS),
        ("cuda", 1_000_000, 4 * BUSY_TOKENS),
        ("cuda", 135_000_000, 4 * BUSY_TOKENS),
        ("cuda", 500_000_000, 2 * BUSY_TOKENS),
        ("cuda", 1_500_000_000, BUSY_TOKENS),
    ],
)
def test_on_cuda_a_pass_of_a_small_model_has_more_tokens(device, parameters, tokens):
    trunk = torch.nn.ParameterList([torch.empty(parameters, device="meta")])
    assert default_micro_tokens(SimpleNamespace(device=torch.device(device), trunk=trunk)) == tokens
