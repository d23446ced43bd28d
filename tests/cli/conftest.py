"""A run of two steps that tests of several commands begin with."""

import shutil

import pytest

from support.command_line import SMALL, poise


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The run itself: read only."""
    run = tmp_path_factory.mktemp("runs") / "trained"
    poise("train", "demo", *SMALL, "steps=2", "checkpoint_every=1", f"run={run}")
    return run


@pytest.fixture
def copy(trained, tmp_path):
    """A copy of it, to be changed."""
    return shutil.copytree(trained, tmp_path / "copy")
