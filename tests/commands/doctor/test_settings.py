"""Environment variables: what is listed, what is warned of, what is never shown."""

import pytest

from mmrl.commands.doctor.settings import setting_findings
from mmrl.config.cluster import ClusterConfig

LOCAL = ClusterConfig()
OWN_RAY = ClusterConfig(name="ray")
OTHER_RAY = ClusterConfig(name="ray", address="auto")


def rows(environ, cluster=LOCAL, *, has_gpu=False):
    return list(setting_findings(environ, cluster, has_gpu=has_gpu))


def test_variables_of_the_engines_are_listed_and_secrets_only_by_name():
    environ = {"NCCL_DEBUG": "INFO", "VLLM_API_KEY": "sesame", "HF_TOKEN": "hf_x", "SHELL": "/bin/sh", "RANK": "0"}
    (row,) = rows(environ)
    assert row.found == "HF_TOKEN=(set), NCCL_DEBUG=INFO, RANK=0, VLLM_API_KEY=(set)"
    assert rows({"SHELL": "/bin/sh"})[0].found == "nothing set"


@pytest.mark.parametrize(
    ("environ", "has_gpu", "cluster", "warned"),
    [
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, False, OTHER_RAY, True),
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, False, OWN_RAY, False),
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, False, LOCAL, False),
        ({"RAY_ADDRESS": ""}, False, OTHER_RAY, False),
        ({"HF_HUB_OFFLINE": "1"}, False, LOCAL, True),
        ({"HF_HUB_OFFLINE": "0"}, False, LOCAL, False),
        ({"CUDA_VISIBLE_DEVICES": ""}, True, LOCAL, True),
        ({"CUDA_VISIBLE_DEVICES": "0"}, True, LOCAL, False),
        ({"CUDA_VISIBLE_DEVICES": ""}, False, LOCAL, False),
        ({"TORCHDYNAMO_DISABLE": "1"}, True, LOCAL, True),
        ({"TORCHDYNAMO_DISABLE": "1"}, False, LOCAL, False),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, True, LOCAL, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True, LOCAL, False),
    ],
)
def test_a_variable_is_warned_of_where_it_matters(environ, has_gpu, cluster, warned):
    (name,) = environ
    listed, *warnings = rows(environ, cluster, has_gpu=has_gpu)
    assert name in listed.found
    assert [(row.check, row.status) for row in warnings] == [(name, "warn")] * warned
    assert all(row.remedy for row in warnings)


def test_an_interface_that_does_not_exist_is_bad():
    listed, wrong = rows({"NCCL_SOCKET_IFNAME": "nowhere0"}, has_gpu=True)
    assert "nowhere0" in listed.found and (wrong.check, wrong.status) == ("network interface", "bad")
    assert "nowhere0; there are " in wrong.found and "lo" in wrong.found and "NCCL_SOCKET_IFNAME" in wrong.remedy
    assert len(rows({"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"})) == 1
