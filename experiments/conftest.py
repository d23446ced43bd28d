"""Studies import each other, and the benchmarks, by plain names."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = [str(folder) for folder in (HERE.parent / "benchmarks", *sorted(HERE.iterdir())) if folder.is_dir()]

sys.path += FOLDERS
os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *FOLDERS])  # for processes
