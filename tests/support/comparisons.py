"""Small comparisons of the embedded model, and results without a training run."""

from poise.referee.compare.plan import read_plan
from poise.runs.folder import RunFolder

SMALL = [
    "steps=2", "prompts=2", "group=2", "task.people=2", "rollout.max_tokens=10", "evaluation.problems=2",
    "evaluation.samples=1", "checkpoint_every=1", "rollouts_every=0", "objective.entropy_coef=0.01", "device=cpu",
]  # fmt: skip # the entropy term moves the weights, though replies are too short to be right


def make(tmp_path, *overrides, regulator="grpo; ar", name="cmp", recipe="tiny"):
    """The plan of a small comparison of two arms and three seeds."""
    return read_plan(recipe, [*SMALL, f"regulator={regulator}", "seeds=3", f"run={tmp_path / name}", *overrides])


def write_rows(path):
    """A file of 20 questions."""
    path.write_text("".join(f'{{"question": "{i} + 1?", "answer": "{i + 1}"}}\n' for i in range(20)))
    return path


def evaluation(accuracy, problems=2):
    """The summary of an evaluation with this accuracy."""
    row = {"value": accuracy, "low": 0.0, "high": 1.0}
    return {
        "accuracy": accuracy,
        "n": problems,
        "samples": 1,
        "greedy": accuracy,
        "table": {"avg@1": row, "greedy": row},
    }


def finish(run, accuracy=0.5, *, steps=None, tokens=100):
    """Write what a run leaves: all of it, or, if it has fewer steps than it should, what a diverged one does."""
    if not (run.folder / "config.json").exists():
        RunFolder.create(run.folder, run.config.model_dump(mode="json"))
    folder = RunFolder.open(run.folder)
    folder.write_json("before.json", evaluation(0.2))
    taken = run.config.steps if steps is None else steps
    for step in range(len(folder.metrics()) + 1, taken + 1):
        folder.log(step, {"tokens/sampled": tokens / run.config.steps, "optim/steps": 1.0, "time/step": 1.0})
    if steps is None:
        folder.write_json("summary.json", {"steps": taken, "before": evaluation(0.2), "after": evaluation(accuracy)})
    else:
        folder.write_json("diverged.json", {"step": steps + 1, "why": "the gradient is not finite"})
