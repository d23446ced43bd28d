"""A picture of a report, for the docs: python benchmarks/screenshots.py REPORT.html PICTURE.png [settings]

    python benchmarks/screenshots.py runs/demo/report.html docs/images/curves.png --view curves
    python benchmarks/screenshots.py runs/demo/report.html phone.png --view responses --size 390x800 --theme dark

Needs playwright (extra dev) and a Chromium.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--view", default="curves", help="curves, dominance, responses or settings")
    parser.add_argument("--size", default="1200x820")
    parser.add_argument("--theme", default="light", choices=["light", "dark"])
    parser.add_argument("--shade", help="for responses")
    parser.add_argument("--keys", nargs="*", default=[], help="pressed one after the other, such as j ArrowRight")
    parser.add_argument("--of", help="a CSS selector: only that element")
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    width, height = map(int, args.size.split("x"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=args.theme)
        page.goto(f"{args.report.resolve().as_uri()}#{args.view}")
        page.wait_for_timeout(800)
        if args.shade:
            page.select_option("#shade", args.shade)
            page.evaluate("document.activeElement.blur()")
        for key in args.keys:
            page.keyboard.press(key)
            page.wait_for_timeout(150)
        page.wait_for_timeout(400)
        args.picture.parent.mkdir(parents=True, exist_ok=True)
        if args.of:
            page.evaluate("document.querySelector('header').style.position = 'static'")  # not over a tall element
            page.locator(args.of).first.screenshot(path=args.picture)
        else:
            page.screenshot(path=args.picture)
        browser.close()


if __name__ == "__main__":
    main()
