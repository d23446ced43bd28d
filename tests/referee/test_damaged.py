"""Run folders that are damaged, or made to do harm: a sentence, never a traceback."""

import gzip
import os
import zlib

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from poise.cli.app import app
from poise.referee.report.html.data import Source
from support.run_folders import WORDS, arrays, look, make_run, response, see


def write(name, content):
    return lambda folder: (folder.path / name).write_bytes(content)


def rollouts(change):
    def damage(folder):
        path = folder.path / "rollouts" / "step-000001.jsonl.gz"
        path.write_bytes(change(path.read_bytes()))

    return damage


def tokens(change):
    return lambda folder: folder.tokens_path(1).write_bytes(change(folder.tokens_path(1).read_bytes()))


def records(**changes):
    return lambda folder: folder.save_rollouts(1, [response(1, i) | changes for i in range(6)])


def without(key):
    kept = [{k: v for k, v in response(1, i).items() if k != key} for i in range(6)]
    return lambda folder: folder.save_rollouts(1, kept)


def fields(texts=WORDS, drop=(), **changes):
    kept = {name: values for name, values in (arrays(6) | changes).items() if name not in drop}
    return lambda folder: folder.save_tokens(1, kept, texts)


def pipe(name):
    def damage(folder):
        (folder.path / name).unlink(missing_ok=True)
        os.mkfifo(folder.path / name)

    return damage


DEEP = b"[" * 100_000 + b"]" * 100_000
DAMAGES = {
    "rollouts cut off": rollouts(lambda data: data[:-20]),
    "rollouts cut in half": rollouts(lambda data: data[:80]),
    "rollouts changed": rollouts(lambda data: data[:40] + bytes(20) + data[60:]),
    "rollouts not compressed": rollouts(lambda _: b"hello"),
    "rollouts of lists": rollouts(lambda _: gzip.compress(b"[1]\n" * 6)),
    "rollouts torn": rollouts(lambda _: gzip.compress(b'{"step": 1')),
    "rollouts not UTF-8": rollouts(lambda _: gzip.compress(b"\xff\n" * 6)),
    "rollouts nested": rollouts(lambda _: gzip.compress(DEEP)),
    "rollouts a pipe": pipe("rollouts/step-000001.jsonl.gz"),
    "too few responses": lambda folder: folder.save_rollouts(1, [response(1, 0)]),
    "no prompt": without("prompt"),
    "no parts": without("parts"),
    "text a number": records(text=5),
    "prompt a list": records(prompt=["a"]),
    "reward a text": records(reward="<b>"),
    "parts a list": records(parts=[1]),
    "environment a text": records(environment="<b>"),
    "environment without numbers": records(environment=[["<b>", "x"]]),
    "tokens cut off": tokens(lambda data: data[:-50]),
    "tokens cut in the header": tokens(lambda data: data[:50]),
    "tokens empty": tokens(lambda _: b""),
    "tokens a pipe": pipe("tokens/step-000001.safetensors"),
    "no metadata": lambda folder: save_file(arrays(6), folder.tokens_path(1)),
    "texts a list": lambda folder: save_file(arrays(6), folder.tokens_path(1), {"texts": "[1]"}),
    "texts torn": lambda folder: save_file(arrays(6), folder.tokens_path(1), {"texts": "{"}),
    "text of a token a list": lambda folder: save_file(
        arrays(6), folder.tokens_path(1), {"texts": '{"0":[1],"1":"","2":"","3":"","4":""}'}
    ),
    "text of a token missing": fields(texts={0: "a"}),
    "no start": fields(drop=["start"]),
    "no logp": fields(drop=["logp"]),
    "no weight": fields(drop=["weight/low", "weight/high"]),
    "start falls": fields(start=torch.tensor([0, 8, 4, 12, 16, 20, 24], dtype=torch.int32)),
    "start too far": fields(start=torch.arange(7, dtype=torch.int32) * 1000),
    "start not whole": fields(start=torch.full((7,), torch.nan)),
    "ids not whole": fields(id=torch.rand(24)),
    "ids too few": fields(id=torch.zeros(4, dtype=torch.int32)),
    "logp a matrix": fields(logp=torch.zeros(24, 3)),
    "logp complex": fields(logp=torch.zeros(24, dtype=torch.complex64)),
    "config torn": write("config.json", b'{"model": "ti'),
    "config nested": write("config.json", b'{"a":' + DEEP + b"}"),
    "metrics without steps": write("metrics.jsonl", b'{"a": 1}\n{"b": 2}\n'),
    "a step that is a text": write("metrics.jsonl", b'{"step": "<b>"}\n{"step": null}\n'),
    "a step of 400 digits": write("metrics.jsonl", b'{"step": 1' + b"0" * 400 + b"}\n" * 2),
    "a number of 5,000 digits": write("metrics.jsonl", b'{"step": 1, "a": 1' + b"0" * 5000 + b"}\n" * 2),
    "metrics torn in the middle": write("metrics.jsonl", b'{"step": 1}\n{"ste\n{"step": 3}\n'),
    "metrics nested": write("metrics.jsonl", b'{"step": 1, "a": ' + DEEP + b"}\n" * 2),
    "metrics a pipe": pipe("metrics.jsonl"),
    "summary torn": write("summary.json", b"{"),
    "summary a pipe": pipe("summary.json"),
    "diagnose a list": write("diagnose.json", b"[1]"),
}


def run(*args):
    found = CliRunner().invoke(app, list(map(str, args)))
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_run_is_refused_with_a_sentence(tmp_path, name):
    folder = make_run(tmp_path / "run", steps=(1,))
    DAMAGES[name](folder)
    found = run("report", folder.path)
    assert found.exit_code == 1
    assert found.stderr.startswith("poise: ")
    assert str(folder.path) in found.stderr.replace("\n", "")
    assert not (folder.path / "report.html").exists()


def test_other_kinds_of_numbers_are_read(tmp_path):
    folder = make_run(tmp_path / "run", steps=(1,))
    fields(logp=torch.zeros(24, dtype=torch.bfloat16), advantage=torch.ones(24, dtype=torch.int64))(folder)
    assert len(zlib.decompress(Source([folder.path]).block((0, 1, 0)))) > 16


def test_a_link_in_the_run_does_not_have_another_file_overwritten(tmp_path):
    folder, victim = make_run(tmp_path / "run", steps=(1,)), tmp_path / "victim"
    victim.write_text("precious")
    (folder.path / ".tmp-report.html").symlink_to(victim)
    assert run("report", folder.path).exit_code == 0
    (folder.path / "report.html").unlink()
    (folder.path / "report.html").symlink_to(victim)
    found = run("report", folder.path)
    assert found.exit_code == 1
    assert "--out" in found.stderr
    assert victim.read_text() == "precious"


def test_error_messages_show_no_control_characters(tmp_path):
    found = run("report", tmp_path / "\x1b[2J\u202e\udcff")
    assert found.exit_code == 1
    assert "\\x1b[2J\\u202e\\udcff" in found.stderr.replace("\n", "")


# In the browser


def test_odd_numbers_do_not_break_the_curves(page, tmp_path):
    folder = make_run(tmp_path / "run", steps=(1,))
    lines = [
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"1" + b"0" * 400,
        b'"<b>"',
        b'{"a": 1}',
        b"[1]",
        b"true",
        b"null",
        b"1e308",
    ]
    good = [b"1e299", b"-1e299", b"1e-320", b"0.5"]
    written = [b'{"step": %d, "reward/mean": %s, "__proto__": 1}\n' % at for at in enumerate([*lines, *good])]
    write("metrics.jsonl", b"".join(written))(folder)
    look(page, tmp_path, folder, tab="curves")
    see(page, ".legend", "mean 0.5", whole=True)
    assert "NaN" not in page.inner_html("#main")
    assert "Infinity" not in page.inner_html("#main")


def test_figures_that_cannot_be_drawn_leave_the_rest_of_the_page(page, tmp_path):
    folder = make_run(tmp_path / "run", steps=(1,))
    folder.write_json("diagnose.json", {"mean": {"regulators": "<b>"}, "verdict": 5})
    look(page, tmp_path, folder)
    page.click("nav button:has-text('dominance')")
    see(page, "#main", "cannot be shown")
    page.click("nav button:has-text('responses')")
    page.wait_for_selector(".tokens span")


def test_fields_may_have_any_name(page, tmp_path):
    folder = make_run(tmp_path / "run", steps=(1,))
    names = ("text", "words", "length", "weights", "__proto__", "constructor", "weight/__proto__")
    fields(**{name: torch.zeros(24) for name in names})(folder)
    look(page, tmp_path, folder)
    page.fill("#search", "answer1x3")
    see(page, "#count", "1 of 6 responses", whole=True)
    see(page, ".pane p", "4 tokens")


def test_a_response_of_10_megabytes(page, tmp_path):
    long = "<b>" * 3_400_000
    record = response(1, 0, text=long, problem=long[:1_000_000])
    folder = make_run(tmp_path / "run", steps=(1,), records=[record], texts=WORDS | {0: long})
    look(page, tmp_path, folder)
    page.wait_for_selector(".tokens span")
    assert page.locator("main b").count() == 1  # the verdict's own


def test_the_page_waits_for_a_run_that_cannot_be_read_yet(page, served):
    folder, url = served
    whole = folder.tokens_path(1).read_bytes()
    folder.tokens_path(1).write_bytes(b"half")
    page.goto(f"{url}/#responses")
    see(page, "#live", "step 1 of")
    folder.tokens_path(1).write_bytes(whole)
    see(page, "#count", "6 of 6 responses", whole=True)
    page.wrong.clear()  # the browser itself reports the 503
