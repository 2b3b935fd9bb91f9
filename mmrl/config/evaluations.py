"""The datasets that a run is evaluated on: one, or several by names, each with its way to sample and to judge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from mmrl.config.base import Contradiction, Count
from mmrl.config.evaluation_names import NAMED, SECTIONS, WORD, has_names, key_of, metric_of
from mmrl.config.plugin_specs import DatasetSpec

LEAST_TEMPERATURE = 0.01
"""The lowest temperature that is not greedy."""
FORMS = ("(one)", NAMED)
"""The two forms of ``data.eval``, as pydantic has them in the paths of its errors."""


def _temperature(value: float) -> float:
    if 0 < value < LEAST_TEMPERATURE:
        raise ValueError(f"is 0 (greedy), or {LEAST_TEMPERATURE} to 10, not {value:g}")
    return value


class EvaluationSpec(DatasetSpec):
    """A dataset's name and options, and the way in which it is sampled and judged."""

    samples: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Completions of each prompt; null is `trainer.eval_samples`."""
    temperature: Annotated[float, Field(ge=0, le=10), AfterValidator(_temperature)] | None = None
    """0 is greedy; null is greedy for one completion, else `sampler.temperature`."""
    max_new_tokens: Count | None = None
    """Longest completion; null is `sampler.max_new_tokens`."""
    metric: Annotated[str, Field(min_length=1)] | None = None
    """The reward that tells right from wrong here; null is `trainer.eval_metric`."""


def _read(value: Any) -> Any:
    """The value without the sets that are taken back.

    Raises:
        ValueError: It has neither form, or a name is no word.
    """
    if not isinstance(value, Mapping) or not has_names(value):
        return value
    kept = {name: each for name, each in value.items() if each is not None}
    plain = [name for name, each in kept.items() if not isinstance(each, Mapping)]
    if plain:
        raise ValueError(
            "is neither one dataset, which has a name, nor a mapping of names to datasets: "
            f"{', '.join(plain)} {'is' if len(plain) == 1 else 'are'} no mapping; write "
            "{name: ..., path: ...}, or {ONE: {name: ..., path: ...}, OTHER: {...}}"
        )
    for name in kept:
        if not WORD.fullmatch(name):
            form = "a letter, then letters, digits, - and _, 64 at most"
            raise ValueError(f"cannot have a set that is called {name!r}: {form}")
    return kept


def _form(value: Any) -> str:
    """The form of a value that is read, or written."""
    is_named = isinstance(value, Mapping) and (
        has_names(value) or any(isinstance(each, DatasetSpec) for each in value.values())
    )
    return FORMS[is_named]


Evaluated = Annotated[
    Annotated[
        Annotated[DatasetSpec, Tag(FORMS[0])] | Annotated[dict[str, EvaluationSpec], Tag(FORMS[1])],
        Discriminator(_form),
    ]
    | None,
    BeforeValidator(_read),
]
"""One dataset, or several by names; None for none."""


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """A dataset that a run is evaluated on, and the way in which it is.

    Attributes:
        name: Its name in ``data.eval``; empty for the one dataset there.
        num_samples: Completions of each prompt.
        temperature: 0 is greedy.
        max_new_tokens: Longest completion.
        accuracy: The reward component that tells right from wrong; None if nothing is scored.
    """

    name: str
    spec: DatasetSpec
    num_samples: int
    temperature: float
    max_new_tokens: int
    accuracy: str | None

    @classmethod
    def of(
        cls, name: str, spec: DatasetSpec, samples: int, temperature: float, max_new_tokens: int, accuracy: str | None
    ) -> EvaluationSet:
        """The set of a spec, and of what holds where that says nothing.

        Args:
            temperature: That of several completions of a prompt.
        """
        own = spec if isinstance(spec, EvaluationSpec) else EvaluationSpec(name=spec.name)
        count, at = own.samples or samples, own.temperature
        if at is None:
            at = 0.0 if count == 1 else temperature
        return cls(name, spec, count, at, own.max_new_tokens or max_new_tokens, own.metric or accuracy)

    @property
    def key(self) -> str:
        """Its dotted key in the config."""
        return key_of(self.name)

    @property
    def judge(self) -> str:
        """``accuracy`` of a set whose completions are scored."""
        assert self.accuracy is not None, "there is nothing to score with"
        return self.accuracy

    @property
    def accuracy_metric(self) -> str:
        """The metric that is the share of completions that are right."""
        return metric_of(self.name, "accuracy")

    @property
    def mean_metric(self) -> str | None:
        """The metric that is the mean of ``accuracy``; other than the share where the reward is graded."""
        return None if self.accuracy is None else metric_of(self.name, f"{self.accuracy}_mean")


def own_judges(specs: Mapping[str, DatasetSpec]) -> dict[str, str]:
    """The judge of right and wrong of each set that names one, by the dotted key that does."""
    said = {key_of(name): spec.metric for name, spec in specs.items() if isinstance(spec, EvaluationSpec)}
    return {f"{key}.metric": metric for key, metric in said.items() if metric is not None}


def contradictions_of(
    sets: Mapping[str, EvaluationSet], awaited: Mapping[str, str | None], episode_tokens: int | None
) -> Iterator[Contradiction]:
    """Contradictions in the ways in which sets are sampled, and keys that wait for a metric of a set that is not there.

    Args:
        awaited: The metric that each of these keys waits for.
        episode_tokens: Most tokens of the policy in an episode; None without an environment.
    """
    for found in sets.values():
        key = found.key
        if found.num_samples > 1 and found.temperature == 0:
            what = f"{key} asks for {found.num_samples} greedy completions of a prompt, which are all the same"
            yield Contradiction((f"{key}.temperature",), what, "set samples: 1, or a temperature above 0")
        if episode_tokens is not None and found.max_new_tokens != episode_tokens:
            what = f"{key}.max_new_tokens is set, and episodes have the limits of the environment"
            yield Contradiction((f"{key}.max_new_tokens",), what, f"remove {key}.max_new_tokens")
    names = [name for name in sets if name]
    for key, metric in awaited.items():
        section, _, rest = (metric or "").partition("/")
        if names and section in SECTIONS and not any(rest.startswith(f"{name}/") for name in names):
            known = ", ".join(metric_of(name, rest.rpartition("/")[2], section) for name in names)
            what = f"{key} waits for {metric}, and data.eval has no such set"
            yield Contradiction((key, "data.eval"), what, f"name one of: {known}")
