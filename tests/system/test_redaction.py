import pytest

from mmrl.system.redaction import Redactor, names_a_secret


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
