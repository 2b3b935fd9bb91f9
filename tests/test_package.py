"""What holds for the repository as a whole: style, types, dependency rules, and what the wheel carries."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tokenize
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import mmrl
from mmrl.commands.help.pages import PAGES

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PLUGINS = PYPROJECT["project"]["entry-points"]
PLUGIN_PACKAGES = {target.partition(".")[0] for group in PLUGINS.values() for target in group.values()}
ORIGINS = "import importlib.util as u, sys; print(*[u.find_spec(name).origin for name in sys.argv[1:]], sep='\\n')"
"""A program that says where packages are."""
SOURCES = ("mmrl", "plugins", "datasets")
TEMPLATE = Path("mmrl/plugin_host/template")
HEAVY = {"PIL", "datasets", "deepspeed", "math_verify", "pyarrow", "ray", "sklearn", "swanlab", "tensorboard", "torch"}
HEAVY |= {"transformers", "vllm"}
COLUMNAR = {f"mmrl.rollout.records.{name}" for name in ("columns", "schema", "writing")}
"""Modules that are made of pyarrow's types."""
SLOW_TO_COLLECT = {
    "datasets", "deepspeed", "math_verify", "mlflow", "nbclient", "peft", "ray", "sklearn", "swanlab", "sympy",
    "torch.nn.attention", "torch.utils", "torchvision", "transformers", "vllm", "wandb",
}  # fmt: skip
"""Packages that take seconds to import, beside torch itself, which every worker needs anyway."""
COMMON_WORDS = {"exact", "format", "length", "math", "numeric", "overlong", "ppo", "relaxed", "table"}
CORE_WORDS = {"choice", "class", "code", "count", "http", "judge", "model", "python", "recorded", "tools"}


def run(*command: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """The output of a command, which fails the test if the command fails."""
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def visible_files() -> list[Path]:
    """Every file of the repository, relative to its root: tracked, or new and not ignored."""
    listing = run("git", "ls-files", "--cached", "--others", "--exclude-standard")
    return [path for path in map(Path, listing.splitlines()) if (ROOT / path).exists()]


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def plugin_names() -> set[str]:
    return {name for group in PLUGINS.values() for name in group}


def test_ruff_finds_nothing() -> None:
    run(sys.executable, "-m", "ruff", "check", ".")


def test_everything_is_formatted() -> None:
    run(sys.executable, "-m", "ruff", "format", "--check", ".")


def test_types_are_sound() -> None:
    run(sys.executable, "-m", "mypy")


def test_imports_keep_to_the_contracts() -> None:
    run(str(Path(sys.executable).with_name("lint-imports")))


def test_the_core_names_no_first_party_plugin() -> None:
    names = plugin_names()
    found = {str(path.relative_to(ROOT)): list(named_plugins(path.read_text(), names)) for path in modules("mmrl")}
    assert {path: lines for path, lines in found.items() if lines} == {}


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


def test_heavy_packages_are_imported_inside_functions() -> None:
    found = {}
    for path in modules(*SOURCES):
        numeric = any(path.is_relative_to(ROOT / folder) for folder in ("mmrl/ops", "mmrl/engine"))
        names = top_level_imports(path)
        packages = {name.partition(".")[0] for name in names} & HEAVY
        # What is in columns is imported inside functions, as the package itself elsewhere.
        is_columnar = ".".join(path.relative_to(ROOT).with_suffix("").parts) in COLUMNAR
        packages = packages - {"pyarrow"} if is_columnar else packages | names & COLUMNAR
        found[str(path.relative_to(ROOT))] = packages - ({"torch"} if numeric else set())
    assert {path: packages for path, packages in found.items() if packages} == {}


def test_tests_import_what_is_slow_to_import_inside_functions() -> None:
    """Each worker imports every test module, also of the tests that it does not run."""
    files = [path for path in modules("tests") if path.name == "conftest.py" or path.name.startswith("test_")]
    found = {path: {n for n in top_level_imports(path) if within(n, SLOW_TO_COLLECT)} for path in files}
    assert {str(path.relative_to(ROOT)): names for path, names in found.items() if names} == {}


def within(module: str, packages: set[str]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def top_level_imports(path: Path) -> set[str]:
    """Modules that importing a module imports; those under ``if TYPE_CHECKING`` are not."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_source_is_ignored() -> None:
    """A folder of sources whose name .gitignore lists would miss its new files, and the wheel all of them."""
    ignored = run("git", "ls-files", "--others", "--ignored", "--exclude-standard", "mmrl", *SOURCES[1:], "tests")
    assert [name for name in ignored.splitlines() if name.endswith(".py")] == []
    lacking = {path.parent for path in modules("mmrl") if TEMPLATE not in path.relative_to(ROOT).parents}
    assert [folder for folder in lacking if not (folder / "__init__.py").exists()] == []


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist, built without a network from the files that are tracked or to be."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for path in visible_files():
        if path.parts[0] in {*SOURCES, "pyproject.toml", "README.md", "LICENSE"} or path.match("examples/*.md"):
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, source / path)
    pip("wheel", "--wheel-dir", str(built), str(source))
    run(sys.executable, "-c", f"from hatchling.build import build_sdist; build_sdist({str(built)!r})", cwd=source)
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def pip(command: str, *words: str) -> None:
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "-qq"]
    run(sys.executable, "-m", "pip", command, *options, *words)


@pytest.mark.full
def test_one_wheel_holds_every_package(packages: dict[str, Path]) -> None:
    carried = {name for name in zipfile.ZipFile(packages["wheel"]).namelist() if ".dist-info/" not in name}
    sources = {path for path in visible_files() if path.parts[0] in SOURCES}
    written = {path.as_posix() for path in sources if path.suffix not in {".md", ".svg"} or TEMPLATE in path.parents}
    pages = {f"mmrl/pages/{name}" for name in PAGES}
    assert carried == {re.sub(r"^(plugins|datasets)/", "", path) for path in written} | pages


@pytest.mark.full
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_package_works_without_the_checkout(kind: str, packages: dict[str, Path], tmp_path: Path) -> None:
    """Installed into a folder of its own, and used from another one."""
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    pip("install", "--target", str(site), str(packages[kind]))
    assert {path.name for path in site.glob("*.dist-info")} == {f"mmrl_train-{mmrl.__version__}.dist-info"}
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def python(*words: str) -> str:
        return run(sys.executable, *words, cwd=work, env=environment)

    found = python("-c", ORIGINS, "mmrl", *sorted(PLUGIN_PACKAGES)).splitlines()
    assert len(found) == 7 and all(Path(origin).is_relative_to(site) for origin in found)
    assert python("-m", "mmrl", "--version") == f"mmrl {mmrl.__version__}\n"
    rows = [line.split() for line in python("-m", "mmrl", "plugins").splitlines()]
    assert {row[1] for row in rows if "mmrl-train" in row} == plugin_names()
    found = json.loads(python("-m", "mmrl", "help", "out of memory", "--json"))
    assert found[0]["place"].startswith(f"{site}/mmrl/pages/mmrl/engine/README.md:")
    python("-m", "mmrl", "init", "plugin", "new-rl")
    assert '"mmrl-train"' in (work / "new-rl/pyproject.toml").read_text()


@pytest.mark.full
def test_a_checkout_called_mmrl_works_from_the_folder_that_holds_it(tmp_path: Path) -> None:
    """There ``mmrl/`` could be a namespace package; an editable install puts the checkout itself on the path."""
    (tmp_path / "mmrl").symlink_to(ROOT)
    venv.create(tmp_path / "venv")
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    pip("install", "--target", str(site), "--editable", str(tmp_path / "mmrl"))
    (site / "required.pth").write_text(sysconfig.get_path("purelib"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def python(*words: str) -> str:
        return run(str(tmp_path / "venv/bin/python"), *words, cwd=tmp_path, env=environment)

    assert python("-m", "mmrl", "--version") == f"mmrl {mmrl.__version__}\n"
    packages = ["mmrl", "datasets", *sorted(PLUGIN_PACKAGES)]
    found = [Path(origin).resolve() for origin in python("-c", ORIGINS, *packages).splitlines()]
    required = Path(sysconfig.get_path("purelib"))  # which may lie in the checkout
    own = [path.is_relative_to(ROOT) and not path.is_relative_to(required) for path in found]
    assert own == [name != "datasets" for name in packages]


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
