"""The answers of rewards for one rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Score = float | Mapping[str, Any]
"""One reward's value for one rollout: any finite number, or several by name.

``rewards[].weights`` weighs several values into one; without it, ``overall`` or ``score`` is the value, and else their
sum. If one rollout of an answer has ``overall`` or ``score``, all must. The other values are components
``<label>/<name>`` of weight 0: logged and recorded, in no sum. Values beside an ``overall`` or ``score`` are ignored
if they are no numbers. A component may be None where it does not apply.
"""


@dataclass(frozen=True, slots=True)
class Spans:
    """A score, and values of parts of the text.

    Attributes:
        value: The score of the whole rollout, which counts as any score.
        spans: (start, end, value) of each part: characters ``rollout.text[start:end]``, at least one, and a finite
            number. Parts may overlap. Times the reward's weight, each value is added to ``Batch.token_rewards`` at the
            part's last token; it is in no sum of rewards.
    """

    value: Score
    spans: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True, slots=True)
class Unscored:
    """In place of a score: None, and why the rollout cannot be scored.

    A step's event ``reward_unscored`` counts them and shows the first one.

    Attributes:
        why: A clause about the reward, such as ``found no verdict in 'Sure!'``.
    """

    why: str
