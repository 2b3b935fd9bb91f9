"""``examples/methods``: installed with pip, its plugins keep the rules of their kinds, and its own tests pass."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "methods"
PUBLIC = {"errors", "interfaces", "ops", "policy_gradient", "score_head", "types"}
"""What a package of plugins may import of mmrl."""
OF_DATA = {"chat_messages", "hub", "images", "templates"}
"""Modules of ``mmrl.data`` that it may import too."""


def python(*words: str | Path, **environment: str) -> str:
    """The output of Python with these arguments, which fails the test if it fails."""
    env = os.environ | environment
    done = subprocess.run([sys.executable, *map(str, words)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def entry_points() -> dict[str, list[str]]:
    """The names of the package's plugins by group, as they stand in ``pyproject.toml``."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    return {group: list(names) for group, names in project["entry-points"].items()}


def plugins() -> list[tuple[str, str]]:
    """Their kinds and names."""
    kinds = {group.removeprefix("mmrl.").removesuffix("s"): names for group, names in entry_points().items()}
    return [(kind, name) for kind, names in kinds.items() for name in names]


def own_tests(plugin: str) -> str:
    return (PACKAGE / "tests" / f"test_{plugin}.py").read_text()


def table() -> list[str]:
    """The first cells of the table of methods in the README, whose rows have six."""
    rows = re.findall(r"^\|(.*)\|$", (PACKAGE / "README.md").read_text(), re.MULTILINE)
    cells = [row.split("|") for row in rows]
    return [name for first, *others in cells if len(others) == 5 for name in re.findall(r"`(\w+)`", first)]


def test_every_plugin_has_a_row_a_file_and_a_test_of_its_kinds_rules_and_each_is_sorted() -> None:
    assert all(group == sorted(group) for group in entry_points().values())
    assert sorted(table()) == sorted(name for _, name in plugins())
    for kind, name in plugins():
        assert (PACKAGE / "src" / "mmrl_methods" / f"{name}.py").exists(), name
        assert f'    check_{kind}("{name}"' in own_tests(name), name


def test_it_imports_of_mmrl_what_anyone_may() -> None:
    for path in (PACKAGE / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            imported = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for package, *rest in (name.split(".") for name in imported):
                assert package == "mmrl_methods" or not package.startswith("mmrl_"), (path.name, package)
                if package == "mmrl":
                    public = (rest[:1] == ["data"] and rest[1] in OF_DATA) or rest[0] in PUBLIC
                    assert public, (path.name, rest)


@pytest.mark.full
def test_installed_with_pip_its_plugins_keep_the_rules_and_its_tests_pass(tmp_path: Path) -> None:
    """The command tries the plugins of which no test says that they keep the rules with their defaults."""
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "-qq", "--disable-pip-version-check"]
    python("-m", "pip", "install", *offline, "--target", site, source)
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [f"{kind}:{name}" for kind, name in plugins() if f'    check_{kind}("{name}")' not in own_tests(name)]
    assert {kind for kind, _ in plugins()} == {word.partition(":")[0] for word in words} and "reward:rbr" in words
    rows = json.loads(python("-m", "mmrl", "plugins", "--json", "--check", *words, PYTHONPATH=path))
    assert [f"{row['kind']}:{row['name']}" for row in rows] == words
    for row in rows:
        needs_options = row["note"].startswith("not checked, as it has no default for")  # its own tests check it
        assert row["status"] == ("loaded" if needs_options else "ok"), row
        assert needs_options or not row["note"], row
    assert {row["distribution"] for row in rows} == {"mmrl-methods"}
    shutil.rmtree(source / "src")  # the tests are those of what is installed
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", source]
    found = python("-m", "pytest", *options, source / "tests", PYTHONPATH=path)
    assert re.search(r"^\d+ passed", found, re.MULTILINE), found
