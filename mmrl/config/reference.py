"""The section of the config that says which frozen network an algorithm compares the policy with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated

from pydantic import Field

from mmrl.config.base import Contradiction, Count, Section, Text


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen network that is another model than the policy.

    Attributes:
        key: The dotted key of its entry in the config.
        path: Its folder, or its name on the hub.
        revision: A hub model's branch, tag or commit; None for its default branch.
        sources: The datasets whose rows it teaches; None for all.
        weight: Its share where several teach a row.
    """

    key: str
    path: str
    revision: str | None
    sources: tuple[str, ...] | None = None
    weight: float = 1.0

    def teaches(self, source: str) -> bool:
        """True if it is asked for rows of a source."""
        return self.sources is None or source in self.sources


class TeacherConfig(Section):
    """One of several teachers."""

    path: Text
    """A Hugging Face model folder, or a name on the hub."""
    revision: Text | None = None
    """Branch, tag or commit of a teacher on the hub; null is its default branch."""
    sources: Annotated[tuple[Text, ...], Field(min_length=1, strict=False)] | None = None
    """Datasets whose rows it teaches; null is all."""
    weight: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Its share in the mean of log-probs, where several teachers teach rows of one source."""


class ReferenceConfig(Section):
    """The frozen network whose log-probs an algorithm may need: the initial policy, or a teacher, or a list of them."""

    path: Text | None = None
    """A Hugging Face model folder, or a name on the hub, of a teacher; null is the policy as it was at the start."""
    revision: Text | None = None
    """Branch, tag or commit of a teacher on the hub; null is its default branch."""
    reset_every: Count | None = None
    """Steps, after each of which the reference becomes the policy as it is then; null: it stays what it was."""
    teachers: Annotated[tuple[TeacherConfig, ...], Field(strict=False)] = ()
    """Several teachers, each for rows of its sources; `reference` may be this list itself."""

    @property
    def models(self) -> tuple[Teacher, ...]:
        """The teachers; none if the reference is the initial policy."""
        if self.path is not None:
            return (Teacher("reference", self.path, self.revision),)
        return tuple(
            Teacher(f"reference.teachers.{place}", each.path, each.revision, each.sources, each.weight or 1.0)
            for place, each in enumerate(self.teachers)
        )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.revision is not None and self.path is None:
            what = "reference.revision is set, and reference.path is null: the reference is the initial policy"
            yield Contradiction(("revision", "path"), what, "set reference.path, or remove reference.revision")
        if self.path is not None and self.teachers:
            what = "reference.path names a teacher, and reference.teachers names several"
            yield Contradiction(("path", "teachers"), what, "put all of them into the list")
        for key in ("path", "teachers"):
            if self.reset_every is not None and getattr(self, key):
                what = f"reference.reset_every makes the policy the reference, and reference.{key} names another model"
                yield Contradiction(("reset_every", key), what, "remove one of them")
        pairs = combinations(zip(self.models, self.teachers, strict=False), 2)
        for (one, first), (other, second) in pairs:
            shared = "rows of all sources" if one.sources is None and other.sources is None else ""
            if not shared:
                named = [source for source in one.sources or other.sources or () if one.teaches(source)]
                shared = ", ".join(f"rows of {source}" for source in named if other.teaches(source))
            if shared and (first.weight is None or second.weight is None):
                what = f"{one.key} and {other.key} both teach {shared}, and not both have a weight"
                own = [each.key.removeprefix("reference.") for each in (one, other)]
                keys = (*own, *(f"{key}.weight" for key in own))
                yield Contradiction(keys, what, "give both a weight, or sources of their own")

    def resets(self, step: int) -> bool:
        """True if the reference becomes the policy after a step."""
        return self.reset_every is not None and step % self.reset_every == 0
