"""Pictures of reports, for the docs. Needs playwright (extra dev) and a Chromium.

    python scripts/screenshots.py docs RUN OTHER     # all pictures in docs/images, from two run folders of recipe tiny
    python scripts/screenshots.py REPORT.html PICTURE.png --view responses --size 390x800 --theme dark
    python scripts/screenshots.py REPORT.html PICTURE.png --view responses/0/1/3 --shade gradient --keys ArrowRight

The docs' runs are `poise train tiny evaluation.every=10 run=RUN` and `poise train tiny steps=20
evaluation.problems=60 regulator="ar(alpha=0.3) | lopti(threshold=0.5)" run=OTHER`. The figures of `poise diagnose` are
drawn from the numbers that are kept in experiments/dominance.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from poise.referee.report.html import write_report
from poise.runs.folder import RunFolder

DOCS = Path(__file__).parents[1] / "docs"
DOMINANCE = Path(__file__).parents[1] / "experiments" / "dominance"
FIGURES = ("embedded", "smollm2")
GRIDS = ("dominance", "influence")  # the first and the second grid of figures
PICTURES: dict[str, dict[str, Any]] = {  # by name: the report, and the settings of ``shoot``
    "result": {"report": "one", "view": "result", "size": "1200x742"},
    "curves": {"report": "one", "view": "curves", "size": "1200x742", "smooth": "0.6"},
    "responses": {
        "report": "one", "view": "responses/0/1/2", "size": "1200x720", "shade": "gradient",
        "keys": ["ArrowRight"] * 8,
    },
    "compare": {"report": "two", "view": "responses/0/1/0", "shade": "weight", "keys": ["c"]},
    "phone": {"report": "one", "view": "result", "size": "390x800", "theme": "dark"},
    **{
        f"{grid}-{name}": {"report": name, "view": "dominance", "of": f"article > .grid >> nth={number}"}
        for name in FIGURES for number, grid in enumerate(GRIDS)
    },
}  # fmt: skip


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


def shoot(
    browser: Any,
    report: Path,
    picture: Path,
    *,
    view: str = "result",
    size: str = "1200x820",
    theme: str = "light",
    shade: str | None = None,
    smooth: str | None = None,
    keys: Sequence[str] = (),
    of: str | None = None,
) -> None:
    """Open a report at a view, press keys, and take a picture of the window or of one element."""
    width, height = map(int, size.split("x"))
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
    page.goto(f"{report.resolve().as_uri()}#{view}")
    page.wait_for_timeout(800)
    if shade:
        page.select_option("#shade", shade)
    if smooth:
        page.fill("#smooth", smooth)
    page.evaluate("document.activeElement.blur()")
    for key in keys:
        page.keyboard.press(key)
        page.wait_for_timeout(150)
    page.wait_for_timeout(400)
    picture.parent.mkdir(parents=True, exist_ok=True)
    if of:
        page.evaluate("document.querySelector('header').style.position = 'static'")  # not over a tall element
        page.locator(of).screenshot(path=picture)
    else:
        page.screenshot(path=picture)
    page.close()


def for_docs(run: Path, other: Path) -> None:
    """Take every picture of a report in docs/images and experiments/dominance again."""
    with tempfile.TemporaryDirectory() as name, chromium() as browser:
        place = Path(name)
        reports = {"one": write_report([run], place / "one.html")}
        reports["two"] = write_report([run, other], place / "two.html")
        for figures in FIGURES:
            kept = RunFolder.create(place / figures, {})
            kept.write_json("diagnose.json", json.loads((DOMINANCE / f"{figures}.json").read_text()))
            reports[figures] = write_report([kept.path], place / f"{figures}.html")
        for picture, settings in PICTURES.items():
            settings = dict(settings)
            report = settings.pop("report")
            folder = DOMINANCE if report in FIGURES else DOCS / "images"
            shoot(browser, reports[report], folder / f"{picture}.png", **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", help="a report, or docs", metavar="REPORT | docs")
    parser.add_argument("paths", type=Path, nargs="+", help="the picture; for the docs two run folders")
    parser.add_argument(
        "--view", default="result", help="result, curves, dominance, responses/RUN/STEP/ROW or settings"
    )
    parser.add_argument("--size", default="1200x820")
    parser.add_argument("--theme", default="light", choices=["light", "dark"])
    parser.add_argument("--shade", help="for responses")
    parser.add_argument("--smooth", help="for curves: from 0 to 0.99")
    parser.add_argument("--keys", nargs="*", default=[], help="pressed one after the other, such as j ArrowRight")
    parser.add_argument("--of", help="a selector: only that element")
    settings = vars(parser.parse_args())
    report, paths = settings.pop("report"), settings.pop("paths")
    if len(paths) != (2 if report == "docs" else 1):
        parser.error("give a report and a picture, or docs and two run folders")
    if report == "docs":
        for_docs(*paths)
        return
    with chromium() as browser:
        shoot(browser, Path(report), paths[0], **settings)


if __name__ == "__main__":
    main()
