"""``deterministic=true`` on CUDA: two runs, and a run that was killed and resumed, end with the same bytes.

Each run is a process of its own, as cuBLAS must have its workspace before CUDA starts.
"""

import signal

import pytest
import torch

from poise._lib.determinism import deterministic
from poise._lib.device import kth_value, running_sum
from poise.models.attention import _has_kernel, repeat
from poise.runs.folder import RunFolder
from support.small_runs import SMALL, command, killed_at, parameters

SETTINGS = [
    *[item for item in SMALL if not item.startswith(("device=", "rollout.max_tokens=", "steps="))],
    "device=cuda", "deterministic=true", "steps=4", "rollout.max_tokens=40", "checkpoint_every=1",
    "objective.kl_coef=0.01", "objective.entropy_coef=0.01", "optim.mini_batch=8", "evaluation.every=2",
    "rollout.old_logp=recomputed", "optim.lr=1e-3",
]  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def finished(process):
    with process as running:
        shown = running.stdout.read()
        return running.wait(), shown


def contents(path):
    """Metrics without times, and weights."""
    folder = RunFolder.open(path, resume=False)
    lines = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in folder.metrics()]
    assert all(line["optim/grad_norm"] > 0 for line in lines)  # the weights do move
    return lines, parameters(folder)


def assert_same(path, expected):
    lines, weights = contents(path)
    assert lines == expected[0]
    for name, value in expected[1].items():
        assert torch.equal(weights[name], value), name


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        [],
        ["regulator=nthr | lopti", "group=8"],
        ["lora.rank=4"],
        ["rollout.top_p=0.9", "regulator=entropy"],
        ["compile=true", "task.people=3", "rollout.max_tokens=200"],
        ["dtype=float32"],
    ],
    ids=["plain", "nthr", "lora", "top_p", "compiled", "float32"],
)
def test_two_runs_and_a_killed_one_have_the_same_bits(tmp_path, more):
    """All three at once: it does not matter how much of the device's memory others hold."""
    train, killed = ["train", "tiny", *SETTINGS, *more], f"run={tmp_path / 'killed'}"
    started = [command(*train, f"run={tmp_path / name}", gpu=True) for name in ("one", "two")]
    started.append(killed_at("log", 3, *train, killed, gpu=True))
    for (code, shown), expected in zip([finished(each) for each in started], (0, 0, -signal.SIGKILL), strict=True):
        assert code == expected, shown
    whole = contents(tmp_path / "one")
    assert_same(tmp_path / "two", whole)
    code, shown = finished(command("train", "--resume", killed, gpu=True))
    assert code == 0, shown
    assert_same(tmp_path / "killed", whole)


@pytest.mark.parametrize("shape", [(1, 200_000), (64, 50_000)])
def test_sums_and_order_statistics_repeat(shape):
    values = torch.rand(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    with deterministic(torch.device("cuda"), 0):
        sums = [running_sum(values, torch.float64) for _ in range(5)]
        assert all(torch.equal(sums[0], other) for other in sums)
        torch.testing.assert_close(sums[0], values.cpu().double().cumsum(-1).cuda(), rtol=1e-12, atol=1e-9)
        assert kth_value(values[0], 7) == values[0].cpu().kthvalue(7).values


def test_gradients_of_repeated_rows_and_of_packed_attention_repeat():
    """The sums that atomics would do in another order each time."""
    from poise.batch import Prompt, padded_batch
    from support.tiny_models import tiny

    g = torch.Generator().manual_seed(0)
    prompts = [Prompt(tuple(torch.randint(6, 90, (60,), generator=g).tolist()))] * 64
    rows = [torch.randint(6, 90, (100,), generator=g) for _ in prompts]
    batch = padded_batch(prompts, rows, torch.device("cuda"))
    policy = tiny("qwen2", "cuda", torch.bfloat16)
    query = torch.zeros(1, 1, 8, device="cuda", dtype=torch.bfloat16)
    assert _has_kernel(query, query)
    x = torch.randn(50, 64, generator=g).cuda().bfloat16().requires_grad_()
    index = torch.randint(50, (100_000,), generator=g).cuda()
    with deterministic(torch.device("cuda"), 0):
        found = []
        for _ in range(5):
            policy.model.zero_grad()
            x.grad = None
            policy.hidden(batch).float().square().sum().backward()
            repeat(x, index).float().square().sum().backward()
            found.append([x.grad.clone(), *(p.grad.clone() for p in policy.trunk.parameters())])
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
