"""The page: one HTML file that contains its style, scripts and data, and makes no network requests.

Model output is untrusted. The file contains it as JSON without HTML's special characters, or as base64,
and the scripts show it only as text. The content security policy allows only our style and our script.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from poise._lib.errors import complain
from poise._lib.files import dumps, replacing
from poise.referee.report.html.data import Decode, Source

SCRIPTS = ("data.js", "draw.js", "chart.js", "curves.js", "result.js", "figures.js", "viewer.js", "app.js")


def write_report(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    x: str = "step",
    progress: Callable[[int, int], None] = lambda *_: None,
    say: Callable[[str], None] = complain,
    decode: Decode | None = None,
) -> Path:
    """Write the page of these run folders and token files to ``out``.

    ``x`` is the x axis of the curves when the page opens (``runs.axes.AXES``). ``progress`` is called with the
    number of written responses and their total, ``say`` with messages about skipped data. ``decode`` is a tokenizer's
    ``decode``, for files with token ids.
    """
    source = Source(paths, x, decode)
    index = source.index()
    for line in (line for run in source.runs for line in run.skipped()):
        say(line)
    total = len(index["rows"])
    with replacing(Path(out)) as file:
        top, bottom = frame(live=False)
        file.write(top.encode())
        file.write(data_element(index))
        for number, block in enumerate(source.blocks()):
            content = base64.b64encode(block)
            file.write(b'<script type="text/plain" id="b%d">' % number + content + b"</script>\n")
            if number % 64 == 63 or number + 1 == total:
                progress(number + 1, total)
        file.write(bottom.encode())
    return Path(out)


def data_element(data: Any) -> bytes:
    """The script element from which the page's scripts read ``data``."""
    return b'<script type="application/json" id="data">' + in_html(data) + b"</script>\n"


def in_html(data: Any) -> bytes:
    """Encode ``data`` as JSON that is safe inside a script element: ASCII without ``<``, ``>`` and ``&``."""
    text = dumps(data).decode("ascii").strip()
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")  # in JSON these occur only inside strings
    return text.encode("ascii")


@cache
def frame(live: bool, scripts: tuple[str, ...] = SCRIPTS) -> tuple[str, str]:
    """The HTML before and after the data. A live page may send requests only to its own server."""
    style, script = _asset("page.css"), "\n".join(['"use strict";', *map(_asset, scripts)])
    hosts = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; connect-src {hosts}; "
        "base-uri 'none'; form-action 'none'"
    )
    top, bottom = _asset("page.html").split("<!-- data -->")
    top = top.replace("{{policy}}", policy).replace("{{style}}", style).replace("{{live}}", json.dumps(live))
    return top, bottom.replace("{{script}}", script)


def _asset(name: str) -> str:
    return (files("poise.referee.report.html") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
