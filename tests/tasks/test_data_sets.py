"""Data sets of the hub, mixtures, streams and objects in memory, as tasks."""

from collections import Counter
from dataclasses import replace

import pytest

from poise.tasks import Attempt, draw, epochs, training_problems
from poise.tasks.data import Data, DataError, Math, task_of
from poise.tasks.data.order import shares
from poise.training.config.schema import load
from support.configs import problem as refused
from support.data_hub import repository, rows

GSM8K = "openai/gsm8k"


@pytest.fixture
def gsm8k(hub):
    splits = {"train": rows(40), "test": rows(6, 100)}
    socratic = {split: [{**row, "question": f"Ask: {row['question']}"} for row in of] for split, of in splits.items()}
    tables = {("main", split): of for split, of in splits.items()}
    hub.add(GSM8K, tables | {("socratic", split): of for split, of in socratic.items()})


def asked(problems):
    return [problem.data["row"]["question"] for problem in problems]


def steps(task, numbers, seed=0, count=4):
    return [asked(training_problems(task, seed=seed, step=step, step_seed=step * 7, count=count)) for step in numbers]


# The hub


@pytest.mark.usefixtures("gsm8k")
def test_a_configuration_and_its_test_split():
    task = Data(GSM8K, reward="number", config="main")
    assert sorted(asked(task.epoch("train", 0, 0))) == sorted(row["question"] for row in rows(40))
    assert sorted(asked(task.epoch("test", 0, 0))) == sorted(row["question"] for row in rows(6, 100))
    assert task.sizes() == (
        "40 problems to train on, 6 held out (split test of openai/gsm8k main, since data.test_split is not off)"
    )
    ids = {problem.id for split in ("train", "test") for problem in task.epoch(split, 0, 0)}
    assert {"openai/gsm8k main:1", "openai/gsm8k main test:1"} < ids
    assert len(ids) == 46
    assert asked(Data(GSM8K, reward="number", config="socratic").epoch("test", 0, 0))[0].startswith("Ask: ")


@pytest.mark.usefixtures("gsm8k")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {},
            r"data openai/gsm8k cannot .*name is missing.*'main', 'socratic'.*; choose one with data.config=NAME$",
        ),
        (
            {"config": "man"},
            r"gsm8k man cannot .*'man' not found.*'main', 'socratic'.*; choose one with data.config=",
        ),
        (
            {"config": "main", "split": "trian"},
            "main has no split 'trian', but test, train; choose one with task.split=",
        ),
        (
            {"config": "main", "test_split": "tset"},
            "has no split 'tset', but test, train; choose one with task.test_split",
        ),
        ({"file": "nobody/nothing"}, "data nobody/nothing cannot be loaded .*check the network"),
        ({"config": "main", "test_file": GSM8K}, r"Config name is missing.*'main', 'socratic'"),
    ],
)
def test_what_the_hub_does_not_have_is_listed(settings, message):
    with pytest.raises(DataError, match=message):
        Data(**{"file": GSM8K, "reward": "number"} | settings)


def test_splits_are_chosen(hub):
    tables = {("default", "train"): rows(30), ("default", "validation"): rows(5, 50), ("default", "extra"): rows(7, 70)}
    hub.add("own/set", tables)
    questions = {key[1]: {row["question"] for row in of} for key, of in tables.items()}

    def both(**settings):
        task = Data("own/set", reward="number", **settings)
        return tuple(set(asked(task.epoch(split, 0, 0))) for split in ("train", "test"))

    assert both() == (questions["train"], questions["validation"])
    assert both(test_split="extra") == (questions["train"], questions["extra"])
    assert both(split="extra") == (questions["extra"], questions["validation"])
    train, test = both(test_split="off", held_out=0.3)
    assert train | test == questions["train"]
    assert test
    assert not train & test
    train, _ = both(split="train[:10]")
    assert train == {row["question"] for row in rows(10)}


@pytest.mark.usefixtures("gsm8k")
def test_a_test_file_of_the_hub_is_its_test_split_or_its_only_one(hub, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"question": "Mine?", "answer": "1"}\n')
    mine = str(tmp_path / "mine.jsonl")
    task = Data(mine, reward="number", test_file={"name": GSM8K, "config": "main"})
    assert sorted(asked(task.epoch("test", 0, 0))) == sorted(row["question"] for row in rows(6, 100))
    assert task.sizes().endswith("6 held out (openai/gsm8k main)")
    hub.add("own/aime", {("default", "train"): rows(3, 7)})
    assert len(Data(mine, reward="number", test_file="own/aime").epoch("test", 0, 0)) == 3
    hub.add("own/two", {("default", "train"): rows(3, 7), ("default", "extra"): rows(2, 7)})
    with pytest.raises(DataError, match=r"has the splits extra, train: choose one with task\.test_split=NAME"):
        Data(mine, reward="number", test_file="own/two")
    assert len(Data(mine, reward="number", test_file="own/two", test_split="extra").epoch("test", 0, 0)) == 2


def test_a_folder_with_the_readme_of_a_repository_is_one(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = repository(tmp_path / "set", {("a", "train"): rows(9), ("b", "train"): rows(8)})
    with pytest.raises(DataError, match=r"Config name is missing.*'a', 'b'"):
        Data(str(folder), reward="number")
    settings = {"file": str(folder), "reward": "number", "config": "b", "held_out": 0.0}
    assert len(Data(**settings).epoch("train", 0, 0)) == 8
    repository(folder, {("a", "train"): rows(9), ("b", "train"): rows(7)})
    assert len(Data(**settings).epoch("train", 0, 0)) == 7  # and not what datasets cached
    assert "is streamed" in Data(**settings, streaming=True).sizes()


def test_settings_of_the_hub_are_refused_for_files(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"question": "Mine?", "answer": "1"}\n')
    for setting in ({"config": "main"}, {"streaming": True}):
        with pytest.raises(
            DataError, match=r"is only for data sets on the hub and folders with a data set's README\.md"
        ):
            Data(str(tmp_path / "mine.jsonl"), reward="number", **setting)
        with pytest.raises(DataError, match=r"in memory.*is only for data sets on the hub"):
            Data(rows(3), reward="number", **setting)
    with pytest.raises(DataError, match="has no splits: remove test_split"):
        Data(rows(3), reward="number", test_split="test")


# On the command line and in recipes


@pytest.mark.usefixtures("gsm8k")
@pytest.mark.parametrize("order", [1, -1])
def test_data_is_a_name_or_a_group(order, tmp_path):
    typed = [f"data={GSM8K}", "data.config=main", "reward=number", "model=some/model"]
    config = load(None, typed[::order])
    assert config.task.settings == {"file": GSM8K, "config": "main", "reward": "number"}
    assert len(config.task.build().epoch("test", 0, 0)) == 6
    group = load(None, [f"data={{name: {GSM8K}, config: main}}", *typed[2:]])
    (tmp_path / "recipe.yaml").write_text(f"data: {{name: {GSM8K}, config: main}}\nreward: number\n")
    recipe = load(tmp_path / "recipe.yaml", typed[3:])
    (tmp_path / "base.yaml").write_text(f"data: {GSM8K}\nreward: number\n")
    inherited = load(tmp_path / "base.yaml", ["data.config=main", *typed[3:]])
    assert config.task.settings == group.task.settings == recipe.task.settings == inherited.task.settings
    assert load(None, ["task.name=math", *typed[:2], "model=some/model"]).task.name == "math"


@pytest.mark.usefixtures("gsm8k")
def test_a_mistyped_key_of_data_is_answered():
    data = [f"data={GSM8K}", "reward=number"]
    assert "unknown key of data 'confg'; did you mean 'config'?" in refused(*data, "data.confg=main")
    assert "['main', 'socratic']" in refused(*data)
    assert "data is short for task.file, and both are set" in refused("data.name=a.jsonl", "task.file=b.jsonl")
    listed = "data=[{name: a.jsonl, wieght: 2}, {name: b.jsonl}]"
    assert "unknown setting of a data set 'wieght'; did you mean 'weight'?" in refused(listed, "reward=exact")
    assert "weight must be between" in refused("data=[{name: a.jsonl, weight: 0}, b.jsonl]", "reward=exact")
    assert "streaming must be true or false" in refused("data=[{name: a.jsonl, streaming: much}]", "reward=exact")


# Mixtures


@pytest.fixture
def two(hub):
    hub.add("own/a", {("default", "train"): rows(30), ("default", "test"): rows(5, 50)})
    problems = [{"problem": f"Solve {i}", "solution": f"\\boxed{{{i}}}", "hint": f"hint {i}"} for i in range(10)]
    hub.add("own/b", {("default", "train"): problems, ("default", "test"): [{**problems[0], "problem": "Solve x"}]})
    return [{"name": "own/a", "weight": 3}, {"name": "own/b"}]


def test_a_mixture_has_its_weights_in_every_epoch_and_loses_no_problem(two):
    task = Data(two, reward="math")
    walked = [task.epoch("train", 0, number) for number in range(4)]
    for epoch in walked:
        assert Counter(problem.difficulty for problem in epoch) == {"own/a": 30, "own/b": 10}
    even = replace(task, file=["own/a", "own/b"])
    walked = [problem for number in range(3) for problem in even.epoch("train", 0, number)]
    counts = Counter(problem.id for problem in walked)
    assert {count for name, count in counts.items() if "own/a" in name} == {2}  # 60 of 120 problems
    assert {count for name, count in counts.items() if "own/b" in name} == {6}
    assert Counter(problem.difficulty for problem in task.epoch("test", 0, 0)) == {"own/a": 5, "own/b": 1}


def test_a_mixture_depends_on_seed_and_step_alone(two):
    task, again = Data(two, reward="math"), Data(two, reward="math")
    whole = [training_problems(task, seed=3, step=step, step_seed=0, count=7) for step in range(1, 13)]
    assert training_problems(again, seed=3, step=12, step_seed=9, count=7) == whole[11]
    assert training_problems(again, seed=4, step=12, step_seed=9, count=7) != whole[11]
    assert epochs(task, 3, 80) == 2


def test_rows_of_a_mixture_keep_their_columns_and_answers(two, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def hinted(completions, hint, problem, question, **rest):\n"
        "    assert all((h is None) == (p is None) != (q is None) for h, p, q in zip(hint, problem, question))\n"
        "    return [None if h is None else float(len(h)) for h in hint]\n"
    )
    task = Data(two, reward=["math", f"{tmp_path}/mine.py:hinted"])
    problems = task.epoch("train", 0, 0)
    tried = []
    for problem in problems:
        row, episode = problem.data["row"], task.episode(problem)
        right = f"\\boxed{{{row['answer']}}}" if "question" in row else row["solution"]
        reply = [{"role": "assistant", "content": f"It is {right}."}]
        tried.append(Attempt(problem, episode, episode.start(), reply, [1]))
    scores = task.score_all(tried)
    task.rewards.close()
    assert all(score.correct for score in scores)
    assert {tuple(score.parts) for score in scores} == {("math",), ("math", "hinted")}


def test_columns_of_other_names_are_found_by_a_list(hub):
    hub.add("own/c", {("default", "train"): [{"query": f"q {i}", "gold": "1"} for i in range(9)]})
    hub.add("own/d", {("default", "train"): [{"task": f"t {i}", "result": "1"} for i in range(9)]})
    names = {"question": ["query", "task"], "answer": ["gold", "result"]}
    task = Data(["own/c", "own/d"], reward="exact", **names)
    assert {problem.data["row"]["answer"] for problem in task.epoch("train", 0, 0)} == {"1"}
    with pytest.raises(DataError, match="data own/c has no column 'task' or 'other'"):
        Data(["own/c", "own/d"], reward="exact", question=["task", "other"])


def test_held_out_questions_of_one_set_are_not_trained_on_in_another(hub):
    hub.add("own/a", {("default", "train"): rows(30), ("default", "test"): rows(5, 50)})
    hub.add("own/b", {("default", "train"): rows(30, 40)})
    task = Data(["own/a", "own/b"], reward="number")
    train, test = (set(asked(task.epoch(split, 0, 0))) for split in ("train", "test"))
    assert not train & test
    assert len(test) > 5  # and a share of the second set
    assert any("of 30 questions in own/b left out of training, as they are held out" in note for note in task.notes)


@pytest.mark.usefixtures("two")
def test_a_weight_too_small_for_a_single_problem_is_refused():
    with pytest.raises(DataError, match="own/b: its weight is too small to get one of 40 problems"):
        Data([{"name": "own/a", "weight": 1000}, "own/b"], reward="math").epoch("train", 0, 0)


def test_leaving_problems_out_of_a_mixture(two):
    task = Data(two, reward="math")
    task.epoch("train", 0, 0)
    task.leave_out(lambda problem: problem.id.endswith(":3"), "since they are long")
    assert len(task.epoch("train", 0, 0)) == 38
    assert task.notes[-3:-1] == [
        f"{name}: 1 train problem left out, since they are long: line 3" for name in ("own/a", "own/b")
    ]
    with pytest.raises(DataError, match="data own/b: all 9 train problems left out"):
        task.leave_out(lambda problem: problem.difficulty == "own/b", "since they are long")


@pytest.mark.parametrize(("weights", "size"), [((1, 1, 1), 10), ((3, 1), 7), ((0.1, 0.2, 0.7), 1000), ((5,), 3)])
def test_shares_add_up_and_are_within_one_of_exact(weights, size):
    found = shares(weights, size)
    assert sum(found) == size
    assert all(abs(share - size * weight / sum(weights)) < 1 for share, weight in zip(found, weights, strict=True))


# Streams


@pytest.fixture
def large(hub):
    hub.add("own/large", {("default", "train"): [*rows(95), {"question": ""}], ("default", "test"): rows(3, 200)})


@pytest.mark.usefixtures("large")
def test_a_stream_goes_through_all_rows_in_shuffled_blocks():
    task = Data("own/large", reward="number", streaming=True, buffer=20)
    assert task.sizes().startswith("own/large is streamed, in blocks of 20 rows, 3 held out (split test of own/large")
    seen = [question for step in steps(task, range(1, 20), count=10) for question in step]
    first, second = seen[:95], seen[95:190]
    everything = [row["question"] for row in rows(95)]
    assert sorted(first) == sorted(second) == sorted(everything)
    assert sorted(first[:20]) == sorted(everything[:20])  # no row is read long before it is needed
    assert first[:20] != everything[:20]
    assert first != second
    assert epochs(task, 0, 190) < 1e-9


@pytest.mark.usefixtures("large")
def test_a_stream_depends_on_seed_and_step_alone():
    settings = {"file": "own/large", "reward": "number", "streaming": True, "buffer": 16}
    whole = steps(Data(**settings), range(1, 40))
    resumed = Data(**settings)
    assert asked(draw(resumed, "train", 0, 2)) == whole[0][:2]  # a trial before the run
    assert steps(resumed, range(30, 40)) == whole[29:]
    assert steps(resumed, [3]) == whole[2:3]  # back again
    assert steps(Data(**settings), [1], seed=1) != whole[:1]
    assert asked(Data(**settings).epoch("test", 0, 0)) == asked(resumed.epoch("test", 0, 0))


def test_a_stream_holds_out_a_share_if_there_is_no_test_split(hub):
    hub.add("own/bare", {("default", "train"): rows(300)})
    task = Data("own/bare", reward="number", streaming=True, buffer=50)
    test = set(asked(task.epoch("test", 0, 0)))
    seen = {question for step in steps(task, range(1, 70)) for question in step}
    assert test
    assert len(test) < 15
    assert not test & seen
    assert 250 < len(seen) < 290  # the same share of the later blocks is not trained on either
    with pytest.raises(DataError, match="none of its first 2 rows falls into the held-out share: raise"):
        Data("own/bare", reward="number", streaming=True, buffer=2, held_out=0.001)


@pytest.mark.usefixtures("large")
def test_a_stream_leaves_out_what_does_not_fit():
    task = Data("own/large", reward="number", streaming=True, buffer=20)
    steps(task, [1])
    task.leave_out(lambda problem: "7" in problem.prompt, "since they are long")
    seen = {question for step in steps(task, range(1, 60)) for question in step}
    assert seen == {row["question"] for row in rows(95) if "7" not in row["question"]}
    task.leave_out(lambda problem: problem.id.startswith("own/large:"), "since they are long")
    with pytest.raises(DataError, match="none of its rows can be trained on"):
        steps(task, [1])


@pytest.mark.usefixtures("large")
def test_streams_and_tables_mix(hub):
    hub.add("own/small", {("default", "train"): rows(10, 500), ("default", "test"): rows(2, 600)})
    parts = [{"name": "own/large", "streaming": True, "weight": 3}, {"name": "own/small"}]
    task, again = (Data(parts, reward="number", buffer=32) for _ in range(2))
    whole = steps(task, range(1, 251))
    drawn = Counter(int(question.split()[2]) >= 500 for step in whole for question in step)
    assert drawn == {False: 750, True: 250}
    assert steps(again, range(200, 251)) == whole[199:]
    assert task.sizes().startswith("10 problems to train on, own/large is streamed")


def test_the_fingerprint_of_a_stream_is_its_first_block_and_what_is_held_out(hub):
    def printed(train, test):
        hub.add("own/set", {("default", "train"): train, ("default", "test"): test})
        return Data("own/set", reward="number", streaming=True, buffer=20).fingerprint

    printed(rows(10), rows(3, 100))
    ways = [{}, {"streaming": True, "buffer": 20}, {"streaming": True, "buffer": 30}]  # each draws in another order
    assert len({Data("own/set", reward="number", **way).fingerprint for way in ways}) == 3
    one = printed(rows(60), rows(3, 100))
    assert one == printed(rows(60), rows(3, 100))
    assert one == printed(rows(50), rows(3, 100))  # a change behind the first block is not seen
    assert one != printed(rows(60, 1), rows(3, 100))
    assert one != printed(rows(60), rows(4, 100))


# Objects


class ByIndex:
    """No iterator, and no end but its length, as datasets of torch have it."""

    def __len__(self):
        return 40

    def __getitem__(self, place):
        return rows(1, place)[0]


def test_objects_of_every_kind_have_the_same_problems_and_the_same_fingerprint():
    datasets, pandas = pytest.importorskip("datasets"), pytest.importorskip("pandas")
    kinds = [rows(40), tuple(rows(40)), datasets.Dataset.from_list(rows(40)), ByIndex(), pandas.DataFrame(rows(40)),
             datasets.DatasetDict({"train": datasets.Dataset.from_list(rows(40))}), {"train": rows(40)},
             {"name": rows(40), "weight": 2.0}]  # fmt: skip
    made = [task_of(data, reward="number") for data in kinds]
    assert len({task.fingerprint for task in made}) == 1
    orders = {tuple(asked(task.epoch("train", 5, 1))) for task in made}
    assert len(orders) == 1
    assert sum(len(made[0].epoch(split, 0, 0)) for split in ("train", "test")) == 40
    assert made[0].epoch("train", 0, 0)[0].id.startswith("in memory:")
    assert task_of(rows(39), reward="number").fingerprint != made[0].fingerprint
    changed = [*rows(39), {"question": "What is 39 + 39?", "answer": "79"}]
    assert task_of(changed, reward="number").fingerprint != made[0].fingerprint


def test_splits_and_tests_of_objects():
    datasets = pytest.importorskip("datasets")
    whole = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(rows(30)), "validation": datasets.Dataset.from_list(rows(4, 50))}
    )
    assert len(task_of(whole, reward="number").epoch("test", 0, 0)) == 4
    assert len(task_of(whole["train"], test=rows(6, 90), reward="number").epoch("test", 0, 0)) == 6
    assert len(task_of(whole["train"], test=whole, reward="number").epoch("test", 0, 0)) == 4
    mixed = task_of([{"name": whole, "weight": 1}, {"name": rows(9, 70), "weight": 1}], reward="number")
    assert len(mixed.epoch("train", 0, 0)) > 30
    stream = task_of(whole["train"].to_iterable_dataset(), reward="number", buffer=8, held_out=0.5)
    assert {question for step in steps(stream, range(1, 40)) for question in step} == set(
        asked(task_of(whole["train"], reward="number", held_out=0.5).epoch("train", 0, 0))
    )


def test_a_row_with_a_name_is_a_row():
    people = [{"name": "Ann", "question": f"How old is Ann, {i}?", "answer": "3"} for i in range(9)]
    task = task_of(people, reward="exact", held_out=0.0)
    assert [problem.data["row"]["name"] for problem in task.epoch("train", 0, 0)] == ["Ann"] * 9


def test_numbers_of_numpy_stay_numbers():
    numpy = pytest.importorskip("numpy")
    given = [{"question": "q", "answer": "1", "level": numpy.int64(3), "steps": numpy.arange(2)}]
    (problem,) = task_of(given, reward="exact", held_out=0.0).epoch("train", 0, 0)
    assert (problem.data["row"]["level"], problem.data["row"]["steps"]) == (3, [0, 1])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "data must be a file, a hub id, a datasets.Dataset or a list of rows, got 3"),
        (iter(rows(3)), "can be read only once: pass a list of its rows"),
        ([], "data in memory has no row"),
        ([1, 2], r"data in memory has no row; 2 unreadable rows .*not an object with named fields, but 1"),
        ([{"text": "x"}], "none of its columns is called prompt, question"),
    ],
)
def test_objects_that_are_no_data_are_refused(data, message):
    with pytest.raises(DataError, match=message):
        task_of(data, reward="exact")


def test_the_task_of_an_object_may_be_math():
    task = task_of(rows(20), name="math")
    assert isinstance(task, Math)
    task.rewards.close()
    with pytest.raises(ValueError, match="unknown name 'maths'; did you mean 'math'"):
        task_of(rows(20), name="maths")
