"""README.md for the package index, with links that lead to the repository. All else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
REPOSITORY = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]


def absolute(link: re.Match[str]) -> str:
    """A Markdown link or picture to a file of the repository, with its whole address."""
    kind = "raw" if link[1] else "blob"
    return f"{link[1]}[{link[2]}]({REPOSITORY}/{kind}/main/{link[3]})"


readme = (HERE / "README.md").read_text(encoding="utf-8")
readme = re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", absolute, readme)
setup(long_description=readme, long_description_content_type="text/markdown")
