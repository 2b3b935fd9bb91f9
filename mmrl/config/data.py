"""The section of the config that says what a run learns from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from mmrl.config.base import MAY_CHANGE, Contradiction, Count, Section, Settings, Text
from mmrl.config.evaluation_names import key_of
from mmrl.config.evaluations import Evaluated
from mmrl.config.plugin_specs import DatasetSpec


class DataConfig(Section):
    """The datasets, and how rows become prompts."""

    train: Annotated[DatasetSpec, MAY_CHANGE]
    """The dataset to train on."""
    mix: Annotated[tuple[DatasetSpec, ...], Field(strict=False), MAY_CHANGE] = ()
    """Further datasets to train on, mixed with `train` by weight."""
    eval: Annotated[Evaluated, MAY_CHANGE] = None
    """The dataset to evaluate on, or several by names, `{NAME: {name: ..., path: ...}, ...}`, each with metrics of its
    own (`eval/NAME/accuracy`); null for none."""
    prompt_template: Annotated[str | None, MAY_CHANGE] = None
    """Jinja text for the last user turn, or a path to a .jinja or .j2 file; null leaves the turn as it is."""
    system_prompt: Annotated[str | None, MAY_CHANGE] = None
    """A system turn put before each conversation that has none."""
    template_options: Settings = Field(default_factory=dict)
    """Options of the model's chat template, by its own names, such as `{enable_thinking: false}`; {} or null takes back
    those of an earlier file, and a null value leaves one to the template."""
    max_prompt_tokens: Annotated[Count, MAY_CHANGE] = 2048
    """Longest prompt, image tokens included."""
    overlong: Annotated[Literal["drop", "fail"], MAY_CHANGE] = "drop"
    """Treatment of a longer prompt."""
    on_bad_row: Annotated[Literal["drop", "fail"], MAY_CHANGE] = "drop"
    """Treatment of a row that cannot be used: a null, a damaged image, a placeholder too many."""
    max_bad_rows: Annotated[float, Field(ge=0, le=1), MAY_CHANGE] = 0.01
    """Share of bad rows above which a dataset is refused."""
    scan_rows: Annotated[Count, MAY_CHANGE] = 100_000
    """Training rows up to which all are read and measured before the run starts; of more, each is when it is reached.
    A run that goes on keeps the way that it began with."""
    max_images: Annotated[Annotated[int, Field(ge=0, le=10**6)] | None, MAY_CHANGE] = None
    """Most images in a prompt: a row with more cannot be used. null: any number; it must be set if a model reads images
    and there are more training rows than `scan_rows`."""
    image_root: Annotated[Text | None, MAY_CHANGE] = None
    """Folder that relative image paths start from and stay below; null is the dataset's own."""
    min_pixels: Count = 3136
    """Smaller images are enlarged to this many pixels, or whole tiles if the model cuts images into tiles."""
    max_pixels: Count = 1003520
    """Larger images are reduced to this many pixels, or to the whole tiles that fit: InternVL's have 200704 each."""

    @property
    def evaluated(self) -> Mapping[str, DatasetSpec]:
        """The datasets to evaluate on by their names; the name of the only one may be empty."""
        return {"": self.eval} if isinstance(self.eval, DatasetSpec) else self.eval or {}

    def contradictions(self) -> Iterator[Contradiction]:
        mixed = (self.train, *self.mix)
        labels = [spec.source for spec in mixed]
        for label in sorted({label for label in labels if labels.count(label) > 1}):
            yield Contradiction(("mix",), f"two datasets are called {label!r}", "give one a label of its own")
        weighted = [spec.source for spec in mixed if spec.weight is not None]
        if self.mix and weighted and len(weighted) < len(mixed):
            what = f"only {', '.join(weighted)} of the mixed datasets has a weight"
            yield Contradiction(("train.weight", "mix"), what, "give each of them a weight, or none")
        evaluated = [(key_of(name).removeprefix("data."), spec) for name, spec in self.evaluated.items()]
        for key, spec in (*([] if self.mix else [("train", self.train)]), *evaluated):
            if spec.weight is not None:
                what = f"data.{key}.weight is set, but there is nothing to mix it with"
                yield Contradiction((f"{key}.weight",), what, f"remove data.{key}.weight")
        if self.min_pixels > self.max_pixels:
            what = "data.min_pixels is more than data.max_pixels"
            yield Contradiction(("min_pixels", "max_pixels"), what, "lower min_pixels")
