"""AdamW's state as named tensors and back, bit for bit: safetensors instead of pickle.

The names are ``step/PARAM``, ``exp_avg/PARAM`` and ``exp_avg_sq/PARAM``. A parameter that never had a gradient has no
state. Learning rates and other settings are not state: they follow from the config and the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor
from torch.optim import Optimizer

Named = Iterable[tuple[str, Tensor]]  # model.named_parameters()
KEYS = {"step", "exp_avg", "exp_avg_sq"}


def optimizer_tensors(optimizer: Optimizer, names: Named) -> dict[str, Tensor]:
    """The optimizer's state by name. The tensors are not copies: write them before the next step."""
    return {
        f"{key}/{name}": value.detach().contiguous()
        for name, parameter in names
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(optimizer: Optimizer, names: Named, tensors: Mapping[str, Tensor]) -> None:
    """Restore the state that ``optimizer_tensors`` returned: all of it or, on error, nothing."""
    parameters = dict(names)
    states: dict[str, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        key, _, name = path.partition("/")
        like = parameters.get(name)
        moment = key != "step"
        if like is None or key not in KEYS or (moment and (tensor.shape, tensor.dtype) != (like.shape, like.dtype)):
            raise ValueError(f"the saved state of the optimizer has {path!r}, which does not fit the model")
        # ``load_state_dict`` moves the step only if AdamW counts on the device
        states.setdefault(name, {})[key] = tensor if moment else tensor.cpu()
    if incomplete := [name for name, state in states.items() if state.keys() != KEYS]:
        raise ValueError(f"the saved state of the optimizer is incomplete for {incomplete[0]!r}")
    trained = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    state = {trained.index(id(parameters[name])): state for name, state in states.items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
