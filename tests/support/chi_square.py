"""Pearson's chi-square, without a dependency for one number."""

import torch


def chi_square(observed, expected, least=5.0):
    """The p-value of the observed counts; bins that expect fewer than ``least`` are put together."""
    pairs = sorted(zip(expected, observed, strict=True))
    bins, rest = [], [0.0, 0.0]
    for e, o in pairs:
        rest = [rest[0] + e, rest[1] + o]
        if rest[0] >= least:
            bins.append(rest)
            rest = [0.0, 0.0]
    if bins:
        bins[-1] = [bins[-1][0] + rest[0], bins[-1][1] + rest[1]]
    statistic = sum((o - e) ** 2 / e for e, o in bins)
    half = torch.tensor([(len(bins) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
