"""Values that threads compute before they are asked for: the same ones, few at a time, and none twice."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from mmrl.system.read_ahead import AHEAD, ReadAhead


class Source:
    """A function that counts its calls; keys above 90 fail."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()
        self.threads: set[str] = set()
        self.go = threading.Event()
        self.go.set()

    def __call__(self, key: int) -> int:
        self.go.wait(30)
        self.calls[key] += 1
        self.threads.add(threading.current_thread().name)
        if key > 90:
            raise ValueError(f"no {key}")
        return key * key


@pytest.mark.parametrize("threads", [0, 3])
def test_values_are_those_of_the_function_and_each_is_read_once(threads):
    source = Source()
    ahead = ReadAhead(source, threads)
    ahead.announce([*range(50), 3])
    assert [ahead(key) for key in range(50)] == [key * key for key in range(50)]
    assert source.calls == Counter(range(50))
    assert any("read-ahead" in name for name in source.threads) is bool(threads)


def test_few_values_wait_to_be_taken():
    source = Source()
    ahead = ReadAhead(source, 2)
    ahead.announce(range(50))
    assert ahead(0) == 0
    for number in range(1 + 2 * AHEAD):  # one was taken, and as many as there is room for are under way
        ahead._under_way.get(number) and ahead._under_way[number].result(30)
    assert len(source.calls) == 1 + 2 * AHEAD


def test_a_key_that_was_not_announced_or_is_passed_over_is_read_all_the_same():
    source = Source()
    ahead = ReadAhead(source, 2)
    ahead.announce(range(20))
    assert [ahead(key) for key in (77, 15, 3, 16)] == [77 * 77, 225, 9, 256]


def test_keys_that_are_passed_over_keep_no_others_from_being_read_ahead():
    """A sampler asks for no image that vLLM has preprocessed already."""
    source = Source()
    ahead = ReadAhead(source, 2)
    ahead.announce(range(50))
    assert ahead(30) == 900
    assert [ahead(key) for key in range(31, 50)] == [key * key for key in range(31, 50)]
    assert not set(source.calls) & set(range(2 * AHEAD, 30)) and source.calls.total() <= 20 + 2 * AHEAD
    source.threads.clear()
    ahead.announce([60, 61])
    assert ahead(60) == 3600 and all("read-ahead" in name for name in source.threads)


def test_an_error_comes_where_the_value_is_asked_for():
    ahead = ReadAhead(Source(), 2)
    ahead.announce([1, 91, 2])
    assert ahead(1) == 1
    with pytest.raises(ValueError, match="no 91"):
        ahead(91)
    assert ahead(2) == 4


def test_what_is_forgotten_and_was_not_begun_is_not_read():
    source = Source()
    source.go.clear()
    ahead = ReadAhead(source, 1)
    ahead.announce(range(20))
    ahead.forget()
    source.go.set()
    assert ahead(19) == 361
    assert set(source.calls) <= {0, 19}
