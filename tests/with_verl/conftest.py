import importlib.util
import os

# verl must first learn what a CPU is (verl_cpu.py), before poise is loaded. As a plugin it is tried in test_plugin.py.
os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"
if importlib.util.find_spec("verl") is None:  # `make test-verl` has an environment with it
    collect_ignore_glob = ["test_*.py"]
