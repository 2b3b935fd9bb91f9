"""Tool calls in the policy's text: three forms, every kind of mistake, and hostile text."""

from __future__ import annotations

import json
import time

import pytest

from mmrl.engine.text.tool_calls import MAX_CALLS, MAX_DEPTH, CallReader
from mmrl.types import Call

SCHEMA = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"label": {"type": "string"}, "box": {"type": "array"}, "deep": {"type": "boolean"}},
        },
    },
}
TAGGED, BARE = CallReader([SCHEMA], headers=("user", "assistant"), marks=("<|im_start|>",)), CallReader(bare=True)


def tagged(text):
    return f"<tool_call>\n{text}\n</tool_call>"


def only(calls):
    (call,) = calls
    return call


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "look", "arguments": {"x": [1, 2.5, null, "é"]}}', {"x": [1, 2.5, None, "é"]}),
        ('{"arguments": {}, "name": "look"}', {}),
        ('{"name": "look"}', {}),
        ('{"name": "look", "arguments": null}', {}),
        ('{"name": "look", "parameters": {"x": 1}}', {"x": 1}),
        ('{"name": "look", "arguments": "{\\"x\\": 1}"}', {"x": 1}),
        ('{"name": "look", "arguments": {"code": "a = \'</tool_call>\'\\n<tool_call>"}}',
         {"code": "a = '</tool_call>'\n<tool_call>"}),
        ('{"name": "look", "arguments": {"code": "two\nlines"}}', {"code": "two\nlines"}),
        ('{"name": "look", "arguments": {"emoji": "\\ud83d\\ude00"}}', {"emoji": "\U0001f600"}),
    ],
)  # fmt: skip
def test_json_between_tags_is_a_call(text, arguments):
    for written in (tagged(text), f"I look.{tagged(text)}", f"<tool_call>{text}</tool_call> and so on"):
        assert only(TAGGED.read(written)) == Call("look", arguments)


def test_several_calls_of_a_turn_keep_their_order():
    calls = [tagged(json.dumps({"name": f"t{i}", "arguments": {"i": i}})) for i in range(5)]
    assert TAGGED.read("so\n".join(calls)) == tuple(Call(f"t{i}", {"i": i}) for i in range(5))
    broken = [calls[0], tagged("{"), calls[2], "<tool_call>oops", calls[4]]
    read = TAGGED.read("".join(broken))
    assert [call.name for call in read] == ["t0", "", "t2", "", "t4"]
    assert [bool(call.error) for call in read] == [False, True, False, True, False]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "there is no JSON"),
        ("look(1)", "there is no JSON"),
        ('{"name": "look", "arguments": {"x": 1}', "its JSON is broken"),
        ("{'name': 'look'}", "its JSON is broken"),
        ('[{"name": "look"}]', "its JSON is no object"),
        ('{"name": 7, "arguments": {}}', "no text as name"),
        ('{"arguments": {}}', "no text as name"),
        ('{"name": "look", "arguments": {"x": NaN}}', "NaN is no number"),
        ('{"name": "look", "arguments": {"x": 1e999}}', "1e999 is no number"),
        ('{"name": "look", "arguments": {"x": -Infinity}}', "-Infinity is no number"),
        ('{"name": "look", "arguments": {"x": ' + "9" * 5000 + "}}", "more than 1000 digits"),
        ('{"name": "look", "name": "leap"}', "'name' comes twice"),
        ('{"name": "look", "arguments": {"x": 1, "y": 1, "x": 2}}', "'x' comes twice"),
        ('{"name": "look"} {"name": "leap"}', "</tool_call> does not follow the JSON"),
        ("{" * 100_000, "its JSON is broken"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_call_that_cannot_be_read_says_why_and_how_calls_look(text, what):
    call = only(TAGGED.read(tagged(text)))
    assert (call.name, call.arguments) == ("", None)
    assert what in call.error and 'A call looks like this:\n<tool_call>\n{"name":' in call.error
    assert len(call.error) < 500


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ("[1]", "no JSON object"),
        ("7", "no JSON object"),
        ('"look closer"', "there is no JSON"),
        ('"{\\"x\\": 1} and"', "something follows the JSON"),
        ('{"x": "\\ud800"}', "half of a character"),
        ('{"\\ud800": 1}', "half of a character"),
        ('{"x": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}", "nested more than 32 levels"),
    ],
)
def test_arguments_that_cannot_be_used_leave_the_name(arguments, what):
    call = only(TAGGED.read(tagged(f'{{"name": "look", "arguments": {arguments}}}')))
    assert (call.name, call.arguments) == ("look", None) and what in call.error


def test_a_name_with_half_of_a_character_can_be_written():
    call = only(TAGGED.read(tagged('{"name": "look\\udc80"}')))
    assert call.arguments is None and call.name.encode() == b"look?"


def test_as_many_levels_as_are_allowed_are_read():
    nested = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert only(TAGGED.read(tagged(f'{{"name": "look", "arguments": {{"x": {nested}}}}}'))).error == ""


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("<parameter=label>\n7\n</parameter>\n<parameter=box>\n[1, 2]\n</parameter>\n", {"label": "7", "box": [1, 2]}),
        ("<parameter=deep>true</parameter><parameter=other> 7 </parameter>", {"deep": True, "other": 7}),
        ("<parameter=other>7 of 8</parameter>", {"other": "7 of 8"}),
        ("<parameter=label>\n\n <b>\n\n</parameter>", {"label": "\n <b>\n"}),
        ("", {}),
    ],
)
def test_marked_up_calls_are_read_by_the_tools_schema(body, arguments):
    assert only(TAGGED.read(tagged(f"<function=look>\n{body}</function>"))) == Call("look", arguments)


@pytest.mark.parametrize(
    ("text", "name", "what"),
    [
        ("<function=look>\n<parameter=x>1\n</function>", "look", "</parameter> is missing after 'x'"),
        ("<function=look>1</function>", "look", "<parameter=name> is missing"),
        ("<function=look><parameter=x>1</parameter>", "look", "</function> is missing"),
        ("<function=look", "", "> is missing"),
        ("<function=></function>", "", "> is missing"),
        ("<function=look><parameter=x>1</parameter><parameter=x>2</parameter></function>", "look", "comes twice"),
        ("<function=look><parameter=x>\ud800</parameter></function>", "look", "half of a character"),
    ],
)
def test_marked_up_calls_that_cannot_be_read_say_why(text, name, what):
    call = only(TAGGED.read(tagged(text)))
    assert (call.name, call.arguments) == (name, None) and what in call.error


def test_a_turn_that_is_json_is_a_call_where_the_template_says_so():
    text = '{"name": "look", "parameters": {"x": "1"}}'
    assert BARE.read(f" {text}\n") == (Call("look", {"x": "1"}),)
    assert BARE.read(f"{text}; {text}") == (Call("look", {"x": "1"}),) * 2
    assert TAGGED.read(text) == () == BARE.read(f"So: {text}")
    assert BARE.read('{"answer": 7}') == () == BARE.read("{7}")
    assert BARE.read(tagged(text)) == (Call("look", {"x": "1"}),)
    broken, after = only(BARE.read(text[:-1])), BARE.read(f"{text} I am done")
    assert "its JSON is broken" in broken.error and '"parameters"' in broken.error
    assert [call.name for call in after] == ["look", ""] and "something follows" in after[1].error


def test_nothing_counts_after_a_message_that_the_policy_makes_up():
    call, other = tagged('{"name": "look"}'), tagged('{"name": "leap"}')
    for header in ("<|im_start|>user\n", "\nuser\n", "\nassistant\n", "\n<|im_start|>"):
        assert [found.name for found in TAGGED.read(f"{call}{header}seen{other}")] == ["look"]
    assert len(TAGGED.read(f"{call}\nthe user\n{other}")) == 2
    spelled = tagged('{"name": "look", "arguments": {"x": "a\nuser\nb"}}')
    assert [found.name for found in TAGGED.read(spelled + other)] == ["look", "leap"]


def test_calls_of_a_turn_are_bounded():
    calls = TAGGED.read(tagged('{"name": "look"}') * (MAX_CALLS + 9))
    assert [call.name for call in calls] == ["look"] * MAX_CALLS + [""]
    assert "more than 64 calls" in calls[-1].error
    assert len(BARE.read('{"name": "look"}' * 100)) == MAX_CALLS + 1


MEGABYTE = 2**20


@pytest.mark.parametrize("reader", [TAGGED, BARE], ids=["tagged", "bare"])
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * (MEGABYTE // 11),
        "</tool_call>" * (MEGABYTE // 12),
        '<tool_call>{"' * (MEGABYTE // 13),
        '<tool_call>{"a": "' + "x" * MEGABYTE,
        "<tool_call><function=" * (MEGABYTE // 21),
        "<tool_call><function=f>" + "<parameter=x>" * (MEGABYTE // 13) + "</function></tool_call>",
        tagged("<function=f>" + "".join(f"<parameter=p{i}>1</parameter>" for i in range(40_000)) + "</function>"),
        tagged('{"name": "f", "arguments": {' + ", ".join(f'"{i}": 1' for i in range(80_000)) + ', "7": 2}}'),
        tagged('{"name": "f", "arguments": {"x": [' + "1," * (MEGABYTE // 2) + "1]}}"),
        '{"name": ' * (MEGABYTE // 9),
        "{" + " " * MEGABYTE + "}",
        "\nuse" * (MEGABYTE // 4) + "<tool_call>",
        "\x00\x1b[2J\u202e" * (MEGABYTE // 8) + "<tool_call>{}",
    ],
    ids=range(13),
)
def test_a_megabyte_of_anything_is_read_in_a_moment(text, reader):
    begin = time.monotonic()
    calls = reader.read(text)
    assert time.monotonic() - begin < 60
    assert len(calls) <= MAX_CALLS + 1 and all(len(call.error) < 500 for call in calls)
