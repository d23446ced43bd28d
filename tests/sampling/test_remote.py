"""A receiver behind an address: dead, slow and lying servers, and runs that stop and resume with one."""

import re
import socket
import threading

import pytest

from poise.models.loading import load_policy
from poise.runs.folder import RunFolder
from poise.sampling.algorithms import Rltr, get
from poise.sampling.draws import Sampling
from poise.sampling.remote import KEY, ReceiverError, Reply, Server, before_control, is_address
from support.command_line import poise
from support.receivers import completion, serving
from support.small_runs import SMALL, parameters

QUICK = {"timeout": 20.0, "patience": 0.0}  # nothing is repeated
HOT = Sampling(0.7, top_p=0.9, top_k=5)


def ask(server, count=1, limit=8, sampling=HOT, **settings):
    prompts = [f"question {number}" for number in range(count)]
    return Server(server.address, **QUICK | settings).complete(
        prompts, [limit] * count, [number << 32 for number in range(count)], sampling
    )


def test_requests_and_replies():
    with serving(lambda asked, _: completion(f"after {asked['prompt']}", finish="length")) as server:
        assert ask(server, 3) == [Reply(f"after question {number}", finished=False) for number in range(3)]
        assert Server(server.address, **QUICK).check() == "tiny"
        Server(f"{server.address}#other", **QUICK).complete(["x"], [1], [0], Sampling())
        Server(f"{server.address}/", **QUICK).complete(["x"], [1], [0], Sampling())
        assert Server("http://127.0.0.1:1/v1", **QUICK).complete([], [], [], HOT) == []
    asked = {each["prompt"]: each for each in server.asked[:3]}
    assert asked["question 2"] == {
        "model": "tiny", "prompt": "question 2", "max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "top_k": 5,
        "seed": 2,
    }  # fmt: skip
    assert [each["model"] for each in server.asked[3:]] == ["tiny", "other", "tiny"]
    assert {"top_p", "top_k"}.isdisjoint(server.asked[4])  # some servers refuse what they do not know
    assert set(server.keys) == {None}


def test_a_key_is_sent_only_if_there_is_one(monkeypatch):
    monkeypatch.setenv(KEY, "secret")
    with serving(lambda *_: "x") as server:
        ask(server)
    assert server.keys == ["Bearer secret"]


def test_requests_are_concurrent():
    together = threading.Barrier(4, timeout=60)  # breaks, and answers with an error, if fewer than four are under way

    def say(*_):
        together.wait()
        return "x"

    with serving(say) as server:
        assert ask(server, 8, timeout=100, concurrent=4) == [Reply("x")] * 8


def close(handler):
    handler.connection.close()


def endless(handler):
    """A reply without an end."""
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b" " * 65536)
    except OSError:
        handler.close_connection = True


def cut(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices"')
    handler.close_connection = True


LIES = {
    "html": ((200, b"<html><h1>Welcome</h1>\x1b[31m</html>"), r'not JSON \(status 200: "<html><h1>Welcome</h1>\?\['),
    "no list": ((200, b'{"choice": []}'), "not a completion"),
    "none": ((200, b'{"choices": []}'), "its answer has 0 continuations, but one was requested"),
    "two": ((200, b'{"choices": [{"text": "a"}, {"text": "b"}]}'), "its answer has 2 continuations"),
    "a number": ((200, b'{"choices": [{"text": 7}]}'), "the text of its reply is not a string"),
    "a list": ((200, b"[]"), "not a completion"),
    "nothing": ((200, b""), "not JSON"),
    "deep": ((200, b"[" * 200_000), "not JSON"),
    "too long": (completion("x", tokens=9), "its reply has 9 tokens, but at most 8 were requested"),
    "too short": (completion("x", tokens=-1), "its reply has -1 tokens"),
    "error": ((503, b"overloaded"), 'status 503: "overloaded"'),
    "closed": (lambda: close, "Remote end closed|Connection reset|RemoteDisconnected"),
    "cut off": (lambda: cut, "IncompleteRead|not JSON"),
    "endless": (lambda: endless, "its answer has more than 1,056,768 bytes"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies(lie):
    said, message = LIES[lie]
    with (
        serving(lambda *_: said() if callable(said) else said) as server,
        pytest.raises(ReceiverError, match=f"no usable answer .*({message}).*restart the server, and resume"),
    ):
        ask(server)


def test_a_request_that_is_refused_is_not_repeated():
    with (
        serving(lambda *_: (400, b'{"error": "maximum context length is 16"}')) as server,
        pytest.raises(ReceiverError, match=r"refuses the request .*maximum context length is 16"),
    ):
        ask(server, patience=600)
    assert len(server.asked) == 1


def test_what_fails_is_repeated_and_said_once(capsys):
    with serving(lambda _, number: (500, b"oops") if number < 4 else "x") as server:
        assert ask(server, 2, patience=600, concurrent=1) == [Reply("x")] * 2
    assert len(server.asked) == 5
    said = capsys.readouterr().err
    assert re.fullmatch(r'the receiver at \S+: status 500: "oops"; trying again for 600 seconds\n', said), said


def test_slow_servers_are_cut_off_even_if_they_send_something_all_the_time():
    ended = threading.Event()

    def drip(handler):
        handler.send_response(200)
        handler.end_headers()
        try:
            while not ended.wait(0.05):
                handler.wfile.write(b" ")
        except OSError:
            handler.close_connection = True

    def silent(handler):
        ended.wait()
        handler.close_connection = True

    for way in (drip, silent):
        with serving(lambda *_, way=way: way) as server:
            with pytest.raises(ReceiverError, match=r"the request took longer than 0.5 seconds"):
                ask(server, timeout=0.5)
            ended.set()
        ended.clear()


def test_one_failure_ends_the_others():
    """Nobody waits for the slow ones: their connections end."""
    ended = threading.Event()

    def wait(handler):
        ended.wait(60)
        handler.close_connection = True

    with serving(lambda asked, _: (400, b"no") if asked["prompt"] == "question 0" else wait) as server:
        with pytest.raises(ReceiverError, match="refuses"):
            ask(server, 4, timeout=1e6, patience=1e6)
        ended.set()


def test_nobody_is_there():
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    with pytest.raises(ReceiverError, match=rf"127.0.0.1:{port}/v1 has given no usable answer .*[Cc]onnection refused"):
        Server(f"http://127.0.0.1:{port}/v1", **QUICK).check()


@pytest.mark.parametrize("address", ["http://", "https:///v1", "http://h/v1?x=1", "http://u:p@h/v1"])
def test_wrong_addresses(address):
    with pytest.raises(ValueError, match="is not the address of a server: write http://HOST:PORT/v1"):
        get(f"rltr(receiver={address!r})", 2)


def test_settings():
    assert not is_address("runs/demo")
    assert Rltr(receiver="http://h/v1", timeout=5).servers["receiver"] == (Server("http://h/v1", 5), None)
    assert Rltr(receiver="http://h/v1").models == {}
    for text, message in [
        ("rltr(timeout=5)", "timeout applies only to a receiver on a server"),
        ("rltr(receiver='http://h/v1', timeout=0)", "timeout must be between 0.01"),
        ("rltr(receiver='http://h/v1', patience=-1)", "patience must be between 0.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            get(text, 2)
    tokenizer = load_policy("embedded", device="cpu").tokenizer
    assert before_control(tokenizer, f"a{tokenizer.eos_token}b") == "a"
    assert before_control(tokenizer, "a b") == "a b"


# Whole runs

TINY = [
    *SMALL, "prompts=2", "group=2", "rollout.max_tokens=48", "rollouts_every=1", "steps=2", "checkpoint_every=1",
    "evaluation=off", "optim.lr=1e-3",
]  # fmt: skip


def rltr(address, **settings):
    more = "".join(f", {name}={value}" for name, value in settings.items())
    return f"algorithm=rltr(receiver='{address}'{more})"


def answers(asked, _=None):
    """Depends on the request alone, as a run that resumes needs it."""
    people = sorted({name for name in re.findall(r"[A-Z]\w+", asked["prompt"]) if name.isalpha()})
    return f" so</think><answer>{' '.join(people[: asked['seed'] % 3])}</answer>"


def test_a_run_stops_when_the_server_dies_and_resumes_exactly(tmp_path):
    with serving(answers) as server:
        port, whole = server.server_port, tmp_path / "whole"
        said = poise("train", "tiny", *TINY, rltr(server.address), f"run={whole}")
        assert said.exit_code == 0, said.stderr
        assert 'receiver: the model "tiny" of http://127.0.0.1' in said.stdout + said.stderr
        prompts = [asked["prompt"] for asked in server.asked[1:]]
        assert all(asked["max_tokens"] < 48 for asked in server.asked)
    folder = RunFolder.open(whole, resume=False)
    assert all(len(line) for line in folder.metrics())
    assert prompts
    records = [record for step in (1, 2) for record in folder.rollouts(step)]
    assert all(any(record["prompt"] in prompt for record in records) for prompt in prompts)

    stopped = tmp_path / "stopped"
    first = sum(bool(record["notes"]["prefix"]) for record in folder.rollouts(1))
    with serving(lambda asked, number: answers(asked) if number <= first + 1 else (502, b"<html>"), port) as server:
        failed = poise("train", "tiny", *TINY, rltr(server.address, patience=0.1), f"run={stopped}")
    assert failed.exit_code == 1
    assert re.search(r'has given no usable answer \(status 502: "<html>"\)', failed.stderr), failed.stderr
    assert len(RunFolder.open(stopped, resume=False).metrics()) == 1
    refused = poise("train", "--resume", f"run={stopped}")  # still down: refused before it starts
    assert refused.exit_code == 1
    assert "onnection refused" in refused.stderr
    with serving(answers, port):
        assert poise("train", "--resume", f"run={stopped}").exit_code == 0
    ours, theirs = parameters(RunFolder.open(stopped, resume=False)), parameters(folder)
    assert all((value == theirs[name]).all() for name, value in ours.items())
