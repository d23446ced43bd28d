import os
import shutil
import sys
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import settings

# The same examples every time: a red test is red for everybody. Hunt for new ones with HYPOTHESIS_PROFILE=explore.
settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("fixed")
torch.set_num_threads(1)
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # a file that imports trl.experimental runs by itself too
os.fsync = lambda _: None  # no test cuts the power: runs in this process need not wait for the disk
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test talks to the hub; read when its library is imported, later


@pytest.hookimpl(tryfirst=True)  # before -m is heeded
def pytest_collection_modifyitems(items):
    for item in items:
        if "browser" in item.fixturenames:
            item.add_marker("browser")
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(scope="session", autouse=True)
def trials_of_the_embedded_model_pass_once():
    """Half of loading it are its trials, and tests load it hundreds of times."""
    if "poise.trainer" not in sys.modules:  # no test of this process needs a model
        return
    from poise.models import load_checks
    from poise.models.location import EMBEDDED
    from poise.sampling.native import engine

    def once(module, name):
        trial, passed = getattr(module, name), set()

        def tried(policy, *rest):
            known = (policy.model.name_or_path, policy.head().weight.dtype, hasattr(policy.model, "peft_config"))
            if rest or not policy.packed or known[0] != str(EMBEDDED):
                return trial(policy, *rest)
            if known not in passed and trial(policy):
                passed.add(known)
            return known in passed

        setattr(module, name, tried)

    once(load_checks, "head_fits")
    once(load_checks, "passes_agree")
    once(engine, "_decodes")


@pytest.fixture(scope="module")
def browser():
    from support.run_folders import chromium

    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser):
    """A page that reports what it asks for, and that fails the test on any error in its console."""
    opened = browser.new_page(viewport={"width": 1200, "height": 900})
    opened.set_default_timeout(60_000)  # milliseconds: only so that a test that fails ends
    opened.wrong, opened.asked = [], []
    opened.on("pageerror", lambda error: opened.wrong.append(str(error)))
    opened.on("console", lambda told: told.type in ("error", "warning") and opened.wrong.append(told.text))
    opened.on("request", lambda request: opened.asked.append(request.url))
    yield opened
    assert opened.wrong == []
    opened.close()


@pytest.fixture
def served(tmp_path):
    """A run folder and the address of its watch server."""
    from poise.referee.report.html import serve
    from support.run_folders import make_run

    folder = make_run(tmp_path / "run", steps=(1,))
    server = serve([folder.path])
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def short_evaluation(monkeypatch):
    """For tests that do not look at accuracy, most of a small run: replies to held-out problems end after 4 tokens."""
    from poise.runs.subscribers import evaluation_schedule

    real = evaluation_schedule.held_out

    def short(sampler, *rest):
        return real(replace(sampler, max_tokens=4), *rest)

    monkeypatch.setattr(evaluation_schedule, "held_out", short)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run of two steps with the embedded model, for all tests that need one: read only."""
    from support.command_line import SMALL, poise

    run = tmp_path_factory.mktemp("runs") / "trained"
    poise("train", "tiny", *SMALL, "steps=2", "checkpoint_every=1", f"run={run}")
    return run


@pytest.fixture
def copy(trained, tmp_path):
    """A copy of it, to be changed."""
    return shutil.copytree(trained, tmp_path / "copy")


@pytest.fixture
def write(tmp_path):
    """Write a recipe."""

    def write(text, name="mine.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for the hub's data sets."""
    from support.data_hub import Hub

    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    stand_in = Hub(tmp_path / "hub", datasets)
    for function in ("load_dataset", "get_dataset_config_names"):
        monkeypatch.setattr(datasets, function, getattr(stand_in, function))
    yield stand_in
    datasets.enable_progress_bars()
