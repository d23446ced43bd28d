"""`poise doctor`: TRL here; of verl, what it says where there is none. With verl: tests/with_verl/test_plugin.py."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from poise.cli.app import app
from poise.integrations import doctor

SCALE = Path(__file__).parents[2] / "examples/scale"
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed (extra 'trl')")


@pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is installed")
def test_the_doctor_says_that_verl_is_missing():
    done = CliRunner().invoke(app, ["doctor", "verl"])
    assert done.exit_code == 1
    assert "verl           not installed" in done.output
    assert "NOT LIVE: No module named 'verl'" in done.output


def ask(*words, config=None):
    said = []
    return doctor.trl(said.append, words, config), "\n".join(said)


@needs_trl
def test_trl_is_live_and_what_it_can_train():
    fine, said = ask("beta=1e-3", "loss_type=grpo")
    assert fine
    assert "live: TRL 1.16" in said
    assert "  ar            can be trained" in said
    assert "  tr-grpo       REFUSED: tr-grpo weights the KL term" in said
    assert "tr-grpo(kl_weighted=False)" in said
    assert "  lopti         REFUSED: lopti masks the KL term, but with loss_type='grpo'" in said
    assert "tried constant(weight=0.5) on the embedded model" in said


@needs_trl
def test_the_command_tries_a_regulator():
    words = ["doctor", "trl", "--config", str(SCALE / "trl-8gpu.yaml"), "use_vllm=false"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "ignored, since GRPOConfig does not have them: model_name_or_path, people, problems" in done.output
    assert "these settings train with ar(alpha=0.3) | lopti(threshold=0.5), in 2 phase(s)" in done.output
    assert "tried ar(alpha=0.3) | lopti(threshold=0.5) on the embedded model" in done.output
    assert CliRunner().invoke(app, [*words, "num_iterations=1"]).exit_code == 1


@needs_trl
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["regulator=lopti"], "set num_iterations=2"),
        (["regulator=lopty"], "did you mean 'lopti'"),
        (["regulator=ar", "importance_sampling_level=sequence"], "set importance_sampling_level='token'"),
        (["regulator=ar", "loss_type=dappo"], "REFUSED: .*dappo"),
        (["loss_type=dappo"], "REFUSED: .*dappo"),
        (["num_iteration=2"], "GRPOConfig has no setting 'num_iteration'; did you mean num_iterations"),
        (["beta"], "'beta': write KEY=VALUE"),
        (["beta=x"], "REFUSED: beta = 'x': GRPOConfig wants a number"),
        (["beta="], "REFUSED: beta = None: GRPOConfig wants a number"),
        (["beta=true"], "REFUSED: beta = True: GRPOConfig wants a number"),
        (["epsilon=[1]"], r"REFUSED: epsilon = \[1\]: GRPOConfig wants a number"),
        (["num_generations=2.5"], r"REFUSED: num_generations = 2.5: GRPOConfig wants a whole number or null"),
        (["use_vllm=maybe"], "REFUSED: use_vllm = 'maybe': GRPOConfig wants true or false"),
        (["use_vllm=true"], r"REFUSED: use_vllm=True needs vLLM .*0\.22.*pip install 'trl\[vllm\]'"),
    ],
)
def test_what_the_doctor_refuses(words, message, monkeypatch):
    versions = doctor.version
    monkeypatch.setattr(
        "poise.integrations.doctor_trl.version", lambda name: "0.32.0" if name == "vllm" else versions(name)
    )
    fine, said = ask(*words)
    assert not fine
    assert re.search(message, said), said


@needs_trl
def test_numbers_of_a_file_are_read_as_by_trls_parser(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("beta: 1e-3\nnum_generations: '4'\nscale_rewards: false\nloss_type: grpo\nregulator: tr-grpo\n")
    said = ask(config=file)[1]
    assert "REFUSED: tr-grpo weights the KL term" in said  # beta is a number, and not 0
    file.write_text("beta: much\n")
    assert "REFUSED: beta = 'much': GRPOConfig wants a number" in ask(config=file)[1]


@needs_trl
def test_a_damaged_file_is_refused(tmp_path):
    file = tmp_path / "mine.yaml"
    for text in ("- 1", "a: [", ""):
        file.write_text(text)
        fine, said = ask(config=file)
        assert not fine
        assert "REFUSED" in said
    assert "no-such.yaml" in ask(config=tmp_path / "no-such.yaml")[1]


@needs_trl
def test_a_loss_that_does_not_weight_tokens_is_found_out(monkeypatch):
    from trl import GRPOTrainer

    stock = GRPOTrainer._compute_loss

    def flat(self, model, inputs):
        advantages = inputs["advantages"]
        return stock(self, model, inputs | {"advantages": advantages.mean(1) if advantages.dim() == 2 else advantages})

    flat.__module__ = stock.__module__
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", flat)
    fine, said = ask()
    assert not fine
    assert "REFUSED: the loss of GRPOTrainer cannot be regulated" in said


@needs_trl
def test_another_trl_and_none(monkeypatch):
    import trl

    monkeypatch.setattr(trl, "__version__", "1.99.0")
    assert "UNTESTED: poise.integrations.trl is tested with TRL 1.16, this is 1.99.0" in ask()[1]
    for name in [name for name in sys.modules if name.startswith("poise.integrations.trl")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "trl", None)
    fine, said = ask()
    assert not fine
    assert "NOT LIVE: poise.integrations.trl needs TRL: install poise with its extra 'trl'" in said
