"""Completions that rows give themselves, as the policy learns them: their lengths, and a pair for a person."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mmrl.errors import plural
from mmrl.runs.setup import RunSetup
from mmrl.types import EncodedPrompt, Prompt, ScoredGroup

_SHOWN_CHARACTERS = 300


class GivenRows:
    """The completions of rows that were looked at.

    Attributes:
        lengths: Tokens of each completion.
        compared: Rows with a best and a worst candidate.
        longer: Those whose best has more tokens.
        shorter: Those whose best has fewer.
    """

    def __init__(self, setup: RunSetup) -> None:
        self._setup = setup
        self.lengths: list[int] = []
        self.compared = self.longer = self.shorter = 0

    def learnable(self, prompt: Prompt) -> EncodedPrompt:
        """The prompt in tokens, if its completions can be learned, which are counted.

        Raises:
            DataError: They cannot.
        """
        encoded = self._setup.encoder.encode(prompt)
        group = self._group(encoded)
        sizes = [len(rollout.token_ids) for rollout in group.rollouts]
        self.lengths += sizes
        if len(sizes) > 1:
            chosen, rejected = sizes[int(group.rewards.argmax())], sizes[int(group.rewards.argmin())]
            self.compared, self.longer = self.compared + 1, self.longer + (chosen > rejected)
            self.shorter += chosen < rejected
        return encoded

    def lines(self) -> list[str]:
        """Facts of all pairs, for a person; none of demonstrations."""
        if not self.compared:
            return []
        longer, shorter = (f"{count / self.compared:.0%}" for count in (self.longer, self.shorter))
        what = f"the chosen is longer than the rejected in {longer} of {self.compared} rows, and shorter in {shorter}"
        return [f"pairs      {what}"]

    def data(self) -> dict[str, Any]:
        """The same for a program."""
        return {"rows": self.compared, "chosen_longer": self.longer, "chosen_shorter": self.shorter}

    def shown(self, prompt: EncodedPrompt) -> Iterator[str]:
        """A row's candidates, best first; none in a run on demonstrations, though its rows may have some."""
        group = self._group(prompt)
        if not group.components:
            return
        for place in np.argsort(-group.rewards, kind="stable").tolist():
            rollout, text = group.rollouts[place], group.rollouts[place].text
            yield f"candidate of score {group.rewards[place]:g}, {plural(len(rollout.token_ids), 'token')}"
            cut = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
            yield from (f"| {line}" for line in cut.splitlines() or [""])

    def _group(self, prompt: EncodedPrompt) -> ScoredGroup:
        return self._setup.step_source.group(prompt, self._setup.algorithm.needs(), self._setup.encoder)
