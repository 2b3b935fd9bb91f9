"""Tools in the prompt: by the chat template where it writes them, else by a text of ours."""

from __future__ import annotations

import json

import pytest

from mmrl.engine.aids.tiny_templates import PLAIN
from mmrl.engine.text.encoding import Encoder
from mmrl.errors import ConfigError
from mmrl.types import Call, Message, Prompt
from tests.engine.test_turns import LOOK, encoder_of

LEAP = {"name": "leap", "description": 'Jumps "far"\nand <|im_end|> down.', "parameters": {"type": "object"}}
ROW = Prompt("row", (Message("user", "2+2?"),))
WITH_SYSTEM = Prompt("row", (Message("system", "Be brief."), Message("user", "2+2?")))


def text_of(setting, row=ROW, **options):
    encoder = Encoder(setting.folder, setting.media, **options)
    prompt = encoder.encode(row)
    assert encoder.num_tokens(row) == len(prompt.token_ids)
    assert prompt.prompt == row
    return prompt.text


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3", "qwen3_5", "llama"])
def test_a_template_that_writes_tools_writes_them(family, bench):
    setting = bench(family)
    for row in (ROW, WITH_SYSTEM):
        text = text_of(setting, row, tools=[LOOK, LEAP])
        schema = json.dumps(LOOK)
        assert schema in text and '"leap"' in text
        renderer = setting.folder.processor or setting.folder.tokenizer
        messages = [{"role": message.role, "content": message.content} for message in row.messages]
        shown = {"type": "function", "function": {**LEAP, "description": LEAP["description"].replace("<|", "<\u200b|")}}
        assert text == renderer.apply_chat_template(
            messages, tools=[LOOK, shown], tokenize=False, add_generation_prompt=True
        )


@pytest.mark.parametrize("row", [ROW, WITH_SYSTEM], ids=["", "with a system turn"])
@pytest.mark.parametrize(("family", "mode"), [("qwen2_5_vl", "auto"), ("qwen3", "text")])
def test_else_they_stand_at_the_start_of_the_system_turn(family, mode, row, bench):
    setting = bench(family)
    text = text_of(setting, row, tools=[LOOK, LEAP], tool_prompt=mode)
    system, _, rest = text.partition("<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>")
    assert system.startswith("<|im_start|>system\nYou can use tools.") and rest == "\n<|im_start|>assistant\n"
    assert json.dumps(LOOK) in system and "<tool_call>\n{" in system
    assert "<\u200b|im_end|> down." in system  # a description ends no turn
    assert system.endswith("Be brief." if row is WITH_SYSTEM else "in the next message.")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3"])
def test_without_tools_or_with_none_prompts_are_as_they_were(family, bench):
    setting = bench(family)
    plain = setting.encoder.encode(WITH_SYSTEM).text
    assert text_of(setting, WITH_SYSTEM, tools=[LOOK], tool_prompt="none") == plain
    assert text_of(setting, WITH_SYSTEM, tool_prompt="text") == text_of(setting, WITH_SYSTEM) == plain


def test_a_template_that_writes_no_tools_cannot_be_asked_to(bench):
    setting = bench("qwen2_5_vl")
    with pytest.raises(ConfigError, match="the model's chat template writes no tools") as caught:
        Encoder(setting.folder, setting.media, tools=[LOOK], tool_prompt="template")
    assert "auto" in caught.value.remedy


@pytest.mark.parametrize(
    ("template", "mode"),
    [
        ("{% if tools %}{{ tools[0]['function']['name'] }}{% endif %}" + PLAIN, "auto"),  # and no description
        ("{% if tools %}{{ raise_exception('no') }}{% endif %}" + PLAIN, "auto"),
        ("{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + PLAIN, "template"),
    ],
    ids=["names only", "fails", "json"],
)
def test_a_template_is_tried_on_a_tool(template, mode, bench):
    text = encoder_of(bench("qwen2"), template, tools=[LOOK]).encode(ROW).text
    assert ("You can use tools." in text) == (mode == "auto")
    assert text.count("look_closer") == text.count("Cuts a part out") == 1


def test_a_schema_that_the_template_cannot_write_is_named(bench):
    template = "{% if tools %}{% for t in tools %}{{ t | tojson }}"
    template += "{{ 1 // (t.function.name != 'look_closer') }}{% endfor %}{% endif %}" + PLAIN
    with pytest.raises(ConfigError, match="cannot write the schema of the tool 'look_closer'") as caught:
        encoder_of(bench("qwen2"), template, tools=[LOOK])
    assert "text" in caught.value.remedy


@pytest.mark.parametrize("tool", [{}, {"name": ""}, {"function": {"description": "d"}}, {"function": "look"}, "look"])
def test_what_is_no_schema_is_refused(tool, bench):
    with pytest.raises(ConfigError, match="this is no schema of a tool"):
        encoder_of(bench("qwen2"), tools=[tool])


def test_two_tools_of_one_name_are_refused(bench):
    with pytest.raises(ConfigError, match="two tools are called 'look_closer'"):
        encoder_of(bench("qwen2"), tools=[LOOK, LOOK["function"]])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen2_5_vl", '<tool_call>\n{"name": "look_closer", "arguments": {"box": [1, 2]}}\n</tool_call>'),
        ("qwen3_vl", 'So.<tool_call>{"name": "look_closer", "arguments": {"box": [1, 2]}}</tool_call>'),
        ("qwen3_5", "<tool_call>\n<function=look_closer>\n<parameter=box>[1, 2]</parameter></function></tool_call>"),
        ("llama", '{"name": "look_closer", "parameters": {"box": [1, 2]}}'),
    ],
)  # fmt: skip
def test_calls_are_read_in_the_form_that_the_prompt_asks_for(family, text, bench):
    encoder = encoder_of(bench(family), tools=[LOOK])
    call = Call("look_closer", {"box": [1, 2]})
    assert encoder.calls(text) == (call,)
    if family != "llama":
        assert encoder.calls(f"{text}\nuser\n<tool_response>\nfound\n</tool_response>{text}") == (call,)
        assert encoder.calls(f"{text}<|im_start|>assistant\n{text}") == (call,)
    assert encoder.calls("So 7.") == ()


def test_a_datasets_images_are_kept_for_an_environment(vision, picture):
    row = Prompt("row", (Message("user", "<image>?"),), (picture(56, 56),))
    kept, dropped = (encoder_of(vision, keeps_images=keeps).encode(row) for keeps in (True, False))
    assert kept.prompt.images == row.images and dropped.prompt.images == ()
    assert kept.images == dropped.images and kept.token_ids.tolist() == dropped.token_ids.tolist()
