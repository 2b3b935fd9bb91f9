"""``mmrl sweep`` as a function, in a process of its own as the others."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.api.datasets import DatasetLike
from mmrl.api.given import NOTHING, ConfigLike, EnvironmentLike, RewardLike, loaded_with
from mmrl.api.origins import Origins
from mmrl.commands.child_command import ChildCommand
from mmrl.commands.sweep.grammar import read_words, words_of
from mmrl.commands.sweep.plan import sweep_folder
from mmrl.config.load import plain_values
from mmrl.config.yaml_tree import Located, read_tree
from mmrl.interfaces import Algorithm
from mmrl.runs.sweeps import Sweep, load_sweep


def sweep(
    config: ConfigLike,
    values: Mapping[str, Any] | Sequence[str] = NOTHING,
    overrides: Mapping[str, Any] = NOTHING,
    *,
    seeds: Iterable[int] | str | None = None,
    parallel: int = 1,
    folder: str | os.PathLike[str] | None = None,
    address: str | None = None,
    rewards: RewardLike | Sequence[RewardLike] = (),
    dataset: DatasetLike | None = None,
    eval_dataset: DatasetLike | Mapping[str, DatasetLike] | None = None,
    algorithm: str | type[Algorithm] | None = None,
    environment: EnvironmentLike | None = None,
) -> Sweep:
    """Run a config with each combination of values and each seed, as ``mmrl sweep`` does; the same call goes on.

    Ctrl-C lets the runs at work save and stop; a second one ends them at once.

    Args:
        config: A YAML file or a mapping.
        values: The values of each axis, such as ``{"learner.lr": [1e-6, 3e-6]}``; or words as on the command line, such
            as ``["learner.lr=1e-6,3e-6"]``.
        overrides: Values that all points share; they win over the config's.
        seeds: Values of ``trainer.seed``, or words as ``"0-4"``; None for the config's.
        parallel: Runs at once; more than 1 are run through Ray.
        folder: The sweep's; by default the config's run folder with ``-sweep`` after it.
        address: A Ray cluster; None for the config's, or one on this machine.
        rewards: As of ``mmrl.train``, as are the further ones. Their sources and rows are written to the sweep's
            folder.

    Returns:
        The sweep: its ``table()``, and each of its ``points`` with ``run``, ``values`` and ``seed``.

    Raises:
        MMRLError: A point's config is wrong, and nothing was started; or points have failed, and all others were run.
        KeyboardInterrupt: Ctrl-C, when the runs have ended.
        InterruptedError: Somebody else's signal came.
    """
    words = words_of(values)
    chosen = seeds if isinstance(seeds, str) or seeds is None else ",".join(map(str, seeds))
    parsed = read_words(words, chosen)
    base = Located.of(config, "config") if isinstance(config, Mapping) else Path(config).expanduser()
    over = Located.of_dotted(overrides, "overrides")
    place = sweep_folder(read_tree([base, over], parsed.overrides)[0]) if folder is None else Path(folder).expanduser()
    given, origins = dict[str, Any](), Origins()
    if rewards or any(each is not None for each in (dataset, eval_dataset, algorithm, environment)):
        # The first point's, for their sources and rows: what they become is the same in all.
        first = {part.key: part.values[0] for part in parsed.parts}
        whole = {**overrides, **first, "trainer.run_dir": str(place)}
        loaded = loaded_with(config, whole, rewards, dataset, algorithm, environment, eval_dataset, origins=origins)
        found = plain_values(loaded.config)
        given |= {"rewards": found["rewards"]} if rewards else {}
        given |= {"algorithm": {"name": found["algorithm"]["name"]}} if algorithm is not None else {}
        given |= {"environment": found["environment"]} if environment is not None else {}
        sets = {"train": dataset, "eval": eval_dataset}
        data = {key: found["data"][key] for key, each in sets.items() if each is not None}
        given |= {"data": data} if data else {}
    request = {
        "config": str(base) if isinstance(base, Path) else base.plain(),
        "given": given,
        "overrides": Located.of(overrides, "").plain(),
        "words": words,
        "options": {"seeds": chosen, "parallel": parallel, "folder": str(place), "address": address},
    }
    with origins.telling():
        ChildCommand("sweep", request, str(place)).wait().complete()
    return load_sweep(place)
