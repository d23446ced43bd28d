"""The small rewards, and where in a reply its answer is found."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise import rewards
from poise.tasks.rewards import answers, equality, formulas


def chat(text):
    return [{"role": "assistant", "content": text}]


def one(spec, text, gold=None, ids=()):
    columns = {} if gold is None else {"answer": [gold]}
    return rewards.get(spec)(prompts=["?"], completions=[text], completion_ids=[list(ids)], **columns)[0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2}", "2"),  # the last box counts: a reply cannot hedge
        (r"\boxed{\text{a \} b}}", r"\text{a \} b}"),
        (r"\boxed 5 and more", "5"),
        (r"\fbox{7}", "7"),
        (r"\boxed{5", None),  # cut off
        (r"\boxedness", None),
        ("<answer> 42 </answer>", "42"),
        (r"<answer>It is \boxed{3}.</answer>", "3"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("48+24 = 72\n#### 72", "72"),
        ("The answer is **1,234**.", "1,234"),
        ("The final answer is: $x+1$. I hope it is correct.", "x+1"),
        ("Answer: B", "B"),
        ("**Final Answer**: 7", "7"),
        (r"The answer is $\$36$ a day.", r"\$36"),
        (r"The answer is \(x\) here", "x"),
        ("The answer is 4. No, the answer is 5. Done.", "5"),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> no box here", None),
        (r"<think>\boxed{1} and on and on", None),
        ("no statement, only 42", None),
        ("", None),
    ],
)
def test_the_stated_answer(text, answer):
    assert answers.final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("2+2 = <<2+2=4>>4\n#### 1,234", "1,234"),
        (r"Thus $x = \boxed{\dfrac{3}{4}}$, as claimed.", r"\dfrac{3}{4}"),
        ("204", "204"),
        (" Paris ", "Paris"),
        ("#### Notes\nfirst\nsecond", "#### Notes\nfirst\nsecond"),
    ],
)
def test_the_gold_answer(text, answer):
    assert answers.gold(text) == answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", "42"),
        ("-7", "-7"),
        ("−7", "-7"),
        ("1,234", "1234"),
        ("1{,}234", "1234"),
        (r"1,\!234", "1234"),
        ("1234.50", "2469/2"),
        (".5", "1/2"),
        ("5.", "5"),
        ("1/3", "1/3"),
        (r"\frac{1}{3}", "1/3"),
        (r"-\dfrac13", "-1/3"),
        (r"\frac9{19}", "9/19"),
        (r"\frac{270}7", "270/7"),
        (r"\frac{-1}{3}", "-1/3"),
        (r"3\frac{1}{2}", "7/2"),
        ("3 1/2", "7/2"),
        ("3½", "7/2"),
        ("1.5e3", "1500"),
        (r"1.5 \times 10^{3}", "1500"),
        (r"\$18.00", "18"),
        ("$18", "18"),
        ("18 dollars", "18"),
        (r"5\text{ cm}^2", "5"),
        (r"5 \mathrm{ km/h}", "5"),
        ("60 miles per hour", "60"),
        (r"45^\circ", "45"),
        (r"45^{\circ}", "45"),
        ("10%", "10"),
        (r"10\%", "10"),
        ("5 million", None),
        ("5 or 6", None),
        ("5 pi", None),
        ("2x", None),
        ("5 pm", None),
        ("1/0", None),
        ("12,34", None),
        ("1e99999999", None),
        ("9" * 600, None),
        ("٣", None),
    ],
)
def test_plain_numbers_are_read_exactly(text, value):
    found = formulas.number_in(formulas.clean(text))
    assert (None if found is None else str(found)) == value


@pytest.mark.parametrize(
    ("spec", "text", "gold", "value"),
    [
        ("exact", "Paris", "Paris", 1.0),
        ("exact", "The answer is  Paris.", "Paris", 1.0),
        ("exact", "paris", "Paris", 0.0),
        ("exact(ignore_case=True)", "paris", "Paris", 1.0),
        ("exact", "", "Paris", 0.0),
        ("exact", "London", ["Paris", "London"], 1.0),  # a list: any of them
        ("exact", "Paris", None, None),
        ("choice", "B", "B", 1.0),
        ("choice", "(b)", "B", 1.0),
        ("choice", "The answer is (C) because …", "C", 1.0),
        ("choice", "D. Paris", "D", 1.0),
        ("choice", r"\boxed{\text{A}}", "A", 1.0),
        ("choice", "option E", "E", 1.0),
        ("choice", "B", 1, 1.0),  # MMLU counts from 0
        ("choice", "B", "(B) Paris", 1.0),
        ("choice", "A dog barked", "A", 0.0),
        ("choice", "a dog", "A", 0.0),
        ("choice", "Between us: B", "B", 0.0),
        ("choice", "F", "F", 0.0),
        ("choice", "<answer>A, B</answer>", "A", 0.0),  # two letters are no choice
        ("choice", "<answer>A/B</answer>", "A", 0.0),
        ("choice", "<answer>(A) and (B)</answer>", "A", 0.0),
        ("choice", "<answer>(A) (B)</answer>", "A", 0.0),
        ("choice", "<answer>A B</answer>", "A", 0.0),
        ("choice", "<answer>a/b</answer>", "A", 0.0),
        ("choice", r"\boxed{\text{A} \text{ or } \text{C}}", "A", 0.0),
        ("choice", "(B) Vitamin C", "B", 1.0),
        ("choice", "(B) A dog", "B", 1.0),
        ("choice", "B. A, or the sum", "B", 1.0),
        ("number", "It is 5, so \\boxed{1,234}", "1234", 1.0),
        ("number", "first 5, then 7", "7", 1.0),  # the last number, on purpose
        ("number(last_number=False)", "first 5, then 7", "7", 0.0),
        ("number", "1 000", "1000", 1.0),
        ("number", "It is 1\u202f000 in all.", "1000", 1.0),
        ("number", "It is 12 345.50.", "12345.5", 1.0),
        ("number", "It is 1 000.", "0", 0.0),
        ("number", "In 2020 300 people", "300", 1.0),
        ("number", "5 250 30", "30", 1.0),
        ("number", "The answer is 18 dollars a day.", "#### 18", 1.0),
        ("number", "The answer is 5 or 6", "6", 0.0),  # two numbers are no answer
        ("number", "The answer is 5 million", "5", 0.0),
        ("number", "x = 5", "5", 1.0),
        ("number", "0.333", "1/3", 0.0),
        ("number(tolerance=0.01)", "0.333", "1/3", 1.0),
        ("number", "10%", "10", 1.0),
        ("number", "10%", "0.1", 0.0),
        ("number", "none", "3", 0.0),
        ("number", "The answer is not 5.", "5", 0.0),
        ("number", "The answer is more than 5.", "5", 0.0),
        ("number", r"\boxed{\sqrt{16}}", "16", 0.0),
        ("number", r"\boxed{5!}", "5", 0.0),
        ("number", r"\boxed{x^5}", "5", 0.0),
        ("number", r"\boxed{-x+5}", "5", 0.0),
        ("number", r"\boxed{x - 5}", "5", 0.0),
        ("number", r"\boxed{x != 5}", "5", 0.0),
        ("number", r"\boxed{16\pi}", "16", 0.0),
        ("number", r"\boxed{\log 100}", "100", 0.0),
        ("number", r"\boxed{5k}", "5", 0.0),
        ("number", r"\boxed{5 x}", "5", 0.0),
        ("number", "<answer>5 or six</answer>", "5", 0.0),
        ("number", "The answer is **5** red apples.", "5", 1.0),
        ("number", "The answer is about 5 of them.", "5", 1.0),
        ("number", "The answer is (5)", "5", 1.0),
        ("number", "The answer is that it’s 5", "5", 1.0),
        ("number", "The answer is that it isn’t 5", "5", 0.0),
        ("number", r"\boxed{n = 5\text{ cm}}", "5", 1.0),
        ("number", r"\boxed{-(5)}", "5", 0.0),  # signs in front of brackets and quotes
        ("number", "<answer>−[5]</answer>", "5", 0.0),
        ("number", '<answer>-"5"</answer>', "5", 0.0),
        ("number", r"\boxed{-(-5)}", "-5", 0.0),
        ("number", r"\boxed{not x=5}", "5", 0.0),
        ("number", r"\boxed{0=5}", "5", 0.0),
        ("number", r"\boxed{2+3=5}", "5", 1.0),
        ("number", r"\boxed{x+1=5}", "5", 0.0),  # of x, and not x
        ("number", r"\boxed{x^2=5}", "5", 0.0),
        ("number", r"\boxed{\sqrt{x}=5}", "5", 0.0),
        ("number", r"\boxed{x!=5}", "5", 0.0),
        ("number", r"\boxed{a+b=5}", "5", 1.0),
        ("number", r"\boxed{x_1=5}", "5", 1.0),
        ("number", r"\boxed{x_1}", "1", 0.0),
        ("number", r"\boxed{2^3=8}", "8", 1.0),
        ("number", r"\boxed{2^4=8}", "8", 0.0),
        ("number", r"\boxed{5!/12=11}", "11", 0.0),
        ("number", "<answer>anything but 5</answer>", "5", 0.0),
        ("number", "#### 60. or more", "60", 0.0),
        ("number", "#### 60. + 2", "60", 0.0),
        ("number", "The answer is 60. Good.", "60", 1.0),
        ("number", r"\boxed{(\frac{1}{2})}", "0.5", 1.0),
        ("number", r"<answer>1 4/5 red apples</answer>", "1.8", 1.0),
        ("number", r"<answer>\frac{3}{2} dozen</answer>", "1.5", 0.0),
        ("number", r"\boxed{a/5}", "5", 0.0),
        ("number", r"\boxed{5/a}", "5", 0.0),
        ("number", "<answer>1 000</answer>", "1000", 1.0),
        ("number", "<answer>1 000 000</answer>", "1000000", 1.0),
        ("number", "<answer>1 00</answer>", "100", 0.0),
        ("number", "42", "42.0", 1.0),
        ("exact", "42", 42.0, 1.0),
        ("exact", "42", "42.0", 1.0),
        ("exact", "42.5", 42.5, 1.0),
        ("exact", "Zu\u0308rich", "Z\u00fcrich", 1.0),
        ("exact", "<answer>'Paris'</answer>", "Paris", 1.0),
        ("exact", 'The answer is "Paris".', "Paris", 1.0),
    ],
)
def test_values(spec, text, gold, value):
    columns = {"prompts": ["?"], "completion_ids": [[]], "answer": [gold]}
    assert rewards.get(spec)(completions=[text], **columns) == [value]
    assert rewards.get(spec)(completions=[chat(text)], **columns) == [value]


def test_regex():
    assert one(r"regex(pattern='\\bfour\\b')", "it is four.") == 1.0
    assert one(r"regex(pattern='\\bfour\\b')", "it is fourteen.") == 0.0
    assert one("regex(pattern='FOUR', ignore_case=True)", "it is four.") == 1.0


@pytest.mark.parametrize(
    ("spec", "text", "value"),
    [
        ("format", "<think>a</think>\n<answer>b</answer>\n", 1.0),
        ("format", "<think>a</think><answer>b</answer> c", 0.0),
        ("format", "hm <think>a</think><answer>b</answer>", 0.0),
        ("format", "<answer>b</answer><think>a</think>", 0.0),
        ("format", "<think>a<answer>b</think></answer>", 0.0),
        ("format", "<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("format", "<think>a</think>b", 0.0),
        ("format(tags=('think',), rest=True)", "<think>a</think>b", 1.0),
        ("format(tags='think')", "<think>a</think>", 1.0),
        ("format(opened=True)", "a</think><answer>b</answer>", 1.0),
        ("format(opened=True)", "<think>a</think><answer>b</answer>", 0.0),
        ("format(tags=('plan', 'code'))", "<plan>1</plan> <code>2</code>", 1.0),
    ],
)
def test_format(spec, text, value):
    assert one(spec, text) == value


@pytest.mark.parametrize(("length", "value"), [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (101, -1.0)])
def test_overlong_is_dapos(length, value):
    assert one("overlong(max_tokens=100, buffer=20)", "", ids=range(length)) == value


def test_the_last_reply_of_a_dialogue_counts():
    dialogue = [
        {"role": "assistant", "content": "\\boxed{1}", "tool_calls": []},
        {"role": "tool", "content": "\\boxed{2}"},
        {"role": "assistant", "content": [{"type": "text", "text": "\\boxed{3}"}]},
        {"role": "tool", "content": "\\boxed{4}"},
    ]
    assert rewards.text_of(dialogue) == "\\boxed{3}"
    assert rewards.text_of([{"role": "assistant", "content": None}]) == ""
    assert rewards.text_of([]) == ""


@pytest.mark.parametrize("column", ["answer", "solution", "ground_truth"])
def test_gold_columns(column):
    assert rewards.get("number")(completions=["3"], **{column: ["3"]}) == [1.0]


def test_a_gold_column_by_name_and_one_that_is_missing():
    assert rewards.get("number(column='target')")(completions=["3"], target=["3"], answer=["4"]) == [1.0]
    with pytest.raises(rewards.RewardError, match=r"lacks any of the columns answer, solution.*number\(column='…'\)"):
        rewards.get("number")(completions=["3"], other=["3"])
    with pytest.raises(rewards.RewardError, match="lacks column 'target'"):
        rewards.get("number(column='target')")(completions=["3"], answer=["3"])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("maths", "unknown reward 'maths'"),
        ("nubmer", "did you mean 'number'"),
        ("exact(pattern='x')", "unknown setting of exact 'pattern'"),
        ("exact(True)", "with their names"),
        ("regex", r"regex\(pattern='…'\)"),
        ("regex(pattern='(')", "not a regular expression"),
        ("number(tolerance=2)", "tolerance must be between 0 and 1"),
        ("overlong", "max_tokens must be between 1"),
        ("overlong(max_tokens=5, buffer=9)", "buffer must be between 0 and 5"),
        ("choice(letters='ab')", "letters must be capital"),
        ("format(tags=())", "tags must be names"),
        ("exact(", "cannot read"),
        ("", "cannot read"),
        ("no_such_module.reward", "no_such_module"),
        ("hypothesis.nothing", "nothing"),
        ("subprocess.Popen(args='touch owned')", "part of Python itself"),
        ("folder/mine.py", "name the function in the file, such as folder/mine.py:name"),
        ("poise.tasks.rewards.simple.Exact", "use the short names of poise's own rewards: exact"),
        ("poise._lib.files:os.remove(path='x')", "use the short names"),
        ("os:system", "part of Python itself"),
    ],
)
def test_mistakes_are_answered(spec, message):
    with pytest.raises((ValueError, TypeError), match=message):
        rewards.get(spec)


GARBAGE = {
    "boxes": "\\boxed{" * 140_000,
    "braces": "\\boxed{" + "{" * 500_000 + "}" * 500_001,
    "digits": "9" * 1_000_000,
    "commas": ",123" * 250_000,
    "numbers": "1 " * 500_000,
    "phrases": "the answer is " * 70_000,
    "hashes": "#### " * 200_000,
    "tags": "<answer>" * 60_000 + "</answer>" * 60_000,
    "thoughts": "<think>" * 140_000,
    "blanks": "answer" + " " * 1_000_000 + "is 5",
    "texts": "\\boxed{" + "\\text{a}" * 100_000 + "}",
    "signs": "\\boxed{" + "\u202e\0−" * 300_000 + "}",
    "stars": "answer is " + "*" * 1_000_000,
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_megabyte_of_garbage_is_scored_at_once(name):
    """Were the time quadratic in the length, this test would not end within the hour."""
    for spec in ("exact", "choice", "number", "math", "format", "regex(pattern='§')"):
        assert one(spec, GARBAGE[name], "42") == 0.0
    assert one("math", GARBAGE[name], "x+1") == 0.0


PIECES = [
    *"0123456789.,/-+=^_()[]{}$%#*\\!<> \n\tabx½−\u202e\0\ud800",
    *("\\boxed{", "\\frac", "\\text{", "<answer>", "</answer>", "</think>", "####", "the answer is ", "\\left("),
    *("\\{", "\\}", " or ", "million", "cm"),
]
MATERIAL = st.lists(st.sampled_from(PIECES)).map("".join)


@settings(deadline=None, max_examples=300)
@given(MATERIAL | st.text(), MATERIAL | st.text())
def test_any_text_is_scored(text, gold):
    for spec in ("exact", "choice", "number", "format"):
        reward = rewards.get(spec)
        (value,) = reward(completions=[text], answer=[gold])
        assert value in (0.0, 1.0, None)
        assert getattr(reward, "answer", lambda _: None)(text) is None or isinstance(reward.answer(text), str)
    assert equality.equal(text, gold) in (True, False, None)
    assert equality.equal(gold, gold) is bool(formulas.clean(gold)) or len(gold) > formulas.LONGEST
    assert isinstance(equality.spelling(text), str)


def test_answers_are_one_text_per_value():
    number = rewards.get("number")
    assert {number.answer(text) for text in ("0.5", r"\boxed{\frac{1}{2}}", "1/2", "answer: .50")} == {"1/2"}
    assert json.dumps(rewards.get("choice").answer("(b)")) == '"B"'


# Feedback


@pytest.mark.parametrize(
    ("spec", "text", "said"),
    [
        ("exact", "<answer>Rome</answer>", 'Your answer was read as "Rome", and it is wrong.'),
        ("exact", "", "No answer could be read. Write the answer between <answer> and </answer>."),
        ("choice", "(B) Rome", 'Your answer was read as "B", and it is wrong.'),
        ("choice", "<answer>A or B</answer>", 'No answer could be read in "A or B". Write one letter between'),
        ("number", "It is 3. So 1/2", 'Your answer was read as "1/2", and it is wrong.'),
        ("number", "<answer>x^5</answer>", 'No answer could be read in "x^5". Write one number between'),
        ("number", "<think>so 5", "No answer could be read: <think> is never closed. Write one number"),
        ("math", r"so \boxed{\frac{1}{2}}", r'Your answer was read as "\frac{1}{2}", and it is wrong.'),
        ("math", "so one half", r"No answer could be read. Put the final answer within \boxed{}."),
        ("regex(pattern='a secret')", "b", "The reply does not have the required form."),
        ("format", "<think>x", "The tag </think> is missing."),
        ("format", "<think></think><answer></answer><answer>", "The tag <answer> must occur once, not 2 times."),
        ("format", "<answer></answer><think></think>", "The reply must have the form <think>...</think><answer>...</"),
        ("format(opened=True)", "</think>x", "The tag <answer> is missing."),
    ],
)
def test_feedback_says_what_was_read_or_what_form_is_asked_for(spec, text, said):
    assert rewards.get(spec).feedback(text, 0.0).startswith(said)
    assert rewards.get(spec).feedback(text, 1.0) == ""


def test_feedback_on_a_reply_that_is_too_long():
    overlong = rewards.get("overlong(max_tokens=10, buffer=4)")
    assert overlong.feedback("x", 0.0) == ""
    assert overlong.feedback("x", -0.5) == "The reply is too long: stay below 6 tokens."


REPLIES = st.one_of(
    st.text(),
    st.from_regex(r"(<think>)?.{0,9}(</think>)?(<answer>)?.{0,80}(</answer>)?", fullmatch=True),
    st.from_regex(r"[^\\]{0,9}\\boxed\{.{0,80}\}", fullmatch=True),
)


@settings(max_examples=60, deadline=None)
@given(text=REPLIES, gold=st.sampled_from(["zqj", "K", "98989", "7/891", r"\sqrt{4973}"]))
@pytest.mark.parametrize("spec", ["exact", "choice(letters='KLM')", "number", "math", "format"])
def test_feedback_never_holds_an_answer_that_the_reply_does_not_hold(spec, text, gold):
    reward = rewards.Rewards(spec)
    columns = {"answer": [gold]}
    (verdict,) = reward.score(["?"], [text], [[1]], columns, ["row"])
    said = reward.feedback(text, verdict.parts)
    assert bool(said) != verdict.correct
    assert gold not in said or gold in text
    assert len(said.split()) < 60
    assert said.isprintable()


@pytest.mark.parametrize("spec", ["exact", "choice", "number", "math", "format", "regex(pattern='a')"])
@pytest.mark.parametrize(
    "text", ["<answer>" * 10**5, "x" * 10**6, "<answer>" + "9 " * 10**5 + "</answer>", "\x00\ud800"]
)
def test_feedback_on_hostile_replies_is_short(spec, text):
    said = rewards.get(spec).feedback(text, 0.0)
    assert 0 < len(said) < 300
    said.encode()


def test_feedback_of_several_rewards_names_only_what_is_lacking():
    def brief(completions, **_):
        return [0.25] * len(completions)

    several = rewards.Rewards(["exact", "format", brief])
    assert several.feedback("Rome", {"exact": 0.0, "format": 0.0, "brief": 0.25}) == (
        'Your answer was read as "Rome", and it is wrong. The tag <think> is missing. The reward "brief" is 0.25.'
    )
    assert several.feedback("Rome", {"exact": 1.0, "format": 1.0}) == ""
