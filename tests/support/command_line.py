"""The command line in this process."""

from typer.testing import CliRunner

from poise.cli.app import app

SMALL = [
    "steps=1", "prompts=2", "group=2", "task.people=2", "rollout.max_tokens=48", "evaluation.problems=2",
    "evaluation.samples=1", "device=cpu",
]  # fmt: skip


def poise(*args):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def fails(*args):
    result = poise(*args)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return result.output
