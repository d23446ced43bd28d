"""Attention of one new token per slot: random inputs, and the result in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from poise.models.attention import over_slots
from poise.sampling.native.slot_cache import Rotation


@dataclass
class Case:
    """Inputs of ``kernels.attend``."""

    query: Tensor
    key: Tensor
    value: Tensor
    keys: Tensor
    values: Tensor
    used: Tensor
    window: int | None
    rotation: Rotation

    def attend(self):
        """The kernels' result; they store the new keys and values."""
        from poise.sampling.native import kernels

        new = self.query, self.key, self.value
        return kernels.attend(*new, self.keys, self.values, self.used, None, self.window, self.rotation)


def case(heads, shared, width, used, length, window=None, *, device="cpu", dtype=torch.float32, rotated=False):
    """Random queries and slots with one row more than is decoded. Keys that no row may read are NaN."""
    g, rows = torch.Generator(device).manual_seed(0), len(used)

    def normal(*shape):
        return torch.randn(*shape, generator=g, device=device).to(dtype)

    used = torch.tensor(used, dtype=torch.int32, device=device)
    keys, values = normal(rows + 1, length, shared, width), normal(rows + 1, length, shared, width)
    unread = torch.arange(length, device=device) >= torch.cat([used - 1, used[:1] * 0])[:, None]
    keys[unread] = values[unread] = float("nan")
    angles = normal(rows, width // 2).repeat(1, 2)
    norms = (normal(width) + 1, normal(width) + 1, 1e-6) if rotated else ()
    rotation = Rotation(angles.cos(), angles.sin(), *norms) if rotated else Rotation()
    new = normal(rows, heads, width), normal(rows, shared, width), normal(rows, shared, width)
    return Case(*new, keys, values, used, window, rotation)


def check(case, error):
    """Attend, and compare the result with float64, and the stored keys and values with what should be stored."""
    rows, at = len(case.query), case.used.long() - 1
    key, row = case.rotation.key(case.key), torch.arange(len(case.query), device=at.device)
    stored = [x.clone() for x in (case.keys, case.values)]
    for store, new in zip(stored, (key, case.value), strict=True):
        store[row, at] = new
    exact = over_slots(
        case.rotation.query(case.query).double(), *(x[:rows].double().nan_to_num() for x in stored),
        *[case.used] * 2, case.used.long(), None, case.window,
    )  # fmt: skip
    found = case.attend()
    assert (found - exact).norm() <= error * exact.norm(), (float((found - exact).norm() / exact.norm()), case.window)
    for store, wanted in zip((case.keys, case.values), stored, strict=True):
        torch.testing.assert_close(store, wanted, atol=error, rtol=2 * error, equal_nan=True)
    return found
