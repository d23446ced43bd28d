"""Recipes and documents that are made to keep a process busy, to fill its memory or to make it trip."""

import json
import re

import pytest

from poise.training.config.schema import ConfigError, load, restore
from support.configs import problem, problems


def levels(depth, value="x"):
    return "[" * depth + value + "]" * depth


ALIAS = r"mine\.yaml, line \d+: the alias \*a\d* stands for a list or a group: write it out, or inherit it with base:"
HOSTILE = {
    "a list of lists of lists": (
        "\n".join(["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))])
        + "\ntracking: *a11\n",
        ALIAS,
    ),
    "merged groups": ("a: &a {k: 1}\nb: {<<: [*a, *a]}\n", ALIAS),
    "a list in itself": ("tracking: &a [*a]\n", ALIAS),
    "a long text many times": (f"s: &s {'x' * 9000}\ntracking: [{'*s, ' * 9000}]\n", "unknown key 's'"),
    "brackets without end": ("tracking: " + "[" * 5000, "cannot be read as YAML: it has more than 20 levels"),
    "many levels": (f"lora: {{targets: {levels(30)}}}\n", "the settings have more than 20 levels"),
    "many keys": ("\n".join(f"k{i}: 1" for i in range(3000)), "… and 2981 more problems"),
    "too long": ("model: " + "x" * 100_000, "it has more than 100,000 characters"),
    "a long number": ("steps: " + "9" * 5000, "cannot be read as YAML: cannot read a value: Exceeds the limit"),
    "a long hexadecimal number": ("steps: 0x" + "f" * 5000, "steps = a whole number of 20000 bits: must be at most"),
    "a number that is none": ("steps: 3\nseed: !!int x\n", "read as YAML: cannot read a value: invalid literal"),
    "a date that is none": ("steps: !!timestamp x\n", "steps = 'x': must be a number"),
    "a truth that is none": ("steps: !!bool x\n", "cannot be read as YAML: cannot read a value: 'x'"),
    "phases without end": ("regulator: grpo(passes=1000000000)", "passes must be between 1 and 100, got 1000000000"),
    "phases that multiply": (f"regulator: {'|'.join(['lopti'] * 600)}", "600 regulators make .* phases together"),
    "passes that multiply": ("regulator: grpo(passes=11)|grpo(passes=10)", "make 110 phases together.*at most 100 are"),
    "no function": ("regulator: poise.regulators.base:Function('x')", "a regulator is a callable .*, got 'x'"),
    "no regulator": ("regulator: poise.regulators.base:Compose(())", "a composition needs at least one regulator"),
    "half a character": ('run: "\\ud800"\n', "run = '.ud800': must be a valid string"),
    "no file name": ('run: "a\\0b"\n', "run = 'a.x00b': must not contain the character NUL"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_recipe_is_refused_at_once_and_in_few_words(write, name):
    text, message = HOSTILE[name]
    told = problems(recipe=write(text))
    assert any(re.search(message, line) for line in told), told
    assert len("\n".join(told)) < 10_000


def test_an_alias_of_a_single_value_is_fine(write):
    config = load(write("base: tiny\nprompts: &n 3\nsteps: *n\n"))
    assert (config.prompts, config.steps) == (3, 3)


def test_inheritance_has_an_end(write):
    paths = [write(f"base: r{i + 1}.yaml\n", f"r{i}.yaml") for i in range(30)]
    assert problem(recipe=paths[0]) == "recipe 'r0.yaml': more than 20 recipes inherit from each other"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"task": {"name": "kk", "people": json.loads(levels(500, "1"))}}, "the settings have more than 20 levels"),
        ({"steps": 10**4000}, "steps = a whole number of 13288 bits: must be at most 2147483647"),
        ({"regulator": "ar | " * 10**4}, "regulator = 'ar | ar"),
        ({"regulator": 5}, "regulator = 5: must be text"),
        ({"task": {"name": ["kk"]}}, "task.name = ['kk']: must be text: the name of a task"),
        ({"task": {"name": "kk", 1: 2}}, "unknown key 'task.1'"),
        ({"task": {"name": "kk"}, True: 2}, "unknown key 'True' (allowed: advantage"),
        ({"task": None}, "task = None: must be a group of settings, {key: value}"),
        ({f"k{i}": 1 for i in range(3000)}, "… and 2981 more problems"),
    ],
)
def test_a_hostile_document_is_refused_too(document, message):
    with pytest.raises(ConfigError) as caught:
        restore(document)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 10_000
