"""Samples with vLLM, in the trainer's process, from a copy of the policy's weights.

poise uses these parts of vLLM: ``LLM``, its ``generate`` with ``SamplingParams``, ``collective_rpc("reload_weights")``,
``reset_prefix_cache`` and ``llm_engine.model_config.max_model_len``.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from torch import Tensor

from poise._lib.device import same_random_numbers
from poise._lib.errors import how_to_install
from poise.batch import Prompt, padded_batch
from poise.models.location import first_line
from poise.models.policy import ModelError, Policy
from poise.models.scoring import score_batch
from poise.sampling import VLLM_MEMORY
from poise.sampling.draws import Sampling, streams
from poise.sampling.requests import Completion, Done, Request, check_requests, numbers

INSTALL = (
    f"{how_to_install('vllm')}; or, for a CPU, in a separate environment and from a clone: "
    "make .venv-vllm/installed, then .venv-vllm/bin/poise"
)
COLDEST, HOTTEST = 0.01, 2.0  # temperatures: vLLM raises lower ones to 0.01, and refuses values above 2


class VllmEngine:
    """Samples with vLLM. Its kernels round differently from the policy's, so its probabilities differ a little.

    Therefore ``Completion.logp`` and ``entropy`` come from a forward pass of the policy over the responses, and
    ``sampler_logp`` comes from vLLM; importance weights correct the difference. With ``top_p`` or ``top_k``, vLLM
    renormalises its probabilities over the remaining tokens. Such probabilities cannot be compared with the policy's,
    so ``sampler_logp`` is None.

    vLLM starts at the first call. Every call copies the weights to vLLM: a copy is far cheaper than sampling, and no
    dirty-tracking is needed. ``batch`` is the maximum number of responses decoded together; with 0 vLLM decides.
    ``memory`` is vLLM's share of the device's memory, ``micro_tokens`` the maximum number of tokens per pass of the
    policy.
    """

    started: ClassVar[int] = 0  # how often vLLM was started in this process

    def __init__(
        self, policy: Policy, batch: int = 0, memory: float = VLLM_MEMORY, micro_tokens: int | None = None
    ) -> None:
        check_installed()
        self.policy, self.batch, self.memory, self.micro_tokens = policy, batch, memory, micro_tokens
        self._llm: Any = None
        self._failed = False

    @torch.no_grad()
    def sample(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        seed: int,
        done: Done | None = None,  # noqa: ARG002
    ) -> list[Completion]:
        """Sample a response to each request, in order."""
        check_requests(requests)
        if sampling.temperature > HOTTEST or 0 < sampling.temperature < COLDEST:
            raise ModelError(
                f"rollout.temperature={sampling.temperature:g}: vLLM samples at 0 and from {COLDEST:g} to {HOTTEST:g} "
                "only; use rollout.engine=auto or transformers"
            )
        if self._failed:
            raise ModelError("rollout.engine=vllm: vLLM has failed in this process and cannot be used again")
        with same_random_numbers(self.policy.device):  # vLLM seeds torch's generators when it starts
            return self._sample(requests, sampling, seed)

    def _sample(self, requests: Sequence[Request], sampling: Sampling, seed: int) -> list[Completion]:
        if self._llm is None:
            self._start()
        room = self._llm.llm_engine.model_config.max_model_len
        need, request = max(((len(r.prompt.tokens) + r.max_tokens, r) for r in requests), key=lambda pair: pair[0])
        if need > room:
            raise ModelError(
                f"a prompt of {len(request.prompt.tokens)} tokens and rollout.max_tokens={request.max_tokens} are more "
                f"than the {room} tokens that vLLM can hold: this is the limit of the model or of rollout.vllm_memory"
            )
        self._failed = True  # an interrupted copy leaves a mix of old and new weights
        self._push()
        self._failed = False
        return self._answer(requests, sampling, seed)

    def _answer(self, requests: Sequence[Request], sampling: Sampling, seed: int) -> list[Completion]:
        from vllm import SamplingParams

        settings = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        seeds = (streams(seed, torch.tensor(numbers(requests))) & (1 << 63) - 1).tolist()  # vLLM reads −1 as "no seed"
        vocabulary = range(self.policy.head().vocabulary)  # vLLM refuses to stop at any other token
        parameters = [
            SamplingParams(
                seed=own_seed,
                max_tokens=request.max_tokens,
                stop_token_ids=[t for t in request.stop if t in vocabulary],
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                ignore_eos=True,  # only the request's stop tokens end it
                **settings,
            )
            for own_seed, request in zip(seeds, requests, strict=True)
        ]
        prompts = [{"prompt_token_ids": list(request.prompt.tokens)} for request in requests]
        try:
            outputs = [answer.outputs[0] for answer in self._llm.generate(prompts, parameters, use_tqdm=False)]
        except BaseException:
            self._failed = True  # vLLM's queue still holds unanswered requests
            raise
        tokens = [torch.tensor(output.token_ids) for output in outputs]
        batch = padded_batch([request.prompt for request in requests], tokens, self.policy.device)
        scores = score_batch(self.policy, batch, sampling.temperature or 1.0, self.micro_tokens)
        return [
            Completion(
                ids,
                logp[: len(ids)],
                entropy[: len(ids)],
                output.finish_reason == "stop",
                torch.tensor(output.logprobs.logprobs) if sampling.whole else None,  # per step only the sampled token's
            )
            for output, ids, logp, entropy in zip(outputs, tokens, *(x.cpu() for x in scores), strict=True)
        ]

    # vLLM itself

    def _start(self) -> None:
        """Start vLLM with the policy's configuration, push the weights, and compare log-probabilities."""
        name, device = type(self.policy.model).__name__, self.policy.device
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where the weights are
        os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # one process talks to itself: no network is needed
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            from vllm import LLM
            from vllm.platforms import current_platform
        except Exception as error:  # a vLLM built for another torch may raise anything
            raise ModelError(
                f"rollout.engine=vllm: vLLM cannot be imported ({first_line(error)}); {INSTALL}"
            ) from error
        built_for = current_platform.device_type
        if built_for != device.type or device.index:
            where = f"the model is on {device}, but this vLLM works on {built_for or 'no device of this machine'}"
            other = f"set device={built_for}, or " if built_for else ""
            raise ModelError(f"rollout.engine=vllm: {where}; {other}{INSTALL}")
        base = self.policy.base
        # If vLLM does not implement a model, it wraps transformers' class, and reads this attribute from each instance.
        base.base_model.do_not_compile = True
        config = copy.deepcopy(base.config)
        config.architectures = [type(base).__name__]
        self._failed = True  # until the trial has passed
        VllmEngine.started += 1
        more: dict[str, Any] = {"max_num_seqs": self.batch} if self.batch else {}
        if device.type == "cpu":
            # On a CPU vLLM packs the head's weights, and does not repack tied weights after an update. If vLLM reads a
            # prompt in pieces, it rewinds the request's generator, which torch's CPU generator cannot do. And
            # gpu_memory_utilization would have to cover everything that this process has in memory.
            config.tie_word_embeddings = False
            room = int(self.memory * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
            more |= {"enforce_eager": True, "enable_chunked_prefill": False, "kv_cache_memory_bytes": room}
        try:
            with TemporaryDirectory() as folder:
                config.save_pretrained(folder)
                self._llm = LLM(
                    model=folder,
                    skip_tokenizer_init=True,
                    load_format="dummy",
                    dtype=str(next(self.policy.trunk.parameters()).dtype).removeprefix("torch."),
                    gpu_memory_utilization=self.memory,
                    max_model_len=-1,
                    logprobs_mode="processed_logprobs",
                    **more,
                )
            self._push()
            gap = self._gap()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # vLLM and the model's code may raise anything
            why = first_line(error)
            change = "raise" if "increasing" in why else "lower"
            other = f"{change} rollout.vllm_memory, or " if "memory" in why else ""
            advice = f"{other}use rollout.engine=auto or transformers"
            raise ModelError(f"rollout.engine=vllm: vLLM cannot sample from {name} here ({why}); {advice}") from error
        half = next(self.policy.trunk.parameters()).dtype in (torch.float16, torch.bfloat16)
        if not gap <= (0.2 if half else 1e-2):
            second = "vLLM was started in this process before: start a new process, or " * (VllmEngine.started > 1)
            raise ModelError(
                f"rollout.engine=vllm: for {name}, vLLM's log-probabilities differ from the policy's by {gap:.3g} on "
                f"average, so vLLM does not run the same model; {second}use rollout.engine=auto or transformers"
            )
        self._failed = False

    def _push(self) -> None:
        """Copy the policy's weights to vLLM, and drop the prompts that vLLM cached with the old weights."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights(self.policy)})
        self._llm.reset_prefix_cache()

    def _gap(self) -> float:
        """Return the mean absolute difference between vLLM's and the policy's log-probabilities of a few tokens."""
        size = self.policy.head().vocabulary  # no special tokens: for them rounding alone may cause a large difference
        prompts = [Prompt(tuple((size // 2 + i) % size for i in range(n))) for n in (3, 8)]
        trial = self._answer([Request(prompt, 16) for prompt in prompts], Sampling(), 0)
        gaps = [each.logp - each.sampler_logp for each in trial if each.sampler_logp is not None]
        return float(torch.cat(gaps).abs().mean())


def check_installed() -> None:
    """Raise ModelError if vLLM is not installed."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:  # without an origin the name is only a folder
        raise ModelError(f"rollout.engine=vllm: vLLM is not installed; {INSTALL}")


def weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Yield the policy's weights, with adapters merged, under their names in a checkpoint.

    Tied weights appear under each of their names.
    """
    base = policy.base
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if ".lora_" in name:
            continue
        layer_name, adapted, own_name = name.partition(".base_layer.")
        value = parameter.detach()
        if adapted and own_name == "weight":
            layer = base.get_submodule(layer_name)
            for adapter in layer.active_adapters:
                value = value + layer.get_delta_weight(adapter).to(value.dtype)
        yield (f"{layer_name}.{own_name}" if adapted else name), value
