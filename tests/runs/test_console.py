"""What a person sees: plain lines without a terminal, and nothing a model wrote that acts on one."""

import io
import math
import os
import re

import pytest

from poise._lib.errors import visible
from poise.runs.axes import x_values
from poise.runs.plots import curve, smooth
from poise.runs.subscribers import console
from poise.runs.subscribers.console import Console, across_rewards, duration, shorten

METRICS = {
    "reward/mean": 1.234,
    "reward/accuracy": 0.45,
    "rollout/length": 71.2,
    "rollout/entropy": 0.312,
    "time/tokens_per_s": 4100.4,
    "optim/lr": 1e-6,
}
# Clears the screen, sets the window's title, writes backwards, uses rich's markup and ends in half a character.
NASTY = "\x1b[2J\x1b]0;owned\x07 \x9b31m [red]bold[/red] [/] :smile: \u202edlrow \r\b\0 \ud800"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless told otherwise: ``clock[0] += 10``."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def shown_on(terminal):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())


def test_a_command_stays_one_line_that_can_be_copied(terminal):
    with Console(0, file=terminal) as out:
        out.note("word " * 40)
        out.note("poise " + "word " * 40, wrap=False)
    lines = shown_on(terminal).splitlines()
    assert max(len(line) for line in lines if line.startswith("word")) <= 100
    assert "poise " + "word " * 40 in lines


def test_plain_lines(capsys, clock, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # which would make rich write colours to a file
    with Console(60, 10) as out:
        clock[0] += 5
        out.step(11, METRICS)
        out.note("saved [bold]step 11[/bold]\x1b[2J")
        clock[0] += 8
        out.step(12, {"reward/mean": None, "rollout/length": 9})
        out.step(60, {"reward/mean": float("nan")})
    assert capsys.readouterr().out.splitlines() == [
        "step  11/60  reward 1.23  accuracy 0.45  length 71  entropy 0.31  4,100 tok/s  4:05 left",
        "saved [bold]step 11[/bold]\\x1b[2J",
        "step  12/60  length 9  5:12 left",
        "step  60/60  reward nan",
    ]


def test_the_time_left_goes_by_the_last_steps(capsys, clock):
    out = Console(1000)
    for step in range(1, 101):
        clock[0] += 100 if step <= 50 else 2
        out.step(step, {})
    assert capsys.readouterr().out.splitlines()[-1] == "step   100/1000  30:00 left"
    assert [duration(seconds) for seconds in (0, 59.6, 3599, 3600, 90061)] == [
        "0:00",
        "1:00",
        "59:59",
        "1:00:00",
        "25:01:01",
    ]


def test_a_budget_may_end_the_run_first(capsys, terminal, clock):
    for file in (None, terminal):
        clock[0] = 0.0
        with Console(60, 10, budget=2000, file=file) as out:
            out.begin(10, 500)
            for step, tokens in ((11, 600), (12, 800)):
                clock[0] += 10
                out.step(step, {"tokens/total": tokens})
            out.step(13, {"tokens/total": 2100})
    lines = [
        "step  11/60  600/2,000 tokens  2:20 left",  # 10 s for 100 tokens
        "step  12/60  800/2,000 tokens  1:20 left",  # 20 s for 300 tokens
        "step  13/60  2,100/2,000 tokens",
    ]
    assert capsys.readouterr().out.splitlines() == lines
    assert "━ 13/60  2,100/2,000 tokens" in shown_on(terminal)
    Console(13, 10, budget=10**9).step(12, {"tokens/total": 5})
    assert "0:00 left" in capsys.readouterr().out  # the last step comes first


def test_quiet_says_nothing(capsys, terminal):
    for file in (None, terminal):
        with Console(3, quiet=True, file=file) as out:
            out.step(1, METRICS)
            out.note("hello")
            out.table([{"a": 1}])
            out.samples_table([("p", "c", 1.0, True)])
    assert capsys.readouterr() == ("", "")
    assert terminal.getvalue() == ""


def test_a_terminal_gets_a_bar(terminal, clock):
    with Console(60, 10, file=terminal) as out:
        clock[0] += 5
        out.step(11, METRICS)
        out.note("saved [bold]step 11[/bold]\x1b[2J")
    shown = shown_on(terminal)
    assert "11/60" in shown
    assert "4:05 left" in shown
    assert "reward 1.23  accuracy 0.45  length 71  entropy 0.31  4,100 tok/s" in shown
    assert "saved [bold]step 11[/bold]\\x1b[2J" in shown
    assert "\x1b[2J" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[?25h")  # the cursor is back
    out.close()


def test_a_dumb_terminal_gets_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with Console(3, file=terminal) as out:
        out.step(1, {"reward/mean": 1.0})
    assert terminal.getvalue().startswith("step  1/3  reward 1.00")


def test_what_a_model_wrote_cannot_act_on_the_terminal(capsys, terminal):
    sample = (NASTY, "line one\n" + NASTY, 1.0, False)
    Console(1).samples_table([sample])
    plain = capsys.readouterr().out
    with Console(1, file=terminal) as out:
        out.samples_table([sample])
        out.note(NASTY)
        out.table([{NASTY: NASTY}])
    for text in (plain, shown_on(terminal)):
        assert not set(text) & set("\x1b\x07\x9b\u202e\b\0\ud800")
        assert "\\x1b[2J" in text
        assert "\\x9b31m" in text
        assert ":smile:" in text
        assert "[/red]" in text
    for sequence in ("\x1b[2J", "\x1b]0;", "\x9b"):
        assert sequence not in terminal.getvalue()
    assert plain.splitlines()[:2] == ["sample  reward 1.00  wrong", "  prompt:"]
    assert "    line one\n    \\x1b[2J" in plain


def test_a_stream_that_cannot_encode_does_not_end_the_run():
    raw = io.BytesIO()
    out = Console(1, file=io.TextIOWrapper(raw, encoding="ascii"))
    out.note("Größe ≥ 3")
    assert raw.getvalue() == b"Gr\\xf6\\xdfe \\u2265 3\n"


def test_a_stream_that_fails_does_not_end_the_run(terminal):
    read, write = os.pipe()
    os.close(read)

    class Full(Terminal):
        def write(self, *_):
            raise OSError(28, "No space left on device")

    for file in (os.fdopen(write, "w"), Full(), terminal):
        if file is terminal:
            file.close()
        with Console(3, file=file) as out:
            out.step(1, METRICS)
            out.note("hello")
            out.samples_table([("p", "c", 1.0, True)])
        if file is not terminal:
            file.close()  # what is left in its buffer does not fail either


def test_streams_that_were_closed_before_poise_began(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    with console.lasting_output(), Console(3) as out:
        out.note("hello")
        print("hello")


def test_long_samples_are_cut_unless_they_are_wanted_whole(capsys, terminal):
    sample = ("ask", "\n".join(f"line {i}" for i in range(40)), 1.0, True)
    for file in (None, terminal):
        with Console(0, file=file) as out:
            out.samples_table([sample])
            out.samples_table([sample], whole=True)
        text = capsys.readouterr().out if file is None else shown_on(terminal)
        assert text.count("[… 25 lines …]") == 1
        assert text.count("line 20") == 1
        assert text.count("line 39") == 2


def test_samples_come_from_the_whole_range_of_rewards():
    def chosen(rewards, k=3):
        return [sample[2] for sample in across_rewards([("", str(i), r, False) for i, r in enumerate(rewards)], k)]

    assert chosen([2.0, -1.0, -1.0, -1.0, 0.4, -1.0]) == [-1.0, 0.4, 2.0]
    assert chosen([0.0, 1.0, 1.0, 1.0]) == [0.0, 1.0, 1.0]
    assert chosen([3.0, 1.0]) == [1.0, 3.0]
    assert chosen([3.0, 1.0, 2.1], 1) == [2.1]
    assert chosen([float("nan"), 5.0, float("inf"), 1.0]) == [1.0, 5.0]
    assert chosen([], 3) == chosen([1.0], 0) == []


def test_long_texts_lose_their_middle():
    text = shorten("a" * 500 + "b" * 500, 100)
    assert text == "a" * 50 + " [… 900 characters …] " + "b" * 50
    assert shorten("a" * 105, 100) == "a" * 105  # the words on what was cut would be longer
    lines = shorten("\n".join(map(str, range(1000))), 10_000, lines=5).split("\n")
    assert lines == ["0", "1", "[… 996 lines …]", "998", "999"]
    assert shorten("short\ntext", 100) == "short\ntext"
    assert visible("tab\t é 漢 😀\n") == "tab\\t é 漢 😀\n"


def test_tables(capsys, terminal):
    rows = [{"name": "漢字", "n": 3}, {"name": "ar\nlopti", "n": 12, "p": 0.03126}]
    Console(1).table(rows)
    assert capsys.readouterr().out == "name       n        p\n漢字       3\nar lopti  12  0.03126\n"
    Console(1).table([])
    assert capsys.readouterr().out == ""
    with Console(1, file=terminal) as out:
        out.table([{"": "3 people", "before": "0.100 [0.080, 0.120]"}])
    assert "3 people  0.100 [0.080, 0.120]" in shown_on(terminal)


# The picture


def test_curve(tmp_path):
    metrics = [{"step": i, "reward/mean": i / 60, "reward/accuracy": None if i == 7 else i / 90} for i in range(1, 61)]
    for i in (0, 30, 59):
        metrics[i]["eval/kk/avg@8"] = i / 60
    path = tmp_path / "plots" / "curve.png"
    odd = [{"step": i, "reward/mean": value} for i, value in enumerate(["x", [1], 10**400, True, math.nan, 1.0])]
    for case in (metrics, metrics[:1], [], [{"step": 1, "eval/$a_/avg@1": 0.5}], odd):
        curve(path, case, "AR $ with_ a stray \\dollar $")
        assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in path.parent.iterdir()] == ["curve.png"]


def test_curves_over_every_axis(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda _, x, y, **style: drawn.append((x, y, style.get("label"))))
    lines = [
        {"step": 0, "eval/kk/avg@2": 0.1},
        {"step": 1, "reward/mean": 0.5, "tokens/total": 100, "time/step": 2.0},
        {"step": 2, "reward/mean": None, "tokens/total": 250, "time/step": 1.0},
        {"step": 3, "reward/mean": 0.7, "tokens/total": 300, "time/step": 1.5},
        {"step": 3, "eval/kk/avg@2": 0.4},
    ]
    expected = {"step": ([1, 3], [0, 3]), "tokens": ([100, 300], [0, 300]), "seconds": ([2.0, 4.5], [0, 4.5])}
    for axis, (training, held_out) in expected.items():
        drawn.clear()
        curve(tmp_path / "curve.png", lines, "one", axis)
        assert (training, [0.5, 0.7], "training reward") in drawn
        assert (held_out, [0.1, 0.4], "held-out kk/avg@2") in drawn
    assert x_values([{"step": 1, "tokens/total": "x", "time/step": None}], "tokens") is None


def test_smoothing_is_light():
    line = [(float(i), 2.0 * i) for i in range(100)]
    assert smooth(line)[3:-3] == line[3:-3]
    zigzag = [(float(i), float(i % 2)) for i in range(100)]
    assert all(0.35 < y < 0.65 for _, y in smooth(zigzag))
    assert smooth(zigzag[:5]) == zigzag[:5]
