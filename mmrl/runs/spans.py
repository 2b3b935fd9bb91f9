"""Values of parts of texts in a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from mmrl.rollout.rewards.scorer import LastTokens

if TYPE_CHECKING:
    from mmrl.runs.setup import RunSetup
    from mmrl.types import Rollout


def last_tokens_of(setup: RunSetup) -> LastTokens | None:
    """The way to find the tokens of parts of texts, of which the first call opens the tokenizer; None if the algorithm
    does not ask for ``token_rewards``."""
    return partial(_last_tokens, setup) if setup.algorithm.needs().token_rewards else None


def _last_tokens(setup: RunSetup, rollout: Rollout, ends: Sequence[int]) -> list[int]:
    from mmrl.engine.text.spans import last_tokens

    return last_tokens(rollout, ends, partial(setup.folder.tokenizer.decode, skip_special_tokens=True))
