"""`poise doctor verl` where there is no verl. With verl: tests/with_verl/test_plugin.py."""

import importlib.util

import pytest
from typer.testing import CliRunner

from poise.cli.app import app


@pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is installed")
def test_the_doctor_says_that_verl_is_missing():
    done = CliRunner().invoke(app, ["doctor", "verl"])
    assert done.exit_code == 1
    assert "verl           not installed" in done.output
    assert "NOT LIVE: No module named 'verl'" in done.output
