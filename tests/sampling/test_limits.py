"""Lengths that do not fit the model are refused before anything is computed, with the numbers and the remedy."""

from contextlib import nullcontext

import pytest
import transformers
from typer.testing import CliRunner

from poise.models.loading import load_policy
from poise.models.policy import ModelError
from poise.referee.diagnose import diagnose
from poise.runs.folder import RunFolder
from poise.sampling.cached_engine import CachedEngine
from poise.sampling.native import graphs
from poise.sampling.native.engine import NativeEngine
from poise.sampling.sampler import Sampler
from poise.tasks import Problem, Score
from poise.trainer import train
from poise.training import config
from poise.training.building import build_sampler
from poise.training.evaluation import evaluate
from support.tiny_models import COMMON, LEARNED, Policy, Words, learned, sample, tiny

ENGINES = [CachedEngine, NativeEngine]


class Told:
    """A task that says one thing."""

    name = "told"

    def __init__(self, prompt):
        self.prompt = prompt

    def problems(self, split, seed):
        return (Problem(f"told/{split}/{seed}/{i}", self.prompt, "1", {}) for i in range(1 << 30))

    def score(self, *_):
        return Score(0.0, False, {}, "")


def rotary(**rope):
    settings = {**COMMON, "max_position_embeddings": 64}
    return Policy(transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, rope_parameters=rope)), Words())


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (lambda: tiny("llama"), 256),
        (lambda: learned("gpt2", 40), 40),
        (lambda: learned("opt", 40), 40),
        (lambda: rotary(rope_type="default", rope_theta=1e4), 64),
        (lambda: rotary(rope_type="linear", rope_theta=1e4, factor=4.0), 256),
        (lambda: rotary(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32), 128),
    ],
)
def test_how_many_positions_a_model_has(policy, expected):
    assert policy().positions == expected


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", [*LEARNED, "llama"])
def test_an_engine_goes_up_to_the_last_position_and_not_beyond(policy, engine):
    held = learned(policy, 32) if policy in LEARNED else rotary(rope_type="default", rope_theta=1e4)
    most = held.positions
    settings = {"temperature": 1.0, "seed": 0}
    out = sample(engine(held), [[7] * 12], 2, max_tokens=most - 12, **settings)
    assert out.tokens.shape[1] <= most - 12
    with pytest.raises(ModelError, match=rf"{most} positions .*12 tokens.* set max_tokens to {most - 12} or less"):
        sample(engine(held), [[7] * 12], 2, max_tokens=most - 11, **settings)
    with pytest.raises(ModelError, match="shorten the prompt"):
        sample(engine(held), [[7] * 70], 2, max_tokens=1, **settings)


def test_training_is_refused_before_the_run(tmp_path):
    run = tmp_path / "run"
    asked = config.load("tiny", [f"run={run}", "rollout.max_tokens=600", "device=cpu"])
    with pytest.raises(ModelError, match=r"1024 positions.*rollout\.max_prompt=512.*max_tokens=600 need 1112"):
        train(asked, quiet=True)
    assert not run.exists()


def test_diagnosing_is_refused_before_the_run(tmp_path):
    asked = config.load("tiny", ["rollout.max_tokens=600", "device=cpu"])
    with pytest.raises(ModelError, match=r"rollout\.max_prompt=512"):
        diagnose(asked, RunFolder.create(str(tmp_path / "run"), {}), say=pytest.fail)


def test_evaluation_names_the_problem_that_is_too_long():
    policy = load_policy("embedded", device="cpu")
    engine = NativeEngine(policy)
    with pytest.raises(ModelError, match=r"told/test/0/0 with 1\d\d\d tokens .*1024|1024 .*told/test/0/0"):
        evaluate(Sampler(policy, engine, Told("knight " * 1500), max_tokens=10), problems=2, samples=1)
    sampler = Sampler(policy, engine, Told("knight " * 50), max_tokens=10, max_prompt=20)
    with pytest.raises(ModelError, match=r"told/test/0/0 has \d+ tokens, more than rollout\.max_prompt=20"):
        evaluate(sampler, problems=2, samples=1)


def test_poise_eval_says_it_without_a_traceback():
    from poise.cli.app import app

    done = CliRunner().invoke(app, ["eval", "embedded", "task.people=2", "problems=1", "max_tokens=1020"])
    assert done.exit_code == 1
    assert "1024 positions" in done.output
    assert "set max_tokens to" in done.output


def test_a_problem_with_a_control_token_that_cannot_be_text_is_refused_by_name():
    policy = load_policy("embedded", device="cpu")
    policy.tokenizer.chat_template = policy.tokenizer.chat_template.replace(
        "message.content", "message.content | upper"
    )
    with pytest.raises(ModelError, match=r"problem told/test/0/0: .*control token"):
        evaluate(Sampler(policy, NativeEngine(policy), Told("a <|end|>"), max_tokens=4), problems=1, samples=1)


def test_a_held_out_problem_that_is_too_long_stops_training(tmp_path):
    with pytest.raises(ModelError, match=r"more than rollout\.max_prompt=9"):
        train(config.load("tiny", [f"run={tmp_path / 'run'}", "rollout.max_prompt=9", "device=cpu"]), quiet=True)


def test_what_a_token_takes_in_the_cache():
    assert NativeEngine(tiny("llama")).token_bytes == 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, bytes


@pytest.mark.parametrize(("task", "length"), [("kk", 64 + 32), ("frozenlake", 64 + 128)])
def test_a_run_is_refused_if_not_even_one_sequence_fits(task, length, tmp_path, monkeypatch):
    """On CUDA, where a slot has room for the longest episode."""
    monkeypatch.setattr(NativeEngine, "_graphs", True)
    held = []
    monkeypatch.setattr("poise._lib.device.free_bytes", lambda _: held[0])
    policy = load_policy("embedded", device="cpu")
    settings = ["rollout.max_prompt=40", "rollout.max_tokens=32", "rollout.max_episode_tokens=128"]
    asked = config.load("grpo", [f"run={tmp_path}", "device=cpu", "model=embedded", f"task.name={task}", *settings])
    token = graphs.slot_bytes(NativeEngine(policy).shapes, 1, 4)
    for fits in (True, False):
        held[:] = [(length + 1 if fits else length - 1) * token / graphs.CACHE_SHARE]
        refused = pytest.raises(ModelError, match=rf"{length} tokens .* lower rollout\.max_tokens")
        with nullcontext() if fits else refused:
            build_sampler(asked, policy, pytest.fail)
