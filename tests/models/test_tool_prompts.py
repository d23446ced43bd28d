"""Tools in the prompt: by the chat template where it knows them, else as text; and tools' results after a reply."""

from pathlib import Path

import pytest

from poise.models.loading import load_policy
from poise.models.prompts import announce, encode, encode_next, known_roles, knows_tools

trl = pytest.importorskip("trl", reason="TRL is not installed (extra 'trl')")

TEMPLATES = {path.stem: path.read_text() for path in sorted(Path(trl.__file__).parent.glob("chat_templates/*.jinja"))}
OTHERS = ("idefics3", "llava_next", "smolvlm")  # models of pictures, whose messages are lists of parts
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Find a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "description": "Its name."}},
            "required": ["town"],
        },
    },
}
OPENING = [{"role": "user", "content": "Where is Oslo?"}]
REPLY = [{"role": "assistant", "content": "I look. <tool_call></tool_call>"}]
RESULTS = [{"role": "tool", "name": "lookup", "content": word} for word in ("In Norway.", "In the north.")]


@pytest.fixture(scope="module")
def tokenizer():
    return load_policy("embedded", device="cpu").tokenizer


def test_a_template_without_tools_gets_them_as_text(tokenizer):
    assert not knows_tools(tokenizer)
    text = tokenizer.decode(encode(tokenizer, OPENING, tools=[TOOL]))
    assert '"name": "lookup"' in text
    assert text.index("lookup") < text.index("Where is Oslo?")
    system = [{"role": "system", "content": "Be brief."}, *OPENING]
    assert announce(tokenizer, system, [TOOL])[0]["content"].startswith("Be brief.\n\nYou can call")
    (result,) = known_roles(tokenizer, [*OPENING, *REPLY, *RESULTS])[2:]
    both = "\n".join(f"<tool_response>\n{message['content']}\n</tool_response>" for message in RESULTS)
    assert result == {"role": "user", "content": both}


def test_without_a_template_tools_are_text_too(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert '"name": "lookup"' in tokenizer.decode(encode(tokenizer, OPENING, tools=[TOOL]))
    after = tokenizer.decode(encode_next(tokenizer, [*OPENING, *REPLY], RESULTS, None, tools=[TOOL]))
    assert after.startswith("\n<tool_response>\nIn Norway.")


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1"])
def test_templates_with_tools_show_schemas_and_results(tokenizer, monkeypatch, name):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[name])
    assert knows_tools(tokenizer)
    expected = tokenizer.apply_chat_template(OPENING, tools=[TOOL], add_generation_prompt=True, return_dict=True)
    assert encode(tokenizer, OPENING, tools=[TOOL]) == expected["input_ids"]
    after = tokenizer.decode(encode_next(tokenizer, [*OPENING, *REPLY], RESULTS[:1], None, tools=[TOOL]))
    assert "In Norway." in after
    assert "Oslo" not in after
    assert "I look" not in after


def test_reasoning_that_a_template_drops_later_on_does_not_matter(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES["qwen3"])
    first = [*OPENING, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nWhich one?"}]
    question = [{"role": "user", "content": "The one in the north."}]
    second = [*first, *question, {"role": "assistant", "content": "<think>\nSo.\n</think>\n\nNorway."}]
    once = encode_next(tokenizer, first, question, None)
    assert encode_next(tokenizer, second, question, None) == once
    assert tokenizer.decode(once).startswith("<|im_end|>\n<|im_start|>user\nThe one in the north.<|im_end|>")


@pytest.mark.parametrize("name", [name for name in TEMPLATES if not name.startswith(OTHERS)])
def test_every_template_gets_a_prompt_and_a_result_that_it_can_show(tokenizer, monkeypatch, name):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[name].replace("bos_token", "''"))
    assert "lookup" in tokenizer.decode(encode(tokenizer, OPENING, tools=[TOOL]))
    after = tokenizer.decode(encode_next(tokenizer, [*OPENING, *REPLY], RESULTS, None, tools=[TOOL]))
    assert after.index("In Norway.") < after.index("In the north.")
