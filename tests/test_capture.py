"""Functions and classes of scripts and notebooks become files that other processes import."""

from __future__ import annotations

import linecache
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mmrl.capture import reference
from mmrl.config import PluginSpec, RewardSpec
from mmrl.errors import ConfigError
from mmrl.registry import create

Define = Callable[..., Any]


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Define]:
    """Runs code as a notebook's cells are run, one after another in ``__main__``; answers what it calls ``name``."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    cells = []

    def run(code: str, name: str = "f") -> Any:
        file = f"<ipython-input-{len(cells)}-{id(main)}>"
        cells.append(file)
        linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
        exec(compile(code, file, "exec", dont_inherit=True), vars(main))
        return vars(main).get(name)

    yield run
    for file in cells:
        del linecache.cache[file]


def test_a_cells_function_comes_with_all_that_it_names(cell: Define, tmp_path: Path) -> None:
    cell("import os.path, re\nimport numpy as np\nfrom math import sqrt as root\nfrom collections.abc import Sequence")
    cell("BASE = 2\nTABLE = {'a': [1, None]}\nWORDS = {'b', 'a'}\nPATTERN = re.compile('(b+)', re.I)")
    cell("class Counter:\n    step = BASE\n    def add(self, n):\n        return n + self.step\n", "Counter")
    cell("def double(x: float) -> float:\n    return BASE * x\n", "double")
    function = cell(
        "def f(rollouts: Sequence[str], scale: float = 1.0):\n"
        "    assert 'b' in WORDS\n"
        "    bs = [len(PATTERN.findall(os.path.basename(each))) for each in rollouts]\n"
        "    return [scale * double(root(np.float64(Counter().add(n) + TABLE['a'][0]))) for n in bs]\n"
    )
    name = reference("reward", function, tmp_path)
    assert name.startswith(f"{tmp_path}/f-") and name.endswith(".py:f")
    reward = create("reward", RewardSpec(name=name, scale=10))
    assert reward.score(["aBba", "a"]) == pytest.approx([20 * math.sqrt(4), 20 * math.sqrt(3)])
    source = Path(name[: -len(":f")]).read_text()
    assert "WORDS = set(['a', 'b'])" in source
    assert reference("reward", function, tmp_path) == name
    changed = cell("def f(rollouts):\n    return [0.0 for each in rollouts]\n")
    assert reference("reward", changed, tmp_path) != name


def test_a_cells_class_comes_with_its_bases_and_options(cell: Define, tmp_path: Path) -> None:
    cell("from mmrl import PluginConfig, Reward")
    cell("class Base(Reward):\n    def value(self, text):\n        return len(text) * self.config.per_letter\n", "Base")
    cell("class Options(PluginConfig):\n    per_letter: float = 3.0\n")
    cell("class Options(PluginConfig):\n    per_letter: float = 1.0\n")
    cls = cell(
        "class Longest(Base):\n"
        "    class Config(Options): ...\n"
        "    def score_one(self, rollout):\n"
        "        return super().value(rollout)\n",
        "Longest",
    )
    name = reference("reward", cls, tmp_path)
    assert create("reward", RewardSpec(name=name, per_letter=2)).score_one("abc") == 6
    assert create("reward", RewardSpec(name=name)).score_one("abc") == 3


def test_postponed_annotations_stay_so(cell: Define, tmp_path: Path) -> None:
    cell("import numpy as np")
    function = cell(
        "from __future__ import annotations\ndef f(rollouts: list[Any], k: np.ndarray | None = None): ...\n"
    )
    with pytest.raises(ConfigError, match="it names Any, which is not defined"):
        reference("reward", function, tmp_path)
    cell("from typing import Any")
    assert Path(reference("reward", function, tmp_path)[:-2]).read_text().startswith("from __future__ import annot")


def test_an_installed_plugin_is_called_by_its_name_and_one_of_a_module_by_that(tmp_path: Path) -> None:
    from mmrl_algorithms.grpo import GRPO

    assert reference("algorithm", GRPO, tmp_path) == "grpo"
    assert reference("algorithm", "grpo", tmp_path) == "grpo"
    assert reference("reward", GRPO, tmp_path) == "import:mmrl_algorithms.grpo:GRPO"


def test_what_a_file_has_that_is_no_importable_module_is_called_by_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def f(rollouts):\n    return [1.0 for each in rollouts]\n")
    module = ModuleType("loaded_by_hand")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "loaded_by_hand", module)
    exec(compile(path.read_text(), path, "exec"), vars(module))
    name = reference("reward", vars(module)["f"], tmp_path)
    assert name == f"{path}:f"
    assert create("reward", PluginSpec(name=name)).score([1]) == [1.0]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("f = lambda rollouts: [1.0]", "a lambda has no name"),
        (
            "def make(scale):\n    def f(rollouts): return [scale]\n    return f\nf = make(2)",
            "uses scale of the function",
        ),
        ("model = object()\ndef f(rollouts): return [model]", "it uses model, a live object of this process: object"),
        ("def f(rollouts): return [missing]", "it names missing, which is not defined"),
        ("import __main__ as me\ndef f(rollouts): return [me.x]", "module __main__, which no other process can import"),
        (
            "import functools\ndef f(rollouts): return [1]\ndef wrap(g):\n    @functools.wraps(g)\n"
            "    def inner(x): return g(x)\n    return inner\ng = f\nf = wrap(f)",
            "f is wrapped in another function, which its source does not show",
        ),
        ("exec('def f(rollouts): return [1]')", "the source of f cannot be found"),
        ("key = 'sk-0123456789abcdefghij'\ndef f(rollouts): return [key]", "its source holds a secret"),
        ("import functools\nf = functools.partial(print, 1)", "partial functools.partial(.*) is no function or class"),
        ("f = print", "builtin_function_or_method .* is no function or class"),
        ("x = list(range(10**5))\ndef f(rollouts): return x", "it uses x, a live object"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(cell: Define, tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        reference("reward", cell(code), tmp_path / "given")
    assert caught.value.where == "reward given to mmrl.train"
    assert caught.value.remedy
    assert not (tmp_path / "given").exists()


def test_decorators_come_too_and_the_wrapped_function_is_the_one_that_counts(cell: Define, tmp_path: Path) -> None:
    cell(
        "import functools\n"
        "def doubled(function):\n"
        "    @functools.wraps(function)\n"
        "    def inner(rollouts):\n"
        "        return [2 * each for each in function(rollouts)]\n"
        "    return inner\n",
        "doubled",
    )
    function = cell("@doubled\ndef f(rollouts):\n    return [1.0 for each in rollouts]\n")
    assert create("reward", RewardSpec(name=reference("reward", function, tmp_path))).score([0, 0]) == [2.0, 2.0]
