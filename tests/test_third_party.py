"""Packages of plugins that others make, as wheels beside mmrl: listed, checked, trained with, or refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mmrl.commands.cli import main
from mmrl.interfaces import API_VERSION
from mmrl.rollout.records import read_lines, recorded_steps

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "third_party_plugin"


def call(*words: str | Path, **environment: str) -> str:
    """The output of Python with these arguments, which fails the test if it fails."""
    command = [sys.executable, *map(str, words)]
    env = os.environ | environment
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


OFFLINE = ["--no-deps", "--no-index", "-qq", "--disable-pip-version-check"]


def build(packages: list[Path], folder: Path) -> list[Path]:
    """A wheel of each package, made without a network."""
    call("-m", "pip", "wheel", "--no-build-isolation", *OFFLINE, "--wheel-dir", folder / "wheels", *packages)
    wheels = sorted((folder / "wheels").iterdir())
    assert len(wheels) == len(packages)
    return wheels


def install(packages: list[Path], folder: Path) -> Path:
    """Install a wheel of each package, as pip does, into a folder for PYTHONPATH."""
    call("-m", "pip", "install", *OFFLINE, "--target", folder / "site", *build(packages, folder))
    return folder / "site"


def path_with(*sites: Path) -> str:
    return os.pathsep.join([*map(str, sites), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The example's package, and one that `mmrl init plugin` has written."""
    folder = tmp_path_factory.mktemp("sources")
    shutil.copytree(EXAMPLE, folder / "example", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    assert main(["init", "plugin", "acme-rl", "--path", str(folder / "acme")]) == 0
    return [folder / "example", folder / "acme"]


@pytest.fixture(scope="module")
def site(sources: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(sources, tmp_path_factory.mktemp("installed"))


FAULTY = {
    "algorithm.crash": (r"^from typing", "raise RuntimeError('no licence')\nfrom typing"),
    "algorithm.newer": (r"^    config: Config", f"    config: Config\n    api_version = {API_VERSION + 1}"),
    "algorithm.lite_ppo": ("", ""),
    "reward.wrong": (r"for rollout in rollouts\]", "for rollout in rollouts] + [0.0]"),
    "environment.rude": (r"raise ToolError", "raise ValueError"),
}
"""Modules of one package and how they come from the template's: one raises, one is for an interface to come, one has
the name of another package's plugin, one gives too many scores, one trusts what a policy writes."""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faulty")
    assert main(["init", "plugin", "faulty", "--path", str(folder / "faulty")]) == 0
    entries: dict[str, str] = {"algorithm": "", "reward": "", "environment": ""}
    for place, (pattern, instead) in FAULTY.items():
        kind, name = place.split(".")
        source = (folder / "faulty" / "src" / "faulty" / f"{kind}.py").read_text()
        text, count = re.subn(pattern, instead, source, count=1, flags=re.MULTILINE)
        assert count == 1
        (folder / "faulty" / "src" / "faulty" / f"{name}.py").write_text(text)
        (plugin,) = re.findall(r"^class (\w+)", source, re.MULTILINE)
        entries[kind] += f'{name} = "faulty.{name}:{plugin}"\n'
    project = folder / "faulty" / "pyproject.toml"
    text = project.read_text()
    for kind, lines in entries.items():
        text, count = re.subn(rf'^faulty = "faulty.{kind}:.*$', lines, text, flags=re.MULTILINE)
        assert count == 1
    project.write_text(text)
    return install([folder / "faulty"], folder / "installed")


@pytest.fixture(scope="module")
def folder(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config that names the packages' plugins, and its data."""
    folder = tmp_path_factory.mktemp("runs")
    rows = [json.dumps({"problem": f"{i}+1?", "answer": str(i + 1)}) + "\n" for i in range(6)]
    (folder / "sums.jsonl").write_text("".join(rows))
    config: dict[str, Any] = {
        "model": {"path": str(models("qwen2"))},
        "data": {"train": {"name": "table", "path": "sums.jsonl"}, "max_prompt_tokens": 1024},
        "environment": {
            "name": "calculator",
            "workers": 1,
            "weights": {"calls": -0.01},
            "max_turns": 2,
            "max_turn_tokens": 12,
            "max_observation_tokens": 64,
        },
        "rewards": [{"name": "repetition", "n": 1}, {"name": "acme_rl", "weight": 0.5, "per_token": 0.01}],
        "algorithm": {"name": "lite_ppo", "clip_high": 0.28},
        "sampler": {"name": "hf", "group_size": 4, "max_new_tokens": 24},
        "learner": {"lr": 1e-3, "zero_stage": 0, "minibatches": 2},
        "trainer": {"steps": 1, "prompts_per_step": 5},
        "trackers": [],
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


SOUND = {
    ("mmrl-lite-ppo", "algorithm", "lite_ppo"),
    ("mmrl-lite-ppo", "reward", "repetition"),
    ("mmrl-lite-ppo", "environment", "calculator"),
    ("acme-rl", "algorithm", "acme_rl"),
    ("acme-rl", "reward", "acme_rl"),
    ("acme-rl", "environment", "acme_rl"),
    ("acme-rl", "monitor", "acme_rl"),
    ("faulty", "algorithm", "lite_ppo"),
    ("faulty", "monitor", "faulty"),
}


@pytest.mark.full
def test_installed_packages_are_checked_whatever_their_neighbours(site: Path, faulty: Path, household) -> None:
    unsound = {("faulty", *place.split(".")) for place in FAULTY} - SOUND
    words = [f"{kind}:{distribution}:{name}" for distribution, kind, name in sorted(SOUND | unsound)]
    path = path_with(site, faulty)
    found = household.run("plugins", "--json", "--check", *words, folder=site, PYTHONPATH=path)
    assert found.returncode == 4, found.stderr
    rows = {(row["distribution"], row["kind"], row["name"]): row for row in json.loads(found.stdout)}
    assert {key for key, row in rows.items() if row["status"] == "ok"} == SOUND
    assert {row["version"] for row in rows.values()} == {"0.1.0"}
    for distribution in ("mmrl-lite-ppo", "faulty"):
        note = f"name taken twice, use {distribution}:lite_ppo"
        assert rows[distribution, "algorithm", "lite_ppo"]["note"] == note
    bad = {key[2]: row["note"] for key, row in rows.items() if row["status"] == "bad"}
    assert bad.keys() == {"crash", "newer", "wrong", "rude"}
    assert "cannot be imported: RuntimeError: no licence" in bad["crash"]
    assert f"written for interface version {API_VERSION + 1}, not {API_VERSION}" in bad["newer"]
    assert "one per rollout" in bad["wrong"]
    assert "step answers whatever a policy writes" in bad["rude"] and "ValueError" in bad["rude"]


@pytest.mark.full
def test_their_own_tests_pass(sources: list[Path], site: Path, tmp_path: Path) -> None:
    tests = [package / "tests" for package in sources]
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", tmp_path]
    output = call("-m", "pytest", *options, *tests, PYTHONPATH=path_with(site))
    assert re.search(r"^\d\d passed", output, re.MULTILINE), output


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "message", "remedy"),
    [
        ([], "several packages install an algorithm plugin called 'lite_ppo'", "select one of them by its long name"),
        (["algorithm={name: crash}"], "cannot be imported: RuntimeError: no licence", "reinstall faulty"),
        (["algorithm={name: newer}"], f"written for interface version {API_VERSION + 1}", "upgrade mmrl"),
        (["algorithm={name: third:lite_ppo}"], "an algorithm plugin called 'third:lite_ppo'", "pip install"),
    ],
)
def test_a_faulty_package_is_named_when_it_is_asked_for(
    overrides, message, remedy, site, faulty, folder, monkeypatch, capsys
) -> None:
    monkeypatch.syspath_prepend(site)
    monkeypatch.syspath_prepend(faulty)
    assert main(["show", str(folder / "config.yaml"), *overrides]) == 4
    complaint = capsys.readouterr().err
    assert message in complaint and remedy in complaint
    assert main(["show", str(folder / "config.yaml"), "algorithm={name: mmrl-lite-ppo:lite_ppo}"]) == 0


def test_without_the_package_the_error_says_what_to_install(folder: Path, household) -> None:
    result = household.run("train", "config.yaml", "trainer.run_dir=nowhere", folder=folder)
    assert result.returncode == 4
    plugins = (("algorithm", "lite_ppo"), ("reward", "repetition"), ("environment", "calculator"))
    for plugin in (f"{'a' if kind == 'reward' else 'an'} {kind} plugin called {name!r}" for kind, name in plugins):
        assert f"no installed package has {plugin}" in result.stderr
    assert "install the package that has it (pip install ...)" in result.stderr
    assert not (folder / "nowhere").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    "cluster",
    [[], pytest.param(["cluster.name=ray", "cluster.ranks=2"], marks=pytest.mark.slow)],
    ids=["local", "ray"],
)
def test_a_run_trains_with_the_packages_plugins_by_name(
    cluster, site: Path, folder: Path, household, warm_mmrl: Callable[..., Any]
) -> None:
    run = folder / ("ray" if cluster else "local")
    words = ["train", "config.yaml", f"trainer.run_dir={run}", *cluster]
    if cluster:
        result = household.run(*words, folder=folder, PYTHONPATH=path_with(site))
    else:
        result = warm_mmrl(*words, folder=folder, site=site)
    assert result.returncode == 0, result.stderr
    environment = json.loads((run / "environment.json").read_text())
    assert {"mmrl-lite-ppo", "acme-rl"} <= {plugin["distribution"] for plugin in environment["plugins"]}
    assert ("environment", "calculator") in {(each["kind"], each["name"]) for each in environment["plugins"]}
    metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    # A policy of random weights calls no tool, which ends the episode, also after a turn that was cut.
    assert metrics["episode/turns_mean"] == 1 and metrics["episode/finish_environment_fraction"] == 1
    assert metrics["reward/calls_mean"] == 0 and metrics["episode/failed_calls_fraction"] == 0
    assert -1 <= metrics["reward/repetition_mean"] <= 0
    assert metrics["policy/grad_norm"] > 0 and "policy/clip_fraction_high" in metrics
    rollouts = list(read_lines(recorded_steps(run)[1]))
    assert len(rollouts) == 20
    groups = np.array([rollout["prompt_id"] for rollout in rollouts])
    rewards = np.array([rollout["reward"] for rollout in rollouts])
    centred = rewards - np.array([rewards[groups == group].mean() for group in groups])
    advantages = [np.mean(rollout["advantage"]) for rollout in rollouts]  # of one row or of each token
    np.testing.assert_allclose(advantages, centred / (rewards.std(ddof=1) + 1e-6), rtol=1e-5, atol=1e-8)
    assert household.members_after(10) == {}


@pytest.mark.full
def test_a_package_that_was_written_for_version_0_2_0_is_sound_and_trains_with_a_message(
    folder: Path, household, warm_mmrl: Callable[..., Any], tmp_path: Path
) -> None:
    source = shutil.copytree(ROOT / "tests" / "old_package", tmp_path / "source")  # pip writes into it
    site = install([source], tmp_path)
    names = {"algorithm": "old_ppo", "reward": "old_length", "environment": "old_echo", "monitor": "old_empty"}
    words = [f"{kind}:{name}" for kind, name in names.items()]
    found = household.run("plugins", "--json", "--check", *words, folder=site, PYTHONPATH=path_with(site))
    assert {row["name"]: row["status"] for row in json.loads(found.stdout)} == dict.fromkeys(names.values(), "ok")
    config: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())
    config["data"]["train"] = {"name": "old_sums"}
    config["environment"] |= {"name": "old_echo", "weights": {}}
    config |= {"rewards": [{"name": "old_length"}], "algorithm": {"name": "old_ppo"}}
    config |= {"monitors": [{"name": "old_empty"}], "trackers": [{"name": "old_lines"}]}
    config["trainer"]["run_dir"] = str(tmp_path / "run")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    result = warm_mmrl("train", "config.yaml", folder=tmp_path, site=site)
    assert result.returncode == 0, result.stderr
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["policy/grad_norm"] > 0 and 0 < metrics["reward/mean"] < 1 and metrics["old/gap"] < 1e-5
    assert metrics["loss/distance"] >= 0 and metrics["monitor/old_empty/empty"] == 0
    assert (tmp_path / "run" / "lines.txt").read_text().endswith(f"1 {metrics['reward/mean']}\n")
    for old, new in (("Credit(values=...)", "Credit(advantages=...)"), ("mmrl.media", "mmrl.data.images")):
        assert f"{old} is now {new}; the old name goes with the next version" in result.stderr


@pytest.mark.slow
def test_a_package_is_installed_beside_mmrl_in_an_environment_of_its_own_and_uninstalled(tmp_path: Path) -> None:
    """A fresh venv with two wheels and pip; what mmrl itself requires comes from this environment."""
    copied = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    for name in ("mmrl", "plugins", "datasets"):
        shutil.copytree(ROOT / name, tmp_path / "mmrl" / name, ignore=copied)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "mmrl" / name)
    shutil.copytree(EXAMPLE, tmp_path / "example", ignore=copied)
    wheels = build([tmp_path / "mmrl", tmp_path / "example"], tmp_path)
    venv.create(tmp_path / "venv", with_pip=True)

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [tmp_path / "venv" / "bin" / "python", *words]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert run("-m", "pip", "install", *OFFLINE, *wheels).returncode == 0
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "required.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    assert str(site) in run("-c", "import mmrl; print(mmrl.__file__)").stdout
    ours = ["algorithm:lite_ppo", "reward:repetition", "environment:calculator"]
    found = run("-m", "mmrl", "plugins", "--json", "--check", *ours, "algorithm:grpo")
    assert [row["status"] for row in json.loads(found.stdout)] == ["ok"] * 4, found
    assert run("-m", "pip", "uninstall", "-qq", "--yes", "mmrl-lite-ppo").returncode == 0
    gone = run("-m", "mmrl", "plugins", "--check", *ours)
    assert gone.returncode == 4 and "no installed package has an algorithm plugin called 'lite_ppo'" in gone.stderr
    assert run("-m", "mmrl", "plugins", "--check", "algorithm:grpo").returncode == 0
