"""``poise doctor verl``: checks whether verl has loaded poise, and shows the plugin errors that verl hides."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from poise._lib.errors import how_to_install
from poise.integrations.demands import CannotRegulateError, probe
from poise.integrations.verl_checks import LOSS, TESTED, TRAINER, check_config, check_verl
from poise.regulators import parse

# Our entry points in the group verl.plugins: the kind of object, its name, and the verl table that should contain it.
PLUGINS = {
    "poise": ("policy loss", LOSS, "verl.trainer.ppo.core_algos", "POLICY_LOSS_REGISTRY"),
    "poise_trainer": ("trainer", TRAINER, "verl.trainer.ppo.v1.trainer_base", "TRAINER_REGISTRY"),
}
PACKAGES = ("poise-rl", "verl", "torch", "transformers", "ray", "tensordict", "TransferQueue")
Say = Callable[[str], None]


def verl(say: Say, overrides: Sequence[str] = (), config_path: Path | None = None, name: str = "ppo_trainer") -> bool:
    """Report versions and whether verl has loaded poise. With settings, also check the settings."""
    for package in PACKAGES:
        say(f"{package:14s} {_version(package)}")
    try:
        check_verl()
    except (ImportError, CannotRegulateError) as error:
        say(f"NOT LIVE: {error}")
        return False
    live = [_is_live(plugin, say) for plugin in PLUGINS]
    if all(live) and (overrides or config_path):
        return _check_settings(say, overrides, config_path, name)
    return all(live)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _is_live(plugin: str, say: Say) -> bool:
    """Whether verl has loaded the plugin; if not, report the error that verl hid."""
    kind, name, module, registry = PLUGINS[plugin]
    what = f"{kind} {name!r}"
    try:
        target = getattr(import_module(module), registry).get(name)
    except (ImportError, AttributeError) as error:
        say(f"NOT LIVE: {plugin}: verl itself cannot be imported ({error}); install what is missing")
        return False
    if target is not None:
        say(f"live: {what} ({target.__module__})")
        return True
    say(f"NOT LIVE: {what} is not known to verl")
    known = [point for point in metadata.entry_points(group="verl.plugins") if point.name == plugin]
    policy = os.getenv("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if not known:
        say(f"  poise's entry points are not installed: {how_to_install('verl')}")
    elif policy.strip().lower() != "auto" and plugin not in policy.lower().split(","):
        say(f"  VERL_USE_EXTERNAL_PLUGINS={policy} excludes the plugin: unset it, or add {plugin}")
    else:
        try:
            known[0].load()
            say(f"  the plugin loads now, but did not load with verl: do your workers import verl {TESTED}?")
        except Exception as error:
            say(f"  importing {known[0].value} fails: {type(error).__name__}: {error}")
    return False


def _check_settings(say: Say, overrides: Sequence[str], config_path: Path | None, name: str) -> bool:
    """Build verl's configuration with these settings, and run the checks of a training run."""
    from hydra import compose, initialize_config_dir, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    search_path = (
        initialize_config_module("verl.trainer.config", version_base=None)
        if config_path is None
        else initialize_config_dir(str(config_path.resolve()), version_base=None)
    )
    try:
        with search_path:
            config = compose(name, overrides=list(overrides))
        return _check_config(say, config)
    except (ValueError, TypeError, AssertionError, HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__  # of hydra's error about an object that it could not build
        say(f"REFUSED: {cause if isinstance(cause, CannotRegulateError) else error}")
        return False


def _check_config(say: Say, config: Any) -> bool:
    """Report the regulator of this configuration. Raise an error if a check rejects the configuration."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    from poise.integrations.verl_trainer import RegulatorMixin

    loss = omega_conf_to_dataclass(config.actor_rollout_ref.actor).policy_loss
    mode = config.trainer.v1.trainer_mode
    text = (config.trainer.v1.get(mode) or {}).get("regulator")
    known = mode in TRAINER_REGISTRY
    ours = known and issubclass(TRAINER_REGISTRY[mode], RegulatorMixin)
    if text and (ours or not known):
        regulator = parse(str(text))
        check_config(config, regulator, wants := probe(regulator), str(text))
        say(f"these settings train with {text}, by the trainer {mode}, in {len(wants.phases)} phase(s)")
        if not known:
            say(f"  provided that {mode} uses RegulatorMixin: it is not registered here, so the doctor cannot tell")
    elif loss.loss_mode == LOSS and not ours:
        say(f"these settings train with {loss.regulator}, by the loss {loss.base_loss}")
    else:
        say(
            f"REFUSED: these settings train without a regulator: trainer_mode is {mode!r} and loss_mode "
            f"{loss.loss_mode!r}. Set trainer.v1.trainer_mode={TRAINER} and trainer.v1.{TRAINER}.regulator, or "
            "policy_loss as docs/verl.md shows"
        )
        return False
    validate_config(config, need_reference_policy(config), need_critic(config))  # verl's own first check
    return True
