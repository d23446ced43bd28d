"""A causal language model from transformers, as the trainer and the engines need it: a trunk, a head, a tokenizer."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from poise._lib.files import MANIFEST, expand, read_json
from poise.head import Head, token_logp
from poise.models import attention, memory, rope, trials
from poise.models.compilation import can_compile, compile_layers
from poise.models.loading import add_adapter, progress_bars
from poise.models.master_weights import Masters
from poise.models.packing import Packed, layout
from poise.models.prompts import encode, encode_next
from poise.models.tool_prompts import Tools
from poise.rollout.types import Rollouts
from poise.runs.folder import RunFolder, verify_model
from poise.tasks import Message

EMBEDDED = Path(__file__).parents[1] / "assets" / "kk-tiny"


class ModelError(ValueError):
    """A model that cannot be loaded or used, with what to do about it."""


class Policy:
    """A model and its tokenizer.

    ``trunk`` is everything below the head, so that hidden states can be had without the logits of every token. It is
    checked at load that ``head(trunk(x))`` is the model's own output. ``packed`` says whether responses can be run end
    to end without padding; that is tried at load too.
    """

    def __init__(self, model: Any, tokenizer: Any, *, compiled: bool = False, longest: int | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        trunk, output = getattr(base, base.base_model_prefix, None), base.get_output_embeddings()
        if not isinstance(trunk, nn.Module) or type(output) not in (nn.Linear, nn.Embedding):
            raise ModelError(
                f"{type(base).__name__}: poise needs a causal language model with a plain linear head"
                + ("; leave lm_head out of lora.targets" if hasattr(output, "lora_A") else "")
            )
        self.base: Any = base  # the model without adapters around it
        self.trunk: nn.Module = trunk
        self._output: nn.Module = output
        self._config = base.config
        self.checkpointing = False  # whether layers are computed again in the backward pass instead of being kept
        self.most_tokens: int | None = None  # fewer tokens per pass than asked for, once memory has run out
        self.masters: Masters | None = None  # of weights in half precision, while they are being trained
        self._texts: dict[int, str] = {}
        self.length_limit: int | None = None  # tokens in a sequence
        length_limit = rope.pin(trunk, longest)
        self.packed = attention.adopt(base)
        self._try()
        self.length_limit = length_limit
        if compiled and self.packed:
            compile_layers(self.trunk)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.trunk.device  # type: ignore[return-value]

    @property
    def eager(self) -> bool:
        """Whether attention is transformers' plain code, whose masks are numbers, not bool."""
        return str(self._config._attn_implementation) == "eager"

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that end a response."""
        ends = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        found = ends if isinstance(ends, list) else [ends]
        return sorted({int(e) for e in [*found, self.tokenizer.eos_token_id] if e is not None})

    def head(self, temperature: float = 1.0) -> Head:
        """The model's head with the temperature that sampling uses. Gradients reach its weight."""
        master = self.masters.of(self._output.weight) if self.masters else None  # type: ignore[arg-type]
        return Head.of(self._output, self._config, temperature, master)

    def encode(self, messages: str | Sequence[Message], tools: Tools = ()) -> list[int]:
        """Messages as the model wants to see them: through its chat template where it has one."""
        return encode(self.tokenizer, messages, self.end_tokens, tools)

    def encode_next(
        self, before: Sequence[Message], said: Sequence[Message], last: int | None, tools: Tools = ()
    ) -> list[int]:
        """What follows the model's reply, the last message of ``before``; ``last`` is the reply's last token."""
        return encode_next(self.tokenizer, before, said, last, self.end_tokens, tools)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a response, without the token that ended it."""
        ended = bool(len(tokens)) and tokens[-1] in self.end_tokens  # which need not be one that a tokenizer skips
        return str(self.tokenizer.decode(list(tokens[:-1] if ended else tokens), skip_special_tokens=True))

    def texts(self, tokens: Tensor) -> dict[int, str]:
        """The text of each token that occurs, by itself; part of a character shows as U+FFFD."""
        found = tokens.unique().tolist()
        for token in found:
            if token not in self._texts:
                self._texts[token] = str(self.tokenizer.decode([token]))
        return {token: self._texts[token] for token in found}

    def hidden(self, rollouts: Rollouts, tokens: Tensor | None = None) -> Tensor:
        """(n, d) hidden states that predict the given response tokens; all of them, row after row, by default.

        ``tokens`` (n,) are flat indices into (B, T). A prompt that several responses share is read once, with
        gradients.
        """
        self.check_length(max(len(p) + n for p, n in zip(rollouts.prompts, rollouts.lengths, strict=True)))
        if not self.packed:
            return self._states(rollouts).flatten(0, 1)[rollouts.index if tokens is None else tokens]
        packed = layout(rollouts)
        places = packed.places
        if tokens is not None or rollouts.has_holes:
            of_all = places.new_zeros(rollouts.tokens.numel()).index_copy_(0, rollouts.ran_index, places)
            places = of_all[rollouts.index if tokens is None else tokens]
        return attention.repeat(self._run(packed), places)

    def check_length(self, tokens: int) -> None:
        """Refuse sequences that are too long for the frequencies at which a rotary embedding was fixed."""
        if self.length_limit is not None and tokens > self.length_limit:
            raise ModelError(
                f"a prompt and its response may have {tokens} tokens together, but the rotary embedding of "
                f"{type(self.base).__name__} was fixed at load for {self.length_limit}: lower rollout.max_tokens, or "
                f"load the model with longest={tokens}"
            )

    def padded_hidden(self, rollouts: Rollouts) -> Tensor:
        """(B, T, d) the same with a place for every token, 0 outside the mask: for regulators that read them."""
        states = self.hidden(rollouts)
        places = torch.zeros(*rollouts.mask.shape, states.shape[-1], dtype=states.dtype, device=states.device)
        places.view(-1, states.shape[-1])[rollouts.index] = states  # by index: a mask would make the host wait
        return places

    def _run(self, packed: Packed) -> Tensor:
        """(L, d) hidden states of the packed tokens."""
        # A mask of four dimensions is one that transformers takes as it is: none of L × L is made.
        mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.device)
        with memory.checkpointed(self.trunk, self.checkpointing):
            states: Tensor = self.trunk(
                input_ids=packed.ids,
                position_ids=packed.positions,
                attention_mask=mask,
                use_cache=False,
                packing=packed,
            ).last_hidden_state[0]
        return states

    def _states(self, rollouts: Rollouts) -> Tensor:
        """(B, T, d) hidden states: that of the prompt's last token, then those of all response tokens but the last.

        The padded form, for models that cannot be run packed: prompts, then responses on top of their cached keys.
        """
        numbers: dict[tuple[int, ...], int] = {}
        prompt_of = [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in rollouts.prompts]
        ids, seen = pad_left(list(numbers), self.device)
        position = (seen.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.trunk.config)
        start = self.trunk(
            input_ids=ids, attention_mask=seen, position_ids=position, past_key_values=cache, use_cache=True
        ).last_hidden_state[:, -1:]
        index = torch.tensor(prompt_of, device=self.device)
        count, width = max(rollouts.lengths) - 1, rollouts.mask.shape[1]
        if count <= 0:
            return torch.nn.functional.pad(start[index], (0, 0, 0, width - 1))
        cache.batch_select_indices(index)
        inputs, inside = rollouts.tokens[:, :count], rollouts.ran[:, 1 : count + 1]
        states = self.trunk(
            input_ids=torch.where(inside, inputs, 0),
            attention_mask=torch.cat([seen[index], inside], 1),
            position_ids=seen.sum(1)[index][:, None] + torch.arange(count, device=self.device),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        states = torch.cat([start[index], states], 1)
        return torch.nn.functional.pad(states, (0, 0, 0, width - states.shape[1]))

    def score(self, rollouts: Rollouts, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """(B, T) log-probabilities of the response tokens, and entropies; 0 elsewhere."""
        index = rollouts.index
        targets = rollouts.tokens.flatten()[index]
        found = token_logp(self.hidden(rollouts), targets, self.head(temperature))
        empty = torch.zeros(rollouts.tokens.numel(), dtype=found[0].dtype, device=index.device)
        logp, entropy = (empty.index_put((index,), values).view(rollouts.tokens.shape) for values in found)
        return logp, entropy

    def budget(self, tokens: int) -> int:
        """Tokens per pass, where ``tokens`` were asked for."""
        return min(tokens, self.most_tokens or tokens)

    def save_memory(self) -> bool:
        """Keep less of each layer for the backward pass from now on; False where that is done, or cannot be."""
        if self.checkpointing or not self.packed:  # the padded form needs a cache
            return False
        self.checkpointing = memory.enable_checkpointing(self.trunk)
        return self.checkpointing

    def save(self, folder: Path) -> None:
        """Write an ordinary transformers folder."""
        with progress_bars(False):
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    def _try(self) -> None:
        """Refuse what would be computed wrongly, and find out whether packed passes are right."""
        name = type(self.base).__name__
        try:
            fits = trials.head_fits(self)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of any kind: it is somebody else's model
            raise ModelError(f"{name} cannot read a text by its token ids alone ({first_line(error)})") from error
        if not fits:
            raise ModelError(
                f"{name} does something between trunk and head that poise does not know; please report the architecture"
            )
        if rotary := rope.varying(self.trunk):
            raise ModelError(
                f"{name}: its rotary embedding ({rotary}) changes with the longest sequence of a pass in a way that "
                "poise does not know; please report the architecture"
            )
        if self.packed and not trials.passes_agree(self):
            self.packed = False
            self.base.set_attn_implementation("sdpa")
        if not self.packed and not trials.passes_agree(self):
            raise ModelError(
                f"{name}: responses to the same prompt, read together, do not get what each gets by itself, "
                "as with recurrent layers; poise cannot train it yet"
            )


def pad_left(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(B, L) token ids, and bool where there is one: padding stands on the left, so that all rows end together."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, torch.arange(longest, device=device) >= longest - lengths[:, None]


def resolve_device(device: str = "auto") -> torch.device:
    """The device a setting means: CUDA where there is one."""
    found = torch.cuda.is_available()
    if device == "auto":
        return torch.device("cuda" if found else "cpu")
    if device.startswith("cuda") and not found:
        raise ModelError(f"device {device}: this torch sees no CUDA device; use device=cpu, or auto")
    try:
        return torch.device(device)
    except RuntimeError:
        raise ModelError(f"device {device!r}: must be auto, or a device of torch such as cpu, cuda or cuda:1") from None


def _runs_beside(folder: Path) -> list[str]:
    """Names of runs in the folder that this would be in: then it is a mistyped run, and no model to ask the hub for."""
    return sorted(run.parent.name for run in folder.parent.glob("*/metrics.jsonl")) if folder.parent != Path() else []


def load_policy(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    lora: Any = None,
    seed: int = 0,
    remote_code: bool = False,
    compiled: bool | None = False,
    longest: int | None = None,
) -> Policy:
    """A model by hub id or local folder, or ``"embedded"``: safetensors only, remote code off unless asked for.

    ``dtype="auto"`` is bfloat16 on CUDA, float32 elsewhere. ``lora`` has the fields rank, alpha and targets; its
    adapter is drawn from ``seed``, and torch's global generator stays as it is. ``compiled`` puts the layers through
    torch.compile for training; None: where that pays. ``longest`` is the most tokens that a prompt and its response
    will have: it matters to rotary embeddings that change with length (``poise.models.rope``).
    """
    import transformers

    place = _resolve(name)
    folder = Path(place)
    verify_model(folder)
    if (folder / "adapter_config.json").exists():
        return _load_adapter(
            folder, device=device, dtype=dtype, remote_code=remote_code, compiled=compiled, longest=longest
        )
    runs = [] if folder.exists() else _runs_beside(folder)
    if not folder.exists() and (name.startswith(("/", ".", "~")) or runs):
        beside = f"; runs there: {', '.join(runs)}" if runs else ""
        raise ModelError(f"{name}: there is no such folder{beside}")
    if folder.is_dir() and not (folder / "config.json").exists():
        raise ModelError(f"{name}: this folder has no config.json, so it is not a transformers model")
    where = resolve_device(device)
    kind = getattr(torch, dtype) if dtype != "auto" else torch.bfloat16 if where.type == "cuda" else torch.float32
    common = {"trust_remote_code": remote_code}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **common)
    except Exception as error:  # transformers raises what it trips over
        if folder.is_dir():
            raise ModelError(
                f"{name}: this folder has no tokenizer or no config.json that can be loaded ({first_line(error)}); "
                "save a tokenizer into it with tokenizer.save_pretrained(folder)"
            ) from error
        raise ModelError(
            f"{name}: neither a folder here nor a model that could be fetched ({first_line(error)})"
        ) from error
    try:
        _check_attention(name, transformers.AutoConfig.from_pretrained(place, **common), remote_code)
        with progress_bars(sys.stderr.isatty()):
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                place, dtype=kind, use_safetensors=True, output_loading_info=True, **common
            )
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of any kind: the files may be damaged, or made to do harm
        raise ModelError(f"{name}: the model cannot be loaded ({first_line(error)})") from error
    _check_weights(name, model, report["missing_keys"])
    if lora is not None:  # before it goes to its device, so that the same seed means the same adapter on each
        model = add_adapter(model, lora, seed)
    model.to(where)
    model.eval()  # no dropout: the probabilities of sampling and of the update must be of one policy
    return Policy(model, tokenizer, compiled=can_compile(where) if compiled is None else compiled, longest=longest)


def _check_attention(name: str, config: Any, remote_code: bool) -> None:
    """Refuse attention by the name of a repository: transformers would fetch it there, and run it."""
    asked = str(getattr(config, "_attn_implementation", None))
    if "/" in asked and not remote_code:
        raise ModelError(
            f"{name}: its config.json asks for attention from {asked}, which is code of somebody else's: take "
            "attn_implementation out of it, or, if you trust that code, set remote_code=true"
        )


def _check_weights(name: str, model: nn.Module, missing: Collection[str] = ()) -> None:
    if said := trials.weights_defect(model, missing):
        raise ModelError(f"{name}: {said}")


def _resolve(name: str) -> str:
    """The folder behind "embedded", behind a checkpoint, or behind a run: the model of its newest checkpoint."""
    if name == "embedded":
        return str(EMBEDDED)
    folder = expand(name) if name.startswith("~") else Path(name)
    if (folder / "checkpoints").is_dir() or (folder / "metrics.jsonl").exists() or (folder / "before.json").exists():
        return str(RunFolder.open(folder, resume=False).newest() / "model")
    if (folder / MANIFEST).exists() and (folder / "model").is_dir():  # a checkpoint
        return str(folder / "model")
    return str(folder) if name.startswith("~") else name


def _load_adapter(folder: Path, **settings: Any) -> Policy:
    """A LoRA adapter merged into the model it was trained on."""
    import peft

    base = _adapted(folder)
    if Path(base).name == EMBEDDED.name:  # saved with its path on another machine, perhaps
        base = "embedded"
    compiled = settings.pop("compiled")
    try:
        policy = load_policy(base, **settings)
    except RecursionError:
        raise ModelError(f"{folder}: this adapter is one on top of itself (base_model_name_or_path)") from None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # that is refused below
            adapted = peft.PeftModel.from_pretrained(policy.model, folder)
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            missing = peft.get_peft_model_state_dict(adapted).keys() - file.keys()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # peft raises what it trips over
        raise ModelError(f"{folder}: the adapter cannot be loaded ({first_line(error)})") from error
    _check_weights(str(folder), adapted, missing)
    merged = adapted.merge_and_unload()
    merged.requires_grad_(True)  # peft had frozen the model under the adapter
    wanted = can_compile(policy.device) if compiled is None else compiled
    return Policy(merged.eval(), policy.tokenizer, compiled=wanted, longest=settings["longest"])


def _adapted(folder: Path) -> str:
    """The model that an adapter was trained on. Its weights must be safetensors: peft would unpickle others."""
    if not (folder / "adapter_model.safetensors").is_file():
        raise ModelError(f"{folder}: this adapter has no adapter_model.safetensors, and nothing else is loaded")
    try:
        found = read_json(folder / "adapter_config.json")
        base = found["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str):
        raise ModelError(f"{folder / 'adapter_config.json'} names no model (base_model_name_or_path): put back a copy")
    if found.get("megatron_config"):  # peft imports the module that stands beside it
        raise ModelError(f"{folder / 'adapter_config.json'} asks for code of Megatron's, which poise does not load")
    return base


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
