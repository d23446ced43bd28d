"""The docs site's own pages, and its links: a hook of mkdocs (``make docs``).

The site has the pages of docs/ and some of the repository's other Markdown files. It also has a page for each method
and one for the Python API, both made from the code. A link to another file of the repository leads to its address.
"""

from __future__ import annotations

import inspect
import os
import re
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import poise
from poise import regulators, surrogates
from poise.sampling.algorithms import TABLE as ALGORITHMS

ROOT = Path(__file__).parents[1]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
METHODS: dict[str, tuple[Mapping[str, Any], str]] = {  # by setting: the table, and the method that has the equation
    "regulator": (regulators.TABLE, "phases"),
    "objective.surrogate": (surrogates.TABLE, "value"),
    "algorithm": (ALGORITHMS, ""),
}


# A table scrolls sideways on a narrow screen; its code does not break inside a word.
STYLE = ".md-typeset td code, .md-typeset th code { word-break: normal; overflow-wrap: normal; }"


class Doctests(Preprocessor):  # type: ignore[misc]
    """Show the examples of docstrings, ``>>> …``, as code: in Markdown they would be quotations."""

    def run(self, lines: list[str]) -> list[str]:
        """Fence each example, which ends with an empty line."""
        shown: list[str] = []
        inside = False
        for line in [*lines, ""]:
            if not inside and line.lstrip().startswith(">>> "):
                inside = True
                shown.append("```pycon")
            elif inside and not line.strip():
                inside = False
                shown.append("```")
            shown.append(line)
        return shown[:-1]


class DoctestExtension(Extension):  # type: ignore[misc]
    """Markdown with ``Doctests``."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Before fenced code is read."""
        md.preprocessors.register(Doctests(md), "doctests", 35)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the methods in place of METHODS in the navigation."""
    config.markdown_extensions.append(DoctestExtension())
    for section in config.nav or []:
        for pages in section.values():
            if "METHODS" in pages:
                pages[pages.index("METHODS") :] = [{name: f"methods/{name}.md"} for name, *_ in _methods()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and pictures from elsewhere that pages show."""
    files.append(File.generated(config, "site.css", content=STYLE))
    for name, setting, kind, equation in _methods():
        files.append(File.generated(config, f"methods/{name}.md", content=_method_page(name, setting, kind, equation)))
    files.append(File.generated(config, "api.md", content=_api_page()))
    for path in _others(config):
        files.append(File.generated(config, path, content=(ROOT / path).read_text(encoding="utf-8")))
    for path in [*_others(config), *(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))]:
        for _, _, target, _ in LINK.findall((ROOT / path).read_text(encoding="utf-8")):
            picture = os.path.normpath(os.path.join(os.path.dirname(path), target))
            if picture.endswith(".png") and not picture.startswith("docs/") and not files.get_file_from_path(picture):
                files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let relative links lead to pages of the site or, if the site has no such page, to the repository."""
    source = page.file.src_uri
    outside = source in _others(config)
    here = os.path.dirname(source if outside else f"docs/{source}")

    def resolved(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(here, link[3]))
        if not source.startswith("methods/") and source != "api.md" and not (ROOT / target).exists():
            raise PluginError(f"{source}: the link to {link[3]} is dead")
        inside = target.removeprefix("docs/") if target.startswith("docs/") else target
        if files.get_file_from_path(inside):
            return f"{link[1]}[{link[2]}]({os.path.relpath(inside, os.path.dirname(source) or '.')}{link[4] or ''})"
        if link[1]:
            raise PluginError(f"{source}: the site has no picture {link[3]}")
        return f"{link[1]}[{link[2]}]({REPOSITORY}/blob/main/{target}{link[4] or ''})"

    # In a table GitHub wants \\| inside code too; Python-Markdown shows the backslash.
    markdown = re.sub(r"(?m)^\|.*$", lambda row: re.sub(r"`[^`]*`", _without_escapes, row[0]), markdown)
    parts = re.split(r"(?ms)(^```.*?^```)", markdown)  # code does not change
    return "".join(part if part.startswith("```") else LINK.sub(resolved, part) for part in parts)


def _without_escapes(code: re.Match[str]) -> str:
    return code[0].replace("\\|", "|")


def _others(config: MkDocsConfig) -> list[str]:
    """The pages of the navigation that are elsewhere in the repository."""
    paths = [path for section in config.nav or [] for pages in section.values() for page in pages
             for path in ([page] if isinstance(page, str) else page.values())]  # fmt: skip
    return [path for path in paths if (ROOT / path).is_file()]


def _methods() -> list[tuple[str, str, Any, str]]:
    return [
        (name, setting, kind, equation)
        for setting, (table, equation) in METHODS.items()
        for name, kind in table.items()
        if (setting, name) != ("algorithm", "grpo")  # the regulator of that name has the page
    ]


def _method_page(name: str, setting: str, kind: Any, equation: str) -> str:
    """Equation, what is the paper's and what ours, the code that differs, settings, metrics."""
    file = str(Path(inspect.getsourcefile(kind) or "").relative_to(ROOT))
    given = [f"`{key}={each.default!r}`" for key, each in inspect.signature(kind).parameters.items()
             if each.default is not each.empty]  # fmt: skip
    code = textwrap.dedent(inspect.getsource(getattr(kind, equation))).strip() if equation else ""
    row = re.search(rf"(?m)^\| `{re.escape(name)}` \|.*$", (ROOT / "docs/papers.md").read_text(encoding="utf-8"))
    source = [cell.strip() for cell in re.split(r"(?<!\\)\|", row[0])[-3:-1]] if row else []
    shown = [
        f"# {name}\n",
        f"`{setting}={name}`\n",
        f"{inspect.getdoc(kind)}\n",
        f"Settings: {', '.join(given)}.\n" if given else "It has no settings.\n",
        "## From the paper, and ours\n",
        f"From: {source[0]}.\n" if source and source[0] else "",
        f"Ours: {source[1]}.\n" if source and source[1] else "",
        "[Papers, and what is ours](../papers.md) has the evidence for and against it.\n",
        "## The code\n",
        f"```python\n{code}\n```\n" if code else "",
        f"The whole file: [{file}](../../{file}).\n",
        "## Metrics\n",
        f"[The table of metrics](../reference.md#metrics) explains the metrics of each {setting.rpartition('.')[2]}.\n",
    ]
    return "\n".join(part for part in shown if part)


def _api_page() -> str:
    """What ``import poise`` offers. A name without a docstring is an error."""
    parts = ["# Python\n", "The package has these names, such as `poise.train`.\n"]
    for name in sorted(poise.__all__, key=str.lower):
        value = getattr(poise, name)
        if name == "__version__":
            continue
        if not inspect.getdoc(value):
            raise PluginError(f"poise.{name} has no docstring")
        path = value.__name__ if inspect.ismodule(value) else f"{value.__module__}.{value.__qualname__}"
        parts.append(f"::: {path}\n")
    return "\n".join(parts)
