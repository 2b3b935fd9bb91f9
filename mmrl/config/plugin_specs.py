"""The entries of the config that name a plugin: an algorithm, a reward, a dataset or a tracker, with its options."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, JsonValue

from mmrl.config.base import MAY_CHANGE, Seconds, Section, Text

Kind = Literal["algorithm", "reward", "dataset", "tracker"]
"""The four kinds of plugins; the entry-point group of a kind is `mmrl.<kind>s`."""

RewardStyle = Literal["mmrl", "trl", "easyr1", "verl"]
"""Conventions of calling a reward function; see `mmrl.plugin_host.foreign_rewards`."""

NONE = "(none)"
"""The name of a plugin that a command does not need, if the config names none."""


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
