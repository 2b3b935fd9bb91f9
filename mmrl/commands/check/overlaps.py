"""Rows that are trained on and held out, and training rows that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from mmrl.commands.check.profile import Profile
from mmrl.system.report import rows


def overlaps(profiles: Mapping[str, Profile], sets: Mapping[str, str]) -> tuple[dict[str, int], list[str]]:
    """For each evaluation set its rows that ask and show the same as a training row, and warnings of what was found.

    Args:
        profiles: Those of ``train``, and of sets by the names that they are shown with.
        sets: The name of each set in the config, by the shown one.
    """
    train, counts = profiles["train"], dict[str, int]()
    warnings = [*_contradictions(train)]
    for shown in profiles.keys() & sets.keys():
        own = profiles[shown]
        counts[sets[shown]] = shared = int(np.isin(own.fingerprints, train.fingerprints).sum())
        if shared:
            same, swapped = _pairs_in(own, train)
            found = f"; {same} with its two answers, {swapped} with these the other way round"
            what = f"{shared} of {len(own.pairs)} rows ask and show the same as a row of data.train"
            warnings.append(f"data.{shown}: {what}{found if same or swapped else ''}")
    return counts, warnings


def _contradictions(train: Profile) -> Iterator[str]:
    """A warning if training rows of one prompt have the same two answers in both orders."""
    _, swapped = _pairs_in(train, train)
    if swapped:
        what = "whose answers another row has for the same prompt the other way round"
        yield f"data.train: {rows(swapped)} of {len(train.pairs)} {what}"


def _pairs_in(own: Profile, other: Profile) -> tuple[int, int]:
    """Rows whose two answers a row of the other profile has for the same prompt: in their order, and in the other."""
    theirs = np.asarray(other.pairs, np.uint64)
    theirs = theirs[theirs != 0]
    same, swapped = (int(np.isin(each, theirs).sum()) for each in (own.pairs, own.swapped))
    return same, swapped
