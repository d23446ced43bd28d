"""AdamW's state as named tensors and back, bit for bit: safetensors instead of pickle.

The names are ``exp_avg/PARAM``, ``exp_avg_sq/PARAM`` (with amsgrad also ``max_exp_avg_sq/PARAM``) and ``step/PARAM``. A
parameter that never had a gradient has no state: only its ``step/PARAM`` = 0 is written, so that a missing name is
always an error. Learning rates and other settings are not state: they follow from the config and the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from poise._lib.errors import unknown

Named = Iterable[tuple[str, Tensor]]  # model.named_parameters()


def optimizer_tensors(optimizer: Optimizer, names: Named) -> dict[str, Tensor]:
    """The optimizer's state by name. The tensors are not copies: write them before the next step.

    ``names`` are the model's named parameters; those that the optimizer does not train are skipped.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter, moments in _trained(optimizer, names):
        state = optimizer.state.get(parameter, {})
        if state and set(state) != {"step", *moments}:
            raise ValueError(f"optimizer_tensors: {name!r} has the state {sorted(state)}, which is not AdamW's")
        tensors[f"step/{name}"] = state["step"].detach() if state else torch.zeros(())
        for moment in moments if state else ():
            tensors[f"{moment}/{name}"] = state[moment].detach().contiguous()
    return tensors


def restore_optimizer(optimizer: Optimizer, names: Named, tensors: Mapping[str, Tensor]) -> None:
    """Restore the state that ``optimizer_tensors`` returned: all of it or, on error, nothing."""
    trained = _trained(optimizer, names)
    expected: dict[str, Tensor] = {}  # name to a tensor of the right shape and dtype
    for name, parameter, moments in trained:
        expected[f"step/{name}"] = torch.empty(())
        step = tensors.get(f"step/{name}")
        if step is None or step.any() or any(f"{moment}/{name}" in tensors for moment in moments):
            expected |= {f"{moment}/{name}": parameter for moment in moments}
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise ValueError(f"restore_optimizer: {_first(missing)} missing from the saved state")
    extra = [name for name in tensors if name not in expected]
    if extra:
        hint = unknown("name", extra[0], expected) if len(expected) < 10 else f"first {extra[0]!r}"
        raise ValueError(f"restore_optimizer: the saved state has {len(extra)} unexpected tensors: {hint}")
    for name, like in expected.items():
        saved = tensors[name]
        if (saved.shape, saved.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"restore_optimizer: {name!r} must be {tuple(like.shape)} {like.dtype}, "
                f"got {tuple(saved.shape)} {saved.dtype}"
            )
    on_device = {id(p) for group in optimizer.param_groups if _counts_on_device(group) for p in group["params"]}
    for name, parameter, moments in trained:
        optimizer.state.pop(parameter, None)
        if f"{moments[0]}/{name}" not in expected:
            continue
        step = tensors[f"step/{name}"]
        state = {"step": step.to(parameter.device if id(parameter) in on_device else "cpu", copy=True)}
        for moment in moments:
            state[moment] = torch.empty_like(parameter, requires_grad=False).copy_(tensors[f"{moment}/{name}"])
        optimizer.state[parameter] = state


def _trained(optimizer: Optimizer, names: Named) -> list[tuple[str, Tensor, tuple[str, ...]]]:
    """Name, parameter and the names of its moments, for each parameter that the optimizer trains."""
    name_of = {id(parameter): name for name, parameter in names}
    trained = []
    for group in optimizer.param_groups:
        moments = ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group.get("amsgrad") else ())
        for parameter in group["params"]:
            if id(parameter) not in name_of:
                raise ValueError(f"the optimizer trains a parameter {tuple(parameter.shape)} that has no name")
            trained.append((name_of[id(parameter)], parameter, moments))
    return trained


def _counts_on_device(group: Mapping[str, object]) -> bool:
    return bool(group.get("fused") or group.get("capturable"))  # then AdamW keeps the step on the device


def _first(names: list[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more names are" if len(names) > 1 else " is")
