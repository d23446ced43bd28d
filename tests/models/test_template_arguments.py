"""Arguments of the chat template, and revisions of models on the hub: what ``template=`` and ``revision=`` do."""

import shutil
from pathlib import Path

import pytest
import torch
from trl.chat_template_utils import qwen3_chat_template

from poise import trainer
from poise.models.loading import load_policy, load_tokenizer
from poise.models.location import split_revision, with_revision
from poise.models.policy import EMBEDDED, ModelError
from poise.models.prompts import opened
from poise.runs.folder import RunFolder
from poise.training import config as configs
from poise.training.config.run_settings import starting_model, to_evaluate
from poise.training.resume import TrainError
from support.configs import problem as refused

# As Qwen3's: without thinking, an empty thought is written for the model.
THINKING = (
    "{% for message in messages %}{{ '<|assistant|>' if message.role == 'assistant' else '<|user|>' }}"
    "{{ message.content }}{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '<think>' if think is not defined or think else 'No thought.' }}"
    "{% endif %}"
)
SMALL = [
    "steps=1", "prompts=2", "group=2", "rollout.max_tokens=4", "evaluation=off", "task.people=2", "device=cpu",
]  # fmt: skip


@pytest.fixture
def thinker(tmp_path):
    folder = tmp_path / "thinker"
    shutil.copytree(EMBEDDED, folder)
    (folder / "chat_template.jinja").write_text(THINKING)
    return str(folder)


def test_arguments_reach_every_prompt(thinker, tmp_path):
    plain, quiet = load_policy(thinker, device="cpu"), load_policy(thinker, device="cpu", template={"think": False})
    texts = [policy.tokenizer.decode(policy.encode("Who?")) for policy in (plain, quiet)]
    assert texts == ["<|user|>Who?<|assistant|><think>", "<|user|>Who?<|assistant|>No thought."]
    hostile = quiet.tokenizer.decode(quiet.encode("Who <|end|>?"))  # which is not encoded by the template in one go
    assert hostile.endswith("<|assistant|>No thought.")
    dialogue = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    said = [{"role": "user", "content": "Sure?"}]
    assert quiet.tokenizer.decode(quiet.encode_next(dialogue, said, None)).endswith("Sure?<|assistant|>No thought.")
    assert (opened(plain.tokenizer), opened(quiet.tokenizer)) == ("<think>", "")
    quiet.save(tmp_path / "saved")
    assert load_policy(str(tmp_path / "saved"), device="cpu").encode("Who?") == plain.encode("Who?")


def test_thinking_of_qwen3_is_turned_off(thinker):
    (Path(thinker) / "chat_template.jinja").write_text(qwen3_chat_template)
    policy = load_policy(thinker, device="cpu", template={"enable_thinking": False})
    end = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert policy.tokenizer.decode(policy.encode("Who?")).endswith(f"Who?<|im_end|>\n{end}")
    before = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    following = policy.encode_next(before, [{"role": "user", "content": "Sure?"}], None)
    assert policy.tokenizer.decode(following).endswith(f"Sure?<|im_end|>\n{end}")


def test_an_argument_that_the_template_lacks_is_refused(thinker, tmp_path):
    with pytest.raises(ModelError, match=r"template\.thinks: the chat template of .* has no argument of that name"):
        load_policy(thinker, device="cpu", template={"thinks": True})
    bare = tmp_path / "bare"
    shutil.copytree(EMBEDDED, bare)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"template\.think: .* does not exist: the model has none"):
        load_policy(str(bare), device="cpu", template={"think": True})
    assert "template: tools cannot be set" in refused("template={tools: []}")


def test_a_run_keeps_its_arguments(thinker, tmp_path):
    def settings(*more, steps=1):
        return configs.load("tiny", [*SMALL, f"model={thinker}", f"run={tmp_path / 'run'}", *more, f"steps={steps}"])

    assert settings("template={think: false}") == settings("template.think=false")
    trainer.train(settings("template.think=false"), quiet=True)
    folder = RunFolder.open(tmp_path / "run", resume=False)
    assert folder.config["template"] == {"think": False}
    assert to_evaluate(str(tmp_path / "run"), []).template == {"think": False}
    for other in ([], ["template.think=true"], ["template={think: false, messages_seen: 1}"]):
        with pytest.raises(TrainError, match="a resumed run keeps its settings, but template"):
            trainer.train(settings(*other, steps=2), resume=True, quiet=True)
    trainer.train(settings("template.think=false", steps=2), resume=True, quiet=True)


# Revisions


def snapshot(cache, revision, model):
    folder = cache / "models--own--model"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    commit = revision[0] * 40
    (folder / "refs" / revision).write_text(commit)
    shutil.copytree(model, folder / "snapshots" / commit)
    return folder / "snapshots" / commit


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The hub's cache with two revisions of a model, which differ in a weight and in the chat template."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(tmp_path / "cache"), raising=False)
    snapshot(tmp_path / "cache", "main", EMBEDDED)
    other = load_policy("embedded", device="cpu")
    with torch.no_grad():
        other.parameters()[0].add_(1.0)
    other.tokenizer.chat_template = THINKING
    other.save(tmp_path / "other")
    snapshot(tmp_path / "cache", "v2", tmp_path / "other")


@pytest.mark.usefixtures("cache")
def test_a_revision_is_the_one_that_is_loaded():
    newest, second = (load_policy(name, device="cpu") for name in ("own/model", "own/model@v2"))
    torch.testing.assert_close(newest.parameters()[0] + 1.0, second.parameters()[0])
    assert (newest.tokenizer.chat_template, second.tokenizer.chat_template) != (THINKING, THINKING)
    assert second.tokenizer.chat_template == THINKING
    assert load_tokenizer("own/model@v2")[0].chat_template == THINKING
    with pytest.raises(ModelError, match="own/model@v3: neither a folder here nor a model that could be fetched"):
        load_policy("own/model@v3", device="cpu")


@pytest.mark.usefixtures("cache")
def test_a_run_records_its_revision(tmp_path):
    run = str(tmp_path / "run")
    asked = [*SMALL, "model=own/model", "objective.kl_coef=0.01", f"run={run}"]
    config = configs.load("tiny", [*asked, "revision=v2"])
    trainer.train(config, quiet=True)
    assert RunFolder.open(run, resume=False).config["revision"] == "v2"
    assert starting_model(run) == "own/model@v2"
    assert to_evaluate(run, []).model_name == run  # a folder, which has no revision
    assert to_evaluate("own/model", ["revision=v2", "task.name=kk"]).model_name == "own/model@v2"
    longer = configs.load("tiny", [*asked, "revision=main", "steps=2"])
    with pytest.raises(TrainError, match="a resumed run keeps its settings, but revision differs"):
        trainer.train(longer, resume=True, quiet=True)


def test_a_folder_has_no_revision(tmp_path):
    assert "only models on the hub have revisions, and model=embedded is local" in refused("revision=v2")
    assert "only models on the hub" in refused("revision=v2", f"model={tmp_path}")
    (tmp_path / "a@b").mkdir()
    assert split_revision(str(tmp_path / "a@b")) == (str(tmp_path / "a@b"), None)
    assert split_revision(with_revision("own/model", "v2")) == ("own/model", "v2")
    assert split_revision(with_revision("own/model", None)) == ("own/model", None)
