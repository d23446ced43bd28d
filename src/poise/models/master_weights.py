"""Float32 master weights for a model that computes in half precision."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn


class Masters:
    """What the optimizer works on: half-precision parameters by their float32 masters, all others themselves.

    In bfloat16 a weight cannot take a step smaller than 1/256 of itself, and gradients of several micro-batches would
    be rounded at every addition. So gradients are added up, and steps taken, in float32; ``publish`` then rounds the
    masters into the model, which has no other copy of its weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._master_of: dict[nn.Parameter, Tensor] = {}
        self.parameters: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.dtype in (torch.bfloat16, torch.float16):
                master = parameter.detach().float().requires_grad_()
                self._master_of[parameter] = master
                parameter.register_post_accumulate_grad_hook(partial(_collect, master))
            self.parameters[name] = self._master_of.get(parameter, parameter)

    def of(self, parameter: Tensor) -> Tensor | None:
        """The master of a parameter, if it has one."""
        return self._master_of.get(parameter)  # type: ignore[call-overload,no-any-return]

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model."""
        if self._master_of:
            torch._foreach_copy_(list(self._master_of), list(self._master_of.values()))

    def serve(self, optimizer: torch.optim.Optimizer) -> None:
        """Publish after every step of the optimizer from now on."""
        optimizer.register_step_post_hook(lambda *_: self.publish())


def _collect(master: Tensor, parameter: Tensor) -> None:
    """Move a gradient to the master, as soon as it is there.

    It is taken off the parameter first: if there is no memory for what follows, nothing must be left behind. (A bound
    method of Masters as a hook would keep the model alive for ever.)
    """
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad.add_(gradient)
