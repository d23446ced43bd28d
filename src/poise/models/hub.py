"""The Hugging Face hub: whether it can be asked for a model, and how one is put there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from poise._lib.errors import how_to_install
from poise.models.errors import ModelError, first_line

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
        raise ModelError(
            f"{name}: there is no such folder here, no such model in the hub's cache, and the hub cannot be asked "
            f"for it ({first_line(error)})"
        ) from error


class Repository:
    """A model repository on the hub, made if it is missing. It is private unless ``public``."""

    def __init__(self, name: str, *, public: bool = False) -> None:
        self.name, self._api = name, _api()
        self.address = str(self._try("create it", self._api.create_repo, name, private=not public, exist_ok=True))
        if not public and not self._try("look at it", self._api.repo_info, name).private:
            raise ModelError(f"{name} is on the hub already, and is public: add --public to put the model there")

    def upload(self, folder: Path, message: str) -> None:
        """Put all files of a folder there, in one commit."""
        about = {"repo_id": self.name, "folder_path": folder, "commit_message": message}
        self._try("upload to it", self._api.upload_folder, **about)

    def _try(self, what: str, call: Any, *args: Any, **settings: Any) -> Any:
        try:
            return call(*args, **settings)
        except Exception as error:  # the hub's own errors, those of its HTTP library, and wrong names
            raise ModelError(
                f"{self.name}: the hub did not let poise {what} ({first_line(error)}); write REPO as NAME/MODEL, "
                "and log in with `hf auth login`, or set HF_TOKEN to a token that may write"
            ) from error


def _api() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ModelError(f"the hub needs huggingface_hub; {how_to_install('hub')}") from error
    return HfApi()
