import math
import time

import pytest

from mmrl.system.redaction import (
    Redactor,
    leads_to_a_secret,
    names_a_secret,
    remember_secrets,
    without_paths,
    without_secrets,
)


@pytest.mark.parametrize("text", ["hf_transfer is on", "sk-learn-digits-experiment", "task-1234567890123456789", "x"])
def test_ordinary_words_are_left_alone(text):
    assert Redactor({"SOME_KEY": "1234567", "PATH": "task-1234567890123456789"})(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("you sent Bearer abc-def.123_xyz)", "you sent Bearer [redacted])"),
        ("http://me:p@ss@host:1/a@b", "http://[redacted]@host:1/a@b"),
        ("https://host/owner/name@main", "https://host/owner/name@main"),
        ("bearer of news", "bearer of news"),
    ],
)
def test_what_stands_for_a_user_is_replaced_wherever_it_stands(text, shown):
    assert Redactor({})(text) == shown


def test_values_of_secret_variables_are_replaced_the_longest_first():
    redact = Redactor({"A_TOKEN": "abcdefgh", "MY_SECRET": "abcdefgh-and-more"})
    assert redact("abcdefgh-and-more, xabcdefghx") == "[redacted], x[redacted]x"


def test_names_of_secrets_are_known_in_any_case():
    assert all(map(names_a_secret, ["HF_TOKEN", "OPENAI_API_KEY", "db_password", "ClientSecret"]))
    assert not names_a_secret("HF_HOME")


def test_variables_below_env_are_judged_as_variables(monkeypatch):
    variables = {"GITHUB_PERSONAL_ACCESS_TOKEN": "a-token-of-mine", "HOST": "here", "EMPTY_KEY": ""}
    config = {"environment": {"env": variables}}
    shown = without_secrets(config)["environment"]["env"]
    assert shown == {**variables, "GITHUB_PERSONAL_ACCESS_TOKEN": "[redacted]"}
    assert without_secrets({"answer_key": "b", "stop_token": "c"}) == {"answer_key": "b", "stop_token": "c"}
    assert leads_to_a_secret(["environment", "env", "NOTION_TOKEN"]) and leads_to_a_secret(["api_key", "a"])
    assert not leads_to_a_secret(["environment", "env", "HOST"]) and not leads_to_a_secret(["data", "NOTION_TOKEN_ID"])
    monkeypatch.setattr("mmrl.system.redaction._of_configs", set())
    remember_secrets(config)
    assert Redactor({})("say a-token-of-mine, here") == "say [redacted], here"


def test_lists_of_texts_and_numbers_are_redacted_item_by_item():
    redact = Redactor({"MY_KEY": "two\nlines long"})
    assert redact.plain(["a", "Bearer", "token-of-mine"]) == ["a", "Bearer", "token-of-mine"]  # not one text
    assert redact.plain(["a", "say two\nlines long"]) == ["a", "say [redacted]"]
    assert redact.plain(["x", "hf_abcdefghijklmnop0"]) == ["x", "[redacted]"]
    assert redact.plain([1, None, True, 0.5]) == [1, None, True, 0.5]
    assert redact.plain([None, math.nan, math.inf, 0]) == [None, None, None, 0]


def test_a_secret_that_goes_through_several_parts_is_replaced_once():
    redact = Redactor({"MY_KEY": "correct-horse"})
    parts = ["say ", "cor", "rect", "-", "horse", ", and corr", "ect", "-horse now"]
    assert redact.parts(parts) == ["say ", "[redacted]", "", "", "", "[redacted]", "", ""]
    assert redact.parts(["cor", "", "rect"]) == ["cor", "", "rect"] and redact.parts([]) == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sk-words-and-more-words-1", "[redacted]"),
        ("no-sk-words-and-more-1words, sk-words-and-more-words", "no-[redacted], sk-words-and-more-words"),
        ("sk-words-with-hf_abcdefghijklmnop-and-none", "sk-words-with-[redacted]-and-none"),
        ("sk-words-correct-horse and sk-words-and-more-words-1", "sk-words-[redacted] and [redacted]"),
        ("Bearer sk-words-and-more-words-1.and.more", "Bearer [redacted]"),
    ],
)
def test_keys_are_words_with_a_digit_anywhere(text, shown):
    assert Redactor({"MY_KEY": "correct-horse"})(text) == shown


@pytest.mark.parametrize("text", ["sk-" * 50_000, "sk-aaaaaaaaaaaaaaaa " * 10_000, "sk-hf_aaaaaaaaaaaaaaaa-" * 10_000])
def test_the_time_grows_as_the_length_of_a_text(text):
    redact, began = Redactor({}), time.process_time()
    redact(text)
    redact.plain([text, text])
    assert time.process_time() - began < 30  # with the square of the length minutes


def test_the_time_for_parts_grows_as_their_number():
    redact, began = Redactor({}), time.process_time()
    assert redact.parts(["Bearer ", "a-token1", " "] * 10_000) == ["Bearer ", "[redacted]", " "] * 10_000
    assert time.process_time() - began < 30


def test_an_integer_beyond_any_float_is_a_text():
    redact = Redactor({})
    assert redact.plain([1, 10**400, -(16**300)]) == [1, hex(10**400), "-0x1" + "0" * 300]
    assert redact.plain({"a": 10**400, "b": 10**308, "c": -(2**1024)}) == {
        "a": hex(10**400), "b": 10**308, "c": hex(-(2**1024))
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/my data/rows.jsonl", "rows.jsonl"),
        ("~/runs/digits/", "digits"),
        ("../mine.py:score", "mine.py:score"),
        ("see /home/me/x.json, or file:///a/b", "see x.json, or b"),
        ("--root=/srv/media", "--root=media"),
        ("data/train.jsonl", "data/train.jsonl"),
        ("org/name", "org/name"),
        ("https://host/a/b/c", "https://host/a/b/c"),
        ("<think> and/or </think>", "<think> and/or </think>"),
        ("/no_think", "/no_think"),
        ("3 / 4 / 5", "3 / 4 / 5"),
    ],
)
def test_paths_of_this_machine_are_reduced_to_their_last_part(text, shown):
    assert without_paths({"a": [text, 1, None]}) == {"a": [shown, 1, None]}
