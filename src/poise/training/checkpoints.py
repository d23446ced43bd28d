"""Checkpoints: weights, optimizer state, and the ``State`` of the run, in ``progress.json`` and ``memory.json``.

The optimizer's state is stored as named tensors in safetensors, not in pickle; AdamW's tensors are named
``step/PARAM``, ``exp_avg/PARAM`` and ``exp_avg_sq/PARAM``. A parameter that never had a gradient has no state. Learning
rates and other settings are not stored: they follow from the config and the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from poise.models.master_weights import MasterWeights
from poise.models.policy import Policy
from poise.runs.checkpoint_files import CheckpointFiles
from poise.runs.folder import CheckpointError, RunFolder
from poise.training.steps import State

Named = Iterable[tuple[str, Tensor]]  # model.named_parameters()
TABLES = {"qmap1", "qmap2"}  # tables of 8-bit codes: constants that all parameters share


class Checkpoints:
    """The checkpoints of one run, due every ``every`` steps (0: only at the end)."""

    def __init__(
        self,
        folder: RunFolder,
        policy: Policy,
        master_weights: MasterWeights,
        optimizer: torch.optim.Optimizer,
        every: int,
    ) -> None:
        self.folder, self.files, self.every = folder, CheckpointFiles(folder), every
        self.policy, self.master_weights, self.optimizer = policy, master_weights, optimizer
        self.saved = 0  # step of the newest checkpoint
        self.weights_of: int | None = 0  # the step of the current weights; None during an update

    def size(self, moment_bytes: float) -> int:
        """The size of one checkpoint in bytes: the model, the float32 weights, and the optimizer's two moments."""
        saved = (value for value in self.policy.model.parameters() if value.requires_grad)  # with LoRA: adapters
        model: int = sum(value.numel() * value.element_size() for value in saved)
        trained = sum(value.numel() for value in self.master_weights.parameters.values())
        return model + int((4 + moment_bytes) * trained)

    def due(self, step: int) -> bool:
        """Whether to save a checkpoint after this step."""
        return self.every > 0 and step % self.every == 0

    @contextmanager
    def updating(self, step: int) -> Iterator[None]:
        """Within this context the weights are mid-update, so ``save_finished`` does not save them."""
        self.weights_of = None
        yield
        self.weights_of = step

    def save(self, state: State) -> None:
        """Save a checkpoint with the current weights and this state of the run."""
        parameters = self.master_weights.parameters
        with self.files.writing(state.step) as path:
            self.policy.save(path / "model")
            save_file({n: p.detach().contiguous() for n, p in parameters.items()}, path / "parameters.safetensors")
            save_file(optimizer_tensors(self.optimizer, parameters.items()), path / "optimizer.safetensors")
            (path / "progress.json").write_text(json.dumps({"tokens": state.tokens}))
            if state.memory is not None:
                (path / "memory.json").write_text(json.dumps(state.memory))
        self.saved = state.step

    def save_finished(self, state: State) -> None:
        """Save the last finished step unless it is saved already. Never save mid-update weights or unlogged steps."""
        if self.weights_of == state.step > self.saved and state.step in (
            each["step"] for each in self.folder.metrics()
        ):
            self.save(state)

    def restore(self) -> State:
        """Load the newest readable checkpoint and return its ``State``; a new ``State`` if there is none."""
        parameters, device = self.master_weights.parameters, str(self.policy.device)

        def read(path: Path) -> State:
            saved = load_file(path / "parameters.safetensors", device=device)
            if saved.keys() != parameters.keys():
                raise ValueError("the checkpoint belongs to a different model")
            state = load_file(path / "optimizer.safetensors", device=device)
            restore_optimizer(self.optimizer, parameters.items(), state)
            with torch.no_grad():
                for name, value in saved.items():
                    parameters[name].copy_(value)
            self.master_weights.publish()
            memory = path / "memory.json"
            tokens = int(json.loads((path / "progress.json").read_bytes())["tokens"])
            return State(tokens=tokens, memory=json.loads(memory.read_bytes()) if memory.exists() else None)

        step, state = self.files.load(read) or (0, State())
        lines = self.folder.metrics()
        if not step and lines and 0 < self.every < lines[-1]["step"]:
            raise CheckpointError(
                f"{self.folder.path} has metrics up to step {lines[-1]['step']}, but no checkpoint: put its "
                "checkpoints back, or begin again in another run=DIR"
            )
        self.saved = self.weights_of = step
        self.folder.rewind(step)
        return replace(state, step=step)


def optimizer_tensors(optimizer: Optimizer, names: Named) -> dict[str, Tensor]:
    """The optimizer's state by name. The tensors are not copies, so write them before the next step."""
    return {
        f"{key}/{name}": torch.as_tensor(value).detach().contiguous()
        for name, parameter in names
        for key, value in optimizer.state.get(parameter, {}).items()
        if key not in TABLES
    }


def restore_optimizer(optimizer: Optimizer, names: Named, tensors: Mapping[str, Tensor]) -> None:
    """Restore the state that ``optimizer_tensors`` returned. On an error, the optimizer does not change."""
    parameters, saved = dict(names), dict[str, dict[str, Tensor]]()
    for path, tensor in tensors.items():
        key, _, name = path.partition("/")
        saved.setdefault(name, {})[key] = tensor
    trained = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    states = {}
    for name, values in saved.items():
        state = _first_state(optimizer, parameters[name]) if name in parameters else {}
        for key, value in values.items():
            like = state.get(key)
            fits = key == "step" or (
                isinstance(like, Tensor) and (value.shape, value.dtype) == (like.shape, like.dtype)
            )
            if like is None or not fits:
                raise ValueError(f"the saved state of the optimizer has '{key}/{name}', which does not fit the model")
            # ``load_state_dict`` moves the step to the device only if AdamW counts there
            state[key] = int(value) if isinstance(like, int) else value.cpu() if key == "step" else value
        if state.keys() - TABLES != values.keys():
            raise ValueError(f"the saved state of the optimizer is incomplete for {name!r}")
        states[trained.index(id(parameters[name]))] = state
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})


def _first_state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor | int]:
    """The optimizer's state of this parameter as it would be before the first step."""
    if not hasattr(optimizer, "init_state"):  # torch's AdamW
        like = torch.empty_like(parameter, device="meta")
        return {"step": torch.tensor(0.0), "exp_avg": like, "exp_avg_sq": like}
    (group,) = optimizer.param_groups
    optimizer.init_state(group, parameter, 0, [id(each) for each in group["params"]].index(id(parameter)))
    return dict(optimizer.state.pop(parameter))
