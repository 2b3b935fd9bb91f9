"""Sums, asked with a template."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.hub import HubRepo
from mmrl.media import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from mmrl.templates import PromptTemplate

from mmrl.interfaces import DatasetFacts, DatasetLoader, PluginConfig
from mmrl.types import Message, Prompt

USED = HubRepo, PromptTemplate, MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS


class OldSums(DatasetLoader):
    facts = DatasetFacts(origin="made up", reward=("old_length",))

    class Config(PluginConfig):
        rows: int = 6

    config: Config

    def load(self) -> Sequence[Prompt]:
        return [
            Prompt(f"sum-{n}", (Message("user", f"{n} + 1?"),), answer=str(n + 1), columns={"n": n})
            for n in range(self.config.rows)
        ]
