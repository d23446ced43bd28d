"""Commands of poise, run in this process: a process of their own would import torch and transformers anew."""

from typer.testing import CliRunner

from poise.cli.app import app

SMALL = [
    "steps=1", "prompts=2", "group=2", "task.people=2", "rollout.max_tokens=48", "evaluation.problems=2",
    "evaluation.samples=1", "device=cpu",
]  # fmt: skip


def contents(folder):
    """Every file of a folder with its bytes."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def poise(*args):
    """Run ``poise …``. An exception that a user would see as a traceback is raised here."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def fails(*args):
    """Run a command that must end with an error message; returns what it printed."""
    result = poise(*args)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return result.output
