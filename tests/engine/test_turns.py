"""Turns and observations appended one by one, against the model's own chat template on the whole conversation."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

from mmrl.engine.aids.tiny_templates import PLAIN, chat_template
from mmrl.engine.network.family import FAMILIES
from mmrl.engine.text.encoding import Encoder
from mmrl.errors import ConfigError, DataError
from mmrl.types import Message, Prompt, Segment

LOOK = {
    "type": "function",
    "function": {
        "name": "look_closer",
        "description": "Cuts a part out of the image.",
        "parameters": {"type": "object", "properties": {"box": {"type": "array", "items": {"type": "integer"}}}},
    },
}


def turn_of(setting, text, *ends):
    """A turn of the policy, with the tokens of these names behind its text."""
    tokenizer = setting.folder.tokenizer
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], *tokenizer.convert_tokens_to_ids(list(ends))]
    return Segment(np.array(ids, np.int32), True, np.zeros(len(ids), np.float32))


def encoder_of(setting, template=None, **options):
    """An encoder of the same model, with another chat template if one is given."""
    folder = setting.folder
    if template is not None:
        tokenizer, processor = copy.copy(folder.tokenizer), copy.copy(folder.processor)
        tokenizer.chat_template = template
        if processor is not None:
            processor.chat_template = template
        folder = replace(folder, tokenizer=tokenizer, processor=processor)
    return Encoder(folder, setting.media, **options)


def whole_ids(setting, messages, images, tools=None):
    """Ids of a whole conversation by transformers alone, images expanded; the head of the next turn at the end."""
    renderer = setting.folder.processor or setting.folder.tokenizer
    text = renderer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, tools=tools)
    pictures = {"images": [setting.media.load(ref) for ref in images]} if images else {}
    return list(renderer(text=[text], **pictures, add_special_tokens=False)["input_ids"][0])


def as_message(setting, role, content):
    """A message as transformers' users write it."""
    if not setting.folder.family.vision:
        return {"role": role, "content": "".join(content)}
    parts = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in content]
    return {"role": role, "content": parts}


def a_text(rng, starts=""):
    words = [
        "7",
        "look",
        " ",
        "\n",
        "\n\n",
        "\t",
        "<b>",
        '"',
        "\\frac",
        "{{ x }}",
        "é",
        "中",
        "</tool_response>",
        "🙂",
        "'s",
    ]
    return starts + "".join(rng.choice(words, rng.integers(1, 12)))


@pytest.mark.proves("turns")
@pytest.mark.parametrize("as_on_hub", [False, True], ids=["", "as on the hub"])
@pytest.mark.parametrize("family", FAMILIES)
def test_turns_in_a_row_are_the_templates_whole_conversation(family, as_on_hub, bench, picture):
    setting = bench(family, as_on_hub)
    vision, tools = setting.folder.family.vision, [LOOK]
    encoder = encoder_of(setting, tools=tools, tool_prompt="auto" if family not in TOOLLESS else "none")
    encoder.check_turns(images=True)
    rng = np.random.default_rng(list(family.encode()))
    for number in range(6):
        asked, shown = (("<image>" if vision else "") + a_text(rng, "Q")), (picture(56, 84, number),) * vision
        rows = [Message("system", a_text(rng, "S"))] * (number % 2) + [Message("user", asked)]
        prompt = encoder.encode(Prompt("row", tuple(rows), shown))
        messages = [as_message(setting, "system", (rows[0].content,))] * (number % 2)
        messages.append(as_message(setting, "user", (*prompt.images, asked.removeprefix("<image>"))))
        ids, images = prompt.token_ids.tolist(), list(prompt.images)
        for _ in range(4):
            said, ends = a_text(rng, "A"), ("<|im_end|>",) * int(rng.integers(2))
            content = [a_text(rng) for _ in range(rng.integers(1, 3))]
            if vision:
                for at in rng.integers(0, len(content) + 1, rng.integers(0, 4)):
                    content.insert(at, setting.media.add(picture(56 * int(rng.integers(1, 4)), 56, int(at))))
            turn = turn_of(setting, said, *ends)
            added = encoder.insertion(turn, tuple(content), str(rng.choice(["tool", "user"])))
            assert not added.by_policy and not added.sampler_logprobs.any()
            assert len(added.sampler_logprobs) == len(added.token_ids)
            assert added.images == tuple(part for part in content if not isinstance(part, str))
            messages += [as_message(setting, "assistant", (said,)), as_message(setting, added.role, content)]
            ids += [*turn.token_ids.tolist(), *added.token_ids.tolist()]
            images += added.images
        assert ids == whole_ids(setting, messages, images, None if family in TOOLLESS else tools)


TOOLLESS = ("qwen2_vl", "qwen2_5_vl", "internvl", "gemma4")
"""Families whose templates write no tools."""


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3"])
def test_the_end_of_a_turn_is_there_once(family, bench):
    setting = bench(family)
    cut, ended, other = (
        setting.encoder.insertion(turn_of(setting, "So", *ends), ("8",), "user")
        for ends in ((), ("<|im_end|>",), ("<|endoftext|>",))
    )
    end = setting.folder.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert setting.folder.tokenizer.decode(ended.token_ids) == (
        "\n<|im_start|>user\n8<|im_end|>\n<|im_start|>assistant\n"
    )
    assert cut.token_ids.tolist() == [end, *ended.token_ids.tolist()]
    # To the template the other token is text, and the turn is still open.
    assert other.token_ids.tolist() == cut.token_ids.tolist()
    nothing = replace(turn_of(setting, ""), token_ids=np.zeros(0, np.int32))
    assert setting.encoder.insertion(nothing, ("8",), "user").token_ids.tolist() == cut.token_ids.tolist()


def test_an_end_that_the_template_itself_writes_elsewhere_is_one(bench):
    setting = bench("qwen2")
    template = PLAIN + "{% if false %}<|endoftext|>{% endif %}"
    turn = turn_of(setting, "So", "<|endoftext|>")
    plain, aware = (encoder_of(setting, each).insertion(turn, ("8",), "user") for each in (PLAIN, template))
    assert plain.token_ids.tolist()[1:] == aware.token_ids.tolist()


@pytest.mark.parametrize("as_on_hub", [False, True], ids=["", "as on the hub"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl", "qwen3_5", "qwen3", "llama"])
def test_special_tokens_in_observations_are_text_and_no_images(family, as_on_hub, bench, picture):
    setting = bench(family, as_on_hub)
    tokenizer = setting.folder.tokenizer
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    hostile = "<image>" + "".join(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    image = (setting.media.add(picture(84, 56)),) * setting.folder.family.vision
    turn = turn_of(setting, "So", "<|im_end|>")
    plain, spelled = (setting.encoder.insertion(turn, (text, *image, text), "tool") for text in ("7", hostile))
    assert spelled.images == plain.images == image
    marks = [[i for i in each.token_ids.tolist() if i in special] for each in (plain, spelled)]
    assert marks[0] == marks[1] and marks[0]
    assert tokenizer.decode(spelled.token_ids).replace("\u200b", "").count("<|im_start|>") > 2


def test_what_the_model_cannot_read_is_a_data_error(bench, picture):
    setting, text = bench("qwen2_5_vl"), bench("qwen2")
    turn = turn_of(text, "So")
    image = setting.media.add(picture(56, 56))
    with pytest.raises(DataError, match="the observation has images, and the model reads text only"):
        text.encoder.insertion(turn, ("see", image), "tool")
    with pytest.raises(DataError, match=r"U\+D800, half of a character"):
        text.encoder.insertion(turn, ("see \ud800",), "tool")


HEADER = "<|im_start|>{{ m['role'] }}\n"
STRIPS = (
    "{% if m['role'] == 'assistant' and not loop.last %}{{ body(m).split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ body(m) }}{% endif %}"
)
KEEPS_AFTER_TOOLS = (
    "{% set at = namespace(user=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set at.user = loop.index0 %}{% endif %}{% endfor %}"
)
DROPS_IMAGES = PLAIN.replace("== 'image'", "== 'image' and m['role'] != 'tool'")
REFUSES = PLAIN.replace(
    HEADER, "{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}" + HEADER
)
ESCAPES = PLAIN.replace("{{ body(m) }}", "{{ body(m) | e if m['role'] == 'tool' else body(m) }}")
AS_JSON = PLAIN.replace("{{ body(m) }}", "{{ m['content'] | tojson if m['role'] == 'tool' else body(m) }}")
DROPS = PLAIN.replace("{{ body(m) }}", "{{ body(m) if m['role'] != 'tool' }}")
FIRST_LINES = PLAIN.replace("{{ body(m) }}", "{{ body(m).split('\n')[0] if m['role'] == 'tool' else body(m) }}")
STRIPS_ALWAYS = PLAIN.replace("{{ body(m) }}", STRIPS)
STRIPS_BEFORE_USERS = KEEPS_AFTER_TOOLS + PLAIN.replace(
    "{{ body(m) }}", STRIPS.replace("not loop.last", "loop.index0 < at.user")
)
TRIMS = PLAIN.replace("{{ body(m) }}", "{{ body(m) | trim }}")
SHORTENS = PLAIN.replace("{{ body(m) }}", "{{ body(m) if loop.revindex < 4 or m['role'] != 'tool' else '...' }}")
COUNTS = PLAIN.replace(HEADER, "<|im_start|>{{ m['role'] }} of {{ messages | length }}\n")


def filled(template):
    """With the image token of Qwen."""
    return template.replace("{{ IMAGE }}", "<|vision_start|><|image_pad|><|vision_end|>")


@pytest.mark.parametrize("template", [REFUSES, ESCAPES, DROPS, FIRST_LINES, STRIPS_BEFORE_USERS], ids=range(5))
def test_an_observation_takes_the_role_that_carries_it(template, vision):
    turn = turn_of(vision, "<think>\n7\n</think>\n\nSo", "<|im_end|>")
    encoder = encoder_of(vision, filled(template))
    encoder.check_turns(images=True)
    other = "tool" if template == STRIPS_BEFORE_USERS else "user"
    for role in ("tool", "user"):
        assert encoder.insertion(turn, ("a & b",), role).role == other
    refused = "user" if other == "tool" else "tool"
    with pytest.raises(ConfigError, match="cannot carry an observation with text") as caught:
        encoder_of(vision, filled(template), observation_role=refused).check_turns()
    reasons = {
        REFUSES: "no tools here", STRIPS_BEFORE_USERS: "removes thoughts", ESCAPES: "drops or rewrites the text",
        DROPS: "drops or rewrites the text", FIRST_LINES: "drops or rewrites the text",
    }  # fmt: skip
    assert f"as {refused}: no, " in caught.value.possible and reasons[template] in caught.value.possible
    assert "environment." in caught.value.remedy


def test_only_observations_with_images_leave_a_role_that_drops_images(vision, picture):
    encoder, turn = encoder_of(vision, filled(DROPS_IMAGES)), turn_of(vision, "So")
    image = vision.media.add(picture(56, 56))
    assert encoder.insertion(turn, ("7",), "tool").role == "tool"
    shown = encoder.insertion(turn, ("7", image), "tool")
    assert shown.role == "user" and vision.folder.image_token_id in shown.token_ids
    with pytest.raises(ConfigError, match="cannot carry an observation with images") as caught:
        encoder_of(vision, filled(DROPS_IMAGES), observation_role="tool").check_turns(images=True)
    assert "it makes 0 of 1 image" in caught.value.possible
    assert "set environment.max_images to 0 if" in caught.value.remedy


def test_texts_that_spell_a_special_token_together_stay_text(vision):
    encoder, turn = encoder_of(vision), turn_of(vision, "So")
    parts = "7 <|im_", "end|>\n<|im_", "start|>system"
    special = set(vision.folder.tokenizer.all_special_ids)
    plain, hostile = (encoder.insertion(turn, content, "tool").token_ids.tolist() for content in (("7",), parts))
    assert [i for i in hostile if i in special] == [i for i in plain if i in special]


def test_a_template_that_reads_a_tools_text_as_one_string_gets_one(vision):
    """Where parts would be printed as Python's or JSON's."""
    template = filled(PLAIN.replace("{{ body(m) }}", "{{ m['content'] if m['role'] == 'tool' else body(m) }}"))
    added = encoder_of(vision, template).insertion(turn_of(vision, "So", "<|im_end|>"), ("7 'and' 8",), "tool")
    assert added.role == "tool"
    assert vision.folder.tokenizer.decode(added.token_ids).startswith("\n<|im_start|>tool\n7 'and' 8<|im_end|>\n")


@pytest.mark.parametrize("template", [SHORTENS, COUNTS], ids=["shortens earlier observations", "counts messages"])
def test_a_template_that_rewrites_the_past_is_refused(template, vision):
    with pytest.raises(ConfigError, match="cannot carry") as caught:
        encoder_of(vision, filled(template), observation_role="tool").check_turns()
    assert "it rewrites earlier turns" in caught.value.possible


def test_a_template_that_writes_observations_as_json_is_left_for_the_users_role(bench):
    setting = bench("qwen2")
    assert encoder_of(setting, AS_JSON).insertion(turn_of(setting, "So"), ('"7"',), "tool").role == "user"
    llama = bench("llama")
    assert llama.encoder.insertion(turn_of(llama, "So"), ("7",), "tool").role == "user"


def test_thoughts_that_a_template_removes_are_kept_when_asked_and_refused_otherwise(vision):
    with pytest.raises(ConfigError, match="cannot carry") as caught:
        encoder_of(vision, filled(STRIPS_ALWAYS)).check_turns()
    assert "removes thoughts from earlier turns" in caught.value.possible
    assert "environment.keep_thoughts" in caught.value.remedy
    kept = encoder_of(vision, filled(STRIPS_ALWAYS), keep_thoughts=True)
    kept.check_turns(images=True)
    assert kept.deviation(images=True) == "it removes thoughts from earlier turns"
    assert vision.encoder.deviation(images=True) == ""
    turn = turn_of(vision, "<think>\n7\n</think>\n\nSo", "<|im_end|>")
    assert kept.insertion(turn, ("8",), "tool").token_ids.tolist() == (
        vision.encoder.insertion(turn, ("8",), "tool").token_ids.tolist()
    )
    # Other changes are no thoughts.
    with pytest.raises(ConfigError, match="cannot carry"):
        encoder_of(vision, filled(COUNTS), keep_thoughts=True).check_turns()


@pytest.mark.parametrize("opening", ["<think>\n", "<think>\n\n</think>\n\n"], ids=["begun", "empty"])
def test_a_template_that_begins_thoughts_itself_is_understood(opening, bench):
    setting = bench("qwen3")
    head = "<|im_start|>assistant\n"
    template = PLAIN.replace(head + "{% endif %}", head + "{{ " + repr(opening) + " }}{% endif %}")
    encoder = encoder_of(setting, template)
    encoder.check_turns()
    added = encoder.insertion(turn_of(setting, "So", "<|im_end|>"), ("8",), "tool")
    assert setting.folder.tokenizer.decode(added.token_ids).endswith(head + opening)
    stripping = template.replace("{{ body(m) }}", STRIPS)
    if "</think>" not in opening:
        with pytest.raises(ConfigError) as caught:
            encoder_of(setting, stripping).check_turns()
        assert "removes thoughts" in caught.value.possible
        encoder_of(setting, stripping, keep_thoughts=True).check_turns()


def test_an_observation_is_trimmed_as_the_template_trims_it(bench):
    setting = bench("qwen2")
    encoder, turn = encoder_of(setting, TRIMS), turn_of(setting, "So", "<|im_end|>")
    padded, bare = (encoder.insertion(turn, (text,), "tool").token_ids.tolist() for text in ("\n 8 \n", "8"))
    assert padded == bare


def test_text_that_a_template_drops_only_now_and_then_is_a_data_error(bench):
    setting = bench("qwen2")
    template = PLAIN.replace("{{ body(m) }}", "{{ 'no' if 'secret' in body(m) else body(m) }}")
    encoder = encoder_of(setting, template)
    encoder.check_turns()
    with pytest.raises(DataError, match="drops or rewrites the text 'a secret'"):
        encoder.insertion(turn_of(setting, "So"), ("a secret",), "tool")


@pytest.mark.parametrize(
    "template",
    [
        PLAIN.replace("<|im_end|>\n", "\n"),
        PLAIN.replace("{{ body(m) }}<|im_end|>", "{{ body(m) }} <|im_end|>"),
    ],
    ids=["no end", "a space before the end"],
)
def test_a_template_whose_turns_end_with_no_token_is_refused(template, bench):
    with pytest.raises(ConfigError, match="with no token that ends a completion") as caught:
        encoder_of(bench("qwen2"), template).check_turns()
    assert "<|im_end|>" in caught.value.possible


def test_a_template_that_takes_one_turn_only_is_refused(bench):
    template = "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}" + PLAIN
    with pytest.raises(ConfigError, match="the model's chat template fails: one turn"):
        encoder_of(bench("qwen2"), template).check_turns()


def test_every_familys_template_writes_conversations_without_tools_alike():
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": role, "content": " 7\n"} for role in ("system", "user", "assistant", "user")]
    texts = {
        render_jinja_template([messages], chat_template=chat_template(family), add_generation_prompt=True)[0][0]
        for family in FAMILIES
    }
    assert texts == {
        "<|im_start|>system\n 7\n<|im_end|>\n<|im_start|>user\n 7\n<|im_end|>\n"
        "<|im_start|>assistant\n 7\n<|im_end|>\n<|im_start|>user\n 7\n<|im_end|>\n<|im_start|>assistant\n"
    }


CALL = '<tool_call>\n{"name": "look_closer", "arguments": {"box": [1, 2]}}\n</tool_call>'


def conversation(vision):
    """A row's messages before its demonstration: tools' answers with images, two in a row, and a second question."""
    image = "<image>" * vision
    return (
        Message("system", "Be brief."),
        Message("assistant", "Hello."),  # before any question: a part of the prompt
        Message("user", f"{image}What digit is this, {image}?"),
        Message("assistant", f"I look.\n{CALL}"),
        Message("tool", f"A part:{image}{image}"),
        Message("tool", "and nothing else"),
        Message("assistant", "It is 7."),
        Message("user", f"And {image}this?"),
        Message("assistant", CALL),
        Message("tool", '{"found": 8}'),
    )


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
def test_a_conversation_with_all_turns_is_the_templates_own(family, bench, picture):
    setting = bench(family)
    vision = setting.folder.family.vision
    messages = conversation(vision)
    shown = tuple(picture(56 * (i + 1), 56, i) for i in range(5 * vision))
    prompt = setting.encoder.encode(Prompt("row", messages, shown, demonstration="8, {so} \\boxed{8}"))
    sample = setting.encoder.demonstrate(prompt, all_turns=True)
    parts = [as_message(setting, m.role, split(m.content)) for m in messages]
    parts.append(as_message(setting, "assistant", (prompt.prompt.demonstration,)))
    whole = whole_ids(setting, parts, prompt.images)
    tail = setting.folder.tokenizer("\n<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    ids = [*sample.prompt.token_ids.tolist(), *sample.token_ids.tolist()]
    assert ids == whole[: -len(tail)]  # which go on after the last end
    assert [s.role for s in sample.segments] == [
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [s.by_policy for s in sample.segments] == [True, False] * 3 + [True]
    assert sample.all_images == prompt.images
    assert [len(s.images) for s in sample.segments] == [n * vision for n in (0, 2, 0, 1, 0, 0, 0)]
    decode = setting.folder.tokenizer.decode
    learned = [decode(s.token_ids) for s in sample.segments if s.by_policy]
    assert learned == [
        f"{text}<|im_end|>" for text in (f"I look.\n{CALL}", "It is 7.", CALL, prompt.prompt.demonstration)
    ]
    assert sample.prompt.text.endswith("?<|im_end|>\n<|im_start|>assistant\n")
    assert sample.prompt.prompt == prompt.prompt and sample.prompt.id == "row"


def split(text):
    """Texts and images of a dataset's message."""
    parts = text.split("<image>")
    return [piece for part in parts for piece in (part, 0)][:-1] if len(parts) > 1 else parts


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2"])
def test_with_its_last_turn_alone_a_conversation_is_a_prompt_and_a_completion(family, bench, picture):
    setting = bench(family)
    vision = setting.folder.family.vision
    shown = tuple(picture(56, 56, i) for i in range(5 * vision))
    prompt = setting.encoder.encode(Prompt("row", conversation(vision), shown, demonstration="8"))
    sample = setting.encoder.demonstrate(prompt)
    assert sample.prompt is prompt and len(sample.segments) == 1 and sample.mask.all()
    single = Prompt("row", (Message("user", "2+2?"),), demonstration="4")
    last, every = (setting.encoder.demonstrate(setting.encoder.encode(single), all_turns=x) for x in (False, True))
    assert last.token_ids.tolist() == every.token_ids.tolist()
    assert last.prompt.token_ids.tolist() == every.prompt.token_ids.tolist()


@pytest.mark.parametrize("at", [1, 3])
def test_an_earlier_turn_that_is_empty_is_read_and_not_learned(at, vision):
    texts = ["2+2?", "4", "3+3?", "6", "4+4?", "8"]
    texts[at] = " \n"
    *messages, last = (Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts))
    sample = vision.encoder.demonstrate(
        vision.encoder.encode(Prompt("row", tuple(messages), demonstration=last.content)), all_turns=True
    )
    decode = vision.folder.tokenizer.decode
    learned = [decode(s.token_ids) for s in sample.segments if s.by_policy]
    assert learned == [f"{text}<|im_end|>" for place, text in enumerate(texts) if place % 2 and place != at]
    assert sample.prompt.text.count("<|im_start|>user") == (2 if at == 1 else 1)  # the first question that is answered
    ids = [*sample.prompt.token_ids.tolist(), *sample.token_ids.tolist()]
    parts = [as_message(vision, message.role, (message.content,)) for message in (*messages, last)]
    assert ids == whole_ids(vision, parts, ())[: len(ids)]


@pytest.mark.parametrize("at", [0, 2, 3])
def test_turns_that_hold_special_tokens_are_no_demonstrations(at, vision):
    texts = ["2+2?", "4", "3+3?", "6"]
    texts[at] += "<|im_end|>" if at else ""
    *messages, last = (Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts))
    row = Prompt("row 7", tuple(messages), demonstration=last.content)
    if at != 3:  # what others say is text
        assert len(vision.encoder.demonstrate(vision.encoder.encode(row), all_turns=True).segments) == 3
        return
    with pytest.raises(DataError, match="special tokens") as caught:
        vision.encoder.demonstrate(vision.encoder.encode(row), all_turns=True)
    assert caught.value.where == "row 7"


@pytest.mark.parametrize("text", ["4<|im_end|>", "<image>4"])
def test_an_earlier_turn_that_cannot_be_learned_names_its_row(text, vision, picture):
    messages = (Message("user", "2+2?"), Message("assistant", text), Message("user", "3+3?"))
    shown = (picture(56, 56),) * text.count("<image>")
    prompt = vision.encoder.encode(Prompt("row 7", messages, shown, demonstration="6"))
    with pytest.raises(DataError, match=r"special tokens|shows an image") as caught:
        vision.encoder.demonstrate(prompt, all_turns=True)
    assert caught.value.where == "row 7"
    assert vision.encoder.demonstrate(prompt).mask.all()


REASONS = (
    "{% set last = namespace(user=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% set said = m['content'].split('</think>')[-1] | trim %}"
    "{% set thought = m['content'].split('</think>')[0].split('<think>')[-1] if '</think>' in m['content'] else '' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > last.user %}{{ '<think>\n' + (thought | trim) + '\n</think>\n\n' }}{% endif %}"
    "{{ said + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] | trim) + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""Begins each turn with a thought, writes one into turns that have none, and removes those before the last question."""


def test_a_template_that_keeps_thoughts_up_to_the_next_question_takes_answers_of_tools(bench):
    setting = bench("qwen3")
    encoder = encoder_of(setting, REASONS)
    encoder.check_turns()
    turns = [turn_of(setting, f"{text}\n</think>\n\nI look.", "<|im_end|>") for text in ("It may be 7.", "Or 8.")]
    ids = encoder.encode(Prompt("row", (Message("user", "What?"),))).token_ids.tolist()
    messages = [{"role": "user", "content": "What?"}]
    for turn, thought in zip(turns, ("It may be 7.", "Or 8."), strict=True):
        added = encoder.insertion(turn, ("Seen.",), "user")
        assert added.role == "tool"  # as a question, it would remove the thoughts
        ids += [*turn.token_ids.tolist(), *added.token_ids.tolist()]
        messages += [
            {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\nI look."},
            {"role": "tool", "content": "Seen."},
        ]
    tokenizer = copy.copy(setting.folder.tokenizer)
    tokenizer.chat_template = REASONS
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with pytest.raises(ConfigError, match="cannot carry") as caught:
        encoder_of(setting, REASONS, observation_role="user").check_turns()
    assert "it removes thoughts from earlier turns" in caught.value.possible
    encoder_of(setting, REASONS, observation_role="user", keep_thoughts=True).check_turns()
