"""Limits of control groups, in both versions' layouts."""

from pathlib import Path

from mmrl.doctor.cgroup import ControlGroups


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def groups(tmp_path: Path, own: str) -> ControlGroups:
    (tmp_path / "own").write_text(own)
    return ControlGroups(tmp_path / "mount", tmp_path / "own")


def test_of_nested_groups_the_tightest_counts(tmp_path):
    mount = tmp_path / "mount"
    write(mount / "job", memory__max="4000", memory__current="1000", cpu__max="150000 100000")
    write(mount / "job/step/task", memory__max="max", memory__current="500", cpu__max="max 100000")
    found = groups(tmp_path, "0::/job/step/task\n")
    assert found.memory_bytes() == (4000, 1000)
    assert found.processors() == 1.5


def test_inside_a_container_the_limits_are_at_the_top(tmp_path):
    write(tmp_path / "mount", memory__max="4000", memory__current="1", cpu__max="50000 100000")
    found = groups(tmp_path, "0::/docker/not-mounted-here\n")
    assert (found.memory_bytes(), found.processors()) == ((4000, 1), 0.5)


def test_version_1_has_a_folder_per_controller(tmp_path):
    mount = tmp_path / "mount"
    write(mount / "memory/a", memory__limit_in_bytes="700", memory__usage_in_bytes="20")
    write(mount / "memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="99")
    write(mount / "cpu/b", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    found = groups(tmp_path, "5:cpu,cpuacct:/b\n4:memory:/a\n")
    assert (found.memory_bytes(), found.processors()) == ((700, 20), 2.0)


def test_without_limits_there_are_none(tmp_path):
    write(tmp_path / "mount/cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert groups(tmp_path, "").processors() is None
    assert ControlGroups(tmp_path / "none", tmp_path / "none").memory_bytes() is None
