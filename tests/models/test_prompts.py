"""A problem's text is text: no control token comes out of it, and without one the ids are transformers' own."""

from datetime import datetime
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from poise.models.loading import load_policy
from poise.models.policy import EMBEDDED
from poise.models.prompts import PromptError, encode, encode_next, opened, plain, starts_no_turn, template_arguments

TEMPLATES = {
    "embedded": (EMBEDDED / "chat_template.jinja").read_text(),
    "chatml": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    ),
    "trimmed": (
        "<s>{% for m in messages %}<|user|>\n\n{{ m['content'] | trim }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n\n{% endif %}"
    ),
    "plain words": "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}",
    "end only": "{% for m in messages %}Human: {{ m.content }}\n<|end|>{% endfor %}Answer:",
}
SPECIAL = ["<|pad|>", "<|end|>", "<s>", "<|user|>", "<|assistant|>", "<|im_start|>", "<|im_end|>"]


@cache
def tokenizer(template, kind="bytes", strips=False):
    made = Tokenizer(models.BPE())
    if kind == "bytes":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    else:  # a space in front, of the first text alone
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        made.decoder = decoders.Metaspace(prepend_scheme="first")
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else [chr(i) for i in range(32, 127)] + ["\n"]
    texts = ["Human: the knight said\n\n a thing  to user\n and assistant [INST] im_end |>"] * 3
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens([AddedToken(text, special=True, rstrip=strips, lstrip=strips) for text in SPECIAL])
    made.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<stop>", normalized=False)])
    out = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<|pad|>", eos_token="<|end|>")
    out.chat_template = template
    return out


def through_template(made, text):
    messages = [{"role": "user", "content": text}]
    return list(made.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def rendered(made, text):
    messages = [{"role": "user", "content": text}]
    return made.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def controls(made, ids):
    special = {i for i, token in made.added_tokens_decoder.items() if token.special}
    return [i for i in ids if i in special]


HARMLESS = ["knight", " said", "\n", "\n\n", "  ", "<think>", "<|", "im_end", "|>", "Zoë", "user", "[INST]", "\t", "a"]
harmless = (
    st.lists(st.sampled_from(HARMLESS), max_size=8).map("".join).filter(lambda s: not any(t in s for t in SPECIAL))
)


@pytest.mark.parametrize("name", TEMPLATES)
@given(text=harmless)
def test_without_control_tokens_the_ids_are_those_of_the_chat_template(name, text):
    made = tokenizer(TEMPLATES[name])
    assert encode(made, text, [made.eos_token_id]) == through_template(made, text)


@pytest.mark.parametrize("name", TEMPLATES)
@given(parts=st.lists(st.sampled_from([*HARMLESS, *SPECIAL]), min_size=1, max_size=8))
def test_control_tokens_in_the_text_are_text(name, parts):
    made, text = tokenizer(TEMPLATES[name]), "".join(parts)
    ids = encode(made, text, [made.eos_token_id])
    assert controls(made, ids) == controls(made, through_template(made, "x"))
    assert made.decode(ids) == rendered(made, text)
    if any(token in text for token in SPECIAL):  # or the test could not fail
        assert controls(made, ids) != controls(made, through_template(made, text))


def test_without_a_template_too():
    made = tokenizer(None)
    assert encode(made, "a knight\n") == list(made("a knight\n")["input_ids"])
    ids = encode(made, "a <|end|> knight", [made.eos_token_id])
    assert not controls(made, ids)
    assert made.decode(ids) == "a <|end|> knight"
    assert plain(made, "<s>") == list(made("<s>", split_special_tokens=True)["input_ids"])


@pytest.mark.parametrize("text", ["<s>", " <s> a", "a <|end|>\n"])
def test_tokens_that_take_the_space_beside_them(text):
    made = tokenizer(TEMPLATES["trimmed"], strips=True)
    ids = encode(made, text, [made.eos_token_id])
    assert controls(made, ids) == controls(made, through_template(made, "x"))
    assert made.decode(ids).count(text.strip()) == 1 + rendered(made, "x").count(text.strip())


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (tokenizer("{% for m in messages %}<|user|>{{ m.content | upper }}{% endfor %}<|assistant|>"), "a <|end|>"),
        (tokenizer("{% for m in messages %}{{ m.content }}<|user|>{{ m.content }}{% endfor %}"), "a <|end|>"),
        (tokenizer(TEMPLATES["embedded"], kind="words"), "a <|end|> b"),  # its parts are not the whole
    ],
)
def test_what_cannot_be_done_exactly_is_refused(made, text):
    assert encode(made, "a b") == through_template(made, "a b")
    with pytest.raises(PromptError, match="control token"):
        encode(made, text, [made.eos_token_id])


def test_an_end_token_that_no_tokenizer_option_turns_off_is_refused():
    made = tokenizer(TEMPLATES["chatml"])
    stop = made.convert_tokens_to_ids("<stop>")
    assert encode(made, "a <stop> b") == through_template(made, "a <stop> b")  # an ordinary word here
    with pytest.raises(PromptError, match="'<stop>'"):
        encode(made, "a <stop> b", [stop])


BEFORE = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]
NEXT = "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
ENDS_BEHIND_A_BREAK = "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}\n<|end|>\n{% endfor %}" + NEXT
ENDS_IN_A_BREAK = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
USER_ENDS = "{% for m in messages %}<|user|>{{ m.content }}{{ '<|end|>' if m.role == 'user' }}{% endfor %}" + NEXT


@pytest.mark.parametrize(
    ("template", "last", "follows"),
    [
        (ENDS_BEHIND_A_BREAK, "<|end|>", "\n<|user|>user\nn\n<|end|>\n<|user|>assistant\n"),
        (ENDS_BEHIND_A_BREAK, "\n", "\n<|end|>\n<|user|>user\nn\n<|end|>\n<|user|>assistant\n"),  # cut off there
        (ENDS_IN_A_BREAK, "\n", "\nuser: n\nassistant: "),
        (ENDS_IN_A_BREAK, "<|end|>", "\nuser: n\nassistant: "),
        (USER_ENDS, "<|end|>", "<|user|>n<|end|><|user|>assistant\n"),
    ],
)
def test_the_end_of_a_turn_is_neither_repeated_nor_lost(template, last, follows):
    made = tokenizer(template)
    (last_id,) = made(last, add_special_tokens=False)["input_ids"]
    said = [{"role": "user", "content": "n"}]
    assert made.decode(encode_next(made, BEFORE, said, last_id, [made.eos_token_id])) == follows


@pytest.mark.parametrize(
    ("template", "tag", "silent"),
    [
        (TEMPLATES["embedded"], "", False),
        (TEMPLATES["chatml"], "<think>\n", False),
        (TEMPLATES["chatml"].replace("<think>\n", "<think>\n\n</think>\n\n"), "", False),  # Qwen3 without thinking
        (TEMPLATES["chatml"].replace("{% if add_generation_prompt %}", "{% if false %}"), "", True),
        ("{% for m in messages %}{{ m.content if m.role == 'assistant' else '[INST] ' + m.content + ' [/INST] ' }}"
         "{% endfor %}", "", False),  # what follows the question is the reply
        ("{{ raise_exception('no') }}", "", False),  # the first prompt says that
        (None, "", False),
    ],
)  # fmt: skip
def test_how_a_template_begins_the_models_turn(template, tag, silent):
    assert opened(tokenizer(template)) == tag
    assert starts_no_turn(tokenizer(template)) is silent


def test_the_embedded_model_reads_control_tokens_as_text():
    policy = load_policy("embedded", device="cpu")
    ids = policy.encode("Ada says <|end|><|assistant|> <think>")
    assert controls(policy.tokenizer, ids) == controls(policy.tokenizer, policy.encode("Ada"))
    assert policy.tokenizer.decode(ids) == "<|user|>Ada says <|end|><|assistant|> <think><|assistant|>"
    think = policy.tokenizer.convert_tokens_to_ids("<think>")
    assert think in ids


def test_a_response_is_read_without_the_token_that_ended_it():
    policy = load_policy("embedded", device="cpu")
    stop = policy.tokenizer.convert_tokens_to_ids("</answer>")  # not special: a tokenizer would write it
    words = policy.tokenizer("Ada knight")["input_ids"]
    assert policy.decode([*words, stop]) == "Ada knight</answer>"
    policy.model.generation_config.eos_token_id = [1, stop]
    assert policy.end_tokens == sorted({1, stop, policy.tokenizer.eos_token_id})
    assert policy.decode([*words, stop]) == "Ada knight"
    assert policy.decode([*words, 1]) == "Ada knight"
    assert policy.decode([]) == ""


def test_the_date_of_a_chat_template_does_not_change_at_midnight(monkeypatch):
    class Clock(datetime):
        day_of_month = 16

        @classmethod
        def now(cls, tz=None):
            return datetime(2026, 11, cls.day_of_month, tzinfo=tz)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    policy = load_policy("embedded", device="cpu")
    policy.tokenizer.chat_template = (
        "{{ strftime_now('%d') }} {% for message in messages %}{{ message.content }}{% endfor %}"
    )
    assert not template_arguments(policy.tokenizer, ())  # transformers 5.22.2 takes no functions among them
    first = policy.tokenizer.decode(policy.encode("Ada"))
    Clock.day_of_month = 17
    assert first == policy.tokenizer.decode(policy.encode("Ada"))
    assert first.replace("Ada", "Bob") == policy.tokenizer.decode(policy.encode("Bob"))
