"""Checkpoints: weights, optimizer state, the algorithm's memory and the number of sampled tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from poise.algorithms import Memory
from poise.models.master_weights import MasterWeights
from poise.models.policy import Policy
from poise.runs.folder import CheckpointError, RunFolder
from poise.training.optimizer_state import optimizer_tensors, restore_optimizer


class Checkpoints:
    """The checkpoints of one run: every ``every`` steps (0: only at the end), and whenever ``save`` is called."""

    def __init__(
        self,
        folder: RunFolder,
        policy: Policy,
        master_weights: MasterWeights,
        optimizer: torch.optim.Optimizer,
        every: int,
    ) -> None:
        self.folder, self.every = folder, every
        self.policy, self.master_weights, self.optimizer = policy, master_weights, optimizer
        self.saved = 0  # step of the newest checkpoint
        self.logged = 0  # newest step with a line in metrics.jsonl
        self.weights_of: int | None = 0  # step that the weights belong to; None during an update

    @property
    def size(self) -> int:
        """The bytes of one checkpoint: the model, the float32 weights, and the optimizer's two moments."""
        saved = (value for value in self.policy.model.parameters() if value.requires_grad)  # of LoRA, the adapters
        model: int = sum(value.numel() * value.element_size() for value in saved)
        return model + 3 * 4 * sum(value.numel() for value in self.master_weights.parameters.values())

    def due(self, step: int) -> bool:
        """Whether to save a checkpoint after this step."""
        return self.every > 0 and step % self.every == 0

    @contextmanager
    def updating(self, step: int) -> Iterator[None]:
        """Inside, the weights belong to no step and must not be saved."""
        self.weights_of = None
        yield
        self.weights_of = step

    def save(self, step: int, memory: Memory | None, tokens: int) -> None:
        """Save the checkpoint of a step, with the number of tokens sampled until then."""

        def write(path: Path) -> None:
            parameters = self.master_weights.parameters
            self.policy.save(path / "model")
            save_file({n: p.detach().contiguous() for n, p in parameters.items()}, path / "parameters.safetensors")
            save_file(optimizer_tensors(self.optimizer, parameters.items()), path / "optimizer.safetensors")
            (path / "progress.json").write_text(json.dumps({"tokens": tokens}))
            if memory is not None:
                (path / "memory.json").write_text(json.dumps(memory))

        self.folder.save_checkpoint(step, write)
        self.saved = step

    def save_finished_step(self, memory: Memory | None, tokens: int) -> None:
        """Save the last finished step, unless it is saved. Never save mid-update weights, or a step not yet logged."""
        if self.weights_of == self.logged > self.saved:
            self.save(self.logged, memory, tokens)

    def restore(self) -> tuple[int, Memory | None, int]:
        """Load the newest readable checkpoint. Return its step (0: none), the algorithm's memory and sampled tokens."""
        parameters, device = self.master_weights.parameters, str(self.policy.device)

        def read(path: Path) -> tuple[Memory | None, int]:
            saved = load_file(path / "parameters.safetensors", device=device)
            if saved.keys() != parameters.keys():
                raise ValueError("the checkpoint is of another model")
            state = load_file(path / "optimizer.safetensors", device=device)
            restore_optimizer(self.optimizer, parameters.items(), state)
            with torch.no_grad():
                for name, value in saved.items():
                    parameters[name].copy_(value)
            self.master_weights.publish()
            memory = path / "memory.json"
            tokens = int(json.loads((path / "progress.json").read_bytes())["tokens"])
            return json.loads(memory.read_bytes()) if memory.exists() else None, tokens

        step, (memory, tokens) = self.folder.load_checkpoint(read) or (0, (None, 0))
        lines = self.folder.metrics()
        if not step and lines and 0 < self.every < lines[-1]["step"]:
            raise CheckpointError(
                f"{self.folder.path} has metrics up to step {lines[-1]['step']}, but no checkpoint: put its "
                "checkpoints back, or begin again in another run=DIR"
            )
        self.saved = self.weights_of = self.logged = step
        self.folder.rewind(step)
        return step, memory, tokens
