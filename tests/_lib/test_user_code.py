"""Whose code runs: names in settings, run folders of others, and modules that lie in the current folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from poise.__main__ import main
from poise._lib import user_code as _user_code
from poise.models.policy import EMBEDDED
from poise.training.config.schema import ConfigError, load, restore
from support.command_line import SMALL, fails, poise

pytestmark = pytest.mark.usefixtures("short_evaluation")

SPY = "from pathlib import Path\nPath('ran').touch()\n"
MINE = (
    SPY
    + """from poise import Regulator, Phase
class Mine(Regulator):
    def phases(self, batch): return [Phase.of(batch)]
"""
)
FOREIGN = [
    "subprocess.Popen('touch ran', shell=True)", "spy_module.Mine", "spy_module:Mine()", "ar | spy_module.Mine",
    "os:system('touch ran')",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(_user_code, "FOLDERS", [str(tmp_path)])
    Path("spy_module.py").write_text(MINE)
    yield
    sys.modules.pop("spy_module", None)


def foreign(**changes):
    document = load("tiny").model_dump(mode="json") | changes
    Path("run/checkpoints/step-000001/model").mkdir(parents=True)
    Path("run/config.json").write_text(json.dumps(document))
    Path("run/metrics.jsonl").touch()


@pytest.mark.parametrize("regulator", FOREIGN)
def test_a_foreign_run_runs_no_code(regulator):
    foreign(regulator=regulator)
    said = fails("train", "--resume", "--dry-run", "run=run")
    assert "the run in run asks to run code that is not part of poise" in said
    assert "add --trust" in said
    fails("train", "--resume", "run=run")
    fails("diagnose", "run", "--out", "there")  # has no use for it, and ends for want of a model
    fails("eval", "run")
    poise("report", "run")
    assert not Path("ran").exists()


def test_what_a_foreign_run_says_is_shown_as_text():
    foreign(model="a\u202eb")
    assert r"a\u202eb" in poise("train", "--resume", "--dry-run", "run=run").output


def test_an_algorithm_that_a_foreign_run_names_needs_consent():
    foreign(algorithm="spy_module.Mine")
    for command in (["train", "--resume", "--dry-run", "run=run"], ["diagnose", "run"], ["eval", "run"]):
        assert "add --trust" in fails(*command)
    assert not Path("ran").exists()
    assert "is not an algorithm" in fails("train", "--resume", "--dry-run", "--trust", "run=run")


def test_consent_loads_it():
    foreign(regulator="spy_module.Mine")
    assert "spy_module.Mine" in poise("train", "--resume", "--dry-run", "--trust", "run=run").output
    assert Path("ran").exists()


@pytest.mark.parametrize("regulator", FOREIGN[:1])
def test_consent_is_for_regulators_only(regulator):
    foreign(regulator=regulator)
    assert "is not a regulator" in fails("train", "--resume", "--dry-run", "--trust", "run=run")
    assert not Path("ran").exists()


def test_the_code_of_a_foreign_runs_model_needs_consent():
    foreign(remote_code=True)
    for command in (["train", "--resume", "--dry-run", "run=run"], ["diagnose", "run"]):
        assert "remote_code = True: it lets the model's own Python run" in fails(*command)
    assert "remote_code: true" in poise("train", "--resume", "--dry-run", "--trust", "run=run").output


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        ('{"base_model_name_or_path": "embedded"}', "adapter_model.bin", "has no adapter_model.safetensors"),
        ('{"base_model_name_or_path": ', "adapter_model.safetensors", "names no model"),
        ("[]", "adapter_model.safetensors", "names no model"),
        ('{"base_model_name_or_path": "adapter"}', "adapter_model.safetensors", "its base model is the adapter itself"),
        ('{"base_model_name_or_path": "embedded"}', "adapter_model.safetensors", "the adapter cannot be loaded"),
        ("[" * 100_000, "adapter_model.safetensors", "names no model"),
        (
            '{"base_model_name_or_path": "embedded", "megatron_config": {"a": 1}, "megatron_core": "spy_module"}',
            "adapter_model.safetensors",
            "needs code of Megatron",
        ),
    ],
)
def test_a_foreign_adapter_is_not_unpickled(config, weights, message):
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text(config)
    Path("adapter", weights).write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    assert message in fails("eval", "adapter", "task.name=kk")
    assert not Path("ran").exists()


HARMED = {  # a file of a model, what it holds, and what is said
    "attention from a repository": (
        "config.json", {"_attn_implementation": "kernels-community/x"}, "asks for attention from kernels-community/x"
    ),
    "code of its own": (
        "config.json", {"auto_map": {"AutoConfig": "spy_module.Mine"}, "model_type": "spy"}, "contains custom code"
    ),
    "a name that is none": ("config.json", {"hidden_act": "os.system"}, "the model cannot be loaded"),
    "no heads": ("config.json", {"num_attention_heads": 0}, "has no tokenizer or config.json that loads"),
    "settings without end": ("config.json", "[" * 100_000, "has no tokenizer or config.json that loads"),
    "a tokenizer without end": ("tokenizer.json", "[" * 100_000, "has no tokenizer or config.json that loads"),
    "weights that are none": ("model.safetensors", "x" * 1000, "the model cannot be loaded"),
    "a template that fails": ("chat_template.jinja", "{{ raise_exception('no') }}", "template fails on its prompt"),
    "a template that looks around": ("chat_template.jinja", "{{ ''.__class__.__mro__ }}", "SecurityError"),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMED)
def test_a_foreign_model_runs_no_code_and_is_refused_with_a_sentence(name):
    shutil.copytree(EMBEDDED, "model")
    shutil.copy("spy_module.py", "model")
    file, text, message = HARMED[name]
    path = Path("model", file)
    path.write_text(text if isinstance(text, str) else json.dumps(json.loads(path.read_text()) | text))
    assert message in fails("eval", "model", "task.name=kk", "device=cpu")
    assert not Path("ran").exists()


def test_the_packages_own_code_needs_no_consent():
    foreign(regulator="poise.regulators.ar:AdvantageReweighting(alpha=0.3) | poise.regulators.Lopti")
    assert poise("train", "--resume", "--dry-run", "run=run").exit_code == 0


def test_what_the_user_names_is_consent():
    assert poise("train", "--dry-run", "regulator=spy_module.Mine").exit_code == 0
    sys.modules.pop("spy_module")
    Path("ran").unlink()
    Path("mine.yaml").write_text("base: below.yaml\n")
    Path("below.yaml").write_text("base: tiny\nregulator: spy_module.Mine\n")
    assert poise("train", "mine.yaml", "--dry-run").exit_code == 0
    assert Path("ran").exists()


@pytest.mark.parametrize(
    ("settings", "asks"),
    [
        ({}, False), ({"regulator": "ar(alpha=0.3) | lopti(order='a.b:c')"}, False), ({"remote_code": True}, True),
        ({"regulator": "poise.regulators.Lopti | ar"}, False), ({"regulator": "ar | mine.Mine(gain=0.5)"}, True),
        ({"regulator": "mine:Mine"}, True), ({"regulator": 5}, False),
    ],
)  # fmt: skip
def test_what_a_run_is_resumed_with(settings, asks):
    assert _user_code.asks_for_code(settings) is asks


def test_in_python_a_document_is_not_trusted_unless_the_caller_says_so():
    document = load("tiny").model_dump(mode="json") | {"regulator": "spy_module.Mine"}
    with pytest.raises(ConfigError, match="trust=True"):
        restore(document)
    assert not Path("ran").exists()
    assert restore(document, trust=True).regulator == "spy_module.Mine"


@pytest.mark.parametrize(
    "name", ["missing_module.Mine", "spy_module.Mime", "spy_module.Path", "broken.Mine", "leaves.Mine"]
)
def test_mistakes_in_code_of_ones_own_are_explained(name):
    Path("broken.py").write_text("def f(:\n")
    Path("leaves.py").write_text("raise SystemExit(3)\n")
    assert f"regulator = '{name}': " in fails("train", f"regulator={name}")


def command(*args, **changes):
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "PYTHONSAFEPATH")}
    done = subprocess.run([sys.executable, *args], env=env | changes, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


SCRIPT = [
    "-c",
    "import sys; sys.path[0] = '/'; from poise.__main__ import main; main()",
]  # as the installed script starts


@pytest.mark.parametrize("start", [SCRIPT, ["-m", "poise"]])
def test_a_module_in_the_current_folder_is_not_taken_for_an_installed_one(start):
    for name in ("yaml", "typer", "torch", "rich"):
        Path(f"{name}.py").write_text(SPY)
    assert command(*start, "--version").strip() == "0.1.0"
    assert not Path("ran").exists()


def test_the_process_of_a_command():
    Path("yaml.py").write_text(SPY.replace("ran", "wrong"))
    shown = command("-m", "poise", "train", "--dry-run", "regulator=spy_module.Mine", OMP_DISPLAY_ENV="true")
    assert "regulator: spy_module.Mine" in shown  # found beside the command, without PYTHONPATH
    assert Path("ran").exists()
    assert not Path("wrong").exists()  # what is installed comes first
    if "OMP_WAIT_POLICY" in shown:  # GNU's library prints what it has read; others keep it to themselves
        assert "OMP_WAIT_POLICY = 'PASSIVE'" in shown


@pytest.mark.parametrize(("wanted", "found"), [(None, "passive"), ("active", "active")])
def test_waiting_threads_spin_only_if_the_user_wants_them_to(monkeypatch, wanted, found):
    monkeypatch.setenv("OMP_WAIT_POLICY", wanted or "")
    if wanted is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(sys, "argv", ["poise", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert os.environ["OMP_WAIT_POLICY"] == found


def test_a_run_of_ones_own_regulator_trains_and_resumes():
    run = ["regulator=spy_module.Mine", "run=mine"]
    assert poise("train", "tiny", *SMALL, *run).exit_code == 0
    assert "poise train --resume run=mine --trust" in fails("train", "tiny", *SMALL, *run)  # there is a run already
    assert "--trust" in fails("train", "--resume", "run=mine", "steps=2")
    assert poise("train", "--resume", "run=mine", "steps=2", "--trust", "--quiet").exit_code == 0


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("[Phase.of(batch, 1 / 0)]", "ZeroDivisionError: division by zero"),
        ("[Phase.of(batch, batch.prob[:2, 0])]", "got shape (2,)"),
        ("batch.prob", "must return a list of poise.Phase, got Tensor"),
        ("None", "must return a list of poise.Phase, got NoneType"),
        ("[Phase.of(batch, -batch.prob)]", "weights are finite, >= 0"),
    ],
)
def test_a_mistake_in_ones_own_regulator_gets_a_sentence(result, message):
    Path("spy_module.py").write_text(MINE.replace("[Phase.of(batch)]", result))
    said = fails("train", "tiny", *SMALL, "regulator=spy_module.Mine", "run=mine")
    assert "regulator 'spy_module.Mine' failed: " in said
    assert message in said
    assert ("spy_module.py, line 5)" in said) == ("Phase.of(batch, -" not in result and "Phase" in result)


@pytest.mark.parametrize("result", ["batch.prob", "None", "0.5", "np.ones(3)"])
def test_a_function_that_returns_no_phases_is_named(result):
    Path("spy_module.py").write_text(
        f"import numpy as np\nimport poise\n\n\n@poise.regulator\ndef mine(batch):\n    return {result}\n"
    )
    said = " ".join(fails("train", "tiny", *SMALL, "regulator=spy_module.mine", "run=mine").split())
    assert "mine must return a list of poise.Phase, got" in said
    assert "return [poise.Phase.of(batch, weights)]" in said


def test_blame_is_for_code_of_ones_own_alone():
    with pytest.raises(ZeroDivisionError), _user_code.blamed("regulator", "ar | lopti"):
        raise ZeroDivisionError
