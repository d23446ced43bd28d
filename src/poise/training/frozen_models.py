"""Frozen models: the reference of the KL term, and the models that an algorithm asks for.

An algorithm names its models in ``models``, a dict from names to sources; ``sampler.others`` then has a sampler for
each model. A source is ``"start"`` (the run's starting weights) or a model as in ``model=``. The KL term and the
algorithm share one copy of the starting weights. With LoRA there is no copy: poise uses the policy's model with its
adapter disabled. A frozen model has no gradients, and is neither in the optimizer nor in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poise._lib.errors import quote
from poise._lib.files import expand
from poise.batch import TokenBatch
from poise.models.loading import load_policy, load_tokenizer
from poise.models.location import locate
from poise.models.policy import ModelError, Policy
from poise.models.scoring import score_batch
from poise.runs.folder import RunFolder
from poise.sampling.algorithms import Algorithm
from poise.sampling.choose import choose
from poise.sampling.draws import Sampling
from poise.sampling.remote_sampler import RemoteSampler
from poise.sampling.requests import Completion, Done, Engine, Request
from poise.sampling.sampler import Sampler
from poise.training.config.schema import Config

START = "start"
FILE = "models.json"  # in the run folder: see ``_checkpoints``


@dataclass(frozen=True, eq=False)
class Frozen:
    """A model that is never trained. With ``adapter`` it is the trained policy without its LoRA adapter."""

    policy: Policy
    adapter: bool = False

    def active(self) -> AbstractContextManager[Any]:
        """A context in which ``policy`` computes with the frozen weights."""
        return self.policy.model.disable_adapter() if self.adapter else nullcontext()

    def logp(self, batch: TokenBatch, temperature: float, micro_tokens: int | None) -> Tensor:
        """The log-probabilities (B, T) of the response tokens."""
        with self.active():
            return score_batch(self.policy, batch, temperature, micro_tokens)[0]

    @property
    def parameters(self) -> int:
        """The number of frozen parameters."""
        own = (each for each in self.policy.model.parameters() if not (self.adapter and each.requires_grad))
        return sum(each.numel() for each in own)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(parameter.nbytes for parameter in self.policy.model.parameters())


@dataclass(frozen=True, eq=False)
class FrozenEngine:
    """Samples from a frozen model with a separate engine, KV cache and CUDA graphs."""

    frozen: Frozen
    engine: Engine

    @property
    def policy(self) -> Policy:
        """The policy object of the frozen model. While this engine samples, it computes with the frozen weights."""
        return self.frozen.policy

    def sample(
        self, requests: Sequence[Request], sampling: Sampling, seed: int, done: Done | None = None
    ) -> list[Completion]:
        """Sample a response to each request, in order."""
        with self.frozen.active():
            return self.engine.sample(requests, sampling, seed, done)


class FrozenModels:
    """The frozen models of a run: the algorithm's models and, with ``reference``, the KL term's reference model.

    Pass ``start``, the model from which the run started, if it is not the config's model.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        algorithm: Algorithm,
        note: Callable[[str], None],
        folder: RunFolder | None = None,
        *,
        reference: bool = False,
        start: str | None = None,
    ) -> None:
        self.config, self.policy, self.algorithm, self.note = config, policy, algorithm, note
        self.start = start or config.model_name
        self.models: Mapping[str, str] = getattr(algorithm, "models", {})
        users = {"the KL term": START, **self.models} if reference else dict(self.models)
        for name, source in self.models.items():
            if folder is not None and source != START and expand(source).resolve() == folder.path.resolve():
                raise ModelError(
                    f"{name} = {source!r} is this run's own folder, and a frozen model cannot be in training: write "
                    f"{START!r} for the weights that the run starts with, or name another run"
                )
        self.checkpoints = _checkpoints(self.start, users.values(), folder)
        self.by_source: dict[str, Frozen] = {}
        first: dict[str, str] = {}  # the first user of each source
        for name, source in users.items():
            if first.setdefault(source, name) == name:
                self.by_source[source] = self._load(name, source)
            if name in self.models:
                note(f"{name}: {self._describe(source, None if first[source] == name else first[source])}")

    @property
    def reference(self) -> Frozen:
        """The starting weights, for the KL term."""
        return self.by_source[START]

    def sizes(self) -> dict[str, Any]:
        """The parameter counts of the policy and, by name, of each model that the algorithm uses."""
        others = {name: self.by_source[source].parameters for name, source in self.models.items()}
        return {"parameters": Frozen(self.policy).parameters, "parameters_of": others}

    def add_to(self, sampler: Sampler) -> Sampler:
        """Add a sampler to ``sampler.others`` for each of the algorithm's models, with the same task and settings.

        Return the new sampler. Also call the algorithm's ``check``, which may reject the models or the task.
        """
        others = {name: self._sampler(name, self.by_source[source], sampler) for name, source in self.models.items()}
        for name, (server, own) in getattr(self.algorithm, "servers", {}).items():
            tokenizer = load_tokenizer(own, remote_code=self.config.remote_code)[0] if own else None
            others[name] = RemoteSampler.of(sampler, server, tokenizer)
            self.note(f"{name}: the model {quote(server.check())} of {server.address}")
        sampler = replace(sampler, others=others) if others else sampler
        if check := getattr(self.algorithm, "check", None):
            check(sampler, self.note)
        return sampler

    def _sampler(self, name: str, frozen: Frozen, like: Sampler) -> Sampler:
        rollout = self.config.rollout

        def note(line: str) -> None:
            self.note(f"{name}: {line}")

        with frozen.active():
            # Not vLLM: it would copy the weights with their adapter, and a second vLLM would need its share of the
            # memory.
            engine = choose(frozen.policy, "auto" if rollout.engine == "vllm" else rollout.engine, rollout.batch, note)
        # No limit on prompts: another tokenizer may need more tokens.
        return replace(like, policy=frozen.policy, engine=FrozenEngine(frozen, engine), max_prompt=None)

    def _load(self, name: str, source: str) -> Frozen:
        config = self.config
        if source == START and hasattr(self.policy.model, "peft_config"):
            return Frozen(self.policy, adapter=True)
        try:
            compiled = bool(config.compile) and source in self.models.values()
            policy = load_policy(self._name(source), compiled=compiled, **config.loading)
            policy.check_settings(config.rollout.max_prompt, config.rollout.max_tokens)
        except ModelError as error:
            if source == START:
                raise
            raise ModelError(f"{name} = {source!r}: {error}") from error
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"{name}: the frozen weights of {self._name(source)} do not fit into memory next to the policy: use "
                "lora.rank=…, which needs no second copy of the starting weights, or a smaller model"
            ) from error
        policy.model.requires_grad_(False)
        return Frozen(policy)

    def _name(self, source: str) -> str:
        """The model's name, or the folder of the checkpoint to load."""
        return self.checkpoints.get(source) or (self.start if source == START else source)

    def _describe(self, source: str, shared: str | None) -> str:
        """Describe the model and the memory for its weights. ``shared`` names the user that has loaded the model."""
        frozen = self.by_source[source]
        what = f"the run's starting weights ({self._name(source)})" if source == START else self._name(source)
        if frozen.adapter:
            return f"{what}: the policy without its LoRA adapter, no second copy of the weights"
        if shared:
            return f"{what}, in the copy that {shared} uses"
        return f"{what}, frozen: the weights take {frozen.nbytes / 2**30:.2f} GiB more on {frozen.policy.device}"


def starting_weights(config: Config, folder: RunFolder) -> str:
    """The model to load at the start of a run. With LoRA, if ``config.model`` is a run: the folder of its checkpoint.

    The checkpoint is the newest one at the time this run began. A resumed run with LoRA needs the same base weights
    again, because its own checkpoints contain only the adapter.
    """
    return _checkpoints(config.model, [START] if config.lora else [], folder).get(START, config.model_name)


def _checkpoints(start: str, sources: Iterable[str], folder: RunFolder | None) -> dict[str, str]:
    """The newest checkpoint of each source that is a run folder, at the time this run began.

    The paths are saved in this run's ``models.json``, so that a resumed run loads the same weights even if the other
    run has continued.
    """
    saved = folder.read_json(FILE) if folder is not None else None
    checkpoints = {source: str(path) for source, path in saved.items()} if isinstance(saved, dict) else {}
    for source in sources:
        name = start if source == START else source
        if source in checkpoints and not Path(checkpoints[source]).is_dir():
            raise ModelError(
                f"{name}: this run began with the weights in {checkpoints[source]}, which are gone: put them back, or "
                "begin another run=DIR"
            )
        if source not in checkpoints and (expand(name) / "checkpoints").is_dir():
            checkpoints[source] = locate(name)
    if folder is not None and checkpoints != (saved or {}):
        folder.write_json(FILE, checkpoints)
    return checkpoints
