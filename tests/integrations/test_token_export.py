"""What the TRL adapter writes for ``poise report`` and ``poise diagnose``."""

import json

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("trl", reason="TRL is not installed (extra 'trl')")

from poise.cli.app import app
from poise.integrations.token_export import TokenExport
from poise.referee.report.html.data import Source
from poise.referee.report.token_files import TokenFiles
from support.trl_runs import build, holed, weights


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(folder, regulator, path, **settings):
    """Two steps; what the regulator saw and returned for each generation batch."""
    more = {"export": path, "export_every": 1} | settings.pop("more", {})
    trainer = build(folder, regulator, more=more, **{"max_steps": 2} | settings)
    seen, regulate = [], trainer.regulator
    object.__setattr__(trainer, "regulator", Spy(regulate, seen))
    trainer.train()
    return trainer, seen


class Spy:
    def __init__(self, regulator, seen):
        self.regulator, self.seen = regulator, seen
        self.needs = regulator.needs

    def __call__(self, batch):
        self.seen.append((batch, self.regulator(batch)))
        return self.seen[-1][1]


@pytest.mark.parametrize(
    ("regulator", "settings"), [("ar(alpha=0.3)", {}), ("lopti(threshold=0.5)", {"num_iterations": 2, "max_steps": 4})]
)
def test_the_file_holds_the_batches_and_the_weights(tmp_path, regulator, settings):
    path = tmp_path / "out" / "tokens.jsonl"
    trainer, seen = train(tmp_path, regulator, path, temperature=1.5, **settings)
    recording = TokenFiles(path)
    assert recording.steps() == ([1, 3] if settings else [1, 2])
    assert recording.skipped() == []
    for number, (batch, phases) in zip(recording.steps(), seen, strict=True):
        records, arrays, texts = recording.read(number)
        expected = {"logp": batch.old_logp, "advantage": batch.token_advantages}
        expected |= {f"weight/{phase.name}": phase.policy for phase in phases}
        if "entropy" in arrays:
            expected["entropy"] = batch.entropy
        for name, values in expected.items():
            torch.testing.assert_close(arrays[name], values[batch.mask], rtol=1e-6, atol=1e-7)
        assert ("entropy" in arrays) is not bool(settings)  # TRL's own pass computes none
        assert [record["reward"] for record in records] == batch.rewards.tolist() == [0, 1] * 4
        assert [record["group"] for record in records] == [0] * 4 + [1] * 4
        assert arrays["start"].diff().tolist() == batch.mask.sum(1).tolist()
        words = [texts[i] for i in arrays["id"].tolist()]
        assert "".join(words[: arrays["start"][1]]) == records[0]["text"]
        assert records[0]["prompt"] == records[3]["prompt"] != records[4]["prompt"]
        assert (
            trainer.processing_class.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)[:8]
            in (records[0]["prompt"])
        )


def test_the_report_and_diagnose_read_it(tmp_path):
    path = tmp_path / "tokens.jsonl"
    train(tmp_path, "grpo", path)
    index = Source([path]).index()
    assert len(index["rows"]) == 16
    assert {"id", "logp", "entropy", "advantage", "weight/all"} == set(index["runs"][0]["fields"])
    assert index["runs"][0]["metrics"]["reward/mean"] == [0.5, 0.5]
    assert index["runs"][0]["metrics"]["reg/all/weight_mean"] == [1, 1]
    done = CliRunner().invoke(app, ["diagnose", str(path)])
    assert done.exit_code == 0, done.output
    assert "2 steps, 16 responses" in done.output


def test_an_export_changes_nothing_in_training(tmp_path):
    found = []
    for export in (None, tmp_path / "tokens.jsonl"):
        trainer = build(tmp_path, "grpo", more={"export": export}, max_steps=2)
        trainer.train()
        found.append(weights(trainer))
    assert torch.equal(*found)


def test_what_a_tool_said_stands_apart(tmp_path):
    path = tmp_path / "tokens.jsonl"
    _, seen = train(tmp_path, "ar", path, more={"rollout_func": holed}, max_steps=1)
    lines = read(path)
    assert [len(line["tokens"]) for line in lines] == seen[0][0].mask.sum(1).tolist()
    (turn,) = lines[0]["environment"]
    assert turn[0] == 2
    assert turn[1]


def test_every_other_batch(tmp_path):
    path = tmp_path / "tokens.jsonl"
    train(tmp_path, "grpo", path, max_steps=5, more={"export_every": 2})
    assert TokenFiles(path).steps() == [1, 2, 4]


# The file


def test_a_resumed_run_continues_its_file_and_a_new_one_replaces_it(tmp_path):
    path, lines = tmp_path / "tokens.jsonl", [{"tokens": ["a"]}, {"tokens": ["b"]}]
    export = TokenExport(path)
    for step in (1, 2, 3):
        export.write(step, lines)
    with path.open("a") as file:
        file.write('{"step": 4, "tok')
    resumed = TokenExport(path)
    for step in (3, 4):
        resumed.write(step, lines)
    assert [line["step"] for line in read(path)] == [1, 1, 2, 2, 3, 3, 4, 4]
    TokenExport(path).write(1, lines)
    assert [line["step"] for line in read(path)] == [1, 1]


def test_another_file_is_refused_and_left_alone(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "?"}\n')
    with pytest.raises(FileExistsError, match="not a file of recorded tokens"):
        TokenExport(data).write(1, [{"tokens": []}])
    assert data.read_text() == '{"question": "?"}\n'


@pytest.mark.parametrize(
    ("arguments", "why"), [(("tokens.json",), "ends with .jsonl"), (("tokens.jsonl", 0), "must be at least 1")]
)
def test_settings_are_checked(tmp_path, arguments, why):
    with pytest.raises(ValueError, match=why):
        TokenExport(tmp_path / arguments[0], *arguments[1:])
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(FileExistsError, match="a folder"):
        TokenExport(tmp_path / "folder.jsonl")
