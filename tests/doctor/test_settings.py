"""Environment variables: what is listed, what is warned of, what is never shown."""

import pytest

from mmrl.doctor.settings import setting_findings


def rows(environ, *, has_gpu=False, uses_ray=False):
    return list(setting_findings(environ, has_gpu=has_gpu, uses_ray=uses_ray))


def test_variables_of_the_engines_are_listed_and_secrets_only_by_name():
    environ = {"NCCL_DEBUG": "INFO", "VLLM_API_KEY": "sesame", "HF_TOKEN": "hf_x", "SHELL": "/bin/sh", "RANK": "0"}
    (row,) = rows(environ)
    assert row.found == "HF_TOKEN=(set), NCCL_DEBUG=INFO, RANK=0, VLLM_API_KEY=(set)"
    assert rows({"SHELL": "/bin/sh"})[0].found == "nothing set"


@pytest.mark.parametrize(
    ("environ", "has_gpu", "uses_ray", "warned"),
    [
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, False, True, True),
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, False, False, False),
        ({"RAY_ADDRESS": ""}, False, True, False),
        ({"HF_HUB_OFFLINE": "1"}, False, False, True),
        ({"HF_HUB_OFFLINE": "0"}, False, False, False),
        ({"CUDA_VISIBLE_DEVICES": ""}, True, False, True),
        ({"CUDA_VISIBLE_DEVICES": "0"}, True, False, False),
        ({"CUDA_VISIBLE_DEVICES": ""}, False, False, False),
        ({"TORCHDYNAMO_DISABLE": "1"}, True, False, True),
        ({"TORCHDYNAMO_DISABLE": "1"}, False, False, False),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, True, False, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True, False, False),
    ],
)
def test_a_variable_is_warned_of_where_it_matters(environ, has_gpu, uses_ray, warned):
    (name,) = environ
    listed, *warnings = rows(environ, has_gpu=has_gpu, uses_ray=uses_ray)
    assert name in listed.found
    assert [(row.check, row.status) for row in warnings] == [(name, "warn")] * warned
    assert all(row.remedy for row in warnings)
