"""The base class of every section of the config, its contradictions, and the types and marks of its fields."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

Count = Annotated[int, Field(ge=1, le=10**9)]
CountOrNever = Annotated[int, Field(ge=0, le=10**9)]
Seconds = Annotated[float, Field(gt=0, le=86400)]
Text = Annotated[str, Field(min_length=1)]
Settings = Annotated[dict[str, JsonValue], BeforeValidator(lambda value: {} if value is None else value)]
"""Settings of another library, by its own names; null is none of them."""


@dataclass(frozen=True, slots=True)
class MayChange:
    """Marks a key that may change when a run goes on: it does not decide what is learned.

    Paths and columns do so only through the model's files and the training prompts, whose fingerprints are compared.

    Attributes:
        keys: Keys of a mapping; empty for all.
    """

    keys: tuple[str, ...] = ()


MAY_CHANGE = MayChange()


class Contradiction(NamedTuple):
    """Values that fit their own keys but contradict each other.

    Attributes:
        keys: Dotted, from the section that tells it.
    """

    keys: tuple[str, ...]
    what: str
    remedy: str

    def below(self, section: str) -> Contradiction:
        """The same with keys that start with this section."""
        return self._replace(keys=tuple(f"{section}.{key}" for key in self.keys))


class Section(BaseModel):
    """Base of every section: frozen, unknown keys are errors, values are not converted."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def contradictions(self) -> Iterator[Contradiction]:
        """Every value that fits its own key but contradicts others of this section."""
        yield from ()
