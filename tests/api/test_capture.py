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

from mmrl.api.capture import reference
from mmrl.config.plugin_specs import PluginSpec, RewardSpec
from mmrl.errors import ConfigError
from mmrl.plugin_host.registry import create

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
        ("x = 10**5000\ndef f(rollouts): return x", "it uses x, a live object of this process: int <int object>"),
        ("x = {float('inf'), 1.0}\ndef f(rollouts): return x", "it uses x, a live object of this process: set"),
        ("k = 1\ndef f(rollouts, k=k): ...\nk = 5", "its source, run again, does not .* same: in f, 1 has become 5"),
        ("k = 1\ndef f(rollouts, *, k=k): ...\nk = 'x'", "'int' has become 'str'"),
        ("k = 1\ndef f(rollouts, k=[k, float('nan')]): ...\nk = 2", "1 has become 2"),
        (
            "fs = []\nfor t in (.1, .9):\n    def f(rollouts, t=t): return [t]\n    fs.append(f)\nf = fs[0]",
            "0.1 has become 0.9",
        ),
        (
            "k = 99\ndef make(k):\n    def f(rollouts, k=k): return [k]\n    return f\nf = make(5)",
            "5 has become 99",
        ),
        (
            "import functools\ndef times(n):\n    def wrap(g):\n        @functools.wraps(g)\n"
            "        def inner(x): return n * g(x)\n        return inner\n    return wrap\n"
            "n = 2\n@times(n)\ndef f(rollouts): return 1\nn = 3",
            "2 has become 3",
        ),
        ("k = 1\nclass f:\n    k = k\n    def score(self): ...\nk = 2", "in f, 1 has become 2"),
        (
            "import pydantic\nk = 1\nclass f(pydantic.BaseModel):\n    n: int = k\n    def score(self): ...\nk = 2",
            "default=1.* has become .*default=2",
        ),
        (
            "class B:\n    def g(self): return 1\nclass f(B):\n    def score(self): ...\n"
            "class B:\n    def g(self): return -1\n",
            "B.g has been defined again",
        ),
        ("def g(): return a\ndef f(rollouts, g=g): ...\ndef g(): return b\na = b = 1", "g has been defined again"),
        ("def f(rollouts): return f.calls\nf.calls = 1", "only one of the two has calls"),
        ("n = 1\ndef f(rollouts, k=1 // n): ...\nn = 0", r"does not run \(ZeroDivisionError: "),
        (
            "class P:\n    def twice(self): return make()\ndef make(p=P): return p\n"
            "def f(rollouts): return P().twice()",
            r"does not run \(NameError: name 'P' is not defined\)",
        ),
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


def scores(function: Any, folder: Path) -> Any:
    """Call a captured function of rollouts."""
    return create("reward", RewardSpec(name=reference("reward", function, folder))).score([0])


def test_two_that_name_each_other_in_annotations_come_both(cell: Define, tmp_path: Path) -> None:
    cell("class P:\n    def twice(self): return make(2).n\n")
    cell("def make(n) -> P:\n    p = P()\n    p.n = n\n    return p\n")
    assert scores(cell("def f(rollouts): return [P().twice()]"), tmp_path) == [2.0]


def test_a_class_attribute_may_take_the_value_of_a_name_that_it_shares(cell: Define, tmp_path: Path) -> None:
    cell("import math\nLIM = 3\ndef half(x): return x / 2\n")
    cell("class C:\n    LIM = LIM\n    half = staticmethod(half)\n    math = math\n")
    assert scores(cell("def f(rollouts): return [C.half(C.LIM) + C.math.floor(1.5)]"), tmp_path) == [2.5]


def test_names_in_quoted_annotations_are_imported(cell: Define, tmp_path: Path) -> None:
    cell("from mmrl import Rollout\nfrom typing import Literal\nmodel = object()")
    function = cell("def f(rollouts: 'list[Rollout]', how: Literal['model', 'a b'] = 'model') -> 'Missing': ...")
    assert "import Rollout" in Path(reference("reward", function, tmp_path)[:-2]).read_text()


def test_the_class_that_is_used_is_the_one_that_comes(cell: Define, tmp_path: Path) -> None:
    cell("class Q: X = 1")
    cell("class Z:\n    class Q: X = 2")
    assert scores(cell("def f(rollouts): return [Q.X]"), tmp_path) == [1.0]
    cell("Q = Z.Q")
    assert scores(cell("def f(rollouts): return [Q.X]"), tmp_path) == [2.0]
    with pytest.raises(ZeroDivisionError):
        cell("1 / 0\nclass Z:\n    class Q: X = 3")
    with pytest.raises(ConfigError, match="in Q, 2 has become 3"):
        scores(cell("def f(rollouts): return [Q.X]"), tmp_path)


def test_an_indented_definition_keeps_its_texts(cell: Define, tmp_path: Path) -> None:
    code = "if True:\n    def f(rollouts):\n        text = '''a\n    b\nc'''\n        return [len(text)]\n"
    assert scores(cell(code), tmp_path) == [9.0]


def test_a_default_may_be_an_object_of_a_class_of_the_same_function(cell: Define, tmp_path: Path) -> None:
    code = "def make():\n    class Q: ...\n    def f(rollouts, q=Q()): return [1]\n    return Q, f\nQ, f = make()"
    assert scores(cell(code), tmp_path) == [1.0]


def test_a_set_is_the_same_in_any_order(cell: Define, tmp_path: Path) -> None:
    cell("EIGHTS = {8, 0}")  # {0, 8} is shown in another order: both have the same place in the table
    assert scores(cell("def f(rollouts): return [len(EIGHTS)]"), tmp_path) == [2.0]


def test_what_is_the_same_when_run_again_passes(cell: Define, tmp_path: Path) -> None:
    cell("import dataclasses, enum, functools\nfrom mmrl import PluginConfig, Reward\nSTEPS = (1, 2)")
    cell("class Kind(enum.Enum):\n    A = 'a'\n    B = 'b'\n")
    cell(
        "@dataclasses.dataclass(frozen=True)\nclass Pair:\n"
        "    kind: Kind = Kind.A\n    n: list = dataclasses.field(default_factory=list)\n"
    )
    cell("@functools.lru_cache\ndef slow(n, among=frozenset({1, 2}), nan=float('nan'), where=object()): return n\n")
    cls = cell(
        "class Own(Reward):\n"
        "    class Config(PluginConfig):\n"
        "        kind: Kind | None = Kind.B\n"
        "        n: int = 1\n"
        "    pair = Pair()\n"
        "    part = functools.partial(slow, STEPS[0])\n"
        "    @functools.cached_property\n"
        "    def once(self): return 1\n"
        "    @property\n"
        "    def twice(self, k=STEPS): return super().__init__\n"
        "    def score_one(self, rollout): return self.part() + self.once\n",
        "Own",
    )
    assert create("reward", RewardSpec(name=reference("reward", cls, tmp_path), n=2)).score_one(0) == 2
