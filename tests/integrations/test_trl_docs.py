"""Every script of docs/trl.md trains."""

import pytest
import torch

trl = pytest.importorskip("trl", reason="TRL is not installed (extra 'trl')")

import transformers  # noqa: E402

from support import trl_runs  # noqa: E402
from support.pages import ROOT, snippets  # noqa: E402
from support.trl_runs import CALL  # noqa: E402

PAGE = ROOT / "docs/trl.md"


def moved(trainer, model):
    """How many steps had a gradient; the weights must have left those of the model on disk."""
    before = transformers.AutoModelForCausalLM.from_pretrained(model).state_dict()
    after = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    assert not all(torch.equal(after[name], value) for name, value in before.items())
    return sum(row["grad_norm"] > 0 for row in trainer.state.log_history[:-1])


@pytest.mark.docs
def test_the_scripts_of_the_page_train(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    whole, subclass, tools = snippets(PAGE)
    found = {"__name__": "snippets"}
    exec(compile(whole, "docs/trl.md", "exec"), found)
    assert moved(found["trainer"], trl_runs.EMBEDDED) == 4
    assert len(capsys.readouterr().out.splitlines()) >= 4

    exec(compile(subclass, "docs/trl.md", "exec"), found)
    trainer = trl_runs.build(tmp_path, "ar", kind=found["MyRegulatedTrainer"], max_steps=2)
    assert isinstance(trainer, found["MyTrainer"])
    trainer.train()
    assert moved(trainer, trl_runs.EMBEDDED) == 2

    model, small = trl_runs.tool_model(tmp_path / "model"), trl_runs.config("runs/tools", max_completion_length=160)
    script = tools.replace("Qwen/Qwen3-0.6B", model)
    assert script != tools
    generate = trl_runs.calls_tools(CALL, ["Done.", "There it is."])
    monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", generate)
    found["GRPOConfig"] = lambda **settings: small if settings["output_dir"] == "runs/tools" else None
    exec(compile(script, "docs/trl.md", "exec"), found)
    assert found["trainer"].state.log_history[0]["tools/call_frequency"] == 0.5
    assert moved(found["trainer"], model) == 4
