"""Progress in a notebook, against a stand-in for IPython's display."""

import base64
import sys
from types import ModuleType, SimpleNamespace

import pytest

from poise.runs import notebook
from poise.runs.subscribers.console import Console


class Shown:
    """What a notebook shows below a cell: each thing is replaced by its updates."""

    def __init__(self):
        self.things = []

    def display(self, bundle, *, raw, display_id):
        assert raw
        assert display_id
        place, things = len(self.things), self.things
        things.append([bundle])
        return SimpleNamespace(update=lambda new, raw: things[place].append(new) if raw else None)


@pytest.fixture
def shown(monkeypatch):
    made = Shown()
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.version_info = (9, 0)  # matplotlib asks
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    display.display = made.display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return made


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(notebook.time, "monotonic", lambda: now[0])
    return now


def metrics(step):
    return {"reward/mean": step / 2, "reward/accuracy": 0.5, "note": None}


def test_a_bar_and_a_curve_replace_themselves(shown, clock, tmp_path, capsys):
    with Console(4) as console:
        console.note("hello")
        for step in (1, 2, 3, 4):
            clock[0] += 1
            console.step(step, metrics(step))
        console.table([{"": "avg@1", "after": 0.5}])
    bars, curves = shown.things
    assert [bundle["text/plain"][:3] for bundle in bars[1:]] == ["1/4", "2/4", "3/4", "4/4"]
    assert '<progress value="0.7500"' in bars[3]["text/html"]
    assert "reward 2.00  accuracy 0.50" in bars[-1]["text/html"]
    assert all(base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG") for bundle in curves[1:])
    (tmp_path / "curve.png").write_bytes(b"\x89PNG of the end")
    console.picture(tmp_path / "curve.png")
    assert base64.b64decode(curves[-1]["image/png"]) == b"\x89PNG of the end"
    assert capsys.readouterr().out == "hello\n       after\navg@1    0.5\n"  # no lines of steps


def test_drawing_takes_a_small_part_of_the_time(shown, clock, monkeypatch):
    """Where a curve takes a second, it is drawn every 20 s, and at the end."""
    drawn = []
    monkeypatch.setattr(
        notebook.Notebook, "_show", lambda *_: (drawn.append(clock[0]), clock.__setitem__(0, clock[0] + 1))
    )
    with Console(45) as console:
        for step in range(1, 46):
            clock[0] += 1
            console.step(step, metrics(step))
    assert drawn == [1, 21, 41, 48]
    assert len(shown.things) == 2


@pytest.mark.parametrize("quiet", [True, False])
def test_nothing_in_a_terminal_or_quietly(shown, monkeypatch, quiet):
    if not quiet:
        monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace())  # IPython in a terminal
    with Console(4, quiet=quiet) as console:
        console.step(1, metrics(1))
    assert shown.things == []
    monkeypatch.delitem(sys.modules, "IPython")
    assert notebook.notebook_display() is None
