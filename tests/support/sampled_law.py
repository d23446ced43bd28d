"""The law by which tokens are drawn: how long the interval of random numbers is that draws a token."""

import torch

BITS = 53  # of a random number
VOCABULARY = 151_936  # Qwen's


def logits():
    """One row, 0-d to (V,): a token of p = 0.9 first, the others from 1e-4 down to 1e-18, the last of about 1e-12."""
    row = -32 * torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(0))
    row[0] = row.logsumexp(0) + torch.log(torch.tensor(9.0))
    row[-1] = row.logsumexp(0) + torch.log(torch.tensor(1e-12))
    row[1000:1010] = -torch.inf
    return row


def chosen(probs):
    """Some tokens of every decade of p from 1e-12 on, the first and the last among them."""
    found = [0, 999, VOCABULARY - 1]
    for decade in range(-12, -3):
        found += ((probs >= 10.0**decade) & (probs < 10.0 ** (decade + 1))).nonzero()[-3:, 0].tolist()
    return torch.tensor(sorted(set(found)))


def interval_lengths(draw, tokens):
    """(n,) how long the interval of each token is, if ``draw`` maps random numbers (m,) to tokens (m,)."""
    ends = torch.cat([tokens, tokens + 1])
    low, high = torch.zeros_like(ends), torch.full_like(ends, 1 << BITS)
    for _ in range(BITS + 1):  # the least random number that draws this token or a later one
        middle = (low + high) // 2
        later = draw(middle.clamp(max=(1 << BITS) - 1).double() * 2.0**-BITS) >= ends
        open_ = low < high
        high, low = torch.where(later & open_, middle, high), torch.where(~later & open_, middle + 1, low)
    first, after = low.chunk(2)
    return (after - first).double() * 2.0**-BITS


def check(draw, row):
    """Every token of p ≥ 1e-12 can be drawn, and those of p ≥ 1e-9 with their probability."""
    probs = row.double().softmax(0)
    tokens = chosen(probs)
    expected = probs[tokens]
    found = interval_lengths(draw, tokens)
    assert (expected >= 1e-12).sum() > 20
    assert (found[expected >= 1e-12] > 0).all()
    often = expected >= 1e-9
    torch.testing.assert_close(found[often], expected[often], rtol=1e-3, atol=0)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=1e-15)
