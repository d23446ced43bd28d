"""``poise export`` and ``poise push``, the latter against a stand-in for the hub."""

import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors import SafetensorError

from poise.models.loading import load_policy
from support.command_line import SMALL, fails, poise


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A run with an adapter, and weights that have moved."""
    run = tmp_path_factory.mktemp("runs") / "adapted"
    poise("train", "tiny", *SMALL, f"run={run}", "lora.rank=2", "optim.lr=1e-2", "objective.entropy_coef=0.1")
    return run


def test_an_exported_model_loads_without_poise(adapted, tmp_path):
    out = tmp_path / "models" / "merged"
    assert f"saved to {out}" in poise("export", adapted, out, "--dtype", "float32").output.replace("\n", "")
    assert {path.name for path in out.iterdir()} >= {"model.safetensors", "tokenizer.json", "config.json", "README.md"}
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = tokenizer("Ada is a knight", return_tensors="pt")["input_ids"]
    ours = load_policy(str(adapted), device="cpu").model(input_ids=ids).logits
    torch.testing.assert_close(model(input_ids=ids).logits, ours)
    before = load_policy("embedded", device="cpu")
    assert not torch.allclose(model(input_ids=ids).logits, before.model(input_ids=ids).logits)
    assert tokenizer.chat_template == before.tokenizer.chat_template
    assert "is not empty; choose another folder" in fails("export", adapted, out)


@pytest.mark.parametrize("name", ["before.json", "summary.json"])
def test_a_damaged_file_of_the_run_is_named(adapted, tmp_path, name):
    run = shutil.copytree(adapted, tmp_path / "run")
    (run / name).write_text('{"accuracy')
    assert f"{name} cannot be read as JSON: put the file back from a copy" in fails("export", run, tmp_path / "out")


def test_the_folder_needs_a_name(adapted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "name a new folder, which poise creates" in fails("export", adapted, ".")


def test_the_dtype_is_that_of_the_model_it_was_trained_from(adapted, tmp_path):
    stored = transformers.AutoConfig.from_pretrained(load_policy("embedded", device="cpu").model.name_or_path).dtype
    for dtype, expected in (("auto", stored), ("float16", torch.float16)):
        poise("export", adapted, tmp_path / dtype, "--dtype", dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / dtype, dtype="auto")
        assert model.dtype == expected


def test_the_card_has_the_numbers_and_no_paths(adapted, tmp_path):
    poise("export", adapted, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    for part in ("| task | kk |", "| LoRA | rank 2, merged |", "| steps | 1 of 1 |", "| greedy | ", "## Held-out"):
        assert part in card
    assert str(adapted.parent) not in card
    poise("export", "embedded", tmp_path / "plain")  # no run made it, so there are no numbers
    assert not (tmp_path / "plain" / "README.md").exists()


def test_the_card_of_the_demo_names_its_model_and_repeats_nothing(tmp_path):
    few = ["steps=1", "prompts=2", "group=2", "evaluation.problems=2", "rollout.max_tokens=8"]
    poise("train", "demo", *few, f"run={tmp_path / 'run'}")
    poise("export", tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| started from | poise's model embedded-plain |" in card
    assert "2 problems, greedily, with 95 % intervals:" in card
    assert "| greedy | " in card
    assert "@1" not in card


def test_the_card_of_another_step_does_not_have_the_numbers_of_the_last(trained, tmp_path):
    poise("export", trained / "checkpoints" / "step-000001", tmp_path / "first")
    poise("export", trained / "checkpoints" / "step-000002" / "model", tmp_path / "second")
    first, second = ((tmp_path / name / "README.md").read_text() for name in ("first", "second"))
    assert "| steps | 1 of 2 |" in first
    assert "Not measured" in first
    assert "| steps | 2 of 2 |" in second
    assert "| greedy | " in second


def test_a_full_disk_leaves_nothing(adapted, tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full)
    assert "could not be written: Error while serializing" in " ".join(fails("export", adapted, tmp_path / "x").split())
    assert list(tmp_path.iterdir()) == []


class Hub:
    """A stand-in for ``HfApi``."""

    def __init__(self, public=False):
        self.public, self.made, self.files = public, [], {}

    def create_repo(self, name, *, private, exist_ok):
        assert exist_ok
        self.made.append((name, private))
        self.public = self.public or not private
        return f"https://hub/{name}"

    def repo_info(self, _):
        return SimpleNamespace(private=not self.public)

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        assert commit_message
        self.files = {path.name: path.read_bytes() for path in folder_path.iterdir()}
        assert repo_id == self.made[-1][0]


@pytest.fixture
def hub(monkeypatch):
    stand_in = Hub()
    monkeypatch.setattr("poise.models.location._api", lambda: stand_in)
    return stand_in


@pytest.mark.parametrize("public", [False, True])
def test_a_pushed_model_is_private_unless_asked(adapted, hub, public):
    shown = poise("push", adapted, "me/knights", *(["--public"] if public else [])).output
    assert hub.made == [("me/knights", not public)]
    assert hub.files.keys() >= {"model.safetensors", "config.json", "tokenizer.json", "README.md"}
    assert b"# knights" in hub.files["README.md"]
    assert shown == f"{'public' if public else 'private'}: https://hub/me/knights\n"


def test_a_public_repository_is_not_filled_by_mistake(adapted, hub):
    hub.public = True
    assert "is public: add --public" in " ".join(fails("push", adapted, "me/knights").split())
    assert not hub.files


def test_what_the_hub_refuses_is_explained(adapted, hub, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("401 Unauthorized\nlong text")

    monkeypatch.setattr(hub, "create_repo", refuse)
    said = " ".join(fails("push", adapted, "me/knights").split())
    assert "the hub did not let poise create it (401 Unauthorized)" in said
    assert "hf auth login" in said


def test_nothing_is_made_on_the_hub_for_a_run_without_a_model(tmp_path, hub):
    assert "there is no such folder" in fails("push", tmp_path / "none", "me/x")
    assert "neither a folder here nor a model" in " ".join(fails("export", "nobody/nothing", tmp_path / "x").split())
    assert hub.made == []
    assert not (tmp_path / "x").exists()
