"""What holds for the repository as a whole: style, types, dependency rules, and what the wheel carries."""

from __future__ import annotations

import ast
import io
import re
import shutil
import subprocess
import sys
import tokenize
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = ("mmrl", "plugins", "datasets")
TEMPLATE = Path("mmrl/plugin_template")
HEAVY = {"PIL", "datasets", "deepspeed", "math_verify", "pyarrow", "ray", "sklearn", "swanlab", "tensorboard", "torch"}
HEAVY |= {"transformers", "vllm"}
COMMON_WORDS = {"exact", "format", "length", "math", "numeric", "overlong", "relaxed", "table"}
CORE_WORDS = {"choice", "code", "count", "http", "model"}


def run(*command: str, cwd: Path = ROOT) -> str:
    """The output of a command, which fails the test if the command fails."""
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def visible_files() -> list[Path]:
    """Every file of the repository, relative to its root: tracked, or new and not ignored."""
    listing = run("git", "ls-files", "--cached", "--others", "--exclude-standard")
    return [path for path in map(Path, listing.splitlines()) if (ROOT / path).exists()]


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def plugin_names() -> set[str]:
    groups = PYPROJECT["project"]["entry-points"].values()
    return {name for group in groups for name in group}


def test_ruff_finds_nothing() -> None:
    run(sys.executable, "-m", "ruff", "check", ".")


def test_everything_is_formatted() -> None:
    run(sys.executable, "-m", "ruff", "format", "--check", ".")


def test_types_are_sound() -> None:
    run(sys.executable, "-m", "mypy")


def test_imports_keep_to_the_contracts() -> None:
    run(str(Path(sys.executable).with_name("lint-imports")))


@pytest.mark.parametrize("path", modules("mmrl"), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_names_no_first_party_plugin(path: Path) -> None:
    assert list(named_plugins(path.read_text(), plugin_names())) == []


def named_plugins(source: str, names: set[str]) -> Iterator[str]:
    """Where source code speaks of a plugin: any use of its name.

    Of a common word as a string of its own, and of a word that the core has for something else only as a ``name``.
    """
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if words := set(re.findall(r"[a-z0-9]+", token.string.lower())) & (names - COMMON_WORDS - CORE_WORDS):
            yield f"line {token.start[0]}: {words}"
    common, core = ("|".join(names & words) or "(?!)" for words in (COMMON_WORDS, CORE_WORDS))
    pattern = re.compile(rf"^({common})$|\bname\W{{1,4}}({common}|{core})\b")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and pattern.search(node.value):
            yield f"line {node.lineno}: {node.value!r}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import math\nx = '{}'.format(1)\n'an exact table of numbers'", 0),
        ("if name == 'math': pass", 1),
        ("text = 'rewards: [{name: exact}]'", 1),
        ("section['model'] = count", 0),
        ("text = 'rewards: [{name: model}]'", 1),
        ("use_grpo = True  # GRPO", 2),
        ('"""As in TensorBoard."""', 1),
    ],
)
def test_the_search_for_plugin_names_tells_them_from_common_words(source: str, found: int) -> None:
    assert len(list(named_plugins(source, plugin_names()))) == found


@pytest.mark.parametrize("path", modules(*SOURCES), ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_packages_are_imported_inside_functions(path: Path) -> None:
    numeric = any(path.is_relative_to(ROOT / folder) for folder in ("mmrl/ops", "mmrl/engine"))
    allowed = {"torch"} if numeric else set()
    assert top_level_imports(path) & HEAVY <= allowed


def top_level_imports(path: Path) -> set[str]:
    """Packages that importing a module imports; those under ``if TYPE_CHECKING`` are not."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_one_wheel_holds_every_package(tmp_path: Path) -> None:
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    for path in visible_files():
        if path.parts[0] in {*SOURCES, "pyproject.toml", "README.md", "LICENSE"}:
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, source / path)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-qq"]
    run(*command, "--wheel-dir", str(wheels), str(source))
    (wheel,) = wheels.iterdir()
    carried = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {path for path in visible_files() if path.parts[0] in SOURCES}
    written = {path.as_posix() for path in sources if path.suffix not in {".md", ".svg"} or TEMPLATE in path.parents}
    assert carried == {re.sub(r"^(plugins|datasets)/", "", path) for path in written}


def test_the_top_level_stays_small() -> None:
    top = {path.parts[0] for path in visible_files() if not path.parts[0].startswith(".")}
    assert top == {"pyproject.toml", "README.md", "LICENSE", "mmrl", "plugins", "datasets", "examples", "tests"}


@pytest.mark.parametrize("folder", ["plugins", "datasets"])
def test_source_roots_are_no_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_datasets_is_the_one_of_hugging_face_even_in_the_repository_root() -> None:
    code = "import importlib.util; print(importlib.util.find_spec('datasets').origin)"
    origin = Path(run(sys.executable, "-c", code).strip())
    assert origin.name == "__init__.py" and not origin.is_relative_to(ROOT / "datasets")
