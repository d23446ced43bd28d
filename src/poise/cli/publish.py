"""``poise export`` and ``poise push``: write a trained model as an ordinary folder, here or on the hub."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer

from poise.cli.common import fail, home, user_errors

_Model = Annotated[str, typer.Argument(metavar="RUN", callback=home, help="A run folder, a checkpoint or an adapter.")]
_Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option("--dtype", help="dtype of the weights; auto: the dtype of the original model."),
]
_RemoteCode = Annotated[bool, typer.Option("--remote-code", help="Let the model's repository run its own Python code.")]


def export(
    run: _Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", callback=home, help="A new folder for the model.")],
    dtype: _Dtype = "auto",
    remote_code: _RemoteCode = False,
) -> None:
    """Write a trained model as an ordinary Hugging Face folder: adapters merged, safetensors, a model card.

    `AutoModelForCausalLM.from_pretrained(OUT)`, vLLM, TRL and others load the folder without poise.

    Examples:

    - `poise export runs/demo models/demo`
    - `poise export runs/lora models/merged --dtype bfloat16`
    """
    from poise._lib.errors import visible
    from poise.runs.lock import check_free

    with user_errors():
        check_free(out, "choose another folder")
        if out.name in ("", ".."):
            fail(f"{out}: name a new folder, which poise creates; to write here, run the command in the parent folder")
        _write(run, out, out.name, dtype, remote_code)
    print(visible(f"saved to {out}"))


def push(
    run: _Model,
    repo: Annotated[str, typer.Argument(metavar="NAME/MODEL", help="The repository on the hub; created if missing.")],
    public: Annotated[
        bool, typer.Option("--public", help="Make the repository public; by default it is private.")
    ] = False,
    dtype: _Dtype = "auto",
    remote_code: _RemoteCode = False,
) -> None:
    """Upload a trained model to the Hugging Face hub: the files that `poise export` writes, in a private repository.

    First log in with `hf auth login` or set HF_TOKEN.

    Examples:

    - `poise push runs/demo me/knights`
    - `poise push runs/demo me/knights --public`
    """
    from poise.models.location import Repository, locate

    with user_errors(), TemporaryDirectory(prefix="poise-push-") as place:
        locate(run)  # raises an error if there is no model, before the repository is created
        repository, folder = Repository(repo, public=public), Path(place) / "model"
        _write(run, folder, repo.rpartition("/")[2], dtype, remote_code)
        repository.upload(folder, "Model trained with poise")
    print(f"{'public' if public else 'private'}: {repository.address}")


def _write(run: str, folder: Path, title: str, dtype: str, remote_code: bool) -> None:
    """Write the model to a new folder, with a model card if the model comes from a run."""
    from poise.models.loading import export as save
    from poise.models.location import locate
    from poise.referee.report.card import card
    from poise.runs.folder import RunFolder, step_of
    from poise.training.config.run_settings import run_of

    origin, source = run_of(run), Path(locate(run)).resolve()  # source: the model's own folder
    text = card(RunFolder.open(origin, resume=False), title, step_of(source.parent)) if origin else None
    save(run, folder, dtype=dtype, remote_code=remote_code)
    if text is not None:
        (folder / "README.md").write_text(text, encoding="utf-8")
