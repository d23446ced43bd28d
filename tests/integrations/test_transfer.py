"""RLTR's transfer as a reward: with TRL's signature, under TRL and in verl's form; with servers and a loaded model."""

import os
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import pytest

from poise.integrations.transfer import Transfer
from poise.models.loading import load_policy
from poise.models.location import EMBEDDED
from poise.models.prompts import as_text
from poise.sampling.draws import Sampling
from poise.sampling.remote import Reply, Server
from poise.tasks.knights_knaves import KnightsKnaves
from poise.tasks.rewards import RewardError
from support.receivers import completion, serving

CHAT = [{"role": "user", "content": "2 + 5 = ?"}]
RIGHT = "<think>two and five make seven</think><answer>7</answer>"
WRONG = "<think>it is about eight I think</think><answer>8</answer>"


class Scripted:
    """A receiver that says what it is told to."""

    def __init__(self, say):
        self.say, self.asked = say, []

    def complete(self, prompts, limits, seeds, sampling):
        self.asked += zip(prompts, limits, seeds, strict=True)
        del sampling
        return [Reply(self.say(prompt)) for prompt in prompts]


@pytest.fixture(scope="module")
def tokenizer():
    return load_policy("embedded", device="cpu").tokenizer


def answer_of(prompt):
    return " so</think><answer>7</answer>" if "two" in prompt else "</think><answer>8</answer>"


def made(tokenizer, **settings):
    receiver = Scripted(answer_of)
    return Transfer(receiver, "exact", tokenizer, **{"low": 0.5, "high": 0.5} | settings), receiver


@pytest.mark.parametrize("form", [str, list])
def test_shares_by_hand(tokenizer, form):
    transfer, receiver = made(tokenizer)
    texts = [RIGHT, WRONG, RIGHT, "<answer>7</answer>", ""]
    chat = form is list
    found = transfer(
        prompts=[CHAT if chat else "2 + 5 = ?"] * 5,
        completions=[[{"role": "assistant", "content": text}] if chat else text for text in texts],
        completion_ids=[[1]] * 5, answer=["7"] * 5, log_metric=print, environments=None,
    )  # fmt: skip
    assert found == [1.0, 0.0, 1.0, 0.0, 0.0]
    prompts = [prompt for prompt, *_ in receiver.asked]
    assert len(prompts) == 2  # equal prefixes once, and nothing to cut
    assert all("2 + 5 = ?" in prompt for prompt in prompts)
    tokens = tokenizer(RIGHT.partition("<answer>")[0], add_special_tokens=False)["input_ids"]
    assert prompts[0].endswith(tokenizer.decode(tokens[: len(tokens) // 2]))
    assert "seven" not in prompts[0]
    assert receiver.asked[0][1] == 1024 - len(tokens) // 2


def test_several_continuations_and_random_numbers(tokenizer):
    def ask(step, **settings):
        transfer, receiver = made(tokenizer, continuations=3, **settings)
        state = type("State", (), {"global_step": step})()
        transfer([CHAT] * 2, [RIGHT, WRONG], trainer_state=state, answer=["7"] * 2)
        return receiver.asked

    first = ask(0)
    assert len({seed for *_, seed in first}) == len(first) == 6
    assert first == ask(0)  # of seed, step and texts alone: a resumed run asks the same
    assert first != ask(1)
    assert first != ask(0, seed=1)
    free = {"low": 0.0, "high": 1.0}
    assert len({len(ask(step, **free)[-1][0]) for step in range(8)}) > 2  # cut at different places


def test_grades_that_fail_do_not_count(tokenizer):
    def fails(completions, **_):
        return [None if "seven" not in text and "two" in text else 1.0 for text in completions]

    transfer = Transfer(Scripted(answer_of), fails, tokenizer, low=0.5, high=0.5)
    assert transfer(["q"] * 2, [RIGHT, WRONG]) == [None, 1.0]

    def broken(completions, **_):
        raise KeyError(len(completions))

    with pytest.raises(RewardError, match="continuation 0 of row 0"):
        Transfer(Scripted(answer_of), broken, tokenizer)(["q"], [RIGHT])


def test_an_address_needs_a_tokenizer():
    with pytest.raises(ValueError, match="pass tokenizer=, the name of the receiver's model"):
        Transfer("http://127.0.0.1:1/v1", "exact")


def test_a_loaded_model_continues():
    """Greedy, from the first half of its own reasoning it says the rest again."""
    seen = []

    def right(completions, number, **_):
        seen.append((number, completions))
        return [1.0 - number[0] / 2] + [0.0] * (len(number) - 1)

    transfer = Transfer("embedded", right, low=0.5, high=0.5, max_tokens=60, sampling=Sampling(temperature=0.0))
    problems = islice(KnightsKnaves(people="2").problems("train", 0), 3)
    prompts = [as_text(transfer.words.tokenizer, problem.prompt) for problem in problems]
    texts = [reply.text for reply in transfer.receiver.complete(prompts, [60] * 3, [0] * 3, transfer.sampling)]
    assert len(set(texts)) == 3
    assert all(len(text) > 40 for text in texts)
    shares = transfer(prompts, texts, number=[0, 1, 2])
    assert seen == [([0, 1, 2], texts)]
    assert shares == [1.0, 0.0, 0.0]


def verl_form():
    """docs/rltr.md shows it."""
    page = (Path(__file__).parents[2] / "docs/rltr.md").read_text()
    (code,) = (block for block in re.findall(r"(?ms)^```python\n(.*?)^```", page) if "compute_score" in block)
    return code


def test_the_form_of_verl(monkeypatch):
    with serving(lambda asked, _: answer_of(asked["prompt"])) as server:
        code = verl_form().replace("http://receiver:8000/v1", server.address)
        code = re.sub(r'tokenizer="[^"]+"', f"tokenizer={str(EMBEDDED)!r}", code)
        space = {"__name__": "reward"}
        exec(compile(code, "docs/rltr.md", "exec"), space)
        monkeypatch.setattr(space["transfer"], "low", 0.5)
        monkeypatch.setattr(space["transfer"], "high", 0.5)
        extra = {"question": "2 + 5 = ?"}
        assert space["compute_score"]("x", RIGHT, "7", extra) == {"score": 1.5, "acc": 1.0, "transfer": 1.0}
        assert space["compute_score"]("x", WRONG, "7", extra) == {"score": 0.0, "acc": 0.0, "transfer": 0.0}
        assert len(server.asked) == 3  # the first was the check


def test_trl_trains_with_it(tmp_path):
    pytest.importorskip("trl", reason="TRL is not installed (extra 'trl')")
    from support.trl_runs import build, spread

    with serving(lambda asked, _: completion(f"</think><answer>{asked['seed'] % 2}</answer>", tokens=1)) as server:
        ones = lambda completions, **_: [float("1" in reply[-1]["content"]) for reply in completions]  # noqa: E731
        transfer = Transfer(server.address, ones, str(EMBEDDED))
        trainer = build(tmp_path, "ar", reward=[spread, transfer], reward_weights=[1.0, 0.5], max_steps=1)
        trainer.train()
    row = trainer.state.log_history[0]
    assert 0 <= row["rewards/transfer/mean"] <= 1
    assert row["reward"] == pytest.approx(row["rewards/spread/mean"] + 0.5 * row["rewards/transfer/mean"], abs=1e-5)
    assert len(server.asked) > 1


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(find_spec, ("fastapi", "uvicorn", "openai"))),
    reason="transformers serve needs fastapi, uvicorn, openai",
)
@pytest.mark.filterwarnings("ignore")  # those of the server
def test_the_server_of_transformers(tmp_path):
    """Greedy, it continues as the same model does when it is loaded here."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    command = [
        "-m",
        "transformers.cli.transformers",
        "serve",
        str(EMBEDDED),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen(
            [sys.executable, *command, "--device", "cpu"], stdout=log, stderr=subprocess.STDOUT, env=env
        )
    try:
        server = Server(f"http://127.0.0.1:{port}/v1#{EMBEDDED}", patience=500.0)
        server.check()
        policy = load_policy("embedded", device="cpu")
        here = Transfer(policy, "exact").receiver
        prompts = ["Is A a knight? A says: B is a knave.", "Two people: A and B."]
        asked = (prompts, [12, 5], [0, 0], Sampling(temperature=0.0))
        theirs = server.complete(*asked)
        assert [reply.text for reply in theirs] == [reply.text for reply in here.complete(*asked)]
        assert any(reply.text for reply in theirs)
    except BaseException:
        print((tmp_path / "log").read_text()[-4000:])
        raise
    finally:
        running.kill()
        running.wait()
