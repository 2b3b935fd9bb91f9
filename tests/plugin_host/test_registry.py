"""Finding, importing, checking and creating plugins of installed packages and of files."""

import hashlib
import shutil
import sys
from pathlib import Path

import pytest

from mmrl.commands.eval.evaluation import _as_decided
from mmrl.config.load import from_mapping
from mmrl.config.plugin_specs import EnvironmentSpec, PluginSpec, RewardSpec
from mmrl.errors import ConfigError, PluginError
from mmrl.interfaces import API_VERSION, Reward
from mmrl.plugin_host.installed import PluginInfo
from mmrl.plugin_host.registry import (
    create,
    list_plugins,
    locate,
    options_class,
    resolve,
)
from mmrl.plugin_host.used import own_code, used_plugins
from mmrl.system.version import DISTRIBUTION

GOOD = """
from mmrl.interfaces import PluginConfig, Reward

class Length(Reward):
    class Config(PluginConfig):
        scale: float = 1.0

    def score(self, rollouts):
        return [self.config.scale * len(rollout) for rollout in rollouts]
"""


def refusal(name: str, kind: str = "reward") -> str:
    with pytest.raises(PluginError) as caught:
        resolve(kind, name)
    assert caught.value.exit_code == 4
    return str(caught.value)


def test_listing_shows_every_package_and_imports_none(package) -> None:
    module = package("raise RuntimeError('imported')")
    found = list_plugins()
    assert PluginInfo("reward", "length", "thirdparty", "1.2", f"{module}:Length") in found
    assert {info.distribution for info in found} >= {"mmrl-train", "thirdparty"}
    assert module not in sys.modules


def test_a_package_that_comes_or_goes_during_a_process_is_noticed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    before = list_plugins()
    info = tmp_path / "late-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mmrl.monitors]\nlate = late:Late\n")
    assert [str(plugin) for plugin in list_plugins() if plugin not in before] == ["monitor plugin 'late' of late 1.0"]
    shutil.rmtree(info)
    assert list_plugins() == before


def test_a_plugin_is_created_with_its_options(package) -> None:
    package(GOOD)
    reward = create("reward", RewardSpec(name="length", scale=2.0))
    assert isinstance(reward, Reward)
    assert reward.score(["abc", ""]) == [6.0, 0.0]


def test_wrong_options_name_the_plugin_the_key_and_a_suggestion(package) -> None:
    package(GOOD)
    with pytest.raises(ConfigError) as caught:
        create("reward", RewardSpec(name="length", scael=2, scale="x"))
    text = str(caught.value)
    assert "unknown key scael" in text
    assert "did you mean scale?" in text
    assert "reward plugin 'length' of thirdparty 1.2" in text
    assert "scale should be a valid number" in text


def test_an_unknown_name_gets_a_suggestion_and_the_installed_ones(package) -> None:
    package(GOOD)
    text = refusal("lenght")
    assert "no installed package has a reward plugin called 'lenght'" in text
    assert "did you mean length?" in text
    assert "possible:" in text
    assert "`mmrl plugins`" in refusal("zzzzzz")
    assert "did you mean mmrl-train:exact?" in refusal("mmrl:exact")


def test_a_name_of_two_packages_must_be_selected_and_only_when_asked_for(package) -> None:
    package(GOOD, "length = {module}:Length\nother = {module}:Length", "first-package")
    package(GOOD, name="second")
    text = refusal("length")
    assert "first-package 1.2" in text
    assert "second 1.2" in text
    assert "first-package:length" in text
    assert resolve("reward", "other").__module__ == "first_package_module"
    assert resolve("reward", "second:length").__module__ == "second_module"
    assert resolve("reward", "First_Package:length").__module__ == "first_package_module"
    assert "no installed package" in refusal("third:length")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import not_installed_anywhere",
            "cannot be imported: ModuleNotFoundError: No module named 'not_installed_any",
        ),
        ("def f(:", "cannot be imported: SyntaxError"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("x = 1", "cannot be imported: AttributeError"),
        ("class Length: pass", "is no subclass of mmrl.interfaces.Reward"),
        ("Length = 3", "3 is no subclass"),
        (GOOD.replace("score", "scores"), "it lacks score_one, or score"),
        (GOOD + "    groups_per_call = '2'\n", "its groups_per_call is '2'"),
        (GOOD + "    workers = 0\n", "its workers is 0, and no whole number from 1"),
        (GOOD + "    secrets = ('scale',)\n", "secrets names options of its own, and needs workers of its own"),
        (GOOD + "    workers = 1\n    secrets = ('key',)\n", "secrets names options of its own"),
        (GOOD + f"    api_version = {API_VERSION + 1}\n", "upgrade mmrl"),
        (GOOD + f"    api_version = {API_VERSION - 1}\n", "upgrade thirdparty"),
        (
            GOOD.replace("(self, rollouts)", "(self)"),
            "score(self) cannot be called as score(rollouts): too many positional",
        ),
        (GOOD.replace("(self, rollouts)", "(self, rollouts, reference)"), "missing a required argument: 'reference'"),
        (GOOD.replace("    def score", "    score = 3\n    def scores"), "score is no method"),
        (GOOD.replace("scale: float", "weight: float"), "options weight have names that mmrl uses itself"),
        (GOOD.replace("class Config(PluginConfig)", "class Config"), "its Config is no subclass"),
    ],
)
def test_a_plugin_that_does_not_fit_is_named_with_its_package_and_the_cause(package, code: str, message: str) -> None:
    module = package(code)
    text = refusal("length")
    assert "reward plugin 'length' of thirdparty 1.2" in text
    assert message in text
    assert f"{module}:Length" in text


def test_a_static_method_can_be_a_hook(package) -> None:
    package(GOOD.replace("    def score(self, rollouts)", "    @staticmethod\n    def score(rollouts)"))
    assert issubclass(resolve("reward", "length"), Reward)


def test_an_import_error_shows_the_plugins_own_line(package) -> None:
    module = package("\n\n1 / 0\n")
    assert f"{module}.py:3)" in refusal("length")


def test_a_constructor_that_fails_is_a_plugin_error(package) -> None:
    package(GOOD + "    def __init__(self, config):\n        raise KeyError('model')\n")
    with pytest.raises(PluginError, match=r"'length' of thirdparty 1.2 cannot be created: KeyError: 'model'"):
        create("reward", RewardSpec(name="length"))


def test_a_config_whose_validator_crashes_is_a_plugin_error(package) -> None:
    package(GOOD.replace("scale: float = 1.0", "def model_post_init(self, context): {}['x']"))
    with pytest.raises(PluginError, match="its Config failed: KeyError"):
        from_mapping(
            {
                "model": {"path": "m"},
                "data": {"train": {"name": "table", "path": "x"}},
                "rewards": [{"name": "length"}],
                "algorithm": {"name": "sft"},
            },
            options_class=options_class,
        )


def test_used_plugins_are_told_once_each(package) -> None:
    package(GOOD)
    spec = {"name": "table", "path": "x"}
    config = from_mapping(
        {
            "model": {"path": "m"},
            "data": {"train": spec, "eval": spec},
            "rewards": [{"name": "length"}, {"name": "thirdparty:length", "label": "again"}],
            "algorithm": {"name": "sft"},
        }
    )
    assert [(info.kind, info.name, info.distribution) for info in used_plugins(config)] == [
        ("dataset", "table", "mmrl-train"),
        ("reward", "length", "thirdparty"),
        ("algorithm", "sft", "mmrl-train"),
    ]


FUNCTION = """
from __future__ import annotations

def even(rollouts, factor: float = 1.0, *, sign=1):
    return [sign * factor * (len(rollout) % 2 == 0) for rollout in rollouts]
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def write(code: str = FUNCTION) -> str:
        Path("my").mkdir(exist_ok=True)
        Path("my/rewards.py").write_text(code)
        return "my/rewards.py:even"

    return write


def test_a_function_in_a_file_is_a_reward_and_its_arguments_are_options(file) -> None:
    reward = create("reward", RewardSpec(name=file(), factor=3, sign=-1))
    assert reward.score(["ab", "abc"]) == [-3.0, 0.0]


def test_a_file_reward_refuses_options_that_its_function_does_not_take(file) -> None:
    with pytest.raises(ConfigError, match="did you mean factor"):
        create("reward", RewardSpec(name=file(), facter=3))
    with pytest.raises(ConfigError, match="factor should be a valid number"):
        create("reward", RewardSpec(name=file(), factor="x"))


def test_a_file_reward_is_identified_by_what_the_file_holds(file) -> None:
    def version() -> str:
        config = {
            "model": {"path": "m"},
            "data": {"train": {"name": "table"}},
            "rewards": [{"name": name}],
            "algorithm": {"name": "sft"},
        }
        info = next(info for info in used_plugins(from_mapping(config)) if info.kind == "reward")
        assert info.distribution == "file"
        return info.version

    name = file()
    before = version()
    file(FUNCTION + "\n# changed")
    assert version() != before


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def odd(rollouts): ...\ndef evens(rollouts): ...", "did you mean evens?"),
        ("def even(): ...", "cannot be called with one argument, the rollouts"),
        ("def even(*, rollouts): ...", "cannot be called with one argument"),
        ("def even(rollouts, weight=1): ...", "options weight have names that mmrl uses itself"),
        ("def even(rollouts, a: 'Missing' = 1): ...", "NameError"),
        ("even = 3", "the file has no function even"),
        ("import nothing_like_this", "cannot be imported: ModuleNotFoundError"),
        ("1 +", "SyntaxError"),
    ],
)
def test_a_file_without_a_usable_function_is_refused(file, code: str, message: str) -> None:
    text = refusal(file(code))
    assert message in text
    assert "my/rewards.py" in text


def test_a_file_that_is_missing_is_refused_and_so_is_a_function_that_is_to_be_a_class(file) -> None:
    assert "No such file" in refusal("nowhere.py:even")
    assert "is no subclass of mmrl.interfaces.Tracker" in refusal(file(), "tracker")
    assert "the file has no class Even" in refusal(file().replace("even", "Even"), "tracker")


@pytest.fixture
def importable(file, monkeypatch: pytest.MonkeyPatch):
    """``file`` in a folder that modules are imported from."""
    monkeypatch.syspath_prepend(Path.cwd())
    yield file
    for name in [name for name in sys.modules if name.partition(".")[0] == "my"]:
        del sys.modules[name]


RULE = """
from mmrl.interfaces import Aggregation, Algorithm, DatasetLoader, PluginConfig
from mmrl.types import Credit, Message, Prompt

class Rule(Algorithm):
    class Config(PluginConfig):
        scale: float = 1.0

    aggregation = Aggregation("token-mean")

    def credit(self, batch):
        return Credit(self.config.scale * batch.rewards)

    def loss(self, tokens): ...

class Rows(DatasetLoader):
    def load(self):
        return [Prompt("0", (Message("user", "?"),))]
"""


def test_files_that_options_name_are_told_of_and_identified_by_what_they_hold(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_tools.py").write_text("one")
    options = {"tools": ["my_tools.py:crop", "gone.py:f", "package.module:g"], "more": {"reward": "my_tools.py:score"}}
    spec = EnvironmentSpec(name="tools", **options)
    config = from_mapping(
        {
            "model": {"path": "m"},
            "data": {"train": {"name": "table", "path": "x"}},
            "environment": spec.model_dump(),
            "algorithm": {"name": "grpo"},
        }
    )
    told = [(info.name, info.version) for info in used_plugins(config) if info.distribution == "file"]
    version = hashlib.sha256(b"one").hexdigest()[:12]
    assert told == [("my_tools.py:crop", version), ("my_tools.py:score", version)]
    assert own_code("environment", spec) == {"my_tools.py": version}
    before = _as_decided(spec, "environment")
    Path("my_tools.py").write_text("two")
    after = _as_decided(spec, "environment")
    assert after["files"] == own_code("environment", spec) != {"my_tools.py": version}
    assert {**after, "files": before["files"]} == before
    Path("my_rewards.py").write_text("three")
    reward = RewardSpec(name="my_rewards.py:score", table="x")
    assert own_code("reward", reward).keys() == {"my_rewards.py"} and not own_code("reward", RewardSpec(name="exact"))


def test_a_file_or_a_module_has_plugins_of_any_kind(importable) -> None:
    path = Path(importable(RULE)[: -len(":even")])
    algorithm = create("algorithm", PluginSpec(name=f"{path}:Rule", scale=2))
    assert algorithm.config.scale == 2
    assert create("dataset", PluginSpec(name=f"{path}:Rows")).load()[0].id == "0"
    name = "import:my.rewards:Rule"
    assert create("algorithm", PluginSpec(name=name)).config.scale == 1
    info = locate("algorithm", name)
    assert info.version == locate("algorithm", f"{path}:Rule").version
    assert (info.distribution, info.target) == ("file", "my.rewards:Rule")


def test_a_module_is_found_without_importing_it_and_its_function_is_a_reward(importable) -> None:
    importable(FUNCTION.replace("even", "evener"))
    assert locate("reward", "import:my.rewards:evener").version
    assert "my.rewards" not in sys.modules
    reward = create("reward", RewardSpec(name="import:my.rewards:evener", factor=3))
    assert reward.score(["ab"]) == [3.0]
    assert RewardSpec(name="import:my.rewards:evener").metric == "evener"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("import:no_such_module:f", "there is no module no_such_module for the reward"),
        ("import:my.nowhere:f", "set PYTHONPATH to the folder that holds it, or name its file: path/to/file.py:f"),
        ("import:my/rewards:f", "possible: import:package.module:Name"),
        ("import:sys:f", "there is no module sys"),
        ("import:my.broken.x:f", "cannot be imported: ZeroDivisionError"),
    ],
)
def test_a_module_that_cannot_be_found_is_refused(importable, name: str, message: str) -> None:
    importable()
    Path("my/broken").mkdir()
    Path("my/broken/__init__.py").write_text("1 / 0")
    assert message in refusal(name)


@pytest.mark.parametrize("info", [info for info in list_plugins() if info.distribution == DISTRIBUTION], ids=str)
def test_every_first_party_plugin_fits_its_interface(info: PluginInfo) -> None:
    assert resolve(info.kind, info.name).__name__ == info.target.rpartition(":")[2]


def test_options_of_the_same_spec_may_come_as_any_spec(package) -> None:
    package(GOOD)
    assert create("reward", PluginSpec(name="length")).config.scale == 1.0
