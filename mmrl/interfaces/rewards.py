"""The interface of rewards."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import ClassVar

from mmrl.interfaces.plugins import Plugin
from mmrl.types import EncodedPrompt, Rollout, Score, Spans, Unscored

Scores = Sequence[Score | Spans | Unscored | None]
"""One score per rollout, in order, which may have values of parts of the text (``Spans``); where it cannot be scored
None, or ``Unscored`` with the reason."""


class Reward(Plugin):
    """Scores rollouts, in a worker process that may be killed and replaced at any time.

    Attributes:
        penalty: True if it shapes the others, as a length penalty does: algorithms that normalise or clip rewards add
            it afterwards.
        workers: Processes of its own, such as 1 for a model that is loaded once; None shares those of the others.
            ``rewards[].workers`` of the config wins.
        groups_per_call: Most groups whose rollouts ``score`` gets in one call, if as many are waiting.
        secrets: Options that name an environment variable with a secret each, or are None. Its workers, which must be
            its own, get these variables; no plugin's process has others that look like secrets.
    """

    penalty: ClassVar[bool] = False
    workers: ClassVar[int | None] = None
    groups_per_call: ClassVar[int] = 1
    secrets: ClassVar[tuple[str, ...]] = ()

    def prepare(self) -> None:
        """Load large things. Called once in each worker before it scores; ``timeout_s`` does not count meanwhile."""
        return

    def score_one(
        self, rollout: Rollout
    ) -> Score | Spans | Unscored | Awaitable[Score | Spans | Unscored | None] | None:
        """A finite number, or several by name (see ``Score``); ``Spans`` has values of parts of the text beside it;
        None, or ``Unscored`` with the reason, takes the rollout out of statistics and loss.

        Override this where each rollout is scored by itself: a call that hangs then costs one rollout. With
        ``async def`` all rollouts of a group are scored side by side. Random numbers repeat with the rollout if they
        are drawn before the first ``await``; later ones, from the global generators, depend on what else was under way.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither score_one nor score")

    def score(self, rollouts: Sequence[Rollout]) -> Scores | Awaitable[Scores]:
        """One number, or several by name, or None or ``Unscored`` per rollout, in order.

        Override this, with ``def`` or ``async def``, where rollouts are scored together: those of one group, or of
        several with ``groups_per_call``.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither score_one nor score")

    def check_rows(self, prompts: Sequence[EncodedPrompt]) -> Sequence[str]:
        """Warnings about rows that it scores, shown by `mmrl check` and at the start of a run.

        Called on the driver, without ``prepare``: ``check`` gives rows all over a dataset, a run its first ones. They
        have the row and its images' sizes (``ImageRef.width``, ``height``, ``file_size``), no tokens and no pixels.
        """
        return ()

    def right_answer(self, prompt: EncodedPrompt) -> str | None:
        """The text that a policy should write, where the reference answer has another form; `mmrl check` grades it.

        None, the default, is the reference answer as it is. The prompt is as in ``check_rows``.
        """
        return None

    def answer_of(self, rollout: Rollout) -> str | None:
        """The answer that a completion gives, for votes among the completions of a prompt (majority@k of `mmrl eval`).

        Equal texts are the same answer, so answers that ``score`` takes for the same, such as ``0.5`` and ``1/2``,
        should give one text. It must not depend on the reference answer. None gives no vote, and is the default. Called
        after each scoring, in the same process and within the same time.
        """
        return None
