import importlib.util

if importlib.util.find_spec("vllm") is None:  # `make test-vllm` has an environment with it
    collect_ignore_glob = ["test_*.py"]
