"""Whether the hub can be asked for a model at all."""

from __future__ import annotations

from poise.models.errors import ModelError

PATIENCE = 10.0  # seconds


def check_hub(name: str) -> None:
    """Refuse a name that is not in the cache if the hub cannot be reached: transformers would retry for a minute."""
    from huggingface_hub import constants, get_session, try_to_load_from_cache

    address = f"{constants.ENDPOINT}/{name}/resolve/main/config.json"
    try:
        if constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        get_session().head(address, timeout=PATIENCE)  # any answer will do: transformers explains what it means
    except Exception as error:  # not a hub id, no network, no such host
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{name}: there is no such folder here, no such model in the hub's cache, and the hub cannot be asked "
            f"for it ({why})"
        ) from error
