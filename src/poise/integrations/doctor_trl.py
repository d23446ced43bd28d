"""`poise doctor trl`: which TRL is installed, and which regulators these settings can train."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from poise._lib.errors import short
from poise.config.documents import parse as parse_yaml
from poise.integrations.demands import probe
from poise.regulators import TABLE, parse

PACKAGES = ("poise", "trl", "torch", "transformers", "accelerate", "datasets", "peft", "vllm")
# Settings that change the loss. The doctor's trial update keeps these, and is small in all other respects.
LOSS_SETTINGS = (
    "beta", "loss_type", "epsilon", "epsilon_high", "delta", "importance_sampling_level", "scale_rewards",
    "entropy_coef", "use_adaptive_entropy", "top_entropy_quantile", "off_policy_mask_threshold", "num_iterations",
)  # fmt: skip
# What a setting may be, by its annotation in GRPOConfig. TRL takes others than it declares where it declares text.
PLAIN_TYPES = {int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}
Say = Callable[[str], None]


def trl(say: Say, overrides: Sequence[str] = (), config: Path | None = None) -> bool:
    """Report versions, and whether these settings can train the regulator they name, or else every regulator."""
    for package in PACKAGES:
        say(f"{package:14s} {version(package)}")
    try:
        from poise.integrations.trl import RegulatedGRPOTrainer
        from poise.integrations.trl_checks import check_trl

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_trl(RegulatedGRPOTrainer)
        for warning in caught:
            say(f"UNTESTED: {warning.message}")
        if not caught:
            say(f"live: TRL {version('trl')} is in the tested range")
        settings = _read_settings(overrides, config, say)
        text = settings.pop("regulator", None)
        args = _grpo_config(settings)
        _check_vllm(args)
    except (ImportError, ValueError, TypeError, OSError, RuntimeError) as error:
        say(f"NOT LIVE: {error}" if isinstance(error, ImportError) else f"REFUSED: {error}")
        return False
    return _every_regulator(say, args, settings) if text is None else _one_regulator(say, str(text), args, settings)


def version(package: str) -> str:
    """The installed version of a package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _read_settings(overrides: Sequence[str], config: Path | None, say: Say) -> dict[str, Any]:
    """The settings for GRPOConfig, and ``regulator``: those of a file for TRL's parser, changed by KEY=VALUE."""
    from trl import GRPOConfig

    known = {"regulator", *(field.name for field in fields(GRPOConfig))}
    settings = parse_yaml(config.read_text()) if config else {}
    if not isinstance(settings, dict):
        raise ValueError(f"{config}: write settings as lines of the form key: value")
    if unknown := sorted(settings.keys() - known):
        say(f"ignored, since GRPOConfig does not have them: {', '.join(unknown)}")
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{short(word)}: write KEY=VALUE")
        if key not in known:
            near = ", ".join(get_close_matches(key, known, n=3, cutoff=0.5))
            raise ValueError(f"GRPOConfig has no setting {short(key)}" + (f"; did you mean {near}?" if near else ""))
        settings[key] = value if key == "regulator" else parse_yaml(value)
    types = get_type_hints(GRPOConfig)
    return {key: _checked(key, value, types.get(key)) for key, value in settings.items() if key in known}


def _checked(key: str, value: Any, annotation: Any) -> Any:
    """The value as TRL's parser would convert it. GRPOConfig itself takes any value, and fails in the middle of a step.

    Raises:
        ValueError: the value is of another type.
    """
    types = get_args(annotation) or (annotation,)
    if not PLAIN_TYPES.keys() >= set(types):
        return value
    try:
        if isinstance(value, bool) and bool not in types:
            raise ValueError  # Python counts true as 1
        return TypeAdapter(annotation).validate_python(value)
    except (ValidationError, ValueError):
        allowed = " or ".join(PLAIN_TYPES[kind] for kind in types)
        raise ValueError(f"{key} = {short(value)}: GRPOConfig wants {allowed}") from None


def _grpo_config(settings: dict[str, Any]) -> Any:
    """TRL's GRPOConfig, which refuses invalid settings. GPUs and the number of processes play no part here."""
    from trl import GRPOConfig

    whole = settings.get("num_generations", GRPOConfig.num_generations)
    size = {} if "generation_batch_size" in settings else {"per_device_train_batch_size": whole}
    return GRPOConfig(**{"output_dir": "runs/doctor", "report_to": "none"} | settings | size | {"use_cpu": True})


def _check_vllm(args: Any) -> None:
    """Raise unless TRL supports the installed vLLM."""
    if not args.use_vllm:
        return
    from packaging.requirements import Requirement

    (needed,) = [need for need in map(Requirement, metadata.requires("trl") or []) if need.name == "vllm"][:1]
    if (found := version("vllm")) == "not installed" or not needed.specifier.contains(found, prereleases=True):
        raise ValueError(
            f"use_vllm=True needs vLLM {needed.specifier}, and vLLM is {found}; run pip install 'trl[vllm]'"
        )


def _check(text: str, args: Any) -> int:
    """Raise if these settings cannot train the regulator; return its number of phases."""
    from poise.integrations.trl_checks import check_config, check_needs

    regulator = parse(text)
    wants = probe(regulator)
    check_config(args, wants, text)
    check_needs(args, regulator, text)
    return len(wants.phases)


def _every_regulator(say: Say, args: Any, settings: dict[str, Any]) -> bool:
    """Report for every regulator, with its default settings, whether these settings can train it."""
    say("with these settings:")
    for name in TABLE:
        try:
            _check(name, args)
            say(f"  {name:13s} can be trained")
        except ValueError as error:
            say(f"  {name:13s} REFUSED: {error}")
    say("for one of them: poise doctor trl regulator=NAME KEY=VALUE ...")
    return _report_trial(say, "constant(weight=0.5)", settings)


def _one_regulator(say: Say, text: str, args: Any, settings: dict[str, Any]) -> bool:
    try:
        count = _check(text, args)
    except (ValueError, TypeError) as error:
        say(f"REFUSED: {error}")
        return False
    say(f"these settings train with {text}, in {count} phase(s)")
    return _report_trial(say, text, settings, count)


def _report_trial(say: Say, text: str, settings: dict[str, Any], steps: int = 1) -> bool:
    try:
        _trial(text, settings, steps)
    except Exception as error:  # any error here would also stop the real run
        say(f"REFUSED: {error}" if isinstance(error, ValueError) else f"REFUSED: {type(error).__name__}: {error}")
        return False
    say(f"tried {text} on the embedded model: TRL's loss with these settings weights tokens, and the model moved")
    return True


def _trial(text: str, settings: dict[str, Any], steps: int) -> None:
    """Train the embedded model for one generation batch with the loss of these settings."""
    import torch
    import transformers
    from datasets import Dataset
    from huggingface_hub import constants

    from poise.integrations.trl import RegulatedGRPOTrainer
    from poise.models.policy import EMBEDDED

    constants.HF_HUB_DISABLE_TELEMETRY = True  # TRL reports every trainer it creates; do not report this one
    small = {
        "generation_batch_size": 4, "per_device_train_batch_size": 4, "num_generations": 2,
        "gradient_accumulation_steps": 1, "max_steps": steps, "max_completion_length": 8, "temperature": 2.0,
        "learning_rate": 1e-3, "bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False,
        "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    kept = {key: value for key, value in settings.items() if key in LOSS_SETTINGS}
    with tempfile.TemporaryDirectory() as folder:
        trainer = RegulatedGRPOTrainer(
            model=str(EMBEDDED),
            reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
            args=_grpo_config(small | kept | {"output_dir": folder}),
            train_dataset=Dataset.from_dict({"prompt": ["Ada says that Bo is a knave."] * 4}),
            regulator=text,
            correct=lambda rewards: rewards[:, 0] == 1,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        before = torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])
        trainer.train()
        after = torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])
    if torch.equal(before, after):
        raise ValueError(f"one generation batch with {text} did not move the model: its weights left no token")
