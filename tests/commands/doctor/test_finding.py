"""Rows, their table, and what may not be in it."""

import pytest

from mmrl.commands.doctor.finding import Finding, Private, exit_code, failure, table

OK = Finding("machine", "ninja", "ok", "ninja")
WARN = Finding("machine", "shared memory", "warn", "0.1 GiB free", "give it more")


def test_columns_are_aligned_and_the_remedy_stands_below():
    assert table([OK, WARN]) == [
        "ok    machine  ninja          ninja",
        "warn  machine  shared memory  0.1 GiB free",
        "                              -> give it more",
    ]


def test_long_rows_wrap_within_their_column():
    lines = table([OK, Finding("versions", "packages", "ok", ", ".join(["numpy 2.3.5"] * 40))])
    assert max(map(len, lines)) <= 120 and len(lines) > 4
    assert all(line.startswith(" " * 24) for line in lines[2:])


def test_an_empty_finding_still_has_its_line():
    assert table([Finding("settings", "environment", "ok", "")]) == ["ok  settings  environment  -"]
    assert table([]) == []


@pytest.mark.parametrize(
    ("bad", "code"), [([], 0), (["machine"], 5), (["numbers"], 6), (["versions", "numbers"], 6), (["engine"], 5)]
)
def test_the_exit_code_says_whether_numbers_disagree(bad, code):
    assert exit_code([OK, WARN, *(Finding(area, "x", "bad", "y") for area in bad)]) == code


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/alice/runs and /home/alicette/x", "~/runs and /home/[user]/x"),
        ("/scratch/alice/tmp, /data/alice", "/scratch/[user]/tmp, /data/[user]"),
        ("/home/bob/.cache", "/home/[user]/.cache"),
        ("ray://me:secret-word@host:1", "ray://[redacted]@host:1"),
        ("token hf_abcdefghijklmnopqrst and sesame-sesame", "token [redacted] and [redacted]"),
        ("malice is not alice", "malice is not alice"),
        (
            "/tmp/torchinductor_alice/x: no, RAY_TMPDIR=/tmp/ray-alice",
            "/tmp/torchinductor_[user]/x: no, RAY_TMPDIR=/tmp/ray-[user]",
        ),
        ("/opt/malice/x, tools/alice2", "/opt/malice/x, tools/alice2"),
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
    ],
)
def test_secrets_homes_and_names_are_taken_out(text, shown):
    private = Private("/home/alice", "alice", {"MY_TOKEN": "sesame-sesame"})
    assert private(text) == shown
    assert Finding("machine", text, "ok", text, text).shown(private) == Finding("machine", shown, "ok", shown, shown)


def test_a_home_at_the_root_hides_nothing():
    assert Private("/", "", {})("/usr/bin/ninja") == "/usr/bin/ninja"
    assert Private("/root", "root", {})("/root/x, /opt/root2, /rootfs") == "~/x, /opt/root2, /rootfs"


def test_a_failure_tells_type_place_and_the_last_lines():
    try:
        raise ValueError("\n".join(f"line {number}" for number in range(9)))
    except ValueError as error:
        text = failure(error)
    assert text.startswith("ValueError in test_finding.py:") and text.endswith(": line 5 line 6 line 7 line 8")


def test_no_half_of_a_token_is_left_where_a_message_is_cut():
    token = "hf_" + "aBcDeFgHiJkLmNoP" * 2
    try:
        raise ValueError(token + "." * 590)
    except ValueError as error:
        text = failure(error)
    assert text.endswith("." * 590) and token[-8:] not in text
