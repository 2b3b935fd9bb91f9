"""Writes the table of algorithms by how far the sampler is behind, from what the installed ones do with numbers.

python -m tests.lag_table
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.config.load import from_mapping
from mmrl.errors import ConfigError
from mmrl.interfaces import Algorithm
from mmrl.plugin_host import registry
from mmrl.policy_gradient import PolicyGradient
from mmrl.runs.asynchrony import check_asynchrony
from mmrl.step.gather import SOURCES
from mmrl.testing import replay
from tests.family_table import table

WRITTEN = Path(__file__).parents[1] / "plugins" / "README.md"
SECTION = "### Tokens of older weights\n"
HEAD = ("algorithm", "`staleness: 0`", "`staleness: 1` to `4`", "`sampler.partial`", "ratio to old", "not corrected")
SPLIT = {"cluster": {"name": "ray", "sampler_ranks": 1, "learner_ranks": 1}}
ROWS, TOKENS = 16, 6
FAR, NEAR = 3.0, 1e-4
"""Log-ratios at which a clip has acted, and at which it has not."""
POLICY_ALONE = {"papo": {"perception_coef": 0.0, "entropy_own_coef": 0.0, "entropy_masked_coef": 0.0}}
"""Options that leave an algorithm its policy gradient alone."""


def page(text: str) -> str:
    """The page with the table as it should be."""
    before, head, after = text.partition(SECTION)
    lines = after.split("\n")
    (first,) = [place for place, line in enumerate(lines) if line.startswith(f"| {HEAD[0]} | {HEAD[1]} |")]
    end = next(place for place in range(first, len(lines)) if not lines[place].startswith("|"))
    return before + head + "\n".join([*lines[:first], *table([HEAD, *rows()]), *lines[end:]])


def rows() -> Iterator[Sequence[str]]:
    """A row for each installed algorithm of this repository, and one more where it may sample its comparisons."""
    for info in registry.list_plugins():
        if info.kind != "algorithm" or not info.target.startswith("mmrl_algorithms."):
            continue
        yield row(info.name, {})
        if "data" in registry.options_class("algorithm", info.name).model_fields:
            yield row(info.name, {"data": "sampled"})


def row(name: str, options: Mapping[str, Any]) -> Sequence[str]:
    """An algorithm's cells."""
    algorithm = registry.given("algorithm", name, options)
    shown = f"`{name}`" + "".join(f", `{key}: {value}`" for key, value in options.items())
    if not SOURCES[algorithm.source].samples:
        assert all(refusal(algorithm, asked) for asked in ASKED)
        return shown, "samples nothing", "refused", "refused", "", ""
    is_corrected = isinstance(algorithm, PolicyGradient)
    cells = [refusal(algorithm, asked) or ("corrected" if is_corrected else "as they are") for asked in ASKED]
    if is_corrected:
        return shown, "exact", *cells, ratio(name), ", ".join(uncorrected(name, algorithm))
    return shown, "exact", *cells, "none", "an order of completions is learned, whoever wrote them"


ASKED: Sequence[Mapping[str, Any]] = (
    {**SPLIT, "trainer": {"staleness": 1}},
    {"sampler": {"partial": {"engine_steps": 16}}},
)


def refusal(algorithm: Algorithm, asked: Mapping[str, Any]) -> str:
    """The reason why a run that asks for older weights is refused; empty if it is not."""
    data = {"train": {"name": "table"}}
    config = from_mapping({"model": {"path": "m"}, "data": data, "algorithm": {"name": "grpo"}, **asked})
    try:
        check_asynchrony(config, algorithm, algorithm.needs(), SOURCES[algorithm.source])
    except ConfigError as error:
        what = error.what.removeprefix("algorithm 'grpo' ").partition(", and ")[0].partition(":")[0]
        return f"refused: {what}"
    return ""


def numbers() -> dict[str, Any]:
    """Four groups of four completions, under which old, current and the sampler's log-probs differ."""
    rng = np.random.default_rng(0)
    old = -rng.random((ROWS, TOKENS)) - 0.1
    return {
        "group_ids": np.arange(ROWS) % 4,
        "rewards": rng.permutation(ROWS) / ROWS + 1,
        "greedy_rewards": np.full(ROWS, 0.5),
        "response_mask": np.ones((ROWS, TOKENS), bool),
        "log_probs": old.copy(),
        "old_log_probs": old,
        "rollout_log_probs": old + rng.normal(0, 0.4, old.shape),
        "ref_log_probs": old + rng.normal(0, 0.3, old.shape),
        "values": rng.random(old.shape),
        "vpreds": rng.random(old.shape),
        "entropy": rng.random(old.shape) + 0.5,
        "max_len": TOKENS,
        "turns": np.zeros((ROWS, TOKENS), int),
        "turn_rewards": [np.zeros(1)] * ROWS,
        "turn_states": [["begin"]] * ROWS,
        "views": {"masked": {"log_probs": old - 0.2, "entropy": rng.random(old.shape)}},
    }


def ratio(name: str) -> str:
    """The ratio by which a token's policy gradient changes, and what a far one leaves of it."""
    data, nothing = numbers(), np.zeros((ROWS, TOKENS))

    def gradient(moved: np.ndarray) -> np.ndarray:
        of = data | {"log_probs": data["old_log_probs"] + moved}
        return np.abs(replay(name, of, options={"kl": {"coef": 0.0}, **POLICY_ALONE.get(name, {})}).grad_log_probs)

    still = gradient(nothing)
    learned, first = still > 0, np.arange(TOKENS) == 0
    moved = gradient(np.where(first, NEAR, nothing))
    if np.allclose(moved, still):
        return "none"
    others = learned & ~first
    of = "of tokens" if np.allclose(moved[others], still[others], atol=0) else "of completions"
    least = (gradient(nothing + FAR)[learned] / still[learned]).min()
    far = "clipped" if not least else "bounded" if least > 1 else "fading"
    return f"{of}, {far}"


def uncorrected(name: str, algorithm: PolicyGradient) -> Iterator[str]:
    """Yields the parts of a loss on older tokens that the correction does not weigh."""
    found = []
    for shift in (0.0, 0.5):
        data = numbers()
        data["rollout_log_probs"] = data["rollout_log_probs"] + shift
        options = {"correction": {"mode": "token-truncate", "high": 1e9}}
        found.append(replay(name, data, options=options).metrics)
    own = (key for key in found[0] if key.startswith("loss/") and key not in ("loss/total", "loss/policy"))
    for key in own:
        if found[0][key] == found[1][key]:
            yield f"its term `{key.removeprefix('loss/')}`"
    needs = algorithm.needs()
    if needs.values:
        yield "the critic's returns"
    yield from (f"completions from view `{view.name}`" for view in needs.views if view.sampled)


if __name__ == "__main__":
    WRITTEN.write_text(page(WRITTEN.read_text()))
    print(f"{WRITTEN} is written")
