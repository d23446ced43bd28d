"""Rewards in processes of their own: what hangs, dies or prints there, and that nothing is left running."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from poise._lib import user_code
from poise.tasks.rewards import RewardError, Rewards, TrainerState
from poise.tasks.rewards.callers import LostError, Process
from support.process_table import alive, children, session, wait_until

MODULE = """
import asyncio, os, sys, time
calls = 0
PIDS = os.path.join(os.path.dirname(__file__), "pids")

def length(completions, **kwargs):
    return [float(len(text)) for text in completions]

def chatty(completions, **kwargs):
    print("to stdout"); print("to stderr", file=sys.stderr)
    os.write(1, b"straight to the descriptor\\n")
    assert sys.stdin.read() == ""
    return [0.0] * len(completions)

async def later(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [None if "none" in text else 1.0 for text in completions]

def pids(completions, **kwargs):
    return [os.getpid()] * len(completions)

def counting(completions, **kwargs):
    global calls
    calls += 1
    return [calls] * len(completions)

def moody(completions, **kwargs):
    for text in completions:
        if "sleep" in text: time.sleep(1000)
        if "spin" in text: 9 ** 9 ** 9 ** 9
        if "die" in text: os._exit(3)
        if "segfault" in text: os.kill(os.getpid(), 11)
        if "raise" in text: raise ValueError("no idea")
        if "exit" in text: sys.exit("bye")
        if "cancel" in text: raise asyncio.CancelledError("enough")
        if "child" in text:
            import subprocess
            subprocess.Popen(["sleep", "1000"])
            away = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            open(PIDS, "a").write(f"{away.pid}\\n"); time.sleep(1000)
    return [0.5] * len(completions)

def forks(completions, **kwargs):
    if "fork" in completions: os.fork()
    return [float(len(text)) for text in completions]

def once(completions, **kwargs):
    if not os.path.exists(PIDS):
        open(PIDS, "w").close(); os._exit(3)
    return [1.0] * len(completions)

def slow(completions, **kwargs):
    time.sleep(0.2 * len(completions))
    return [1.0] * len(completions)

def talks(completions, log_extra, log_metric, trainer_state, level, **kwargs):
    log_extra("upper", [text.upper() for text in completions])
    log_metric("step", trainer_state.global_step)
    return [float(each) for each in level]

def nan(completions, **kwargs):
    return [float("nan") if "bad" in text else 0.0 for text in completions]

class Scaled:
    def __init__(self, scale=2.0): self.scale = scale
    def __call__(self, completions, **kwargs): return [self.scale] * len(completions)

def make(value):
    return lambda completions, **kwargs: [value] * len(completions)
"""


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(user_code, "FOLDERS", [str(tmp_path)])
    (tmp_path / "moody_rewards.py").write_text(MODULE)
    yield
    sys.modules.pop("moody_rewards", None)


def score(names, texts, timeout=30.0, quick=False, **columns):
    specs = [f"moody_rewards.{name}" for name in names.split()]
    with Rewards(specs, timeout=timeout, quick=quick) as rewards:
        ids = [f"q{i}" for i in range(len(texts))]
        return rewards.score(["?"] * len(texts), texts, [[]] * len(texts), columns, ids)


def test_the_same_values_as_in_this_process():
    texts = ["a", "bb", "none \ud800 \0 \u202e", "x" * 300_000]
    for names in ("length later Scaled Scaled(scale=3) make(value=0.5)", "chatty"):
        assert score(names, texts) == score(names, texts, quick=names != "chatty")


@pytest.mark.parametrize("quick", [True, False])
def test_a_file_by_its_path(tmp_path, monkeypatch, quick):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my folder"
    folder.mkdir()
    (folder / "beside.py").write_text("SCALE = 2.0\n")
    (folder / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "import beside\n"
        "@dataclass\n"
        "class Scaled:\n"
        "    scale: float = beside.SCALE\n"
        "    def __call__(self, completions, **_): return [self.scale] * len(completions)\n"
        "def half(completions, **_): return [0.5] * len(completions)\n"
    )
    specs = ["my folder/mine.py:half", "my folder/mine.py:Scaled", f"{folder}/mine.py:Scaled(scale=3)"]
    with Rewards(specs, quick=quick) as rewards:
        monkeypatch.chdir(folder)  # found when it was named
        verdict = rewards.score(["?"], ["a"], [[]], {}, ["1"])[0]
    sys.modules.pop("beside", None)
    assert verdict.parts == {"half": 0.5, "Scaled": 2.0, "Scaled_2": 3.0}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("none.py:x", "there is no file"),
        ("moody_rewards.py:lenght", "did you mean 'length'"),
        ("moody_rewards.py:calls", "not callable"),
        ("moody_rewards.py:make(valeu=1)", "unexpected keyword argument"),
        ("broken.py:x", "broken.py, line 1: SyntaxError|SyntaxError"),
    ],
)
def test_files_that_do_not_have_it(tmp_path, monkeypatch, spec, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("def x(:\n")
    with pytest.raises((ValueError, TypeError), match=message):
        Rewards(spec)


def test_settings_of_others_name_no_code():
    with user_code.untrusted("the run"):
        for spec in ("moody_rewards.length", "moody_rewards.py:length"):
            with pytest.raises(user_code.UntrustedError, match="--trust"):
                Rewards(spec)
        Rewards(["math", "regex(pattern='x')"])


def test_one_process_per_reward_which_stays():
    texts = ["a"] * 3
    with Rewards(["moody_rewards.pids", "moody_rewards.counting"]) as rewards:
        first, second = (rewards.score(["?"] * 3, texts, [[]] * 3, {}, ["1", "2", "3"]) for _ in range(2))
    assert first[0].parts["pids"] == second[0].parts["pids"] != os.getpid()
    assert [first[0].parts["counting"], second[0].parts["counting"]] == [1, 2]


def test_a_reward_that_never_runs_starts_no_process():
    rewards = Rewards(["moody_rewards.length", "regex(pattern='x')"])
    assert all(caller._process is None for caller in rewards._callers)


@pytest.mark.parametrize(
    "how", ["sleep", "die", "segfault", *(pytest.param(how, marks=pytest.mark.slow) for how in ("spin", "child"))]
)
def test_a_row_that_hangs_fails_and_the_others_keep_their_values(tmp_path, how):
    texts = ["fine"] * 19 + [how]
    verdicts = score("moody length", texts, timeout=2.0)
    assert [v.reward for v in verdicts[:19]] == [4.5] * 19
    assert all(v.failed is None for v in verdicts[:19])
    if how == "child":  # one in its own session too
        wait_until(lambda: not alive(map(int, (tmp_path / "pids").read_text().split())))
    said = {"die": "exit code 3", "segfault": "SIGSEGV"}.get(how, "took longer than 2 seconds")
    assert verdicts[19].failed.startswith("reward 'moody' ")
    assert said in verdicts[19].failed
    assert verdicts[19].failed.endswith("(row q19)")
    assert verdicts[19].reward == 0.0
    assert not verdicts[19].correct
    assert verdicts[19].applies


@pytest.mark.filterwarnings("default")
def test_a_batch_of_one_row_gets_a_second_try():
    with pytest.warns(RuntimeWarning, match=r"'once' ended its process \(exit code 3\)"):
        (verdict,) = score("once", ["a"])
    assert (verdict.reward, verdict.failed) == (1.0, None)


@pytest.mark.parametrize("path", ["moody_rewards.py:length", "moody_rewards.length"])
def test_a_reward_that_was_edited_is_not_started_again(tmp_path, monkeypatch, path):
    """A run would go on with another reward than it began with."""
    monkeypatch.chdir(tmp_path)
    with Rewards(path) as rewards:
        assert rewards.score(["?"], ["abc"], [[]], {}, ["1"])[0].reward == 3
        file = tmp_path / "moody_rewards.py"
        file.write_text(file.read_text().replace("float(len(text))", "2.0 * len(text)"))
        assert rewards.score(["?"], ["abc"], [[]], {}, ["1"])[0].reward == 3  # in the process that has loaded it
        rewards.close()
        with pytest.raises(RewardError, match=r"moody_rewards.py was edited after loading"):
            rewards.score(["?"], ["abc"], [[]], {}, ["1"])


def test_a_reward_that_forks_answers_each_request_once():
    with Rewards("moody_rewards.forks") as rewards:
        for text in ("fork", "a", "bb", "fork", "ccc"):
            assert rewards.score(["?"], [text], [[]], {}, ["1"])[0].reward == len(text)


def test_an_answer_to_another_request_is_refused(tmp_path):
    process = Process("reward", module=str(tmp_path / "moody_rewards.py"), name="length", args=None, settings={})
    request = {"arguments": {"completions": ["a"]}, "count": 1, "state": {}}
    process._connection.send_bytes(json.dumps({**request, "number": 1}).encode())  # an answer that nobody waits for
    with pytest.raises(LostError, match="a different request"):
        process.ask(request, 30)
    assert not process.alive


def test_many_rows_that_hang_stop_early():
    with pytest.raises(RewardError, match=r"'moody' has no value for 3 of the first 3 rows \(of 40\).*row q2"):
        score("moody", ["die"] * 40)


@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_a_slow_batch_is_called_row_by_row_and_said():
    with pytest.warns(RuntimeWarning, match="'slow' took longer than 2 seconds on 15 rows together"):
        assert [v.reward for v in score("slow", ["a"] * 15, timeout=2.0)] == [1.0] * 15


@pytest.mark.parametrize(
    ("name", "texts", "message"),
    [
        ("moody", ["a", "raise"], r"'moody' raised ValueError: no idea \(.*moody_rewards.py, line \d+\) \(row q1\)"),
        ("moody", ["a", "exit"], r"'moody' raised SystemExit: bye.*\(row q1\)"),
        ("moody", ["a", "cancel"], r"'moody' raised CancelledError: enough.*\(row q1\)"),
        ("nan", ["a", "bad"], r"'nan' returned nan, not a finite number.*\(row q1\)"),
        ("talks", ["a"], r"'talks' cannot be called \(missing a required argument: 'level'\): it gets prompts"),
    ],
)
def test_what_is_wrong_is_said_as_in_this_process(name, texts, message):
    for quick in (False, True):
        with pytest.raises(RewardError, match=message):
            score(name, texts, quick=quick)


def test_what_is_logged_comes_back():
    with Rewards("moody_rewards.talks") as rewards:
        columns, state, reported = {"level": [1, 2]}, TrainerState(global_step=5), {}
        verdicts = rewards.score(["?"] * 2, ["a", "b"], [[], []], columns, ["1", "2"], state, reported=reported)
        assert [v.extra for v in verdicts] == [{"upper": "A"}, {"upper": "B"}]
        assert reported == {"step": [5.0]}


def test_columns_that_cannot_travel():
    with pytest.raises(RewardError, match=r"columns cannot be sent .*type bytes .*reward_quick=true"):
        score("talks", ["a"], level=[b"x"])


def test_a_pattern_that_takes_for_ever():
    texts = ["fine"] * 19 + ["a" * 40 + "!"]
    with Rewards("regex(pattern='(a+)+$')", timeout=2.0) as rewards:
        verdicts = rewards.score(["?"] * 20, texts, [[]] * 20, {}, [f"q{i}" for i in range(20)])
    assert [v.failed is None for v in verdicts] == [True] * 19 + [False]


def test_nothing_is_left_after_close_and_without_it():
    before = children(os.getpid())
    score("length moody", ["a"])
    rewards = Rewards("moody_rewards.length")
    rewards.score(["?"], ["a"], [[]], {}, ["1"])
    del rewards
    wait_until(lambda: children(os.getpid()) <= before)


PARENT = """
import os, sys, threading
sys.path.append({folder!r})
from poise.tasks.rewards import Rewards
rewards = Rewards(["moody_rewards.pids", "moody_rewards.moody"])
rewards.score(["?"], ["a"], [[]], {{}}, ["1"])
pids = [caller._process.pid for caller in rewards._callers]
print(*pids, flush=True)
if {text!r}:
    rewards.score(["?"], [{text!r}], [[]], {{}}, ["1"])
"""


@pytest.mark.parametrize(
    "text", ["", "child", *(pytest.param(text, marks=pytest.mark.slow) for text in ("sleep", "spin"))]
)
def test_nothing_is_left_when_the_parent_ends_or_is_killed(tmp_path, text):
    code = PARENT.format(folder=str(tmp_path), text=text)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    if text:
        time.sleep(0.5)  # let the call begin
        wait_until(lambda: text != "child" or (tmp_path / "pids").exists())
        pids += session(pids[1])
        pids += map(int, (tmp_path / "pids").read_text().split()) if text == "child" else []
        parent.send_signal(signal.SIGKILL)
    parent.wait(60)
    parent.stdout.close()
    wait_until(lambda: not alive(pids))


def test_a_thread_that_started_a_worker_may_end():
    from concurrent.futures import ThreadPoolExecutor

    with Rewards("moody_rewards.pids") as rewards:
        found = set()
        for _ in range(3):
            with ThreadPoolExecutor(1) as pool:
                found.add(pool.submit(rewards.score, ["?"], ["a"], [[]], {}, ["1"]).result()[0].reward)
    assert len(found) == 1


def test_a_worker_that_is_stopped_does_not_block_the_sender(tmp_path):
    process = Process("reward", module=str(tmp_path / "moody_rewards.py"), name="length", args=None, settings={})
    stopped = session(process.pid) - {process.pid}
    assert len(stopped) == 1
    os.kill(*stopped, signal.SIGSTOP)
    with pytest.raises(LostError, match="took longer"):
        process.ask({"arguments": {"completions": ["x" * 1_000_000]}, "count": 1, "state": {}}, 0.5)
    assert not alive({process.pid} | stopped)


def test_the_worker_imports_neither_poise_nor_torch(tmp_path):
    (tmp_path / "look.py").write_text(
        "import sys\ndef look(completions, **_):\n    return [float(m in sys.modules) for m in ('poise', 'torch')]\n"
    )
    with Rewards("look.look") as rewards:
        verdicts = rewards.score(["?"] * 2, ["a"] * 2, [[]] * 2, {}, ["1", "2"])
    sys.modules.pop("look", None)
    assert [v.reward for v in verdicts] == [0.0, 0.0]
