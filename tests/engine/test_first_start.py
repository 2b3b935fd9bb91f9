"""The sign that engines start for the first time."""

import sys

import pytest

from mmrl.engine.machine.first_start import once


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of vLLM; this environment's packages are compiled."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr("mmrl.engine.machine.first_start._is_compiled", lambda package: True)
    return tmp_path / "vllm"


def test_a_start_is_the_first_until_vllm_has_a_cache(cache):
    assert once(samples_with_vllm=True) == ["vLLM looks at its models"]
    assert once(samples_with_vllm=False) == []
    cache.mkdir()
    assert once(samples_with_vllm=True) == ["vLLM looks at its models"]
    (cache / "modelinfos").mkdir()
    assert once(samples_with_vllm=True) == []


def test_a_start_is_the_first_until_packages_are_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    assert once(samples_with_vllm=False) == ["Python compiles deepspeed"]
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # each start is slow then
    assert once(samples_with_vllm=False) == []
