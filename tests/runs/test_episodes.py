"""A run's environment before anything starts: what plugins, prompts and the sampler are told of it."""

import re
from types import SimpleNamespace

import pytest

from mmrl.config.load import from_mapping
from mmrl.errors import ConfigError
from mmrl.rollout.episodes.player import EpisodePlayer
from mmrl.rollout.episodes.process import EnvironmentFacts
from mmrl.runs.episodes import playing
from mmrl.runs.run_warnings import config_warnings, run_facts
from mmrl.runs.setup import RunSetup

FACTS = EnvironmentFacts(({"type": "function", "function": {"name": "look"}},), ("length",), 1.0)


@pytest.fixture
def setup(tmp_path, monkeypatch, models):
    """A run with an environment whose facts are known."""
    monkeypatch.setattr("mmrl.runs.environment.environment_facts", lambda spec: FACTS)

    def build(family="qwen2_5_vl", **sections):
        config = {
            "model": {"path": str(models(family))},
            "data": {"train": {"name": "table", "path": "none"}, "max_prompt_tokens": 100},
            "algorithm": {"name": "grpo"},
            "environment": {"name": "any", "max_turns": 3, "max_observation_tokens": 50, "max_images": 5, "workers": 1},
            "sampler": {"group_size": 2, "max_new_tokens": 20},
            "trainer": {"steps": 1, "prompts_per_step": 2},
        }
        return RunSetup(from_mapping(config | sections), tmp_path)

    return build


def test_an_environment_is_enough_to_learn_from(setup):
    made = setup()
    assert made.algorithm.needs() is not None
    assert (facts := run_facts(made)).rewards == ("environment", "length") and facts.accuracy == "environment"
    with pytest.raises(ConfigError, match="needs a reward"):
        _ = setup(environment=None).algorithm


def test_a_run_is_told_that_eager_answers_do_not_repeat(setup):
    options = {"name": "python", "workers": 1}
    (told,) = config_warnings(setup(environment={**options, "scheduling": "eager"}))
    assert told.startswith("environment.scheduling: eager") and "does not repeat to the bit" in told
    assert config_warnings(setup(environment=options)) == []


@pytest.mark.parametrize(("family", "most"), [("qwen2_5_vl", 2 + 5), ("qwen2", 0)])
def test_the_sampler_reserves_memory_for_images_of_prompts_and_of_observations(setup, family, most):
    """The ranks count from the spec of the run's setup; that of an evaluation holds its own prompts'."""
    made = setup(family)
    made.prompts, made.evaluations = SimpleNamespace(max_images=2 if most else 0), {}
    assert made.engine_spec(made.algorithm).max_sequence_images == most


@pytest.mark.parametrize(
    ("allowed", "most", "remedy"),
    [
        (100, 0, r"set data.max_prompt_tokens: 60$"),
        (100, 40, r"set data.max_prompt_tokens: 2\d and environment.max_tokens: \d+ or less$"),
        (10**7, 10**6, r"data.max_prompt_tokens: 2\d and environment.max_tokens"),
    ],
)
def test_an_episode_must_fit_the_model(setup, tmp_path, monkeypatch, allowed, most, remedy):
    """The error names the number to change, and the longest prompt."""
    (tmp_path / "rows.jsonl").write_text('{"problem": "what is 1+1?", "answer": "2"}\n' * 3)
    monkeypatch.setattr("mmrl.runs.setup.RunSetup.encoder", SimpleNamespace(num_tokens=lambda prompt: 29))
    data = {"train": {"name": "table", "path": str(tmp_path / "rows.jsonl")}, "max_prompt_tokens": allowed}
    reads = setup().folder.max_tokens
    follows = reads - 60 if most == 0 else reads - 29 + most
    spec = {"name": "any", "max_turns": 3, "max_tokens": follows, "workers": 1}
    with pytest.raises(ConfigError, match=f"prompts and episodes may take {allowed + follows} tokens") as found:
        _ = setup(environment=spec, data=data).prompts
    assert "the longest prompt of data.train has 29 tokens" in found.value.where
    assert re.search(remedy, found.value.remedy), found.value.remedy


def test_prompts_tell_of_tools_and_keep_images_for_the_environment(setup, monkeypatch):
    seen, proven = {}, []

    def encoder(folder, media, **options):
        seen.update(options)
        return SimpleNamespace(check_turns=lambda *asked, **named: proven.append(asked))

    monkeypatch.setattr("mmrl.engine.text.encoding.Encoder", encoder)
    _ = setup().encoder
    assert len(proven) == 1
    assert seen == {
        "tools": FACTS.tools, "observation_role": "auto", "tool_prompt": "auto", "keep_thoughts": False,
        "keeps_images": True,
    }  # fmt: skip


def test_nothing_is_played_without_an_environment(setup, tmp_path):
    with playing(setup(environment=None, rewards=[{"name": "any"}])) as player:
        assert player is None
    made = setup()
    made.encoder = made.media = None
    with playing(made) as player:
        assert isinstance(player, EpisodePlayer) and player.components == ("length",)
    with pytest.raises(RuntimeError, match="closed"):
        player.pool.open(None, 1)
