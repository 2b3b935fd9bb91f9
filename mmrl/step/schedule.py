"""The schedule of a run: which batch is sampled with which weights, as data. Clocks decide who waits, and nothing else.

Batch t is what step t learns from, and v(t) are the weights that step t leaves. With a lag of k steps
(``trainer.staleness``) batch t is sampled with v(max(0, t - 1 - k)), exactly. The slots of batches that are sampled and
not yet learned from are k + 1 at most, that of the step which is being learned among them.

k = 0, one loop. Whoever does not work waits, whether or not ranks of their own sample::

    main      gather 1 ─ learn 1 ─ gather 2 ─ learn 2 ─ gather 3 ─ learn 3
    weights     v(0)                 v(1)                 v(2)

k = 1, two loops. The main thread opens slot t + k when it begins step t, and takes batch t out of its slot::

    thread    gather 1 ─ gather 2 ─ gather 3 ─ gather 4 ─ ...        waits while its next slot is not open
    weights     v(0)       v(0)       v(1)       v(2)
                     ╲          ╲          ╲
    main      · · · · · learn 1 ─ learn 2 ─ learn 3 ─ ...            waits while its next batch is not there
    opens     1 and 2 with v(0),  3 with v(1),  4 with v(2)

After step t, a checkpoint and an evaluation wait until batch t + k is gathered: then nothing is being sampled, and slot
t + 1 + k is still closed. So an evaluation has the sampler to itself, and a checkpoint holds the batches t + 1 to t + k
and the place in the rows after the last of them. A run that goes on learns from these, and nothing is sampled twice.

No slot beyond the last step is opened. A run that is given more steps later begins there as at its first step: the next
k + 1 batches are sampled with the weights that it has.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmrl.config.sections import TrainerConfig


@dataclass(frozen=True, slots=True)
class Schedule:
    """The slots of a run.

    Attributes:
        lag: Steps by which the sampler's weights are behind.
        steps: The run's.
    """

    lag: int
    steps: int

    @classmethod
    def of(cls, config: TrainerConfig) -> Schedule:
        """The schedule that a config asks for."""
        return cls(config.staleness, config.steps)

    def last_open(self, step: int) -> int:
        """The last batch whose slot is open while a step is learned, and until the next one begins."""
        return min(step + self.lag, self.steps)
