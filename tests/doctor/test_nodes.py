"""Nodes against the driver, from reports written by hand."""

from mmrl.cluster.nodes import NodeReport, node_reports
from mmrl.config import from_mapping
from mmrl.doctor.nodes import node_findings

HERE = {"torch": "2.13.0", "vllm": "0.32.0", "thirdparty": "1.0", "python": "3.11.7"}


def report(**changes) -> NodeReport:
    same = {"node": "a1", "host": "worker-1", "num_gpus": 8, "folders": {"run folder": "shared"}, "versions": HERE}
    return NodeReport(**(same | changes))


def test_a_node_like_the_driver_is_one_row():
    (row,) = node_findings([report()], HERE)
    assert (row.check, row.status, row.found) == ("worker-1", "ok", "8 GPU(s); run folder shared")


def test_private_folders_are_fine_and_say_what_will_be_sent():
    (row,) = node_findings([report(folders={"run folder": "private", "model": "private"})], HERE)
    assert row.status == "ok"
    assert row.found == (
        "8 GPU(s); run folder private, model private; what is in its run folder and model will be sent there"
    )


def test_each_differing_version_is_named_and_bad():
    versions = HERE | {"torch": "2.12.0", "thirdparty": "", "extra": "3"}
    rows = list(node_findings([report(host="worker-2"), report(versions=versions)], HERE))
    assert [(row.check, row.status) for row in rows] == [("worker-2", "ok"), ("worker-1", "ok"), ("worker-1", "bad")]
    assert rows[-1].found == (
        "differs from the driver: extra 3 (here missing), thirdparty missing (here 1.0), torch 2.12.0 (here 2.13.0)"
    )


def test_a_local_run_has_no_other_nodes():
    config = from_mapping({"model": {"path": "m"}, "data": {"train": {"name": "d"}}, "algorithm": {"name": "a"}})
    assert node_reports(config) == []
