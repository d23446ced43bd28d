"""Runs of other trainers: token files, and prime-rl's exports, in the report and in ``poise diagnose``."""

import json
import math
import os
import struct
import zlib

import pytest
import torch
from typer.testing import CliRunner

from poise import TokenBatch, regulators
from poise.cli.app import app
from poise.diagnostics import Intervals
from poise.models.policy import EMBEDDED
from poise.referee.report import token_files
from poise.referee.report.html import write_report
from poise.referee.report.html.data import Source
from poise.referee.report.token_files import TokenFiles
from poise.referee.report.weighing import weigh
from support.run_folders import HOSTILE, make_run, see

NUMBERS = [-0.5, -1.5, -0.25]


def line(step=1, row=0, **changes):
    """A line with every field; None leaves one out."""
    fields = {
        "step": step, "prompt": f"question {row // 2}", "tokens": ["so", " it", " is"], "logp": NUMBERS,
        "entropy": [0.5, 0.25, 0.125], "advantage": 1.0 if row % 2 else -0.5, "weight": [1.0, 0.5, 2.0],
        "sampler_logp": NUMBERS, "reward": float(row % 2), "correct": bool(row % 2), "group": row // 2,
        "finished": True, "difficulty": "2", "parts": {"format": 1.0}, "gold": "yes", "answer": "no",
    }  # fmt: skip
    return {name: value for name, value in (fields | changes).items() if value is not None}


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in lines))
    return path


def run(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def rows_of(index):
    return [dict(zip(index["columns"], row, strict=True)) for row in index["rows"]]


def tokens_of(source, index, at):
    """The texts and numbers of a response's block."""
    run, block = index["runs"][at[0]], zlib.decompress(source.block(at))
    place = 0
    for _ in range(2):  # the text, and what the environment said
        place += 4 + -(-struct.unpack_from("<I", block, place)[0] // 4) * 4
    count = (len(block) - place) // 4 // len(run["fields"])
    values = {}
    for name in run["fields"]:
        values[name] = struct.unpack_from(f"<{count}{'i' if name == 'id' else 'f'}", block, place)
        place += 4 * count
    return [run["words"][i] for i in values["id"]], values


# Reading


def test_a_token_file_becomes_rows_blocks_and_curves(tmp_path):
    path = write(tmp_path / "tokens.jsonl", [line(step, row) for step in (1, 4) for row in range(4)])
    source = Source([path])
    index = source.index()
    rows = rows_of(index)
    assert [(row["step"], row["row"], row["length"]) for row in rows] == [(s, r, 3) for s in (1, 4) for r in range(4)]
    assert [row["correct"] for row in rows[:2]] == [False, True]
    assert [index["texts"][rows[2][name]] for name in ("prompt", "gold", "answer")] == ["question 1", "yes", "no"]
    assert rows[2]["problem"] == "group 1"
    words, values = tokens_of(source, index, (0, 4, 3))
    assert words == ["so", " it", " is"]
    assert values["logp"] == tuple(NUMBERS)
    assert values["advantage"] == (1.0, 1.0, 1.0)
    assert values["weight/all"] == (1.0, 0.5, 2.0)
    run = index["runs"][0]
    assert run["steps"] == [1, 4]
    assert run["metrics"]["reward/mean"] == [0.5, 0.5]
    assert run["metrics"]["rollout/length"] == [3, 3]
    assert run["metrics"]["reg/all/weight_mean"] == [pytest.approx(3.5 / 3)] * 2


def test_what_a_line_does_not_say_is_unknown(tmp_path):
    path = write(tmp_path / "tokens.jsonl", [{"step": 3, "tokens": ["a", "b"]}, {"step": 3, "ids": [7, 8], "logp": -1}])
    source = Source([path])
    index = source.index()
    assert [row["correct"] for row in rows_of(index)] == [None, None]
    assert [row["reward"] for row in rows_of(index)] == [None, None]
    words, values = tokens_of(source, index, (0, 3, 0))
    assert words == ["a", "b"]
    assert all(math.isnan(value) for value in values["logp"])
    assert tokens_of(source, index, (0, 3, 1))[0] == ["⟨7⟩", "⟨8⟩"]
    assert index["runs"][0]["metrics"].keys() >= {"rollout/length"}
    assert "reward/mean" not in index["runs"][0]["metrics"]


def test_steps_of_a_folder_come_from_all_its_files(tmp_path):
    write(tmp_path / "out/b.jsonl", [line(2, 1), line(1, 1)])
    write(tmp_path / "out/a.jsonl", [line(2, 0)])
    rows = rows_of(Source([tmp_path / "out"]).index())
    assert [(row["step"], row["reward"]) for row in rows] == [(1, 1.0), (2, 0.0), (2, 1.0)]


DAMAGES = {
    "no JSON": "hello\n",
    "a list": "[1]\n",
    "torn in the middle": '{"step": 1, "tok\n',
    "not UTF-8": None,  # written as bytes below
    "nested": "[" * 100_000 + "]" * 100_000 + "\n",
    "no step": line(step=None),
    "a step that is a text": line(step="<b>"),
    "a step that is true": line(step=True),
    "a negative step": line(step=-1),
    "no tokens": line(tokens=None),
    "tokens of numbers": line(tokens=[1, 2, 3]),
    "ids of texts": line(tokens=None, ids=["a", "b", "c"]),
    "an enormous id": line(tokens=None, ids=[1, 2, 2**70]),
    "too few numbers": line(logp=[-1.0]),
    "numbers that are texts": line(logp=["-1", "-1", "-1"]),
    "numbers in lists": line(logp=[[-1.0], [-1.0], [-1.0]]),
    "numbers in an object": line(entropy={"a": 1}),
    "an enormous number": line(advantage=[10**400, 1, 1]),
    "probabilities for log-probabilities": line(logp=[0.5, 0.5, 0.5]),
    "a negative weight": line(weight=[-1.0, 1.0, 1.0]),
    "a weight that is a text": line(weight="<b>"),
    "reward a text": line(reward="<b>"),
    "correct a number": line(correct=1),
    "prompt a list": line(prompt=["a"]),
    "parts a list": line(parts=[1]),
    "group a list": line(group=[1]),
    "environment a text": line(environment="<b>"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_line_is_named_and_left_out(tmp_path, name):
    path = write(tmp_path / "tokens.jsonl", [line(), DAMAGES[name] or "x\n", line(2)])
    if DAMAGES[name] is None:
        path.write_bytes(path.read_bytes().replace(b"x\n", b'{"step": 1, "tokens": ["\xff"]}\n'))
    source = Source([path])
    index = source.index()
    assert [row["step"] for row in rows_of(index)] == [1, 2]
    (warning,) = index["runs"][0]["warnings"]
    assert f"{path}, line 2 is skipped: " in warning["what"]
    assert len(warning["what"]) < len(str(path)) + 200
    done = run("report", path)
    assert f"{path}, line 2 is skipped: " in done.stderr
    assert f"{path}, line 2 is skipped: " in run("diagnose", path).stderr


def test_of_many_damaged_lines_the_first_are_named(tmp_path):
    path = write(tmp_path / "tokens.jsonl", [line(), *["x\n"] * 1000])
    skipped = TokenFiles(path).skipped()
    assert len(skipped) == token_files.NAMED + 1
    assert "995 more lines" in skipped[-1]


def test_a_line_that_is_too_long_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "LONGEST_LINE", 4000)
    edge = json.dumps(line(3)).ljust(4000)
    made = [line(), line(prompt="x" * 10_000), edge[:-1] + "\n", edge + "\n", line(2)]
    path = write(tmp_path / "tokens.jsonl", made)
    recording = TokenFiles(path)
    assert recording.steps() == [1, 2, 3]
    assert [text.partition(": ")[0] for text in recording.skipped()] == [f"{path}, line {n} is skipped" for n in (2, 4)]


def test_files_without_a_response_are_refused_with_a_sentence(tmp_path):
    empty, other = write(tmp_path / "empty.jsonl", []), write(tmp_path / "other.jsonl", [{"question": "?"}])
    for command in ("report", "diagnose"):
        assert f"{empty} has no readable response: no line" in run(command, empty).stderr
        done = run(command, other)
        assert done.exit_code == 1
        assert f"{other}, line 1 is skipped: step is not a whole number" in done.stderr
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "is not a file" in run("report", tmp_path / "pipe.jsonl").stderr


def test_a_run_folder_that_lost_its_settings_is_no_folder_of_token_files(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder.path / "config.json").unlink()
    assert "has no config.json" in run("report", folder.path).stderr


# Files that grow


def test_a_growing_file_is_read_on_and_a_line_is_read_when_it_is_whole(tmp_path):
    path = write(tmp_path / "tokens.jsonl", [line(1), json.dumps(line(2))[:40]])
    source = Source([path])
    before = source.stamp()
    assert [row["step"] for row in rows_of(source.index())] == [1]
    with path.open("a") as file:
        file.write(json.dumps(line(2))[40:] + "\n" + json.dumps(line(1, 1)) + "\n")
    assert source.stamp() != before
    index = source.index()
    assert [(row["step"], row["row"]) for row in rows_of(index)] == [(1, 0), (1, 1), (2, 0)]
    assert index["runs"][0]["warnings"] == []
    assert index["runs"][0]["metrics"]["reward/mean"] == [0.5, 0.0]


def test_a_file_that_was_replaced_is_read_anew(tmp_path):
    path = write(tmp_path / "tokens.jsonl", [line(1), line(2), line(3)])
    source = Source([path])
    source.index()
    write(path, [line(1, tokens=["x"], logp=None, entropy=None, weight=None, sampler_logp=None)])
    index = source.index()
    assert [row["step"] for row in rows_of(index)] == [1]
    assert tokens_of(source, index, (0, 1, 0))[0] == ["x"]
    with pytest.raises(KeyError):
        source.block((0, 3, 0))


def test_reading_costs_in_proportion_to_the_file(tmp_path, monkeypatch):
    parsed = []
    row = TokenFiles._row
    monkeypatch.setattr(TokenFiles, "_row", lambda self, text: parsed.append(text) or row(self, text))
    counts = []
    for steps in (10, 40):
        path = write(tmp_path / f"{steps}.jsonl", [line(step, number) for step in range(steps) for number in range(6)])
        parsed.clear()
        write_report([path], tmp_path / "report.html")
        counts.append(len(parsed))
    assert counts == [3 * 60, 3 * 240]  # to find the steps, for the index, for the blocks
    source = Source([path])
    source.index()
    parsed.clear()
    with path.open("a") as file:
        file.write(json.dumps(line(40)) + "\n")
    source.index()
    assert len(parsed) == 2  # the new line: found, and read


# prime-rl


def exported(step=1, **changes):
    """A line as prime-rl's trainer writes it: prompt 1 2, then 3 4 by the model, 5 by a tool, 6 by the model."""
    own = [False, False, True, True, False, True]
    nothing = [None] * 6
    return {
        "schema_version": 1, "step": step, "rank": 0, "micro_step": 0, "micro_sequence_idx": 0,
        "export_sequence_idx": 0, "env_name": "gsm", "token_ids": [1, 2, 3, 4, 5, 6], "position_ids": list(range(6)),
        "loss_mask": own, "advantages": [0.0, 0.0, 0.5, 0.5, 0.0, 0.5], "inference_logprobs": [0, 0, -1, -2, 0, -3],
        "trainer_logprobs": [0, 0, -1.5, -2.5, 0, -3.5], "entropy": [9, 9, 0.1, 0.2, 9, 0.3], "mismatch_kl": nothing,
        "log_importance_ratio": nothing, "importance_ratio": nothing, "prob_delta": nothing,
        "is_masked": [False, False, False, True, False, False], "is_masked_high": nothing, "is_masked_low": nothing,
        "rl_weights": nothing, "ce_weights": nothing, "ref_kl_weights": nothing,
    } | changes  # fmt: skip


def test_prime_rl_exports_are_read(tmp_path):
    for rank, step in ((0, 1), (1, 1), (0, 2)):
        write(tmp_path / f"token_exports/step_{step}/rank_{rank}.jsonl", [exported(step)])
    words = {1: "What", 2: "?", 3: " 4", 4: "2", 5: "[tool]", 6: "."}
    for path in (tmp_path, tmp_path / "token_exports", tmp_path / "token_exports/step_1/rank_0.jsonl"):
        source = Source([path], decode=lambda ids: "".join(words[i] for i in ids))
        index = source.index()
        rows = rows_of(index)
        assert [row["step"] for row in rows] == ([1] if path.suffix else [1, 1, 2])
        assert index["texts"][rows[0]["prompt"]] == "What?"
        assert rows[0]["problem"].startswith("gsm ")
        shown, values = tokens_of(source, index, (0, 1, 0))
        assert shown == [" 4", "2", "."]
        assert values["logp"] == (-1.5, -2.5, -3.5)
        assert values["sampler_logp"] == (-1, -2, -3)
        assert values["advantage"] == (0.5, 0.5, 0.5)
        assert values["weight/all"] == (1, 0, 1)
        assert values["entropy"] == pytest.approx((0.1, 0.2, 0.3))
        block = zlib.decompress(source.block((0, 1, 0)))
        assert b'[[2, "[tool]"]]' in block


def test_prime_rl_exports_without_texts_get_them_from_a_tokenizer(tmp_path):
    path = write(tmp_path / "rank_0.jsonl", [exported(rl_weights=[0, 0, 0.5, 1, 0, 2])])
    done = run("report", path, "--tokenizer", EMBEDDED, "--out", tmp_path / "with.html")
    assert done.exit_code == 0, done.stderr
    text = (tmp_path / "with.html").read_text()
    run("report", path, "--out", tmp_path / "without.html")
    bare = (tmp_path / "without.html").read_text()
    assert "\\u27e83\\u27e9" in bare
    assert "\\u27e83\\u27e9" not in text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"schema_version": 2}, "schema_version is 2: poise reads version 1 of prime-rl's exports"),
        ({"loss_mask": [False] * 6}, "loss_mask marks no token"),
        ({"loss_mask": [True]}, "loss_mask is not a list of 6 values"),
        ({"token_ids": ["<b>"] * 6}, "a token id is not a whole number"),
        ({"entropy": None}, "entropy is not a list of 6 values"),
        ({"rl_weights": ["<b>"] * 6}, "weight/all has values that are not numbers"),
    ],
)
def test_a_prime_rl_line_that_cannot_be_read_is_named(tmp_path, changes, why):
    path = write(tmp_path / "rank_0.jsonl", [exported(), exported(**changes)])
    (skipped,) = TokenFiles(path).skipped()
    assert f"{path}, line 2 is skipped: " in skipped
    assert why in skipped


# poise diagnose


def test_shares_by_hand(tmp_path):
    logp = [math.log(p) for p in (0.2, 0.9, 0.6)]
    path = write(tmp_path / "tokens.jsonl", [line(1, 0, logp=logp, advantage=[1.0, -2.0, 3.0])])
    weighed = weigh(TokenFiles(path), {"grpo": regulators.parse("grpo")}, Intervals.cut([0.5, 0.75]))
    pull = torch.tensor([1 * 0.8, 3 * 0.4, 2 * 0.1])
    assert weighed.token_share == pytest.approx([1 / 3] * 3)
    assert weighed.pull["grpo"] == pytest.approx((pull / pull.sum()).tolist(), rel=1e-5)
    pull = pull * torch.tensor([1.0, 2.0, 0.5])  # the file's own weights
    assert weighed.pull["recorded"] == pytest.approx((pull / pull.sum()).tolist(), rel=1e-5)
    assert (weighed.steps, weighed.responses, weighed.tokens) == (1, 1, 3)


@pytest.mark.parametrize("method", sorted(regulators.TABLE.keys() - {"nthr"}))
def test_methods_weigh_the_recorded_batch_as_they_do_any_other(tmp_path, method):
    long, short = [-0.1, -3.0, -0.7, -1.2], [-2.0, -0.3]
    entropies = {4: [0.1, 1.2, 0.6, 0.9], 2: [1.1, 0.2]}
    made = [
        line(1, row, tokens=["x"] * len(logp), logp=logp, entropy=entropies[len(logp)], weight=None, sampler_logp=None)
        for row, logp in enumerate((long, short, long, short))
    ]
    path = write(tmp_path / "tokens.jsonl", made)
    weighed = weigh(TokenFiles(path), {method: regulators.parse(method)}, Intervals())
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]] * 2)
    batch = TokenBatch(
        torch.tensor([long, [*short, 0, 0]] * 2), mask, torch.tensor([-0.5, 1.0] * 2), torch.tensor([0, 0, 1, 1]),
        entropy=torch.tensor([entropies[4], [*entropies[2], 0, 0]] * 2), rewards=torch.tensor([0.0, 1.0] * 2),
    )  # fmt: skip
    assert weighed.metrics[method] == pytest.approx(regulators.summary(regulators.parse(method)(batch), batch))


def test_diagnose_says_what_it_can_and_what_needs_the_model(tmp_path):
    path = write(tmp_path / "tokens.jsonl", [line(1, row, entropy=None) for row in range(4)])
    done = run("diagnose", path, "--regulator", "ar", "--regulator", "lopti", "--regulator", "nthr | ar", "--regulator",
               "entropy", "--intervals", "0.3")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert f"{path}: 1 steps, 4 responses, 12 tokens" in done.output
    table = [row.split() for row in done.output.splitlines()]
    assert ["p", "tokens", "recorded", "ar", "lopti"] in table
    assert any(row[:2] == ["lopti", "high"] for row in table)
    assert "nthr | ar was skipped: it needs head, hidden, targets" in done.output
    assert "entropy was skipped: it needs entropy" in done.output
    assert "not available without the model" in done.output


def test_diagnose_refuses_what_does_not_apply(tmp_path):
    path = write(tmp_path / "tokens.jsonl", [line()])
    assert "settings and --out need a model" in run("diagnose", path, "prompts=3").stderr
    assert "settings and --out need a model" in run("diagnose", path, "--out", tmp_path / "x").stderr
    assert "unknown regulator" in run("diagnose", path, "--regulator", "arr").stderr
    bare = write(tmp_path / "bare.jsonl", [line(logp=None)])
    assert "no token has both a log-probability (logp) and an advantage" in run("diagnose", bare).stderr


def test_advantages_of_zero_leave_nothing_to_learn(tmp_path):
    path = write(tmp_path / "tokens.jsonl", [line(advantage=0.0)])
    assert "grpo leaves nothing to learn" in run("diagnose", path).output


# The page


def test_the_page_shows_what_is_known_and_nothing_else(page, tmp_path):
    bare = {"step": 7, "tokens": ["one", " two"], "logp": [-0.5, -1.0], "text": "one two"}
    write_report([write(tmp_path / "tokens.jsonl", [bare, bare])], tmp_path / "report.html")
    page.goto((tmp_path / "report.html").as_uri())
    see(page, ".pane h3", "Step 7")
    assert page.locator("nav button").all_inner_texts() == ["responses", "curves"]
    assert page.locator("#shade option").all_inner_texts() == ["probability"]
    assert page.locator("#f-correct, #f-difficulty").count() == 0
    assert page.locator(".pane summary").all_inner_texts() == ["Plain text"]
    assert page.inner_text("#row-0") == "step 7 · 2 tokens"
    page.hover(".tokens span[data-i='1']")
    assert "0.3678794" in page.inner_text("#tip")
    assert "entropy" not in page.inner_text("#tip")
    assert "gradient" not in page.inner_text("#tip")


def test_a_whole_line_shades_like_a_run_of_poise_beside_one(page, tmp_path):
    path = write(tmp_path / "tokens.jsonl", [line(1, 1, weight={"low": [1, 0, 0], "high": [0, 1, 2]}, advantage=2.0)])
    write_report([path, make_run(tmp_path / "run", steps=(1,)).path], tmp_path / "report.html")
    page.goto((tmp_path / "report.html").as_uri() + "#responses/0/1/0")
    see(page, ".pane h3", "Correct, reward 1")
    page.select_option("#shade", "gradient")
    see(page, ".ends", "gradient")
    page.hover(".tokens span[data-i='2']")
    expected = 2 * 2.0 * (1 - math.exp(-0.25))
    assert f"{expected:.7f}" in page.inner_text("#tip")
    page.select_option("#shade", "nthr")  # only the other run has it
    see(page, ".ends", "nthr")


def test_hostile_lines_show_as_text_and_run_nothing(page, tmp_path):
    hostile = line(
        tokens=[HOSTILE] * 3, prompt=HOSTILE, text=HOSTILE, problem=HOSTILE, difficulty=HOSTILE, gold=HOSTILE,
        answer=HOSTILE, group=HOSTILE, parts={HOSTILE: 1.0}, environment=[[1, HOSTILE]],
        weight={HOSTILE: [1.0] * 3, "__proto__": [1.0] * 3},
    )  # fmt: skip
    path = write(tmp_path / "tokens.jsonl", [hostile, json.dumps({HOSTILE: 1}) + "\n", f"{HOSTILE!a}\n"])
    write_report([path], tmp_path / "report.html", say=lambda _: None)
    page.goto((tmp_path / "report.html").as_uri())
    see(page, ".tokens span", "<script>window.hacked=1</script>")
    see(page, ".warnings", "line 2 is skipped")
    for shade in page.locator("#shade option").all_inner_texts():
        page.select_option("#shade", shade)
        see(page, ".ends", shade)
    page.hover(".tokens span[data-i='0']")
    page.click("nav button:has-text('curves')")
    assert page.evaluate("window.hacked") is None
    assert page.query_selector("main img, main script, main svg[onload]") is None
    assert not {"\0", "\u202e", "\u2066", "\x1b"} & set(page.text_content("main"))
