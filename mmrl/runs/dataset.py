"""A dataset that its loader has read, and what the loader tells of it."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.config.plugin_specs import DatasetSpec
from mmrl.errors import plugin_errors
from mmrl.interfaces import DatasetLoader, SampledRow
from mmrl.plugin_host import registry
from mmrl.types import Prompt


class Dataset:
    """The rows of a config's dataset.

    Args:
        image_root: The folder that image paths count from, for loaders that have such an option and were given none.

    Attributes:
        rows: As the loader gives them.
        about: The dataset's facts, and its loader's choices, by name.

    Raises:
        DataError: The data cannot be read.
        PluginError: The loader fails.
    """

    def __init__(self, spec: DatasetSpec, image_root: str | None) -> None:
        if image_root is not None and "image_root" in registry.options_class("dataset", spec.name).model_fields:
            options = {key: value for key, value in spec.options.items() if value is not None}
            spec = DatasetSpec(name=spec.name, **{"image_root": image_root, **options})
        self._loader: DatasetLoader = registry.create("dataset", spec)
        with plugin_errors(self._loader, "load"):
            self.rows: Sequence[Prompt] = self._loader.load()
        self.about = self._about()

    def fingerprint(self) -> str:
        """The loader's fingerprint of its data."""
        with plugin_errors(self._loader, "fingerprint"):
            fingerprint = self._loader.fingerprint()
            if not isinstance(fingerprint, str):
                raise TypeError(f"expected a text, got {fingerprint!r:.200}")
        return fingerprint

    def notes(self) -> list[str]:
        """The loader's notes on what it left out."""
        with plugin_errors(self._loader, "notes"):
            return texts(self._loader.notes())

    def sampled(self) -> list[SampledRow]:
        """Some of its rows as a policy has sampled them."""
        with plugin_errors(self._loader, "sampled"):
            found = list(self._loader.sampled())
            if not all(isinstance(each, SampledRow) for each in found):
                raise TypeError(f"expected rows of SampledRow, got {found!r:.200}")
        return found

    def _about(self) -> dict[str, str]:
        about = dict[str, str]()
        if (facts := self._loader.facts) is not None:
            about |= {"dataset": f"{facts.origin}, licence {facts.licence}"}
            about |= {"rewards": ", ".join(facts.reward)} if facts.reward else {}
            about |= {"note": facts.notes} if facts.notes else {}
        with plugin_errors(self._loader, "describe"):
            return about | {str(name): str(value) for name, value in self._loader.describe().items()}


def texts(answer: Sequence[str]) -> list[str]:
    """A plugin's answer as a list of texts; raises TypeError for anything else."""
    if isinstance(answer, str) or not all(isinstance(text, str) for text in answer):
        raise TypeError(f"expected a list of texts, got {answer!r:.200}")
    return list(answer)
