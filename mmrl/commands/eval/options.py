"""The options of an evaluation, and the evaluation set that it is on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmrl.config.problems import suggestion
from mmrl.config.sections import Config
from mmrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Options:
    """The command line's options; None leaves one to the config.

    Attributes:
        samples: Completions of each prompt.
        temperature: 0 is greedy, as is one completion without a temperature.
        limit: How many prompts, from the first on.
        blank_images: True to sample prompts with images also with blank ones.
        output: Where completions and results are kept.
        on: The evaluation set's name; needed if there are several.
        best_of: Completions of which the best one is chosen.
        by: The reward that chooses it, see ``with_chooser``; None for the weighted sum.
    """

    samples: int | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    limit: int | None = None
    blank_images: bool = False
    output: Path | None = None
    on: str | None = None
    best_of: int | None = None
    by: str | None = None


def with_one_set(config: Config, name: str | None) -> Config:
    """The config with the evaluation set of this name alone, or with its only one.

    Raises:
        ConfigError: There is none, none of this name, or none is named and there are several.
    """
    sets = config.data.evaluated
    if not sets:
        raise ConfigError("there is nothing to evaluate on", where="data.eval", remedy="name a dataset")
    if name is None and len(sets) == 1:
        return config
    known = [each for each in sets if each]
    if name is None:
        what = f"data.eval has {len(sets)} sets, and one is evaluated at a time"
        raise ConfigError(what, where="mmrl eval", possible=", ".join(known), remedy=f"name one: --on {known[0]}")
    if name not in known:
        what = f"data.eval has no set {name!r}" if known else "data.eval is one dataset, without a name"
        remedy = suggestion(name, known) if known else "leave out --on"
        raise ConfigError(what, where=f"--on {name}", possible=", ".join(known), remedy=remedy)
    chosen = {name: sets[name]}
    return config.model_copy(update={"data": config.data.model_copy(update={"eval": chosen})})


def check_counts(options: Options) -> None:
    """See that the numbers of things are some.

    Raises:
        ConfigError: One is not; it names the option.
    """
    for name, value, most in (
        ("samples", options.samples, 4096),
        ("best-of", options.best_of, 4096),
        ("max-new-tokens", options.max_new_tokens, 10**9),
        ("limit", options.limit, None),
    ):
        if value is not None and not 1 <= value <= (most or value):
            up_to = "1 or more" if most is None else f"1 to {most}"
            raise ConfigError(f"--{name} is {value}", where="mmrl eval", possible=up_to)
