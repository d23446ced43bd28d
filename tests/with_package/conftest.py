import importlib.metadata

import poise

# `make test-package` has an environment with the wheel; elsewhere poise is imported from the clone.
if "site-packages" not in str(poise.__file__) or not list(importlib.metadata.distributions(name="poise-rl")):
    collect_ignore_glob = ["test_*.py"]
