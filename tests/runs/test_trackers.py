"""Trackers: TensorBoard for real, W&B and trackio against stand-ins with the part of their API that is used."""

import os
import re
import subprocess
import sys
from importlib.metadata import distributions
from types import ModuleType

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from poise._lib.errors import how_to_install
from poise.runs.trackers import tracking


def scalars(folder, name):
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard(tmp_path):
    with tracking(["tensorboard"], tmp_path, {"seed": 1}) as (tracker,):
        for step in (1, 2, 3):
            tracker.log(step, {"reward/mean": step / 2, "optim/loss": float("nan")})
    assert scalars(tmp_path / "tensorboard", "reward/mean") == [(1, 0.5), (2, 1.0), (3, 1.5)]


def test_a_resumed_run_hides_the_steps_it_repeats(tmp_path):
    with tracking(["tensorboard"], tmp_path, {}) as (killed,):
        for step in (1, 2, 3):
            killed.log(step, {"a": step})
    with tracking(["tensorboard"], tmp_path, {}, start_step=1) as (resumed,):
        resumed.log(2, {"a": 20})
    assert scalars(tmp_path / "tensorboard", "a") == [(1, 1), (2, 20)]


@pytest.fixture
def calls(monkeypatch):
    """What was called on the stand-ins for wandb and trackio."""
    made = []

    class Run:
        id = "abc"

        def log(self, metrics, *, step):
            made.append(("run.log", metrics, step))

        def finish(self):
            made.append(("run.finish",))

    wandb, trackio = ModuleType("wandb"), ModuleType("trackio")

    def init(*, project, name, id, resume, config, dir):  # noqa: A002 - their names
        made.append(("wandb.init", project, name, id, resume, config, dir))
        return Run()

    wandb.init = init
    trackio.init = lambda **settings: made.append(("trackio.init", *settings.values()))
    trackio.log = lambda metrics, *, step: made.append(("trackio.log", metrics, step))
    trackio.finish = lambda: made.append(("trackio.finish",))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    return made


def test_wandb_and_trackio(tmp_path, calls):
    with tracking(["wandb", "trackio", "wandb"], tmp_path, {"seed": 1}) as trackers:
        for tracker in trackers:
            tracker.log(4, {"reward/mean": 0.5})
    assert calls == [
        ("wandb.init", "poise", tmp_path.name, None, "allow", {"seed": 1}, str(tmp_path)),
        ("trackio.init", "poise", tmp_path.name, "never", {"seed": 1}),
        ("run.log", {"reward/mean": 0.5}, 4),
        ("trackio.log", {"reward/mean": 0.5}, 4),
        ("trackio.finish",),
        ("run.finish",),
    ]


def test_a_resumed_run_continues_its_run_there(tmp_path, calls, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    for start_step in (0, 2):
        with tracking(["wandb", "trackio"], tmp_path, {}, start_step=start_step):
            pass
    begun, resumed = (call for call in calls if call[0] == "wandb.init")
    assert begun == ("wandb.init", "mine", tmp_path.name, None, "allow", {}, str(tmp_path))
    assert resumed == ("wandb.init", "mine", tmp_path.name, "abc", "allow", {}, str(tmp_path))
    assert [call[3] for call in calls if call[0] == "trackio.init"] == ["never", "allow"]


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("trackio", "trackio")])
def test_a_missing_package_says_what_to_install_and_closes_the_others(tmp_path, calls, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=re.escape(how_to_install(name))), tracking(["wandb", name], tmp_path, {}):
        pytest.fail("a tracker is missing")
    assert calls[-1] == ("run.finish",)


def test_a_folder_called_wandb_is_not_wandb(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()  # what W&B leaves in the folder it ran in, and Python imports as an empty package
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    if getattr(__import__("wandb"), "__file__", None):
        pytest.skip("wandb is installed, and comes first")
    needed = re.escape(f"'wandb' is not installed; {how_to_install('wandb')}")
    with pytest.raises(ImportError, match=needed), tracking(["wandb"], tmp_path, {}):
        pytest.fail("there is no tracker")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_package_itself_without_its_service(tmp_path, name):
    """Not part of the extra dev: 100 MB each. In a process of its own, since both start threads."""
    if not any(distributions(name=name)):
        pytest.skip(f"{name} is not installed")
    code = (
        "import sys; from pathlib import Path; from poise.runs.trackers import tracking\n"
        f"with tracking(['{name}'], Path('run'), {{'seed': 1}}) as (tracker,):\n"
        "    for step in (1, 2): tracker.log(step, {'reward/mean': step / 2})\n"
    )
    (tmp_path / "run").mkdir()
    env = os.environ | {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True, capture_output=True)
    assert list(tmp_path.glob("run/wandb/offline-run-*/*.wandb" if name == "wandb" else "trackio/poise.db"))
