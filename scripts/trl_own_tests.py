"""TRL's own tests of its GRPOTrainer, run over poise's adapter.

    git clone https://github.com/huggingface/trl && python scripts/trl_own_tests.py trl
    python scripts/trl_own_tests.py trl --regulator "ar(alpha=0.2)" -k "test_train and not vlm"

The tests run twice: with TRL's trainer, and with poise's in its place. The script says which tests pass with TRL's and
fail with poise's, and which end with other weights (with a regulator that changes nothing, such as grpo, none should).
The checkout's own TRL is used. Models and data that the tests would download are stood in for: tiny random models
of the same classes with the tokenizer of poise's embedded model, and a few made-up prompts. Tests that cannot pass with
these fail twice, and are counted; those of tools need Qwen3's tokenizer (--tokenizer FOLDER). Models with images are
left out. Nothing is written into the checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path("tests/test_grpo_trainer.py")
SMALL = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
REPOSITORY, REGULATOR, RESULTS = "TRL_REPOSITORY", "TRL_REGULATOR", "TRL_RESULTS"  # the plugin's settings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path, help="a checkout of TRL's repository")
    parser.add_argument("--regulator", default="grpo")
    parser.add_argument("--tokenizer", help="a folder with the tokenizer of the stand-ins")
    args, pytest_options = parser.parse_known_args()
    if not (args.repository / TESTS).is_file():
        parser.error(f"{args.repository} has no {TESTS}: name a checkout of TRL's repository")
    with tempfile.TemporaryDirectory() as folder:
        build_models((args.repository / TESTS).read_text(), Path(folder) / "hub", args.tokenizer)
        stock, ours = (
            run(args.repository, regulator, Path(folder), pytest_options) for regulator in ("", args.regulator)
        )
    return report(stock, ours, args.regulator)


def run(repository: Path, regulator: str, folder: Path, options: list[str]) -> dict[str, dict[str, Any]]:
    """The outcome of each test, and the hash of the weights that each training in it ended with."""
    results = folder / "results.json"
    results.unlink(missing_ok=True)
    env = os.environ | {
        "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder / "hub"), REPOSITORY: str(repository.resolve()),
        REGULATOR: regulator, RESULTS: str(results), "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])),
    }  # fmt: skip
    print(f"\n--- with {f'poise, {regulator}' if regulator else 'TRL alone'}", flush=True)
    command = [
        sys.executable, "-m", "pytest", str(TESTS), "-q", "-p", "trl_own_tests", "-p", "no:cacheprovider",
        "--deselect", f"{TESTS}::TestGRPOTrainerVLM", *options,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=repository, env=env, check=False)
    if not results.exists():
        raise SystemExit(f"pytest ended with {done.returncode} before it ran a test")
    found: dict[str, dict[str, Any]] = json.loads(results.read_text())
    return found


def report(stock: dict[str, dict[str, Any]], ours: dict[str, dict[str, Any]], regulator: str) -> int:
    passed = [test for test, result in stock.items() if result["outcome"] == "passed"]
    failed = sum(result["outcome"] == "failed" for result in stock.values())
    broken = [test for test in passed if ours.get(test, {}).get("outcome") != "passed"]
    trained = [test for test in passed if stock[test]["weights"] and test not in broken]
    other = [test for test in trained if stock[test]["weights"] != ours[test]["weights"]]
    print(f"\nTRL's tests: {len(passed)} pass with TRL's trainer, {failed} fail with these stand-ins")
    print(f"with poise ({regulator}): {len(passed) - len(broken)} of these {len(passed)} pass")
    print(f"{len(trained) - len(other)} of {len(trained)} that train end with the same weights, bit for bit")
    for title, tests in (("fails with poise", broken), ("other weights", other)):
        for test in tests:
            print(f"  {title}: {test}")
    return bool(broken)


# --- stand-ins


def build_models(tests: str, hub: Path, tokenizer_folder: str | None = None) -> None:
    """Tiny models of the classes that the tests name, as a cache of the hub."""
    import torch
    import transformers
    from trl.chat_template_utils import qwen3_chat_template

    from poise.models.policy import EMBEDDED

    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder or EMBEDDED)
    tokenizer.chat_template = qwen3_chat_template
    ends = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    pattern = r"(trl-internal-testing/tiny-(\w+?For(?:CausalLM|SequenceClassification))[\w.-]*)"
    for model_id, name in sorted(set(re.findall(pattern, tests))):
        kind = getattr(transformers, name, None)
        if kind is None:
            continue  # tests of a class that this version lacks fail twice
        known = kind.config_class().to_dict()
        sizes = {name: value for name, value in SMALL.items() if name in known} | {"vocab_size": len(tokenizer)} | ends
        if "SequenceClassification" in name:
            sizes["num_labels"] = 1
        torch.manual_seed(0)
        try:
            model = kind(kind.config_class(**sizes))
        except Exception as error:
            print(f"no stand-in for {model_id}: {type(error).__name__}: {error}")
            continue
        place = hub / f"models--{model_id.replace('/', '--')}"
        model.save_pretrained(place / "snapshots/0")
        tokenizer.save_pretrained(place / "snapshots/0")
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs/main").write_text("0")


def load_dataset(_path: str, name: str = "", split: str | None = None, streaming: bool = False, **_: Any) -> Any:
    """Made-up prompts in the place of trl-internal-testing/zen."""
    from datasets import Dataset, DatasetDict

    texts = [f"Ada says that Bo is a knave, {number} times." for number in range(17)]
    prompts: list[Any] = texts
    if name.startswith("conversational"):
        prompts = [[{"role": "user", "content": text}] for text in texts]
    parts = DatasetDict(train=Dataset.from_dict({"prompt": prompts}), test=Dataset.from_dict({"prompt": prompts[:2]}))
    found = parts if split is None else parts[split]
    return found.to_iterable_dataset() if streaming and split else found


# --- this file as a plugin of pytest, in the process that runs the tests

_found: dict[str, dict[str, Any]] = {}


def pytest_configure() -> None:
    """Put the checkout's TRL, the stand-ins and the regulated trainer in place before the tests are imported."""
    sys.path.insert(0, os.environ[REPOSITORY])
    import datasets
    import trl

    datasets.load_dataset = load_dataset
    if regulator := os.environ[REGULATOR]:
        from poise.integrations.trl import RegulatedGRPOTrainer

        class GRPOTrainer(RegulatedGRPOTrainer):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, regulator=regulator, **kwargs)

        trl.GRPOTrainer = GRPOTrainer


@pytest.fixture(autouse=True)
def _hash_weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from transformers import Trainer

    hashes: list[str] = []
    train = Trainer.train

    def hashed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = train(self, *args, **kwargs)
        digest = hashlib.sha256()
        for weight in self.model.state_dict().values():
            digest.update(weight.detach().cpu().float().numpy().tobytes())
        hashes.append(digest.hexdigest())
        return result

    monkeypatch.setattr(Trainer, "train", hashed)
    yield
    _found.setdefault(request.node.nodeid, {})["weights"] = hashes


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the outcome."""
    result = _found.setdefault(report.nodeid, {"weights": []})
    if report.when == "call" or report.outcome != "passed":
        result["outcome"] = report.outcome


def pytest_sessionfinish() -> None:
    """Hand the results over."""
    Path(os.environ[RESULTS]).write_text(json.dumps(_found))


if __name__ == "__main__":
    raise SystemExit(main())
