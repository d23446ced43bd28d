"""vLLM as an engine on CUDA: compiled, with CUDA graphs, in the trainer's process, with the policy's weights."""

import random
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from poise.runs.folder import RunFolder
from poise.sampling.vllm_engine import VllmEngine
from support.pages import ROOT
from support.tiny_models import sample
from support.vllm_engines import STARTED, small

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: pip install '.[vllm]'"),
    pytest.mark.filterwarnings("ignore"),  # vLLM and torch.compile have many for their own code
]

MEMORY = 0.1
ROUNDING = 0.1  # mean distance of log-probabilities, in bfloat16
A_RUN = """
import pathlib, sys
from support.vllm_engines import train_on_vowels
train_on_vowels(pathlib.Path(sys.argv[1]), *sys.argv[2:])
"""


@pytest.fixture(scope="module")
def engine():
    policy = small()
    policy.model.to("cuda", torch.bfloat16)
    random.seed(5), torch.manual_seed(5)
    expected = random.random(), float(torch.rand((), device="cuda"))
    random.seed(5), torch.manual_seed(5)
    STARTED.append(VllmEngine(policy, memory=MEMORY))
    before = torch.cuda.memory_reserved()  # of this process alone: others may use the device, too
    sample(STARTED[-1], prompts(2), 1, max_tokens=4, temperature=1.0, seed=0)  # starts it
    STARTED[-1].taken = torch.cuda.memory_reserved() - before
    assert (random.random(), float(torch.rand((), device="cuda"))) == expected  # vLLM draws none of the process's own
    return STARTED[-1]


def prompts(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 40, (n,), generator=g).tolist()
    return [torch.randint(6, 700, (length,), generator=g).tolist() for length in lengths]


def gap(out):
    return float((out.logp - out.sampler_logp)[out.mask].abs().mean())


def test_log_probabilities_are_the_policys_and_those_of_vllm_next_to_them(engine):
    for temperature in (1.0, 0.6):
        out = sample(engine, prompts(5), 8, max_tokens=40, temperature=temperature, seed=3)
        with torch.no_grad():
            logp, entropy = engine.policy.score(out.batch, temperature)
        torch.testing.assert_close(logp[out.mask], out.logp[out.mask], atol=0.05, rtol=0.01)
        torch.testing.assert_close(entropy[out.mask], out.entropy[out.mask], atol=0.05, rtol=0.01)
        assert 0 < gap(out) < ROUNDING


def test_changed_weights_reach_the_recorded_graphs(engine):
    before = sample(engine, prompts(6), 4, max_tokens=30, temperature=1.0, seed=0)
    kept = {name: value.clone() for name, value in engine.policy.model.state_dict().items()}
    addresses = [parameter.data_ptr() for parameter in inside(engine).parameters()]
    with torch.no_grad():
        for parameter in engine.policy.model.parameters():
            parameter.add_(0.5 * parameter.std() * torch.randn_like(parameter))
        moved, _ = engine.policy.score(before.batch, 1.0)
    after = sample(engine, prompts(6), 4, max_tokens=30, temperature=1.0, seed=0)
    engine.policy.model.load_state_dict(kept)
    assert (moved - before.sampler_logp)[before.mask].abs().mean() > 5 * ROUNDING  # they are another model's
    assert gap(after) < ROUNDING
    assert [parameter.data_ptr() for parameter in inside(engine).parameters()] == addresses


def inside(engine):
    """The module that vLLM runs."""
    (model,) = engine._llm.apply_model(lambda model: model)
    return model


def test_the_copy_of_the_weights_is_on_the_device_and_in_the_policys_dtype(engine):
    found = {(parameter.device.type, parameter.dtype) for parameter in inside(engine).parameters()}
    assert found == {("cuda", torch.bfloat16)}


def test_vllm_takes_no_more_than_its_share(engine):
    _, total = torch.cuda.mem_get_info()
    assert engine.taken < MEMORY * total + 3e9  # graphs and workspaces are not counted by vLLM


def test_a_seed_draws_the_same_tokens_and_another_seed_others(engine):

    def draw(seed):
        return sample(engine, prompts(4), 32, max_tokens=1, temperature=1.0, seed=seed).tokens[:, 0]

    first = draw(1)
    assert (first == draw(1)).float().mean() > 0.95  # rounding may decide a near tie
    assert (first == draw(2)).float().mean() < 0.8


def test_more_responses_than_graphs_were_recorded_for(engine):
    out = sample(engine, prompts(80), 8, max_tokens=12, temperature=1.0, seed=1)
    assert len(out.lengths) == 640
    assert gap(out) < ROUNDING


def test_a_run_with_vllm_reports_a_small_mismatch_at_every_step(tmp_path):
    """In a process of its own: a second vLLM in a process gets other log-probabilities on CUDA, and is refused."""
    settings = ["steps=5", "device=cuda", f"rollout.vllm_memory={MEMORY}"]
    subprocess.run([sys.executable, "-c", A_RUN, str(tmp_path), *settings], cwd=ROOT / "tests", check=True)
    lines = RunFolder.open(tmp_path / "run", resume=False).metrics()
    assert len(lines) == 5
    for line in lines:  # the weights have moved before every step but the first
        assert line["rollout/mismatch"] < ROUNDING
        assert line["rollout/importance"] == pytest.approx(1.0, abs=0.05)
