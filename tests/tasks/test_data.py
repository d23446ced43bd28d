"""Datasets as tasks: files, columns, splits, epochs, and what is said about rows that cannot be used."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from poise import tasks
from poise.tasks import Attempt, TaskError, draw, training_problems
from poise.tasks.data import Data, Math
from poise.tasks.data.rows import DataError
from poise.tasks.rewards import get

ROWS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i), "level": i % 3} for i in range(200)]


def jsonl(path, rows=ROWS):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def attempts(task, replies, split="train"):
    for problem, reply in zip(draw(task, split, 0, len(replies)), replies, strict=True):
        episode = task.episode(problem)
        yield Attempt(problem, episode, episode.start(), [{"role": "assistant", "content": reply(problem)}], [1, 2])


def questions(problems):
    return [problem.data["row"]["question"] for problem in problems]


# Files


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "parquet", "folder", "splits"])
def test_every_kind_of_file_gives_the_same_problems(kind, tmp_path):
    path = tmp_path / f"rows.{kind}"
    rows = [{"question": row["question"], "answer": row["answer"]} for row in ROWS]
    if kind == "jsonl":
        jsonl(path, rows)
    elif kind == "jsonl.gz":
        gzip = pytest.importorskip("gzip")
        path.write_bytes(gzip.compress(Path(jsonl(tmp_path / "plain.jsonl", rows)).read_bytes()))
    elif kind == "json":
        path.write_text(json.dumps({"version": 1, "data": rows}))
    elif kind == "csv":
        with path.open("w", newline="") as out:
            writer = csv.DictWriter(out, ["question", "answer"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        datasets = pytest.importorskip("datasets")
        dataset = datasets.Dataset.from_list(rows)
        if kind == "parquet":
            dataset.to_parquet(path)
        elif kind == "folder":
            dataset.save_to_disk(path)
        else:
            datasets.DatasetDict({"train": dataset, "test": dataset.select(range(3))}).save_to_disk(path)
    task = Data(str(path), reward="exact")
    if kind == "splits":  # has a test split of its own, whose three questions are not trained on
        assert len(task.epoch("test", 0, 0)) == 3
        assert len(task.epoch("train", 0, 0)) == 197
        assert "3 of 200 questions" in task.notes[0]
        return
    both = [*task.epoch("train", 0, 0), *task.epoch("test", 0, 0)]
    assert sorted(questions(both)) == sorted(row["question"] for row in rows)
    assert {problem.data["row"]["answer"] for problem in both} == {row["answer"] for row in rows}


def test_lines_that_cannot_be_used_are_counted_and_named(tmp_path):
    lines = [{"question": "a", "answer": "1"}, "{broken", {"question": "  ", "answer": "1"}, "[1, 2]", "",
             {"answer": "1"}, {"question": "a", "answer": "2"}, {"question": [{"role": "robot", "content": "x"}]},
             '{"question": "\\ud800 half", "answer": "3"}']  # fmt: skip
    task = Data(jsonl(tmp_path / "rows.jsonl", lines), reward="exact", held_out=0.0)
    told = "\n".join(task.notes)
    assert "3 unreadable rows left out: lines 2, 4, 9 (line 2: not JSON" in told
    assert "2 rows without a question (left out): lines 3, 6" in told
    assert "1 row left out (a message must have a role" in told
    assert "1 row with a repeated question (kept): line 7" in told
    assert len(task.epoch("train", 0, 0)) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no row"),
        ("{oops\n", r"has no row; 1 unreadable row left out: line 1 \(line 1: not JSON: .* at column 2\)"),
        (
            '{"text": "x", "label": 1}\n',
            r"none of its columns is called prompt, question.*has: text, label.*task.question=",
        ),
        ('{"question": ""}\n{"question": null}\n', "none of its 2 rows has a question in column 'question'"),
    ],
)
def test_files_that_hold_nothing_say_what_to_do(content, message, tmp_path):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        Data(str(tmp_path / "rows.jsonl"), reward="exact")


def test_mistakes_are_answered(tmp_path):
    file = jsonl(tmp_path / "rows.jsonl")
    for settings, message in [
        ({"file": str(tmp_path / "no.jsonl")}, "there is no such file or folder"),
        ({"file": "sums.txt"}, "there is no such file or folder; poise reads files that end in .jsonl"),
        ({"file": "owner/sums.csv.GZ"}, "there is no such file or folder"),
        ({"file": str(tmp_path)}, "this folder has neither files of datasets' save_to_disk nor"),
        ({"file": __file__}, "must end in .jsonl"),
        ({"question": "quest"}, "has no column 'quest'.*task.question=COLUMN"),
        ({"answer": "gold"}, "has no column 'gold'.*task.answer=COLUMN"),
        ({"reward": "exact(column='gold')"}, r"has no column 'gold', which a reward names \(it has: question, answer"),
        ({"reward": ()}, "needs a reward: reward=math"),
        ({"reward": "mth"}, "did you mean 'math'"),
        ({"reward": ["exact", "number"], "reward_weights": [1.0]}, "give one weight per reward: 2 rewards, 1 weight"),
        ({"held_out": 1.5}, "held_out must be between"),
    ]:
        with pytest.raises(ValueError, match=message):
            Data(**{"file": file, "reward": "exact"} | settings)


@pytest.mark.parametrize("reward", ["exact", ["format", "math"]])
def test_a_missing_answer_column_is_found_before_a_model_is_loaded(reward, tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", [{"question": row["question"], "result": row["answer"]} for row in ROWS])
    with pytest.raises(
        DataError, match=r"called answer, .*\(it has: question, result\).*answer: set task\.answer=COLUMN"
    ):
        Data(file, reward=reward)
    assert Data(file, reward=reward, answer="result")
    assert Data(file, reward="exact(column='result')")
    assert Data(file, reward="format")


def test_too_few_questions_to_hold_some_out_say_so(tmp_path):
    task = Data(jsonl(tmp_path / "rows.jsonl", ROWS[:1] * 30), reward="exact")
    with pytest.raises(TaskError, match=r"a hash chose none of its 1 different question; set task.held_out above 0.1"):
        draw(task, "test", 0, 4)
    with pytest.raises(TaskError, match=r"split test; set task\.held_out above 0, "):
        draw(replace(task, held_out=0.0), "test", 0, 4)


def test_a_hub_id_without_a_network_says_so(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def no_network(name):
        raise ConnectionError(f"Couldn't reach '{name}' on the Hub (LocalEntryNotFoundError)\nand more")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    with pytest.raises(DataError, match=r"data openai/gsm8k cannot be loaded \(ConnectionError.*check the network"):
        Data("openai/gsm8k", reward="math")
    rows = datasets.Dataset.from_list(ROWS[:20])
    monkeypatch.setattr(datasets, "load_dataset", lambda _: datasets.DatasetDict({"main": rows}))
    with pytest.raises(DataError, match=r"has no split 'train', but main; choose one with task\.split=NAME"):
        Data("openai/gsm8k", reward="math")
    assert len(Data("openai/gsm8k", reward="math", split="main", held_out=0.0).epoch("train", 0, 0)) == 20


# Splits and epochs


def test_the_held_out_share_goes_by_the_question(tmp_path):
    task = Data(jsonl(tmp_path / "rows.jsonl"), reward="exact", held_out=0.2)
    train, test = (set(questions(task.epoch(split, 0, 0))) for split in ("train", "test"))
    assert not train & test
    assert 20 <= len(test) <= 60
    shuffled = Data(jsonl(tmp_path / "more.jsonl", [*ROWS[::-1], *ROWS[:50]]), reward="exact", held_out=0.2)
    assert set(questions(shuffled.epoch("test", 0, 0))) == test  # whatever the order, and whatever is repeated
    assert not Data(jsonl(tmp_path / "rows.jsonl"), reward="exact", held_out=0.0).epoch("test", 0, 0)


def test_questions_that_are_also_held_out_are_named_and_not_trained_on(tmp_path):
    test = [{"question": "WHAT is  3 + 3?", "answer": "6"}, {"question": "What is 1000 + 1000?", "answer": "2000"}]
    task = Data(jsonl(tmp_path / "a.jsonl"), reward="exact", test_file=jsonl(tmp_path / "b.jsonl", test))
    assert "1 of 200 questions" in task.notes[0]
    assert "line 4" in task.notes[0]
    assert "What is 3 + 3?" not in questions(task.epoch("train", 0, 0))
    assert len(task.epoch("test", 0, 0)) == 2


def test_an_epoch_has_every_problem_once_in_an_order_of_its_own(tmp_path):
    task = Data(jsonl(tmp_path / "rows.jsonl"), reward="exact")
    orders = [tuple(questions(task.epoch("train", seed, number))) for seed in (0, 1) for number in (0, 1)]
    assert len(set(orders)) == 4
    assert len({tuple(sorted(order)) for order in orders}) == 1
    again = Data(jsonl(tmp_path / "rows.jsonl"), reward="exact")
    assert tuple(questions(again.epoch("train", 1, 1))) == orders[3]
    size = len(orders[0])
    seen = [q for step in range(1, size + 1)
            for q in questions(training_problems(task, seed=0, step=step, step_seed=0, count=3))]  # fmt: skip
    assert seen == [q for number in range(3) for q in questions(task.epoch("train", 0, number))]


# What the model is shown


def test_system_prompt_and_template(tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", [{"problem": "x {y} + 1", "hint": "h", "answer": "1"}])
    task = Data(file, reward="exact", held_out=0.0, system="Be brief.", template="{hint}: {question} \\boxed{} {no}")
    (problem,) = task.epoch("train", 0, 0)
    assert task.episode(problem).start() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "h: x {y} + 1 \\boxed{} {no}"},
    ]


def test_rows_of_messages_are_shown_as_they_are(tmp_path):
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]
    file = jsonl(tmp_path / "rows.jsonl", [{"messages": chat, "answer": "A"}, {"messages": chat[1:2], "answer": "A"}])
    task = Data(file, reward="exact", held_out=0.0, system="Mine")
    starts = [task.episode(problem).start() for problem in sorted(task.epoch("train", 0, 0), key=lambda p: p.id)]
    assert starts == [chat[:2], [{"role": "system", "content": "Mine"}, chat[1]]]


# Rewards


REWARDS = """
def seen(prompts, completions, completion_ids, level, **rest):
    assert sorted(rest) == ["answer", "log_extra", "log_metric", "question", "trainer_state"], sorted(rest)
    return [float(len(completion)) + 100 * number for completion, number in zip(completions, level)]


async def later(completions, **rest):
    return [None if "skip" in completion else -1.0 for completion in completions]
"""


def test_all_columns_reach_the_reward_and_several_are_weighed(tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    specs = [f"{tmp_path}/mine.py:seen", f"{tmp_path}/mine.py:later", "exact"]
    task = Data(jsonl(tmp_path / "rows.jsonl"), reward=specs, reward_weights=[1.0, 0.5, 10.0])
    tried = list(attempts(task, [lambda _: "skip", lambda p: p.data["row"]["answer"]]))
    scores = task.score_all(tried)
    task.rewards.close()
    levels = [attempt.problem.data["row"]["level"] for attempt in tried]
    right = tried[1].problem.data["row"]["answer"]
    assert scores[0].reward == 4 + 100 * levels[0]
    assert scores[1].reward == len(right) + 100 * levels[1] - 0.5 + 10
    assert scores[1].parts == {"seen": len(right) + 100 * levels[1], "later": -1.0, "exact": 1.0}
    assert [score.failed for score in scores] == [None, None]


def test_chat_rows_get_chat_completions(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def seen(prompts, completions, **rest):\n"
        "    return [float(p[-1]['content'] == 'U' and c == [{'role': 'assistant', 'content': 'hi'}])"
        " for p, c in zip(prompts, completions)]\n"
    )
    file = jsonl(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "U"}]}])
    task = Data(file, reward=f"{tmp_path}/mine.py:seen", held_out=0.0)
    assert [score.reward for score in task.score_all(list(attempts(task, [lambda _: "hi"])))] == [1.0]
    task.rewards.close()


def test_a_row_that_no_reward_applies_to_takes_no_part(tmp_path):
    (tmp_path / "mine.py").write_text("def never(completions, **rest):\n    return [None] * len(completions)\n")
    task = Data(jsonl(tmp_path / "rows.jsonl"), reward=f"{tmp_path}/mine.py:never")
    (score,) = task.score_all(list(attempts(task, [lambda _: "x"])))
    assert score.failed == "no reward applies to it"
    task.rewards.close()


def test_a_named_answer_column_reaches_built_in_rewards(tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", [{"question": "q", "gold": "7", "answer": "wrong"}])
    task = Data(file, reward="exact", answer="gold", held_out=0.0)
    assert [score.correct for score in task.score_all(list(attempts(task, [lambda _: "7"])))] == [True]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Two and two?", "answer": "2 + 2 is 4.\n#### 4"},  # GSM8K
        {"problem": "$2+2$?", "solution": "It is $\\boxed{4}$.", "level": "Level 1", "type": "Algebra"},  # MATH
        {"problem": "2+2", "answer": "4", "solution": "long"},  # DeepScaleR
        {"ID": "2024-I-1", "Problem": "2+2", "Answer": 4},  # AIME, whose columns are capitalised
    ],
)
def test_the_math_task_reads_the_usual_columns(row, tmp_path):
    task = tasks.get("math", file=jsonl(tmp_path / "rows.jsonl", [row]), held_out=0.0)
    assert isinstance(task, Math)
    right, wrong = (next(attempts(task, [lambda _, said=said: said])) for said in (r"So \boxed{4}.", r"So \boxed{5}."))
    assert right.prompt[0]["content"].endswith(r"within \boxed{}.")
    assert [score.correct for score in task.score_all([right, wrong])] == [True, False]
    task.rewards.close()


def test_problems_that_do_not_fit_are_left_out_and_named(tmp_path):
    task = Data(jsonl(tmp_path / "rows.jsonl"), reward="exact", held_out=0.0)
    before = task.epoch("train", 0, 0)
    task.leave_out(lambda problem: problem.id.endswith((":3", ":7")), "since they are long")
    assert len(task.epoch("train", 0, 0)) == len(before) - 2
    assert task.notes[-1] == "2 train problems left out, since they are long: lines 3, 7"
    with pytest.raises(DataError, match="all 198 train problems left out, since they are long: shorten them"):
        task.leave_out(lambda _: True, "since they are long", "shorten them")


def test_another_file_has_another_fingerprint(tmp_path):
    one = Data(jsonl(tmp_path / "rows.jsonl"), reward="exact")
    assert one.fingerprint == replace(one, reward="number").fingerprint
    changed = [*ROWS[:-1], {**ROWS[-1], "answer": "0"}]
    assert one.fingerprint != Data(jsonl(tmp_path / "rows.jsonl", changed), reward="exact").fingerprint


@pytest.mark.parametrize(("name", "setting"), [("math", "file"), ("data", "file"), ("environment", "factory")])
def test_a_missing_setting_is_named(name, setting):
    with pytest.raises(ValueError, match=f"task '{name}' needs a {setting}: task.{setting}="):
        tasks.get(name)


def test_one_weight_needs_no_list(tmp_path):
    task = Data(jsonl(tmp_path / "rows.jsonl"), reward="exact", reward_weights=0.5)
    (score,) = task.score_all(list(attempts(task, [lambda p: p.data["row"]["answer"]])))
    assert score.reward == 0.5


def test_an_episode_says_what_was_read_as_its_answer_and_not_the_right_one(tmp_path):
    task = Data(jsonl(tmp_path / "rows.jsonl"), reward=["number", "format"])
    tried = list(attempts(task, [lambda p: p.data["row"]["answer"], lambda _: "It is 1.", lambda _: "Who knows?"]))
    assert [score.correct for score in task.score_all(tried)] == [True, False, False]
    right, wrong, unread = (attempt.episode.feedback() for attempt in tried)
    assert right == "The tag <think> is missing."
    assert wrong == 'Your answer was read as "1", and it is wrong. The tag <think> is missing.'
    assert unread.startswith("No answer could be read. Write one number between <answer> and </answer>.")


def test_feedback_does_not_depend_on_the_right_answer(tmp_path):
    said = []
    for shift in (0, 1000):
        rows = [{**row, "answer": str(int(row["answer"]) + shift)} for row in ROWS]
        task = Math(jsonl(tmp_path / f"{shift}.jsonl", rows))
        tried = list(attempts(task, [lambda _: r"\boxed{-3}", lambda _: "x", lambda _: r"\boxed{\text{9 cm}}"] * 20))
        assert not any(score.correct for score in task.score_all(tried))
        said.append([attempt.episode.feedback() for attempt in tried])
    assert said[0] == said[1]


# What would be lost without a word


def test_a_column_or_key_that_is_there_twice_is_named(tmp_path):
    (tmp_path / "rows.csv").write_text("question,answer,answer\nWhat?,1,2\n")
    with pytest.raises(DataError, match="the column 'answer' occurs twice"):
        Data(str(tmp_path / "rows.csv"), reward="exact")
    twice = '{"question": "What?", "answer": "1", "answer": "2"}'
    task = Data(jsonl(tmp_path / "rows.jsonl", [*ROWS, twice]), reward="exact")
    assert "1 unreadable row left out: line 201" in task.notes[0]
    assert "the key 'answer' occurs twice" in task.notes[0]
    (tmp_path / "rows.json").write_text(f"[{twice}]")
    with pytest.raises(DataError, match="the key 'answer' occurs twice"):
        Data(str(tmp_path / "rows.json"), reward="exact")


def test_rows_without_an_answer_are_named(tmp_path):
    rows = [*ROWS, {"question": "And?", "answer": None}, {"question": "Or?"}, {"question": "But?", "answer": " "}]
    rows += [{"question": "Why?", "answer": float("nan")}, {"question": "How?", "answer": []}]
    file = jsonl(tmp_path / "rows.jsonl", rows)
    assert "5 rows without an answer (rewards that compare" in Data(file, reward="exact").notes[0]
    assert Data(file, reward="exact").notes[0].endswith("lines 201, 202, 203, 204, 205")
    assert get("exact")(completions=["nan"], answer=[float("nan")]) == [None]
    assert Data(file, reward="regex(pattern='a')").notes == []


def test_messages_with_parts_of_text(tmp_path):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]
    rows = [{"messages": [{"role": "user", "content": parts}], "answer": "4"}] * 3
    task = Data(jsonl(tmp_path / "rows.jsonl", rows), reward="exact", held_out=0.0)
    assert task.epoch("train", 0, 0)[0].prompt == "What is 2 + 2?"
    picture = [{"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}], "answer": "4"}]
    with pytest.raises(DataError, match=r"has a question in column 'messages' .*text as its content"):
        Data(jsonl(tmp_path / "pictures.jsonl", picture), reward="exact")
