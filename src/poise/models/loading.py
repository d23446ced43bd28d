"""Load a transformers model and its tokenizer: from the hub, a folder, a run, a checkpoint or a LoRA adapter. And
export one as an ordinary folder.

Only safetensors are read, and no code from a model's repository runs unless the caller allows it.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from poise._lib.errors import short
from poise._lib.files import TEMPORARY, read_json, remove
from poise.models import trials
from poise.models.places import EMBEDDED, ModelError, check_hub, first_line, locate
from poise.runs.folder import verify_model


def load_model(
    name: str, *, device: str = "auto", dtype: str = "auto", lora: Any = None, seed: int = 0, remote_code: bool = False
) -> tuple[Any, Any]:
    """The model, on its device and in evaluation mode, and its tokenizer. Settings are those of ``load_policy``."""
    source = locate(name)
    folder = Path(source)
    verify_model(folder)
    if (folder / "adapter_config.json").exists():
        return _load_adapted(folder, device=device, dtype=dtype, remote_code=remote_code)
    torch_device = resolve_device(device)
    default = torch.bfloat16 if torch_device.type == "cuda" else torch.float32
    tokenizer = _load_tokenizer(name, source, remote_code)
    model = _load_weights(name, source, default if dtype == "auto" else getattr(torch, dtype), remote_code)
    _check_vocabulary(name, model, tokenizer)
    if lora is not None:  # on the CPU, so that a seed gives the same adapter on every device
        model = add_adapter(model, lora, seed)
    model.to(torch_device)
    model.eval()  # no dropout: sampling and update must use the same probabilities
    return model, tokenizer


def resolve_device(device: str = "auto") -> torch.device:
    """The torch device of a setting; ``auto`` is CUDA if available, else the CPU."""
    has_cuda = torch.cuda.is_available()
    if device == "auto":
        return torch.device("cuda" if has_cuda else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ModelError(f"device {device!r}: must be auto, or a device of torch such as cpu, cuda or cuda:1") from None
    if found.type == "cuda" and not has_cuda:
        raise ModelError(f"device {device}: this torch sees no CUDA device; use device=cpu, or auto")
    if found.type == "cuda" and found.index is not None and found.index >= torch.cuda.device_count():
        raise ModelError(f"device {device}: this torch sees {torch.cuda.device_count()} CUDA devices, from cuda:0 on")
    if found.type not in ("cpu", "cuda"):
        _check_device(found)
    return found


def _check_device(device: torch.device) -> None:
    """Refuse a device that this torch cannot compute on."""
    try:
        torch.ones(1, device=device).item()  # a meta tensor has no value
    except Exception as error:  # an AssertionError, a RuntimeError, a NotImplementedError: each device has its own
        raise ModelError(
            f"device {device}: this torch cannot compute there ({first_line(error)}); use device=cpu, or auto"
        ) from None


def add_adapter(model: Any, lora: Any, seed: int) -> Any:
    """Wrap the model with a new LoRA adapter, initialised from ``seed``."""
    import peft

    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=lora.targets
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed every GPU's generator
        try:
            return peft.get_peft_model(model, settings)
        except ValueError as error:  # no layer has such a name, or it is of a kind that peft cannot adapt
            kinds = {path.rpartition(".")[2] for path, part in model.named_modules() if isinstance(part, nn.Linear)}
            named = short(lora.targets)
            raise ModelError(
                f"lora.targets = {named}: {first_line(error)} (linear layers of this model: {', '.join(sorted(kinds))})"
            ) from error


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


def _load_tokenizer(name: str, source: str, remote_code: bool) -> Any:
    import transformers

    if not Path(source).is_dir():
        check_hub(name)
    try:
        return transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=remote_code)
    except Exception as error:  # transformers raises many types here
        if Path(source).is_dir():
            raise ModelError(
                f"{name}: this folder has no tokenizer or no config.json that can be loaded ({first_line(error)}); "
                "save a tokenizer into it with tokenizer.save_pretrained(folder)"
            ) from error
        raise ModelError(
            f"{name}: neither a folder here nor a model that could be fetched ({first_line(error)})"
        ) from error


def _load_weights(name: str, source: str, dtype: torch.dtype, remote_code: bool) -> Any:
    import transformers

    common = {"trust_remote_code": remote_code}
    try:
        _check_attention(name, transformers.AutoConfig.from_pretrained(source, **common), remote_code)
        with progress_bars(sys.stderr.isatty()):
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, use_safetensors=True, output_loading_info=True, **common
            )
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # damaged or hostile files may raise anything
        raise ModelError(f"{name}: the model cannot be loaded ({first_line(error)})") from error
    _check_weights(name, model, report["missing_keys"])
    return model


def _check_vocabulary(name: str, model: Any, tokenizer: Any) -> None:
    """Refuse a tokenizer that makes tokens that the model does not have."""
    known, made = model.get_input_embeddings().weight.shape[0], tokenizer.vocab_size  # tokens added later not counted
    if made > known:
        raise ModelError(
            f"{name}: its tokenizer has {made} tokens, but the model only {known}: this is another model's tokenizer; "
            "put the right one into the folder, or call model.resize_token_embeddings(len(tokenizer)) and save it"
        )


def _check_attention(name: str, config: Any, remote_code: bool) -> None:
    """Refuse an attention implementation named by a repository: transformers would download and run it."""
    implementation = str(getattr(config, "_attn_implementation", None))
    if "/" in implementation and not remote_code:
        raise ModelError(
            f"{name}: its config.json asks for attention from {implementation}, which is third-party code: "
            "remove attn_implementation from it or, if you trust that code, set remote_code=true"
        )


def _check_weights(name: str, model: nn.Module, missing: Collection[str] = ()) -> None:
    if defect := trials.weights_defect(model, missing):
        raise ModelError(f"{name}: {defect}")


def _load_adapted(folder: Path, *, device: str, dtype: str, remote_code: bool) -> tuple[Any, Any]:
    """A LoRA adapter merged into its base model, and the base model's tokenizer."""
    import peft

    base = adapted_model(folder)
    assert base is not None
    try:
        model, tokenizer = load_model(base, device=device, dtype=dtype, remote_code=remote_code)
    except RecursionError:
        raise ModelError(f"{folder}: its base model is the adapter itself (base_model_name_or_path)") from None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # _check_weights refuses them below
            adapted = peft.PeftModel.from_pretrained(model, folder)
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            missing = peft.get_peft_model_state_dict(adapted).keys() - file.keys()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # peft raises many types here
        raise ModelError(f"{folder}: the adapter cannot be loaded ({first_line(error)})") from error
    _check_weights(str(folder), adapted, missing)
    merged = adapted.merge_and_unload()
    merged.requires_grad_(True)  # peft froze the base model
    return merged.eval(), tokenizer


def adapted_model(folder: Path) -> str | None:
    """The model that the adapter in a folder belongs to; None if the folder has no adapter."""
    if not (folder / "adapter_config.json").exists():
        return None
    base = _base_model(folder)
    # The adapter may have been saved on another machine, with its path there.
    return "embedded" if Path(base).name == EMBEDDED.name else base


def _base_model(folder: Path) -> str:
    """The base model that an adapter names. Refuses what peft would unpickle, or import from elsewhere."""
    if not (folder / "adapter_model.safetensors").is_file():
        raise ModelError(f"{folder}: this adapter has no adapter_model.safetensors, and nothing else is loaded")
    try:
        config = read_json(folder / "adapter_config.json")
        base = config["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str):
        raise ModelError(f"{folder / 'adapter_config.json'} names no model (base_model_name_or_path): restore it")
    if config.get("megatron_config"):  # peft would import the module that this names
        raise ModelError(f"{folder / 'adapter_config.json'} needs code of Megatron, which poise does not load")
    return base


def export(name: str, folder: Path, *, dtype: str = "auto", remote_code: bool = False) -> None:
    """Write the model of a run, a checkpoint or an adapter to a new folder. ``auto`` keeps the dtype of the base model.

    Adapters are merged in float32, and rounded once. The folder appears when it is complete.
    """
    source = locate(name)
    base = adapted_model(Path(source))
    target = _stored_dtype(source if base is None else locate(base)) if dtype == "auto" else getattr(torch, dtype)
    loaded = target if base is None else torch.float32
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


def _stored_dtype(source: str) -> torch.dtype:
    """The dtype that a model's config.json names."""
    import transformers

    if not Path(source).is_dir():
        check_hub(source)
    try:
        found = getattr(transformers.AutoConfig.from_pretrained(source), "dtype", None)
    except Exception:  # ``load_model`` says what is wrong with the model
        found = None
    return found if isinstance(found, torch.dtype) else torch.float32
