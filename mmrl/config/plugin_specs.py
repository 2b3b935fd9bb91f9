"""The entries of the config that name a plugin, such as an algorithm or a reward, with its options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from mmrl.config.base import MAY_CHANGE, Contradiction, Count, Seconds, Section, Text

Kind = Literal["algorithm", "reward", "dataset", "environment", "tracker", "monitor"]
"""The kinds of plugins; the entry-point group of a kind is `mmrl.<kind>s`."""

RewardStyle = Literal["mmrl", "trl", "easyr1", "verl"]
"""Conventions of calling a reward function; see `mmrl.plugin_host.foreign_rewards`."""

UNNAMED = "unnamed_environment"
"""The type of the validation error of an environment whose name neither is there nor follows from its options."""
NONE = "(none)"
"""The name of a plugin that a command does not need, if the config names none."""


EVERY = "all"
"""The name, among monitors, of all that are installed and not named."""


class PluginSpec(Section):
    """A plugin's name and options."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)

    name: Text
    """A name that `mmrl plugins` lists, `distribution:name`, `path/to/file.py:Name`, `import:package.module:Name`."""

    @property
    def options(self) -> dict[str, Any]:
        """The options that the plugin's own ``Config`` validates."""
        return dict(self.model_extra or {})


class DatasetSpec(PluginSpec):
    """A dataset's name and options."""

    label: Text | None = None
    """Its name in `rewards[].sources` and records; by default the plugin's name without distribution."""
    weight: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Its share of the training rows among the datasets that are mixed; null for all of them is by their sizes."""

    @property
    def source(self) -> str:
        """The label, or its default."""
        return self.label or self.name.rpartition(":")[2]


class RewardSpec(PluginSpec):
    """A reward's name and options."""

    name: Text
    """A name that `mmrl plugins` lists, `distribution:name`, `path/to/file.py:name` or `import:package.module:name`."""
    weight: float = 1.0
    """Its factor in the sum of rewards."""
    timeout_s: Annotated[Seconds, MAY_CHANGE] = 30.0
    """Seconds that one rollout (`score_one`) or one group (`score`) may take before it is given up as unscored."""
    sources: Annotated[tuple[Text, ...], Field(min_length=1, strict=False)] | None = None
    """Datasets whose rows it scores; null is all. Rewards with the same label must not share a dataset."""
    on_error: Annotated[Literal["fail", "skip"], MAY_CHANGE] = "fail"
    """When it raises: fail ends the run, skip leaves the rollout unscored, up to 5 % of a step."""
    workers: Annotated[Annotated[int, Field(ge=1, le=256)] | None, MAY_CHANGE] = None
    """Processes of its own; null shares those of the other rewards, unless the reward says otherwise."""

    style: RewardStyle | None = None
    """Convention of a file's function: mmrl's, trl's, easyr1's or verl's; null tells it by its parameters."""
    weights: Annotated[dict[Text, float], Field(min_length=1)] | None = None
    """For a reward that answers several components by name: factor of each in its score; null is `overall` or `score`
    if it has one, else their sum."""

    label: Text | None = None
    """Its name in metrics and `trainer.eval_metric`; by default the plugin's name without distribution or file."""

    @property
    def metric(self) -> str:
        """The label, or its default."""
        return self.label or self.name.rpartition(":")[2]

    def shares_rows_with(self, other: RewardSpec) -> bool:
        """True if some dataset's rows may be scored by both."""
        return not self.sources or not other.sources or not set(self.sources).isdisjoint(other.sources)


class EnvironmentSpec(PluginSpec):
    """An environment's name and options, and the limits of an episode."""

    name: Text
    """A name that `mmrl plugins` lists, `distribution:name`, `path/to/file.py:Name` or `import:package.module:Name`.
    Left out, it is the one option that is called like an environment: `{web: [...]}` is `{name: web, web: [...]}`."""
    max_turns: Count = 8
    """Turns that the policy may take; an episode ends with its last one."""
    max_turn_tokens: Count | None = None
    """Longest turn of the policy; null is `sampler.max_new_tokens`, which bounds all its turns together."""
    max_observation_tokens: Count = 512
    """Longest observation, image tokens and the marks around it included; a longer one ends the episode."""
    max_tokens: Count | None = None
    """Longest episode, after the prompt; null is what the other limits allow."""
    max_images: Annotated[int, Field(ge=0, le=10**4)] = 8
    """Most images that observations of an episode may hold; one image more ends the episode."""
    latency_steps: Count = 8
    """Steps of the sampler after which an observation is read, however long it took; see `scheduling`."""
    scheduling: Literal["reproducible", "eager"] = "reproducible"
    """reproducible: what shares a batch, and so every number, repeats. eager: an observation is read once it is there,
    for slow tools and many GPUs."""
    observation_role: Literal["auto", "tool", "user"] = "auto"
    """Role of the messages with observations; auto is the environment's own, or user where the model's template cannot
    carry it."""
    tool_prompt: Literal["auto", "template", "text", "none"] = "auto"
    """The way the policy learns of tools: by the model's template, or by a text in the system turn; auto is the
    template if it can."""
    keep_thoughts: bool = False
    """true: the policy reads its own earlier thoughts (`<think>`) where the model's chat template would remove them.
    Otherwise such a template is refused, as what was sampled is never rewritten."""
    weights: dict[Text, float] = Field(default_factory=dict)
    """Factor of each component that it scores in the reward, 1 where it is not named; `environment` is the sum of its
    turns' rewards."""
    timeout_s: Annotated[Seconds | None, MAY_CHANGE] = None
    """Seconds that one call may take; null is the environment's own limit."""
    workers: Annotated[Annotated[int, Field(ge=1, le=256)], MAY_CHANGE] = 4
    """Processes that episodes are spread over."""

    @model_validator(mode="before")
    @classmethod
    def _named_by_its_option(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "name" in values:
            return values
        options = [key for key in values if key not in cls.model_fields]
        installed = sorted({entry.name for entry in entry_points(group="mmrl.environments")})
        named = [key for key in options if key in installed]
        if len(named) == 1:
            return {"name": named[0], **values}
        if not options:
            return values
        raise PydanticCustomError(UNNAMED, "has no name", {"options": options, "named": named, "installed": installed})

    def limits(self, max_new_tokens: int) -> tuple[int, int]:
        """Most tokens of the policy's turn, and of an episode after its prompt.

        Args:
            max_new_tokens: Most tokens of the policy in an episode.
        """
        turn = min(self.max_turn_tokens or max_new_tokens, max_new_tokens)
        return turn, self.max_tokens or max_new_tokens + self.max_turns * self.max_observation_tokens

    def against(
        self, max_new_tokens: int, ranks_together: int, engine: Mapping[str, JsonValue]
    ) -> Iterator[Contradiction]:
        """Contradictions to the sampler's section, with keys from the config's root.

        Args:
            ranks_together: Ranks that take a sampler's steps together.
            engine: Its ``engine``.
        """
        turn, most = self.limits(max_new_tokens)
        if most < turn:
            limit = "sampler.max_new_tokens" if self.max_turn_tokens is None else "environment.max_turn_tokens"
            what = f"environment.max_tokens is {most}, less than one turn: {limit} is {turn}"
            remedy = "raise environment.max_tokens, or set environment.max_turn_tokens to less"
            yield Contradiction(("environment.max_tokens", limit), what, remedy)
        if self.scheduling == "eager" and ranks_together > 1:
            what = f"environment.scheduling is eager, but {ranks_together} ranks sample together, in the same steps"
            sizes = ("sampler.tensor_parallel_size", "sampler.pipeline_parallel_size")
            yield Contradiction(("environment.scheduling", *sizes), what, "set environment.scheduling: reproducible")
        if engine.get("async_scheduling"):
            what = "sampler.engine.async_scheduling is set, but with an environment the sampler's steps are counted"
            keys = ("sampler.engine.async_scheduling", "environment")
            yield Contradiction(keys, what, "remove sampler.engine.async_scheduling")


class MonitorSpec(PluginSpec):
    """A monitor's name and options."""

    name: Text
    """A name that `mmrl plugins` lists, `path/to/file.py:Name`, `import:package.module:Name`; or `all`: every installed
    one that the list does not name, with its defaults."""
    off: bool = False
    """true: not this one, though the list has `all`."""

    @property
    def label(self) -> str:
        """Its name in alarms and metrics: the plugin's, without distribution or file."""
        return self.name.rpartition(":")[2]
