"""Whether poise's tests pass with newer versions of torch, transformers and TRL than the pinned ones.

    python scripts/newer_versions.py                                  # the newest version of each
    python scripts/newer_versions.py transformers==5.23.0 -- tests/models -m ""   # this one, and these tests

The versions are installed into a throw-away environment on top of the one that runs this script, which stays as it is.
torch is tried only if the index has a newer build for CPUs ("+cpu"): the others are gigabytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from importlib import metadata
from pathlib import Path
from sysconfig import get_paths

from packaging.version import Version

PACKAGES = ("torch", "transformers", "trl")
FOLDERS = ("models", "sampling", "integrations", "tasks", "training")
ROOT = Path(__file__).parents[1]


def main() -> int:
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    wanted = words[:at] or PACKAGES
    tests = words[at + 1 :] or [f"tests/{folder}" for folder in FOLDERS]
    chosen = [word if "==" in word else newest(word) for word in wanted]
    requirements = [requirement for requirement in chosen if requirement]
    if not requirements:
        print("nothing to try")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        python = environment(Path(folder), requirements)
        names = sorted({*PACKAGES, "tokenizers", "huggingface_hub", *(word.split("==")[0] for word in requirements)})
        subprocess.run([python, "-c", SHOW, *names], check=True)
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, check=False)
    print(f"{', '.join(requirements)}: the tests {'pass' if done.returncode == 0 else 'do not pass'}")
    return done.returncode


SHOW = "import sys; from importlib.metadata import version\nfor name in sys.argv[1:]: print(name, version(name))"


def newest(name: str) -> str | None:
    """The newest version that the index has, as a requirement; None if there is nothing newer to try."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", name], capture_output=True, text=True, check=False
    )
    lines = [line for line in listed.stdout.splitlines() if line.startswith("Available versions:")]
    if not lines:
        print(f"{name}: the index could not be read: {listed.stderr.strip()[-300:]}")
        return None
    versions = sorted(map(Version, lines[0].partition(":")[2].split(",")))
    here = Version(metadata.version(name))
    usable = [version for version in versions if name != "torch" or version.local == "cpu"]
    if not usable or usable[-1] <= here:
        print(f"{name}: {here} is the newest that can be tried; the index has {versions[-1]}")
        return None
    return f"{name}=={usable[-1]}"


def environment(folder: Path, requirements: list[str]) -> str:
    """A virtual environment on top of this one, with these versions; the path of its python."""
    python, _ = layer(folder)
    kept = folder / "kept.txt"  # no other torch comes along
    tried = {requirement.split("==")[0] for requirement in requirements}
    kept.write_text("".join(f"{name}=={metadata.version(name)}\n" for name in PACKAGES if name not in tried))
    subprocess.run([python, "-m", "pip", "install", "--quiet", "-c", str(kept), *requirements], check=True)
    return python


def layer(folder: Path) -> tuple[str, Path]:
    """An empty virtual environment on top of this one: its python, and the folder of its packages."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin/python")
    place = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    (Path(place) / "base.pth").write_text(f"import site; site.addsitedir({get_paths()['purelib']!r})\n")
    return python, Path(place)


if __name__ == "__main__":
    raise SystemExit(main())
