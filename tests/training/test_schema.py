"""Settings: their defaults, what they are built into, and the trip to a file and back."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise import advantages, tasks
from poise.training.config.schema import Config, ConfigError, TaskConfig, dump, load, recipes


def test_every_advantage_can_be_named():
    for name in advantages.TABLE:
        assert load("tiny", [f"advantage={name}"]).build_advantage().function is advantages.TABLE[name]
    without = [name for name in advantages.TABLE if not advantages.get(name).needs_groups]
    assert without == ["reinforce-pp", "reinforce-pp-tokens"]


def test_defaults_work_and_cannot_be_changed():
    config = Config(task={"name": "kk"})
    assert config.model == "embedded"
    assert config.task.build().name == "kk"
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 3
    with pytest.raises(ValueError, match="frozen"):
        config.task.people = 3


def test_a_task_keeps_its_settings_beside_its_name():
    task = TaskConfig(name="kk", people=(2, 3))
    assert task.settings == {"people": [2, 3]}
    assert task.build() == tasks.get("kk", people="2-3")
    assert task.model_dump(mode="json") == {"name": "kk", "people": [2, 3]}


def test_one_response_per_prompt_needs_no_group_with_reinforce_pp():
    assert load("tiny", ["group=1", "advantage=reinforce-pp"]).group == 1
    assert load("tiny", ["group=1", "advantage=reinforce-pp-tokens"]).group == 1
    with pytest.raises(ConfigError, match="compares the responses to a prompt"):
        load("tiny", ["group=1", "advantage=reinforce-pp-baseline"])


def test_the_error_is_a_value_error_and_travels_between_processes():
    with pytest.raises(ValueError, match=r"optim\.lr") as caught:
        load("tiny", ["lr=1", "stpes=2"])
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) == "\n".join(again.problems)


@pytest.mark.parametrize("name", recipes())
def test_a_dump_is_a_recipe(name, write):
    config = load(name)
    assert load(write(dump(config))) == config
    assert Config.model_validate(json.loads(json.dumps(config.model_dump(mode="json")))) == config


texts = st.text(min_size=1).filter(lambda text: text.isprintable()) | st.sampled_from(
    ["1e4", "1.5e3", "2026-01-02", "null", "yes", "3", "0x1f", "1:30", "~", "a: b", "# c", " d ", "é"]
)


@given(
    texts,
    st.sampled_from(["tensorboard", "wandb", "trackio"]),
    st.floats(1e-12, 10),
    st.none() | st.floats(1.01, 1e6),
    st.sampled_from(["2-3", 5, (3, 4)]),
    st.none() | st.fixed_dictionaries({"rank": st.integers(1, 9), "targets": st.lists(texts, min_size=1, max_size=2)}),
)
def test_whatever_is_in_it_survives_the_trip(tmp_path_factory, run, track, lr, dual, people, lora):
    groups = {
        "optim": {"lr": lr},
        "objective": {"dual_clip": dual},
        "task": {"name": "kk", "people": people},
        "lora": lora,
    }
    config = Config(run=run, tracking=[track], **groups)
    path = tmp_path_factory.mktemp("trip") / "mine.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load(path) == config
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_the_home_folder_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    config = load("tiny", ["run=~/runs/x", "model=~/models/y"])
    assert (config.run, config.model) == ("/home/ada/runs/x", "/home/ada/models/y")
    assert load("tiny", ["run=./~x"]).run == "./~x"
    with pytest.raises(ConfigError, match=r"run = '~nobody-here/x': .* there is no user 'nobody-here'"):
        load("tiny", ["run=~nobody-here/x"])
