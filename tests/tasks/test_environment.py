"""Environments in TRL's shape: tools, rewards, mistakes of the model, and environments that raise or hang."""

import json
import threading
import time
from itertools import islice

import pytest

from poise.models.prompts import schemas_of
from poise.tasks import Attempt, TaskError, judge_all
from poise.tasks.data import DataError
from poise.tasks.environment import Environment
from poise.tasks.rewards import TrainerState
from poise.tasks.time_limit import HungError, Worker


class Counter:
    made = 0

    def __init__(self):
        Counter.made += 1
        self._log = []

    def reset(self, target: int = 7, **_) -> str:
        self.total, self.target = 0, target
        return f"Make the total {target}."

    def add(self, number: int) -> str:
        """Add to the total.

        Args:
            number: What to add.
        """
        if self.total >= self.target:
            raise ValueError("Game over.")
        self.total += number
        return f"the total is now {self.total}"

    async def look(self) -> int:
        """Look at the total."""
        return self.total

    def _hidden(self):
        """Not a tool."""

    def get_reward(self) -> float:
        return float(self.total == self.target)


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(task, replies, problem=None):
    problem = problem or next(task.problems("train", 0))
    episode = task.episode(problem)
    said = [episode.start()]
    for reply in replies:
        said.append(episode.step(reply))
        if not said[-1]:
            break
    (score,) = judge_all(task, [Attempt(problem, episode, said[0], [], [], TrainerState(5))])
    return said, score


def test_an_episode_calls_tools_until_a_reply_has_no_call():
    task = Environment(Counter)
    said, score = play(task, [call("add", number=3), call("add", number=4) + call("look"), "Done.", "More."])
    assert said == [
        [{"role": "user", "content": "Make the total 7."}],
        [{"role": "tool", "name": "add", "content": "the total is now 3"}],
        [
            {"role": "tool", "name": "add", "content": "the total is now 7"},
            {"role": "tool", "name": "look", "content": "7"},
        ],
        [],
    ]
    assert (score.reward, score.correct, dict(score.parts)) == (1.0, True, {"Counter": 1.0})
    tools = task.episode(next(task.problems("train", 0))).tools()
    assert [schema["function"]["name"] for schema in schemas_of(tools)] == ["add", "look"]
    assert schemas_of(tools)[0]["function"]["parameters"]["required"] == ["number"]


def test_mistakes_of_the_model_are_answered_with_errors():
    replies = [call("ad", number=3), call("add", numbr=3), "<tool_call>?</tool_call>", call("add", number=9)]
    said, score = play(Environment(Counter), [*replies, call("add", number=9), "Done."])
    contents = [message["content"] for messages in said[1:] for message in messages]
    assert "did you mean 'add'" in contents[0]
    assert "unexpected keyword argument" in contents[1]
    assert "not JSON" in contents[2]
    assert contents[3] == "the total is now 9"
    assert contents[4] == "{'error': 'Game over.'}"
    assert score.failed is None
    assert score.reward == 0


def test_the_last_turn_counts_but_is_not_answered():
    said, score = play(Environment(Counter, turns=2), [call("add", number=3), call("add", number=4), "never asked"])
    assert [len(messages) for messages in said] == [1, 1, 0]
    assert score.correct


def test_environments_are_used_again():
    task = Environment(Counter)
    before = Counter.made
    for _ in range(5):
        play(task, ["Done."])
    assert Counter.made == before


def test_attempts_at_a_problem_get_its_number_as_seed_where_reset_asks_for_it():
    class Seeded(Counter):
        def reset(self, seed: int = 0, **row) -> str:
            return f"{super().reset(target=seed)} {sorted(row)}"

    task = Environment(Seeded)
    problems = list(islice(task.problems("train", 0), 3))
    starts = [task.episode(problem).start()[0]["content"] for problem in [*problems, *problems]]
    assert starts[:3] == starts[3:]
    assert len(set(starts)) == 3
    assert starts[0].endswith("['prompt']")
    test = {problem.id for problem in islice(task.problems("test", 0), 50)}
    assert not test & {problem.id for problem in islice(task.problems("train", 0), 500)}


def broken(method, how):
    def fail(*_, **__):
        return how()

    return type("Broken", (Counter,), {method: fail})


def raising():
    raise OSError("no connection")


def hanging():
    time.sleep(60)


@pytest.mark.parametrize("method", ["reset", "get_reward"])
@pytest.mark.parametrize(("how", "why"), [(raising, "OSError: no connection"), (hanging, "within 0.2 s")])
def test_an_environment_that_raises_or_hangs_loses_its_episode_only(method, how, why):
    task = Environment(broken(method, how), timeout=0.2)
    said, score = play(task, [call("add", number=7), "Done."])
    assert said[-1] == []
    assert why in score.failed
    assert f"Broken.{method}" in score.failed
    assert (score.reward, score.correct) == (0.0, False)
    task._pool.kind.reset, task._pool.kind.get_reward = Counter.reset, Counter.get_reward
    assert play(task, [call("add", number=7), "Done."])[1].correct


def test_a_tool_that_hangs_loses_its_episode_and_a_reward_gained_before_is_not_counted():
    class Slow(Counter):
        def wait(self) -> str:
            """Wait."""
            time.sleep(60)

    task = Environment(Slow, timeout=0.2)
    said, score = play(task, [call("add", number=7), call("wait"), "Done."])
    assert said[-1] == []
    assert "a tool of Slow did not return within 0.2 s" in score.failed
    assert score.reward == 0
    assert score.parts == {}


def test_reward_functions_get_the_environments_and_are_added():
    def totals(environments, completions, trainer_state, **_):
        assert len(completions) == len(environments)
        assert trainer_state.global_step == 5
        return [environment.total / 10 for environment in environments]

    task = Environment(Counter, reward=[totals])
    _, score = play(task, [call("add", number=7), "Done."])
    assert score.reward == pytest.approx(1.7)
    assert dict(score.parts) == {"Counter": 1.0, "totals": 0.7}


def unhinted(self, far):
    """Jump."""
    return f"{self} {far}"


def untold(self, far: int) -> str:
    """Jump so far."""
    return f"{self} {far}"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (type("NoReset", (), {"get_reward": lambda _: 1.0}), "NoReset has no reset method"),
        (type("NoReward", (), {"reset": lambda _: "Hi."}), "no get_reward, and there is no reward function"),
        (type("NoWords", (Counter,), {"jump": lambda _, far: far}), "NoWords.jump is public, so it is a tool"),
        (type("NoHints", (Counter,), {"jump": unhinted}), "NoHints.jump is public.*argument far lacks"),
        (type("NoArgs", (Counter,), {"jump": untold}), "NoArgs.jump is public.*argument far lacks"),
        (lambda: 1 / 0, "the factory failed: ZeroDivisionError"),
        (3, "must be a class or function, got 3"),
        ("nothing.here.Env", "there is no module"),
        ("os.getcwd", "is not an environment: name a class"),
        ("subprocess.Popen", "is not an environment"),
        ("shutil.rmtree", "is not an environment"),
        ("poise.tasks.get", "is not an environment"),
    ],
)
def test_what_is_no_environment_is_refused(kind, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Environment(kind)


def test_an_environment_that_shows_nothing_is_refused():
    task = Environment(type("Silent", (Counter,), {"reset": lambda *_, **__: None}))
    with pytest.raises(TaskError, match="the model would read nothing"):
        task.episode(next(task.problems("train", 0))).start()


def test_a_worker_keeps_its_thread_until_a_call_hangs():
    worker = Worker()
    first = worker.run(5, threading.get_ident)
    assert worker.run(5, threading.get_ident) == first
    with pytest.raises(HungError, match=r"within 0.05 s"):
        worker.run(0.05, time.sleep, 30)
    assert worker.run(5, threading.get_ident) != first
    with pytest.raises(KeyError):
        worker.run(5, {}.__getitem__, "x")


def test_rows_of_a_file_reach_reset(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"Row {i}. "}], "target": i} for i in range(1, 21)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Environment(Counter, file=str(file))
    train, test = (task.epoch(split, 0, 0) for split in ("train", "test"))
    assert (len(train), len(test)) == (18, 2)
    assert not {p.data["row"]["target"] for p in train} & {p.data["row"]["target"] for p in test}
    assert sorted(task.epoch("train", 0, 1), key=repr) == sorted(train, key=repr)
    assert task.epoch("train", 0, 1) != train
    assert list(islice(task.problems("train", 0), 36)) == [*train, *task.epoch("train", 0, 1)]
    target = train[0].data["row"]["target"]
    said, score = play(task, [call("add", number=target), "Done."], train[0])
    assert said[0] == [{"role": "user", "content": f"Row {target}. Make the total {target}."}]
    assert score.correct
    assert Environment(Counter, file=str(file), held_out=0).epoch("test", 0, 0) == []
    for content, message in [("", "no rows"), ("{", "line 1"), ('{"target": 17}\n', "no row is left for training")]:
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            Environment(Counter, file=str(file))


def test_rows_stay_in_their_split_when_the_file_grows(tmp_path):
    file, before, seen = tmp_path / "rows.jsonl", {"train": set(), "test": set()}, set()
    for rows in (1000, 1005, 1010, 2000):
        file.write_text("".join(json.dumps({"target": number}) + "\n" for number in range(rows)))
        task = Environment(Counter, file=str(file))
        found = {split: {p.data["row"]["target"] for p in task.epoch(split, 0, 0)} for split in ("train", "test")}
        assert all(before[split] <= found[split] for split in found)
        assert len(found["train"]) + len(found["test"]) == rows
        assert 0.08 < len(found["test"]) / rows < 0.12
        assert task.fingerprint == Environment(Counter, file=str(file)).fingerprint
        before = found
        seen.add(task.fingerprint)
    assert len(seen) == 4


def test_rows_in_both_files_are_refused(tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text('{"target": 1}\n{"target": 2}\n')
    two.write_text('{"target": 2}\n')
    with pytest.raises(ValueError, match=r"are also in .*two.jsonl"):
        Environment(Counter, file=str(one), test_file=str(two))
    two.write_text('{"target": 3}\n')
    task = Environment(Counter, file=str(one), test_file=str(two))
    assert [len(task.epoch(split, 0, 0)) for split in ("train", "test")] == [2, 1]


class Reflective(Counter):
    def feedback(self) -> str:
        return f"The total was {self.total}, not {self.target}."


def attempt(task, replies):
    problem = next(task.problems("train", 0))
    episode = task.episode(problem)
    prompt = episode.start()
    for reply in replies:
        episode.step(reply)
    judge_all(task, [Attempt(problem, episode, prompt, [], [])])
    return episode


def test_an_environments_own_feedback_is_no_tool_and_is_asked_before_the_environment_is_used_again():
    task = Environment(Reflective)
    one, other = attempt(task, [call("add", number=3), "Done."]), attempt(task, ["Done."])
    assert (one.feedback(), other.feedback()) == ("The total was 3, not 7.", "The total was 0, not 7.")
    assert [tool.__name__ for tool in one.tools()] == ["add", "look"]


def test_an_environment_without_feedback_repeats_what_a_tool_said_last():
    task = Environment(Counter)
    assert attempt(task, ["Done."]).feedback() == "No tool was called. Turns: 1."
    episode = attempt(task, [call("add", number=3), "Done."])
    assert episode.feedback() == 'The last tool said "the total is now 3". Turns: 2.'


def test_feedback_with_arguments_is_a_tool():
    class Complaints(Counter):
        def feedback(self, text: str) -> str:
            """Say what you think of it.

            Args:
                text: What you think.
            """
            return text

    episode = attempt(Environment(Complaints), [call("feedback", text="fine"), "Done."])
    assert [tool.__name__ for tool in episode.tools()] == ["add", "feedback", "look"]
    assert episode.feedback() == 'The last tool said "fine". Turns: 2.'


@pytest.mark.parametrize("how", [raising, hanging])
def test_feedback_that_raises_or_hangs_costs_the_environment_and_not_the_episode(how):
    task = Environment(type("Broken", (Counter,), {"feedback": lambda _: how()}), timeout=0.2)
    said, score = play(task, [call("add", number=7), "Done."])
    assert said[-1] == []
    assert score.correct


def test_feedback_that_is_no_text_is_an_error_that_says_so():
    wrong = type("Wrong", (Counter,), {"feedback": lambda _: 3})
    with pytest.raises(TaskError, match=r"^Wrong\.feedback must return text, got 3$"):
        play(Environment(wrong), ["Done."])


def test_columns_that_bear_names_of_ours(tmp_path):
    """What the model said reaches the reward, whatever the row holds."""
    names = ("completions", "prompts", "completion_ids", "completion", "method", "function", "seconds", "args")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"target": 7, **dict.fromkeys(names, "the row's")}) + "\n")
    seen = {}

    def look(**columns):
        seen.update(columns)
        return [0.0] * len(columns["completions"])

    task = Environment(Counter, file=str(tmp_path / "rows.jsonl"), held_out=0.0, reward=look)
    problem = next(task.problems("train", 0))
    episode, attempt_prompt = task.episode(problem), [{"role": "user", "content": "?"}]
    episode.start()
    episode.step("the model's")
    said = [{"role": "assistant", "content": "the model's"}]
    (score,) = judge_all(task, [Attempt(problem, episode, attempt_prompt, said, [1, 2])])
    assert score.failed is None
    assert (seen["completions"], seen["prompts"], seen["completion_ids"]) == ([said], [attempt_prompt], [[1, 2]])
    assert "completion" not in seen
    assert seen["method"] == ["the row's"]


@pytest.mark.parametrize(
    ("column", "why"),
    [("self", "multiple values for argument 'self'"), ("level", "unexpected keyword argument 'level'")],
)
def test_a_column_that_reset_cannot_take_is_refused_by_name(tmp_path, column, why):
    class Narrow(Counter):
        def reset(self, target: int) -> str:
            return f"Make the total {target}."

    (tmp_path / "rows.jsonl").write_text(json.dumps({"target": 7, column: 1}) + "\n")
    kind = Counter if column == "self" else Narrow
    message = rf"rows\.jsonl:1: {kind.__name__}\.reset does not accept this row \(.*{why}\): every column"
    with pytest.raises(DataError, match=message):
        Environment(kind, file=str(tmp_path / "rows.jsonl"), held_out=0.0)


class Leaves(Counter):
    where = ""

    def _leave(self, where):
        if where == self.where:
            raise SystemExit(3)

    def reset(self, **_) -> str:
        self._leave("reset")
        return "Leave."

    def leave(self) -> str:
        """Leave."""
        self._leave("tool")
        return "stayed"

    def get_reward(self) -> float:
        self._leave("get_reward")
        return 1.0


@pytest.mark.parametrize("where", ["reset", "get_reward", "tool"])
def test_an_environment_that_exits_loses_its_episode_only(where):
    task = Environment(type("Leaves", (Leaves,), {"where": where}))
    episode = task.episode(next(task.problems("train", 0)))
    episode.start()
    said = episode.step(call("leave"))
    score = episode.score()
    if where == "tool":
        assert (said[0]["content"], score.reward) == ("{'error': '3'}", 1.0)
    else:
        assert f"Leaves.{where} raised SystemExit: 3" in score.failed
