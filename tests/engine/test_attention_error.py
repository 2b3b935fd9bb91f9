"""The measure of attention kernels: small for a sound one, large for a wrong one."""

import pytest
import torch

from mmrl.engine.aids.attention_error import LIMITS, attention_error, tower_error
from mmrl.engine.network import attention


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_kernel_in_use_is_within_its_limit(precision):
    error = attention_error("cpu", precision)
    assert 0 < error < LIMITS[precision]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_kernel_that_is_wrong_in_one_row_is_found_out(precision, monkeypatch):
    sound = attention.packed_sdpa

    def off_by_one(module, query, key, value, mask, **options):
        output, _ = sound(module, query, key, value, mask, **options)
        return torch.cat([output[:, :-1], output[:, -2:-1]], 1), None

    monkeypatch.setitem(attention.KERNELS, "mmrl_packed_sdpa", off_by_one)
    assert attention_error("cpu", precision) > 2 * LIMITS[precision]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_gpus_kernel_is_within_its_limit(precision):
    assert attention_error("cuda", precision) < LIMITS[precision]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_the_gpus_kernel_of_vision_towers_is_within_its_limit():
    assert tower_error("cuda", "bfloat16") < LIMITS["bfloat16"]
