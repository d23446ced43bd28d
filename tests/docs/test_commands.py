"""The command lines that the documents show, run one after the other as a reader would, made small."""

import json
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from poise.cli.app import app
from poise.models.loading import load_policy
from support.pages import ROOT, files, snippets

pytestmark = pytest.mark.docs
TINY = ["task.people=2", "rollout.max_tokens=48", "device=cpu"]
SIZES = {  # put at the end of a command, where it wins
    "train": [
        *TINY,
        "steps=1",
        "prompts=4",
        "group=4",
        "model=embedded",
        "optim.lr=2e-4",
        "evaluation.problems=1",
        "evaluation.samples=1",
    ],
    "compare": [
        *TINY,
        "regulator=grpo; ar | lopti",
        "model=embedded",
        "seeds=2",
        "steps=1",
        "prompts=2",
        "group=2",
        "evaluation.problems=1",
        "evaluation.samples=1",
    ],
    "eval": ["task.people=2", "samples=2", "problems=2", "max_tokens=48"],
    "diagnose": ["--batches", "1", "prompts=1", "group=4", *TINY],
    "other task": [
        "steps=2",
        "prompts=2",
        "group=2",
        "model=embedded",
        "device=cpu",
        "rollout.max_tokens=16",
        "rollout.max_prompt=900",
        "evaluation.problems=1",
        "evaluation.samples=1",
    ],
    "tutorial": [
        "steps=2",
        "prompts=2",
        "group=4",
        "device=cpu",
        "evaluation.problems=1",
        "evaluation.samples=1",
    ],
}
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
EXAMPLES = sorted((ROOT / "examples").glob("*/README.md"))
RECORDED = ("tokens.jsonl", "token_exports")  # of other trainers
OTHER_TASKS = ("task.name=", "environment=", "data=")
MINE = """
from dataclasses import dataclass
from poise import Phase, Regulator

@dataclass(frozen=True)
class Mine(Regulator):
    power: float = 0.5

    def phases(self, batch):
        return [Phase.of(batch, batch.prob**self.power)]
"""


def commands(page):
    """The words of each `poise` command in the page's shell blocks, comments left out."""
    blocks = re.findall(r"(?ms)^```bash\n(.*?)^```", page.read_text())
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    mine = r"(PYTHONPATH=\. )?poise |python (?!experiments/)[\w/-]+\.py"  # studies have tests of their own
    return [shlex.split(line, comments=True) for line in lines if re.match(mine, line)]


def run(*words):
    done = CliRunner().invoke(app, list(words))
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, f"{' '.join(words)}: {done.output}"
    return done.output


def weights(model):
    return torch.cat([weight.detach().flatten() for weight in load_policy(model, device="cpu").model.parameters()])


def run_small(words, page):
    """A command of a page, in its smallest size; what it trains must have moved."""
    verb, own_model = words[0], not any("Qwen/" in word for word in words)
    words = [re.sub(r"^(model=)?Qwen/.*", r"\1embedded", word) for word in words]
    if verb == "python":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words[1:])
            runpy.run_path(words[1], run_name="__main__")
        return
    if "--watch" in words:  # serves until it is stopped: test_report.py
        return
    if any(Path(word).name in RECORDED for word in words):  # nothing to make smaller
        run(*words)
        return
    if "--resume" in words:
        assert "already at step 1" in run(*words)
        run(*words, "steps=2")
    elif verb == "train" and page in TUTORIALS and own_model:
        run(*words, *SIZES["tutorial"])
    elif verb == "eval" and page in [*TUTORIALS, *EXAMPLES]:
        run(*words, "samples=1", "problems=2", "max_tokens=64")
    elif verb == "train" and any(word.startswith(OTHER_TASKS) for word in words):
        run(*words, *SIZES["other task"])
        if not any("brief" in word for word in words):  # a reward that any reply gets some of
            return  # the embedded model knows K&K alone: without a success there is nothing to learn from
    elif verb == "compare" and any(word.startswith(OTHER_TASKS) for word in words):
        sizes = [size for size in SIZES[verb] if not size.startswith("task.")]
        run(*words, *sizes, "--dry-run")  # which tries two steps
    else:
        run(*words, *SIZES.get(verb, []))
    if verb == "train":
        resumed = [words[words.index("--resume") + 1]] if "--resume" in words else []
        (folder,) = {word.removeprefix("run=") for word in [*words, *resumed] if word in resumed or word[:4] == "run="}
        assert not torch.equal(weights(folder), weights("embedded"))


def own_commands():
    """Pages with commands of this repository alone: those for verl, vLLM and several GPUs are tested with these."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *EXAMPLES]
    found = {page: commands(page) for page in pages}
    return {page: lines for page, lines in found.items() if lines and page.name not in ("scale.md", "verl.md")}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Ten steps of the demo: the run that pages speak of without making it."""
    folder = tmp_path_factory.mktemp("made") / "demo"
    run("train", "demo", *SIZES["train"], "steps=10", "prompts=1", f"run={folder}", "--quiet")
    assert not torch.equal(weights(str(folder)), weights("embedded"))
    return folder


def save_files(page):
    """What a reader has in the folder: the files of the page, and for a tutorial those that the first one makes."""
    if page in TUTORIALS:
        for name, code in files(ROOT / "docs/tutorials/data.md").items():
            Path(name).write_text(code)
            runpy.run_path(name)
    for name, code in files(page).items():
        Path(name).write_text(code)


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("data", "0.6 {'right': 0.5, 'brief': 0.5} False"),
        ("regulator", "tensor([[0.1000, 0.5000, 1.0000]])\ntensor([[1., 1., 1.]])"),
    ],
)
def test_the_code_of_a_tutorial_prints_what_it_says(page, shown, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = ROOT / f"docs/tutorials/{page}.md"
    save_files(path)
    for code in snippets(path):
        if not re.match(r"# \w+\.py\n", code):
            exec(compile(code, str(path), "exec"), {"__name__": "snippet"})
    assert capsys.readouterr().out.strip() == shown
    assert shown.splitlines()[0] in " ".join(path.read_text().split())


@pytest.mark.parametrize("page", own_commands(), ids=lambda page: str(page.relative_to(ROOT).with_suffix("")))
def test_the_commands_of_a_page_run(page, tmp_path, monkeypatch, demo, hub):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mymodule.py").write_text(MINE)
    for name in ("gsm8k-train", "gsm8k-test"):
        rows = [{"question": f"{name}: what is 2 + {i}?", "answer": f"2 + {i}\n#### {2 + i}"} for i in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = {"train": rows[:3] * 3, "test": rows[3:]}
    hub.add("openai/gsm8k", {(name, split): of for name in ("main", "socratic") for split, of in parts.items()})
    hub.add("own/problems", {("default", "train"): [{"problem": f"Solve {i}", "solution": str(i)} for i in range(40)]})
    tokens = {"step": 1, "ids": [5, 6], "logp": [-0.5, -2.0], "advantage": 1.0}
    for name in ("tokens.jsonl", "outputs/token_exports/step_1/rank_0.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(tokens) + "\n")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    save_files(page)
    for name in () if page in EXAMPLES else ("demo", "grpo", "ar"):  # an example makes its runs itself
        shutil.copytree(demo, Path("runs") / name)
    for line in own_commands()[page]:
        words = [word for word in line if word not in ("PYTHONPATH=.", "poise")]
        if "rollout.engine=vllm" in words:  # trained in with_vllm
            run(*words, "--dry-run")
        else:
            run_small(words, page)
