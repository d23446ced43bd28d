"""The policy: a transformers causal language model as the trainer and the engines use it.

Shapes: B responses, T response tokens (padded), N selected response tokens, L packed tokens, d hidden width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from poise._lib.device import send
from poise.batch import Prompt, TokenBatch
from poise.head import Head, token_logp
from poise.models import attention, layers, load_checks, rope
from poise.models.layers import compile_layers
from poise.models.location import EMBEDDED, ModelError, first_line
from poise.models.master_weights import MasterWeights
from poise.models.packing import Packed, extents_of, layout, own_tokens, pack, response_tokens
from poise.models.prompts import Tools, encode, encode_next, encode_prefill
from poise.tasks import Message

__all__ = ["EMBEDDED", "ModelError", "Policy", "busy_tokens", "pad_left"]

BUSY_TOKENS = 16384  # tokens per pass that keep a device busy
BUSY_WORK = BUSY_TOKENS * 1e9  # tokens × parameters of a pass on CUDA that takes longer than launching its kernels
NO_LIMIT = 1 << 62  # tokens
STRETCHED = ("linear", "dynamic", "yarn")  # rotary embeddings whose factor extends the trained positions


class Policy:
    """A model and its tokenizer.

    ``trunk`` is the model without its head: it returns hidden states and computes no logits. ``packed`` says whether
    responses can be run end to end without padding. The constructor checks on a few tokens that ``head(trunk(x))`` is
    the model's own output, and that packed passes give the same states as separate passes.
    """

    def __init__(self, model: Any, tokenizer: Any, *, compiled: bool = False, longest: int | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        trunk, output = getattr(base, base.base_model_prefix, None), base.get_output_embeddings()
        if not isinstance(trunk, nn.Module) or type(output) not in (nn.Linear, nn.Embedding):
            raise ModelError(
                f"{type(base).__name__}: poise needs a causal language model with a plain linear head"
                + ("; remove lm_head from lora.targets" if hasattr(output, "lora_A") else "")
            )
        self.base: Any = base  # the model without its LoRA adapter
        self.trunk: nn.Module = trunk
        self._output: Any = output
        self._config = base.config
        self.checkpointing = False  # recompute layers in the backward pass instead of keeping their activations
        self.most_tokens: int | None = None  # upper bound of tokens per pass, set when memory runs out
        self.master_weights: MasterWeights | None = None  # while half-precision weights are trained
        self._heads: dict[float, Head] = {}  # by temperature
        self._texts: dict[int, str] = {}
        self.length_limit: int | None = None  # tokens per sequence; the trials below need no limit
        length_limit = rope.pin(trunk, longest)
        self.packed = attention.adopt(base)
        self._run_trials()
        self.length_limit = length_limit
        if compiled and self.packed:
            compile_layers(self.trunk)

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.trunk.device  # type: ignore[return-value]

    def parameters(self) -> list[Tensor]:
        """The optimizer's parameters: the master weights, or the model's own parameters if it has none."""
        if self.master_weights is not None:
            return list(self.master_weights.parameters.values())
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that end a response, without tokens that the model cannot sample."""
        ends = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        configured = ends if isinstance(ends, list) else [ends]
        size = len(self._output.weight)
        tokens = {int(token) for token in (*configured, self.tokenizer.eos_token_id) if token is not None}
        return sorted(token for token in tokens if 0 <= token < size)

    @cached_property
    def vocabulary_hash(self) -> str:
        """A hash of the vocabulary. Two tokenizers have the same hash if the same ids mean the same tokens."""
        tokens = sorted(self.tokenizer.get_vocab().items())
        return hashlib.sha256(repr(tokens).encode("utf-8", "surrogatepass")).hexdigest()

    def head(self, temperature: float = 1.0) -> Head:
        """The model's head at a sampling temperature. Gradients reach the head's weight."""
        master = self.master_weights.masters.get(self._output.weight) if self.master_weights else None
        head = self._heads.get(temperature)
        if head is None or head.weight is not self._output.weight or head.master is not master:
            head = self._heads[temperature] = Head.of(self._output, self._config, temperature, master)
        return head

    def encode(self, messages: str | Sequence[Message], tools: Tools = ()) -> list[int]:
        """The token ids of messages, through the chat template if the tokenizer has one."""
        return self._known(encode(self.tokenizer, messages, self.end_tokens, tools))

    def encode_next(
        self, before: Sequence[Message], said: Sequence[Message], last: int | None, tools: Tools = ()
    ) -> list[int]:
        """The token ids between the model's reply and its next turn: see ``prompts.encode_next``."""
        return self._known(encode_next(self.tokenizer, before, said, last, self.end_tokens, tools))

    def encode_prefill(self, text: str) -> list[int]:
        """The token ids of a text that begins the model's turn: see ``prompts.encode_prefill``."""
        return self._known(encode_prefill(self.tokenizer, text))

    def _known(self, tokens: list[int]) -> list[int]:
        """Return the tokens. Raise ModelError if one has no embedding.

        A tokenizer may have more tokens than the model.
        """
        if tokens and max(tokens) >= (size := self.base.get_input_embeddings().weight.shape[0]):
            text = self.tokenizer.decode([max(tokens)])
            raise ModelError(
                f"a prompt has token {max(tokens)} of the tokenizer ({text!r}), but the model has only {size} tokens: "
                "save the folder again after model.resize_token_embeddings(len(tokenizer))"
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a response, without the token that ended it."""
        ended = bool(len(tokens)) and tokens[-1] in self.end_tokens  # the tokenizer need not treat it as special
        return str(self.tokenizer.decode(list(tokens[:-1] if ended else tokens), skip_special_tokens=True))

    def read(self, prompt: Prompt) -> str:
        """The exact text of a prompt: chat template, system message, tools and control tokens included."""
        tokens = list(prompt.tokens)
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def texts(self, tokens: Tensor) -> dict[int, str]:
        """The text of each distinct token, decoded alone; an incomplete character shows as U+FFFD."""
        distinct = tokens.unique().tolist()
        for token in distinct:
            if token not in self._texts:
                self._texts[token] = str(self.tokenizer.decode([token]))
        return {token: self._texts[token] for token in distinct}

    def hidden(self, batch: TokenBatch, tokens: Tensor | None = None) -> Tensor:
        """(N, d) hidden states that predict the model's own tokens in row order, or only ``tokens``.

        ``tokens`` (N,) are flat indices into (B, T). If several responses share a prompt, the prompt is run once, with
        gradients.
        """
        self._check_rotary(max(len(extent.prompt.tokens) + extent.length for extent in extents_of(batch)))
        tokens = own_tokens(batch) if tokens is None else tokens
        if not self.packed:
            return self.padded_states(batch).flatten(0, 1)[tokens]
        packed = layout(batch)
        places_BT = packed.places.new_zeros(batch.mask.numel())
        places_BT.index_copy_(0, response_tokens(batch), packed.places)
        return attention.repeat(self._packed_states(packed), places_BT[tokens])

    @property
    def positions(self) -> int | None:
        """The largest combined length of a prompt and its response; None if the config sets no limit."""
        config = self.base.config.get_text_config()
        most = getattr(config, "max_position_embeddings", None)
        if not isinstance(most, int) or most < 1:
            return None
        rotary: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
        # One set of parameters for all layers, or one per kind of layer.
        for parameters in (rotary, *(part for part in rotary.values() if isinstance(part, dict))):
            if parameters.get("rope_type") in STRETCHED:
                trained = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
                most = max(most, int((parameters.get("factor") or 1) * trained))
        return most

    @property
    def longest(self) -> int:
        """The limit on the combined length of a prompt and its response: from the config and ``length_limit``."""
        return min((limit for limit in (self.positions, self.length_limit) if limit is not None), default=NO_LIMIT)

    def check_positions(self, prompt: int, max_tokens: int, described: str, setting: str = "max_tokens") -> None:
        """Raise ModelError if a prompt of ``prompt`` tokens and its longest response exceed the model's positions.

        Beyond the last position, a position table ends, or rotary embeddings have angles that the model was never
        trained on. In the message, ``described`` describes the prompt and ``setting`` names the setting that limits the
        response.
        """
        most = self.positions
        if most is None or prompt + max_tokens <= most:
            return
        room = most - prompt
        remedy = f"set {setting} to {room} or less" if room > 0 else "shorten the prompt"
        raise ModelError(
            f"{type(self.base).__name__} has {most} positions (max_position_embeddings), but {described} and "
            f"max_tokens={max_tokens} need {prompt + max_tokens}: {remedy}, or use a model with more positions"
        )

    def check_settings(self, max_prompt: int, max_tokens: int) -> None:
        """Raise ModelError if a run's longest prompt and longest response together exceed the model's positions."""
        described = f"prompts of up to rollout.max_prompt={max_prompt} tokens"
        self.check_positions(max_prompt, max_tokens, described, "rollout.max_tokens")

    def check_lengths(self, lengths: Iterable[tuple[int, int]]) -> None:
        """Raise ModelError if a prompt and its longest response exceed the model's positions.

        ``lengths`` has the number of tokens of each prompt and of its longest response.
        """
        need, prompt = max((prompt + max_tokens, prompt) for prompt, max_tokens in lengths)
        self.check_positions(prompt, need - prompt, f"a prompt of {prompt} tokens")
        self._check_rotary(need)

    def _check_rotary(self, tokens: int) -> None:
        """Raise ModelError if a sequence is longer than the length for which a rotary embedding was fixed."""
        if self.length_limit is not None and tokens > self.length_limit:
            raise ModelError(
                f"a prompt and its response may have {tokens} tokens together, but the rotary embedding of "
                f"{type(self.base).__name__} was fixed at load for {self.length_limit} tokens: lower "
                f"rollout.max_tokens, or load the model with longest={tokens}"
            )

    def padded_hidden(self, batch: TokenBatch, states_N: Tensor | None = None) -> Tensor:
        """(B, T, d) hidden states for regulators, 0 outside the mask.

        ``states_N`` is ``hidden(batch)``, if the caller has already computed it.
        """
        places = own_tokens(batch)
        states = self.hidden(batch, places) if states_N is None else states_N
        padded = torch.zeros(*batch.mask.shape, states.shape[-1], dtype=states.dtype, device=states.device)
        padded.view(-1, states.shape[-1])[places] = states  # by index: a mask would make the host wait
        return padded

    def _packed_states(self, packed: Packed) -> Tensor:
        """(L, d) hidden states of the packed tokens."""
        with layers.checkpointed(self.trunk) if self.checkpointing else nullcontext():
            return attention.run(self.trunk, packed.ids, packed.positions, packing=packed)[0]

    def padded_states(self, batch: TokenBatch) -> Tensor:
        """(B, T, d) hidden states of the prompt's last token, then of all response tokens except the last.

        For models that cannot be run packed. A pass over the padded prompts fills a KV cache; a second pass runs the
        responses on this cache.
        """
        assert batch.targets is not None
        extents, cache = extents_of(batch), DynamicCache(config=self.trunk.config)
        last_states, prompt_mask = self.read_prompts([extent.prompt for extent in extents], cache)
        count, width = max(extent.length for extent in extents) - 1, batch.mask.shape[1]
        if count <= 0:
            return torch.nn.functional.pad(last_states[:, None], (0, 0, 0, width - 1))
        lengths = send([extent.length for extent in extents], self.device)
        inputs, mask = batch.targets[:, :count], torch.arange(1, count + 1, device=self.device) < lengths[:, None]
        states = self.trunk(
            input_ids=torch.where(mask, inputs, 0),
            attention_mask=torch.cat([prompt_mask, mask], 1),
            position_ids=prompt_mask.sum(1)[:, None] + torch.arange(count, device=self.device),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        states = torch.cat([last_states[:, None], states], 1)
        return torch.nn.functional.pad(states, (0, 0, 0, width - states.shape[1]))

    def read_prompts(self, prompts: Sequence[Prompt], cache: DynamicCache) -> tuple[Tensor, Tensor]:
        """Run each distinct prompt through the model once, and fill ``cache`` with a row for each entry of ``prompts``.

        Returns the hidden states of the prompts' last tokens (B, d), and the mask of the prompts, padded on the left
        (B, L).
        """
        numbers: dict[Prompt, int] = {}
        prompt_B = send([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], self.device)
        ids, mask = pad_left([prompt.tokens for prompt in numbers], self.device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        states = self.trunk(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state[:, -1]
        cache.batch_select_indices(prompt_B)
        return states[prompt_B], mask[prompt_B]

    def score(
        self, batch: TokenBatch, temperature: float = 1.0, states_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(B, T) log-probabilities and entropies of the model's own tokens, 0 elsewhere. With gradients.

        ``states_N`` is ``hidden(batch)``, if the caller has already computed it.
        """
        assert batch.targets is not None
        places = own_tokens(batch)
        targets = batch.targets.flatten()[places]
        states_N = self.hidden(batch, places) if states_N is None else states_N
        logp_N, entropy_N = token_logp(states_N, targets, self.head(temperature))
        zeros = torch.zeros(batch.mask.numel(), dtype=logp_N.dtype, device=places.device)
        logp_BT, entropy_BT = (
            zeros.index_put((places,), values).view(batch.mask.shape) for values in (logp_N, entropy_N)
        )
        return logp_BT, entropy_BT

    def budget(self, micro_tokens: int | None = None) -> int:
        """The number of tokens per pass: ``micro_tokens``, or by default enough to keep the device busy.

        Once memory has run out, passes are smaller.
        """
        if micro_tokens is None:
            micro_tokens = busy_tokens(self.device, sum(parameter.numel() for parameter in self.trunk.parameters()))
        return min(micro_tokens, self.most_tokens or micro_tokens)

    def passes(self, batch: TokenBatch, rows: Sequence[int], micro_tokens: int | None = None) -> list[list[int]]:
        """Divide these rows of a batch into passes, and return the rows of each pass."""
        return pack(batch, rows, self.budget(micro_tokens))

    def save_memory(self) -> bool:
        """Turn gradient checkpointing on.

        Return False if it is already on or the model does not support it.
        """
        if self.checkpointing or not self.packed:  # a padded pass needs a KV cache, which excludes checkpointing
            return False
        self.checkpointing = layers.enable_checkpointing(self.trunk)
        return self.checkpointing

    def save(self, folder: Path) -> None:
        """Save model and tokenizer as an ordinary transformers folder."""
        for adapter in getattr(self.model, "peft_config", {}).values():
            if isinstance(adapter.target_modules, set):  # a set's order differs from process to process
                adapter.target_modules = sorted(adapter.target_modules)
        with progress_bars(False):
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    def _run_trials(self) -> None:
        """Raise ModelError if poise would compute this model wrongly.

        If packed passes give different states from separate passes, turn packed passes off.
        """
        name = type(self.base).__name__
        try:
            fits = load_checks.head_fits(self)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # third-party model code may raise anything
            raise ModelError(f"{name} cannot run on token ids alone ({first_line(error)})") from error
        if not fits:
            raise ModelError(
                f"{name} does something between trunk and head that poise does not know; please report the architecture"
            )
        if rotary := rope.varying(self.trunk):
            raise ModelError(
                f"{name}: its rotary embedding ({rotary}) changes with the longest sequence of a pass in a way that "
                "poise does not know; please report the architecture"
            )
        if self.packed and not load_checks.passes_agree(self):
            self.packed = False
            self.base.set_attn_implementation("sdpa")
        if not self.packed and not load_checks.passes_agree(self):
            raise ModelError(
                f"{name}: a response's log-probabilities depend on the other responses in its pass, "
                "as with recurrent layers; poise cannot train it yet"
            )


def busy_tokens(device: torch.device, parameters: int) -> int:
    """The tokens of a pass that keep the device busy: on CUDA up to 4 times more for a small model."""
    if device.type != "cuda":
        return BUSY_TOKENS
    return int(max(BUSY_TOKENS, min(4 * BUSY_TOKENS, BUSY_WORK / parameters)))


def pad_left(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(B, L) token ids padded on the left, so that all rows end together, and their mask."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, torch.arange(longest, device=device) >= longest - lengths[:, None]


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Show or hide transformers' progress bars inside the context."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    if not shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()
