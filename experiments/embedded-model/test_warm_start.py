"""Warm start: packed passes have the plain loop's loss and gradient, for any task that shows how it is done."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
import warm_start
import yaml
from demonstrations import Demonstrations, as_batch, dialogue, encode_row
from make_model import changed, main, parse
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from warm_start import Warmstart, build_model, build_tokenizer, embedded, gradient, train
from worked import WorkedKnights

from poise import tasks
from poise.models.loading import load_policy
from poise.models.policy import Policy
from poise.models.prompts import plain
from poise.sampling.native.engine import NativeEngine
from poise.sampling.sampler import Sampler

pytestmark = pytest.mark.studies

SMALL = {"width": 32, "layers": 2, "heads": 2, "vocabulary": 420, "steps": 3, "batch": 6}
LAKE = {"side": 3, "turns": 4}
COMPACT = {"style": "compact", "noise": 0.2}


@pytest.fixture(scope="module")
def policies() -> dict[str, Policy]:
    """Tiny models in float64, each with a tokenizer of its task's texts."""
    found = {}
    for name, settings, style in (("kk", {"people": "2-3"}, COMPACT), ("frozenlake", LAKE, {})):
        small = Warmstart(task=name, task_settings=settings, **style, **SMALL)
        tokenizer = build_tokenizer(small.build_task(), small.vocabulary, problems=60)
        found[name] = Policy(build_model(small, tokenizer).double(), tokenizer)
    return found


def plain_loss(policy: Policy, ids: list[list[int]], labels: list[list[int]]) -> torch.Tensor:
    """As a loop without packing has it: padding on the right, the logits of every token."""
    padded = pad_sequence([torch.tensor(row) for row in ids], batch_first=True)
    wanted = pad_sequence([torch.tensor(row) for row in labels], batch_first=True, padding_value=-100)
    policy.base.set_attn_implementation("sdpa")
    try:
        logits = policy.model(input_ids=padded, use_cache=False).logits
    finally:
        policy.base.set_attn_implementation("poise")
    return cross_entropy(logits[:, :-1].flatten(0, 1), wanted[:, 1:].flatten())


@pytest.mark.parametrize("micro_tokens", [None, 150])
def test_loss_and_gradient_are_those_of_the_plain_loop(policies: dict[str, Policy], micro_tokens: int | None) -> None:
    policy, task = policies["kk"], WorkedKnights(people="2-3", **COMPACT)
    rows = Demonstrations(task, policy, batches=3, batch=6, seed=4)[2]
    seed = 4 * 1_000_003 + 2
    ids, labels = [], []
    for number, problem in enumerate(islice(task.problems("train", seed + 1), 6)):
        prompt = policy.encode(problem.prompt)
        written = task.demonstration(problem, seed=seed * 10_007 + number)
        response = [*plain(policy.tokenizer, written), policy.tokenizer.eos_token_id]
        ids.append(prompt + response)
        labels.append([-100] * len(prompt) + response)
    assert [row.prompt + row.tokens for row in rows] == ids

    parameters = list(policy.model.parameters())
    expected = plain_loss(policy, ids, labels)
    gradients = torch.autograd.grad(expected, parameters)
    found = gradient(policy, as_batch(rows, policy.device), micro_tokens)
    assert found.item() == pytest.approx(expected.item(), abs=1e-10)
    for parameter, right in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, right, atol=1e-10, rtol=1e-8)


def test_in_several_turns_only_the_experts_tokens_are_learned(policies: dict[str, Policy]) -> None:
    policy, task = policies["frozenlake"], tasks.get("frozenlake", **LAKE)
    rows = Demonstrations(task, policy, batches=1, batch=5, seed=0)[0]
    assert any(not all(row.own) for row in rows)
    problem = next(iter(task.problems("train", 1)))
    turns = list(dialogue(task, problem, 0))
    written = [token for token, own in zip(rows[0].tokens, rows[0].own, strict=True) if own]
    assert policy.tokenizer.decode(written).split("<|end|>")[:-1] == [reply for _, reply in turns]
    messages = [m for said, reply in turns for m in (*said, {"role": "assistant", "content": reply})]
    whole = policy.tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert rows[0].prompt + rows[0].tokens == whole

    labels = [
        [-100] * len(row.prompt) + [t if own else -100 for t, own in zip(row.tokens, row.own, strict=True)]
        for row in rows
    ]
    expected = plain_loss(policy, [row.prompt + row.tokens for row in rows], labels)
    found = gradient(policy, as_batch(rows, policy.device))
    assert found.item() == pytest.approx(expected.item(), abs=1e-10)


def test_the_expert_of_a_game_wins_its_demonstrations() -> None:
    task = tasks.get("frozenlake", **LAKE)
    for problem in islice(task.problems("train", 0), 5):
        episode = task.episode(problem)  # type: ignore[attr-defined]
        episode.start()
        for _, reply in dialogue(task, problem, 0):
            episode.step(reply)
        assert episode.score().correct


@pytest.mark.parametrize(("name", "settings"), [("kk", {"people": 2}), ("frozenlake", LAKE)])
def test_it_trains_and_goes_on_from_its_own_model(tmp_path: Path, name: str, settings: dict[str, object]) -> None:
    said: list[tuple[int, dict[str, float]]] = []
    train(Warmstart(name, settings, **SMALL), tmp_path / "first", device="cpu", say=lambda *told: said.append(told))
    assert [step for step, _ in said] == [3]
    kept = yaml.safe_load((tmp_path / "first" / "warmstart.yaml").read_text())
    assert (kept["task"], kept["task_settings"]) == (name, settings)

    again = Warmstart(name, settings, model=str(tmp_path / "first"), steps=1, batch=2)
    trained = train(again, tmp_path / "second", device="cpu")
    start, end = (load_policy(str(tmp_path / part), device="cpu") for part in ("first", "second"))
    assert start.tokenizer.get_vocab() == end.tokenizer.get_vocab()
    moved = [(a - b).abs().max().item() for a, b in zip(start.model.parameters(), end.model.parameters(), strict=True)]
    assert 0 < max(moved) < 0.02  # two thousandths a weight, and no new model
    torch.testing.assert_close(list(trained.model.parameters()), list(end.model.parameters()))


def test_it_stops_where_the_accuracy_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "MEASURED", 8)
    said: list[tuple[int, dict[str, float]]] = []
    for goal, last in ((0.0, 2), (1.0, 5)):
        small = Warmstart("frozenlake", LAKE, **{**SMALL, "steps": 5}, stop_at=goal, measure_every=2, max_tokens=3)
        train(small, tmp_path / str(goal), device="cpu", say=lambda *told: said.append(told))
        assert said[-1][0] == last
    assert [step for step, found in said if "reward/accuracy" in found] == [2, 2, 4]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_signal_ends_it_early_and_saves_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    def rate(step: int, _steps: int) -> float:
        if step == 2:
            signal.raise_signal(signal.SIGINT)
        return 1.0

    monkeypatch.setattr(warm_start, "_rate", rate)
    noted: list[str] = []
    small = Warmstart("kk", {"people": 2}, **{**SMALL, "steps": 500}, workers=workers)
    train(small, tmp_path / "model", device="cpu", note=noted.append)
    assert noted[-1].startswith("stopped after step 2 of 500")
    load_policy(str(tmp_path / "model"), device="cpu")


@pytest.fixture
def _not_under_nohup() -> Iterator[None]:
    """Where nohup started the tests, this process would ignore SIGHUP, as it should."""
    before = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.usefixtures("_not_under_nohup")
def test_a_signal_to_the_workers_too_is_the_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """A terminal, `timeout` and batch systems signal all processes of a job."""

    def rate(step: int, _steps: int) -> float:
        if step == 2:
            for worker in multiprocessing.active_children():
                assert worker.pid
                os.kill(worker.pid, number)
        if step == 20:  # far more batches than had been prepared
            signal.raise_signal(number)
        return 1.0

    monkeypatch.setattr(warm_start, "_rate", rate)
    noted: list[str] = []
    small = Warmstart("kk", {"people": 2}, **{**SMALL, "steps": 500}, workers=1)
    train(small, tmp_path / "model", device="cpu", note=noted.append)
    assert noted[-1].startswith("stopped after step 20 of 500")
    assert not multiprocessing.active_children()


def test_workers_do_not_change_the_rows(tmp_path: Path) -> None:
    small = Warmstart("kk", {"people": 2}, **{**SMALL, "steps": 2})
    models = []
    for workers in (0, 2):
        out = tmp_path / str(workers)
        models.append(train(replace(small, workers=workers), out, device="cpu").model.state_dict())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_an_example_encodes_as_the_template_says(policies: dict[str, Policy]) -> None:
    policy = policies["kk"]
    row = encode_row(policy, iter([([{"role": "user", "content": "hello"}], "knight")]))
    assert row.own == [True] * len(row.tokens)
    assert policy.tokenizer.decode(row.prompt + row.tokens) == "<|user|>hello<|assistant|>knight<|end|>"


def test_the_prompts_show_the_tools_as_when_sampling(policies: dict[str, Policy]) -> None:
    policy, task = policies["kk"], tasks.get("search-qa")
    rows = Demonstrations(task, policy, batches=1, batch=2, seed=0)[0]
    problems = list(islice(task.problems("train", 1), 2))
    games = Sampler(policy, NativeEngine(policy), task, max_tokens=8)._start(problems)
    assert [row.prompt for row in rows] == [list(game.prompt.tokens) for game in games]
    assert all("JSON schemas" in policy.tokenizer.decode(row.prompt) for row in rows)


@pytest.mark.parametrize(
    ("behind", "end"), [("\n<|end|>\n", "\n<|end|>"), ("<|user|>\n", "<|user|>"), ("<|pad|><|end|>", "<|pad|><|end|>")]
)
def test_a_turn_ends_as_the_template_says(policies: dict[str, Policy], behind: str, end: str) -> None:
    """The second template ends turns in a token that is none of the model's end tokens."""
    policy = policies["kk"]
    tokenizer = copy.copy(policy.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|assistant|>{{ m.role }}\n{{ m.content }}BEHIND{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>assistant\n{% endif %}"
    ).replace("BEHIND", behind)
    turns = [([{"role": "user", "content": text}], text.upper()) for text in ("up", "down")]
    row = encode_row(Policy(policy.model, tokenizer), iter(turns))
    messages = [m for said, reply in turns for m in (*said, {"role": "assistant", "content": reply})]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(row.prompt + row.tokens) == text.rstrip("\n")
    written = [token for token, own in zip(row.tokens, row.own, strict=True) if own]
    assert tokenizer.decode(written) == f"UP{end}DOWN{end}"


def test_a_model_stops_at_the_end_that_it_has_learned(tmp_path: Path) -> None:
    train(Warmstart("kk", {"people": 2}, **{**SMALL, "steps": 1}), tmp_path / "first", device="cpu")
    policy = load_policy(str(tmp_path / "first"), device="cpu")
    policy.tokenizer.chat_template = policy.tokenizer.chat_template.replace("<|end|>", "<|user|>")
    policy.save(tmp_path / "other")
    again = Warmstart("kk", {"people": 2}, model=str(tmp_path / "other"), steps=1, batch=2)
    train(again, tmp_path / "second", device="cpu")
    ends = load_policy(str(tmp_path / "second"), device="cpu").end_tokens
    assert ends == sorted(policy.tokenizer.convert_tokens_to_ids(["<|end|>", "<|user|>"]))


class Mute:
    """A task that only scores."""

    name = "mute"

    def problems(self, split: str, seed: int) -> Iterator[tasks.Problem]:  # noqa: ARG002
        yield tasks.Problem("1", "?", "1", {})

    def score(self, problem: tasks.Problem, text: str) -> tasks.Score:  # noqa: ARG002
        return tasks.Score(0.0, False)


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="width is of a new model"):
        Warmstart("kk", model="embedded", width=32)
    with pytest.raises(ValueError, match="must be a multiple of heads"):
        Warmstart("kk", width=33)
    monkeypatch.setitem(tasks.TASKS, "mute", Mute)
    with pytest.raises(TypeError, match="needs demonstration"):
        Warmstart("mute").build_task()


def test_the_embedded_models_settings_are_those_kept_beside_it() -> None:
    assert (embedded().style, embedded().noise, embedded().model) == ("compact", 0.2, None)
    embedded().build_task()


def test_settings_that_are_typed() -> None:
    typed = ["task.people=3-5", "style=sentences", "lr=1e-3", "compile=false", "noise=0"]
    found = changed(embedded(), parse(typed))
    assert found.task_settings == {"people": "3-5"}
    assert (found.style, found.lr, found.compile, found.noise, found.width) == ("sentences", 1e-3, False, 0, 160)
    other = changed(embedded(), parse(["task.name=frozenlake", "task.side=3", "model=my-model"]))
    assert (other.task, other.task_settings, other.style) == ("frozenlake", {"side": 3}, "sentences")
    for wrong, message in (("stepz=3", "unknown setting 'stepz'"), ("steps", "write key=value")):
        with pytest.raises(ValueError, match=message):
            changed(embedded(), parse([wrong]))
    with pytest.raises(ValueError, match="noise is of task"):
        changed(embedded(), parse(["task.name=frozenlake", "noise=0.1"])).build_task()


def test_the_script_makes_a_model_that_loads_and_is_reproducible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["steps=3", "batch=4", "width=32", "layers=1", "heads=2", "vocabulary=400", "task.people=2", "device=cpu"]
    for name in ("a", "b"):
        main([str(tmp_path / name), *small])
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert weights[0] == weights[1]
    assert f"poise eval {tmp_path / 'b'}" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "a" / "warmstart.yaml").read_text())["task_settings"] == {"people": 2}
    with pytest.raises(SystemExit, match="is there already"):
        main([str(tmp_path / "a")])
