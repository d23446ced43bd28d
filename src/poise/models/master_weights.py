"""Float32 master weights for a model that computes in half precision."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn


class MasterWeights:
    """The optimizer's parameters: float32 masters for half-precision parameters, and all other parameters as they are.

    A bfloat16 weight cannot take a step smaller than 1/256 of itself, and a sum of several micro-batches' gradients in
    bfloat16 would be rounded at every addition. So the masters accumulate gradients and take the optimizer's steps in
    float32. ``publish`` rounds the masters into the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.masters: dict[nn.Parameter, Tensor] = {}  # of the half-precision parameters
        self.parameters: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.dtype in (torch.bfloat16, torch.float16):
                master = parameter.detach().float().requires_grad_()
                self.masters[parameter] = master
                parameter.register_post_accumulate_grad_hook(partial(_collect, master))
            self.parameters[name] = self.masters.get(parameter, parameter)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model."""
        if self.masters:
            torch._foreach_copy_(list(self.masters), list(self.masters.values()))

    def serve(self, optimizer: torch.optim.Optimizer) -> None:
        """Call ``publish`` after every step of this optimizer."""
        if self.masters:
            optimizer.register_step_post_hook(lambda *_: self.publish())


def _collect(master: Tensor, parameter: Tensor) -> None:
    """Move a parameter's gradient to its master as soon as it is computed.

    The parameter's gradient is cleared first, so that none is left if memory runs out here. This is a plain function,
    because a bound method as a hook would keep the model from ever being freed.
    """
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad.add_(gradient)
