"""Load a transformers model and its tokenizer from the hub, a folder, a run, a checkpoint or a LoRA adapter, or copy a
model that Python holds. Export a model as an ordinary folder.

Only safetensors are read, and no code from a model's repository runs unless the caller allows it.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from poise._lib import live
from poise._lib.errors import short
from poise._lib.files import TEMPORARY, read_json, remove
from poise.models import load_checks
from poise.models.adapters import use_lean_forward
from poise.models.layers import compiling_pays
from poise.models.location import SHIPPED, ModelError, check_hub, first_line, locate, split_revision
from poise.models.policy import Policy, progress_bars
from poise.runs.checkpoint_files import verify_model

MOST_LAYERS = 10_000


def load_policy(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    lora: Any = None,
    seed: int = 0,
    remote_code: bool = False,
    compiled: bool | None = False,
    tokens: float = math.inf,
    longest: int | None = None,
    template: Mapping[str, Any] | None = None,
) -> Policy:
    """Load a model by hub id (``NAME@REVISION``), folder, run, checkpoint or adapter, or one of ``SHIPPED``.

    ``dtype="auto"`` is bfloat16 on CUDA, float32 elsewhere. ``lora`` has the fields rank, alpha and targets; ``seed``
    initialises the adapter without changing torch's global generator. ``remote_code`` lets the model's repository run
    code. ``compiled`` runs training through torch.compile; None compiles on CUDA if that saves time in training on
    ``tokens`` tokens. ``longest`` is the largest combined length of a prompt and its response: rotary embeddings that
    depend on the length are fixed for it (``poise.models.rope``). ``template`` has the chat template's arguments.
    """
    model, tokenizer = load_model(
        name, device=device, dtype=dtype, lora=lora, seed=seed, remote_code=remote_code, template=template
    )
    if compiled is None:
        compiled = compiling_pays(model, tokens)
    return Policy(model, tokenizer, compiled=compiled, longest=longest)


def load_model(
    name: str, *, device: str = "auto", dtype: str = "auto", lora: Any = None, seed: int = 0, remote_code: bool = False,
    template: Mapping[str, Any] | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Load the model, on its device and in evaluation mode, and its tokenizer. The settings are ``load_policy``'s."""
    source, common = _source(name, remote_code)
    folder = Path(source)
    verify_model(folder)
    if (folder / "adapter_config.json").exists():
        return _load_adapted(folder, device=device, dtype=dtype, remote_code=remote_code, template=template)
    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device)
    if live.is_name(name):
        model, tokenizer = live.get(name).copy(name, torch_dtype, template)
    else:
        tokenizer = _load_tokenizer(name, source, common, template)
        model = _load_weights(name, source, torch_dtype, common)
    _check_vocabulary(name, model, tokenizer)
    if lora is not None:  # on the CPU, so that a seed gives the same adapter on every device
        if torch_device.type == "cpu" and getattr(model, "is_quantized", False):
            raise ModelError(
                f"{name}: its weights are quantised, and bitsandbytes computes no gradients through them on a CPU: "
                "train it on CUDA, or train an unquantised copy of the model"
            )
        model = add_adapter(model, lora, seed)
    model.to(torch_device)
    model.eval()  # no dropout: sampling and update must use the same probabilities
    return model, tokenizer


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that the user has loaded, and its tokenizer. poise never changes either of them."""

    model: Any
    tokenizer: Any

    @classmethod
    def of(cls, model: Any, tokenizer: Any = None) -> LoadedModel:
        """Combine a model with its tokenizer.

        ``tokenizer`` is a tokenizer or its name; by default, it is loaded from where the model was loaded.
        """
        if not all(hasattr(model, name) for name in ("get_input_embeddings", "generate", "config")):
            raise TypeError(f"model: expected a hub id, a folder or a loaded transformers model, got {short(model)}")
        if hasattr(model, "peft_config") and not hasattr(model, "merge_and_unload"):
            raise ModelError(
                "model: transformers loaded it with an adapter, which only peft can merge: pass the adapter's folder, "
                "model=FOLDER, or load it with peft.AutoPeftModelForCausalLM"
            )
        if tokenizer is None or isinstance(tokenizer, str | os.PathLike):
            name = str(tokenizer or getattr(model, "name_or_path", ""))
            if not name:
                raise ModelError(
                    "model: its name_or_path is empty, so poise finds no tokenizer: pass its tokenizer too, tokenizer=…"
                )
            tokenizer, _ = load_tokenizer(name)
        if not hasattr(tokenizer, "get_vocab"):
            raise TypeError(f"tokenizer: expected a tokenizer of transformers, or its name, got {short(tokenizer)}")
        return cls(model, tokenizer)

    def copy(self, name: str, dtype: torch.dtype, template: Mapping[str, Any] | None) -> tuple[Any, Any]:
        """Return a copy of the model for training and its tokenizer, as if both were loaded from a folder.

        Adapters are merged.
        """
        load_checks.check_weights(name, self.model)
        model = copy.deepcopy(self.model)
        if hasattr(model, "peft_config"):
            model = model.merge_and_unload()
            model.requires_grad_(True)  # peft froze the base model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ModelError("model: none of its weights requires a gradient: call model.requires_grad_(True)")
        for parameter in model.parameters():  # not model.to(dtype), which would round the rotary frequencies too
            parameter.data = parameter.data.to(dtype)
        if getattr(model, "_supports_sdpa", False):
            model.set_attn_implementation("sdpa")
        model.name_or_path = ""  # LoRA adapters record it, and peft would look for it on the hub
        tokenizer = copy.deepcopy(self.tokenizer)
        if template:
            _set_arguments(name, tokenizer, template)
        return model, tokenizer

    def __fingerprint__(self) -> dict[str, str]:
        """A hash of the weights and a hash of the tokenizer."""
        weights, tokenizer = hashlib.sha256(), self.tokenizer
        with torch.no_grad():
            for name, value in sorted(self.model.state_dict().items()):
                weights.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
                weights.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy())
        backend = getattr(tokenizer, "backend_tokenizer", None)
        rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
        described = repr((rules, tokenizer.chat_template, sorted(tokenizer.special_tokens_map.items())))
        frozen = [name for name, parameter in self.model.named_parameters() if not parameter.requires_grad]
        weights.update(repr(frozen).encode())
        return {
            "weights": weights.hexdigest(),
            "tokenizer": hashlib.sha256(described.encode("utf-8", "surrogatepass")).hexdigest(),
        }


def resolve_device(device: str = "auto") -> torch.device:
    """The torch device of the setting ``device``; ``auto`` is CUDA if available, else the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return torch.device("cuda" if count else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ModelError(f"device {device!r}: must be auto, or a device of torch such as cpu, cuda or cuda:1") from None
    if resolved.type == "cuda" and (resolved.index or 0) >= count:
        raise ModelError(f"device {device}: this torch sees {count} CUDA devices; use one of them, cpu or auto")
    if resolved.type == "mps":
        raise ModelError(f"device {device}: poise has not been tried on Apple's GPUs; use device=cpu, or auto")
    if resolved.type not in ("cpu", "cuda"):
        try:
            torch.ones(1, device=resolved).item()  # a meta tensor has no value
        except Exception as error:  # each device has its own type
            wrong = f"this torch cannot compute there ({first_line(error).partition('. ')[0]})"
            raise ModelError(f"device {device}: {wrong}; use device=cpu, or auto") from None
    return resolved


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The torch dtype of the setting ``dtype``; ``auto`` is bfloat16 on CUDA, float32 elsewhere."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    kind: torch.dtype = getattr(torch, dtype)
    return kind


def add_adapter(model: Any, lora: Any, seed: int) -> Any:
    """Wrap the model with a new LoRA adapter, initialised from ``seed``.

    The adapter has the model's dtype. ``MasterWeights`` has float32 copies of all weights that are trained in half
    precision, adapters included. peft's float32 adapter would compute in float32, and keep float32 inputs for the
    backward pass.
    """
    import peft

    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=lora.targets
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed every GPU's generator
        try:
            adapted = peft.get_peft_model(model, settings)
        except ValueError as error:  # no layer has such a name, or peft cannot adapt such a layer
            kinds = {path.rpartition(".")[2] for path, part in model.named_modules() if isinstance(part, nn.Linear)}
            named = short(lora.targets)
            raise ModelError(
                f"lora.targets = {named}: {first_line(error)} (linear layers of this model: {', '.join(sorted(kinds))})"
            ) from error
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(model.dtype)
    use_lean_forward(adapted)
    return adapted


def load_tokenizer(
    name: str, *, remote_code: bool = False, template: Mapping[str, Any] | None = None
) -> tuple[Any, list[int]]:
    """Load the model's tokenizer without the model. Returns it with the tokens that end a response."""
    import transformers

    source, common = _source(name, remote_code)
    if (base := adapted_model(Path(source))) is not None:
        return load_tokenizer(base, remote_code=remote_code, template=template)
    tokenizer = _load_tokenizer(name, source, common, template)
    try:
        generation = transformers.GenerationConfig.from_pretrained(source, revision=common["revision"])
    except OSError:  # it has no generation_config.json
        generation = transformers.GenerationConfig.from_model_config(configuration(name, remote_code))
    ends = generation.eos_token_id
    end_tokens = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    return tokenizer, sorted(end_tokens)


def _source(name: str, remote_code: bool) -> tuple[str, dict[str, Any]]:
    """The model's folder or hub id, and the arguments of ``from_pretrained`` for all of its parts."""
    hub_id, revision = split_revision(name)
    return locate(hub_id), {"trust_remote_code": remote_code, "revision": revision or "main"}


def _load_tokenizer(name: str, source: str, common: dict[str, Any], template: Mapping[str, Any] | None) -> Any:
    import transformers

    if not Path(source).is_dir():
        check_hub(source, common["revision"])
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **common)
    except Exception as error:  # transformers raises many types here
        wrong = "neither a folder here nor a model that could be fetched"
        if Path(source).is_dir():
            wrong = "this folder has no tokenizer or config.json that loads; save them with save_pretrained"
        raise ModelError(f"{name}: {wrong} ({first_line(error)})") from error
    if template:
        _set_arguments(name, tokenizer, template)
    return tokenizer


def _set_arguments(name: str, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """Pass these arguments to the chat template in every prompt.

    Raises ModelError for unknown arguments, which the template would ignore.
    """
    text = tokenizer.chat_template
    written = str(text.values() if isinstance(text, dict) else text or "")
    for argument in arguments:
        if not re.search(rf"\b{re.escape(argument)}\b", written):
            has = "has no argument of that name" if text else "does not exist: the model has none"
            raise ModelError(f"template.{argument}: the chat template of {name} {has}; remove it")
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **arguments)


def _load_weights(name: str, source: str, dtype: torch.dtype, common: dict[str, Any]) -> Any:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(source, **common)
        check_config(name, config, common["trust_remote_code"])
        with progress_bars(sys.stderr.isatty()):
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, use_safetensors=True, output_loading_info=True, **common
            )
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # damaged or hostile files may raise anything
        raise ModelError(f"{name}: the model cannot be loaded ({first_line(error)})") from error
    load_checks.check_weights(name, model, report["missing_keys"])
    return model


def _check_vocabulary(name: str, model: Any, tokenizer: Any) -> None:
    """Raise ModelError if the tokenizer has more tokens than the model."""
    size, tokens = model.get_input_embeddings().weight.shape[0], tokenizer.vocab_size  # without tokens added later
    if tokens > size:
        raise ModelError(
            f"{name}: its tokenizer has {tokens} tokens, but the model only {size}: this is another model's tokenizer; "
            "put the right one into the folder, or call model.resize_token_embeddings(len(tokenizer)) and save it"
        )


def configuration(name: str, remote_code: bool = False) -> Any:
    """The configuration of a model; for an adapter, of its base model."""
    import transformers

    source, common = _source(name, remote_code)
    if live.is_name(source):
        return live.get(source).model.config
    if (base := adapted_model(Path(source))) is not None:
        return configuration(base, remote_code)
    if not Path(source).is_dir():
        check_hub(source, common["revision"])
    config = transformers.AutoConfig.from_pretrained(source, **common)
    check_config(name, config, remote_code)
    return config


def check_config(name: str, config: Any, remote_code: bool) -> None:
    """Raise ModelError for a config that asks for third-party attention code or for too many layers.

    transformers would run that code or try to build these layers.
    """
    if (layers := getattr(config.get_text_config(), "num_hidden_layers", 0)) > MOST_LAYERS:
        raise ModelError(f"{name}: its config.json asks for {layers:,} layers, more than {MOST_LAYERS:,}; correct it")
    implementation = str(getattr(config, "_attn_implementation", None))
    if "/" in implementation and not remote_code:
        raise ModelError(
            f"{name}: its config.json asks for attention from {implementation}, which is third-party code: "
            "remove attn_implementation from it or, if you trust that code, set remote_code=true"
        )


def _load_adapted(
    folder: Path, *, device: str, dtype: str, remote_code: bool, template: Mapping[str, Any] | None
) -> tuple[Any, Any]:
    """Merge a LoRA adapter into its base model. Returns the merged model and the base model's tokenizer."""
    import peft

    base = adapted_model(folder)
    assert base is not None
    try:
        model, tokenizer = load_model(base, device=device, dtype=dtype, remote_code=remote_code, template=template)
    except RecursionError:
        raise ModelError(f"{folder}: its base model is the adapter itself (base_model_name_or_path)") from None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # check_weights refuses them below
            # By default peft loads it on a GPU first, also for an export, and whatever else fills the GPU.
            adapted = peft.PeftModel.from_pretrained(model, folder, torch_device=str(model.device))
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            missing = peft.get_peft_model_state_dict(adapted).keys() - file.keys()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # peft raises many types here
        raise ModelError(f"{folder}: the adapter cannot be loaded ({first_line(error)})") from error
    load_checks.check_weights(str(folder), adapted, missing)
    merged = adapted.merge_and_unload()
    merged.requires_grad_(True)  # peft froze the base model
    return merged.eval(), tokenizer


def has_adapter(name: str) -> bool:
    """Whether the model is a LoRA adapter, which ``load_model`` merges into its base model."""
    if live.is_name(name):
        return hasattr(live.get(name).model, "peft_config")
    return adapted_model(Path(locate(split_revision(name)[0]))) is not None


def adapted_model(folder: Path) -> str | None:
    """The base model of the adapter in a folder; None if the folder has no adapter."""
    if not (folder / "adapter_config.json").exists():
        return None
    base = _base_model(folder)
    # The adapter may have been saved on another machine, with that machine's path.
    return next((name for name, shipped in SHIPPED.items() if shipped.name == Path(base).name), base)


def _base_model(folder: Path) -> str:
    """The base model that an adapter names.

    Raises ModelError if peft would unpickle a file or import code to load the adapter.
    """
    if not (folder / "adapter_model.safetensors").is_file():
        raise ModelError(f"{folder}: this adapter has no adapter_model.safetensors, and poise loads no other format")
    try:
        config = read_json(folder / "adapter_config.json")
        base = config["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        base = None
    if base is None and live.known(live.MODEL):  # a model passed from Python has no path
        base = live.MODEL
    if not isinstance(base, str):
        raise ModelError(
            f"{folder / 'adapter_config.json'} names no model (base_model_name_or_path): restore it; if the model was "
            "passed to poise.train, the result of that call has the trained model"
        )
    if config.get("megatron_config"):  # peft would import the module that this names
        raise ModelError(f"{folder / 'adapter_config.json'} needs code of Megatron, which poise does not load")
    return base


def export(name: str, folder: Path, *, dtype: str = "auto", remote_code: bool = False) -> None:
    """Write the model of a run, a checkpoint or an adapter to a new folder. ``auto`` keeps the dtype of the base model.

    Adapters are merged in float32 and rounded once. The folder appears only when it is complete.
    """
    target = _stored_dtype(name) if dtype == "auto" else getattr(torch, dtype)
    loaded = target if adapted_model(Path(locate(name))) is None else torch.float32
    model, tokenizer = load_model(name, device="cpu", dtype=str(loaded).removeprefix("torch."), remote_code=remote_code)
    model.to(target)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(TEMPORARY + folder.name)
    remove(temporary)
    try:
        with progress_bars(False):
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        if folder.exists():
            folder.rmdir()  # it is empty
        os.replace(temporary, folder)
    except Exception as error:
        # safetensors and tokenizers, written in Rust, raise their own error types for a full disk.
        if isinstance(error, SafetensorError) or "(os error " in str(error):
            raise OSError(f"{folder} could not be written: {first_line(error)}") from error
        raise
    finally:
        remove(temporary)


def _stored_dtype(name: str) -> torch.dtype:
    """The dtype in the config.json of a model, or of an adapter's base model."""
    try:
        dtype = getattr(configuration(name), "dtype", None)
    except Exception:  # ``load_model`` reports the cause
        dtype = None
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
