import pytest

from mmrl.config.plugin_specs import EnvironmentSpec
from tests.rollout.episodes.games import GAME


@pytest.fixture(scope="session")
def games(tmp_path_factory):
    path = tmp_path_factory.mktemp("games") / "games.py"
    path.write_text(GAME)
    return path


@pytest.fixture(scope="session")
def game(games):
    """The spec of an environment of ``games.py``."""
    return lambda name="Game", **fields: EnvironmentSpec(**{"name": f"{games}:{name}", "workers": 1, **fields})
