"""A system prompt, for templates with and without a system role."""

import pytest

from poise.models.loading import load_policy
from poise.models.prompts import knows_system, with_system

END = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TEMPLATES = {  # and whether they have a system role
    "named roles": ("{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}" + END, True),
    "into the first message": (
        "{% if messages[0].role == 'system' %}{% set first = messages[0].content + ' / ' %}{% else %}"
        "{% set first = '' %}{% endif %}{% for m in messages if m.role != 'system' %}"
        "{% if m.role not in ('user', 'assistant') %}{{ raise_exception('Unknown role') }}{% endif %}"
        "<|user|>{{ first if loop.first else '' }}{{ m.content }}<|end|>{% endfor %}" + END,
        True,
    ),
    "none at all": (None, True),
    "refused": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}<|user|>{{ m.content }}<|end|>{% endfor %}" + END,
        False,
    ),
    "left out": ("{% for m in messages if m.role != 'system' %}<|user|>{{ m.content }}{% endfor %}" + END, False),
    "the embedded model's": ("", False),  # it shows the text as the model's own
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_advice_reaches_the_model(name, monkeypatch):
    tokenizer = (policy := load_policy("embedded", device="cpu")).tokenizer
    template, known = TEMPLATES[name]
    if template != "":
        monkeypatch.setattr(tokenizer, "chat_template", template)
    assert knows_system(tokenizer) is known
    question = {"role": "user", "content": "Who is a knave?"}
    messages = with_system(tokenizer, [{"role": "system", "content": "Be brief."}, question], "Think.")
    if known:
        assert messages == [{"role": "system", "content": "Think."}, question]
    else:
        assert messages == [{"role": "user", "content": "Think.\n\nWho is a knave?"}]
    shown = tokenizer.decode(policy.encode(messages))
    assert shown.index("Think.") < shown.index("Who is a knave?")
    assert "Be brief." not in shown
