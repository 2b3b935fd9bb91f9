"""The errors after which the engines of a run are started again, and how often."""

from __future__ import annotations

from mmrl.config.sections import Config
from mmrl.errors import DeviceBusyError, DeviceMemoryError, RankLostError, ResourceError

RESTARTED = (RankLostError, DeviceBusyError, DeviceMemoryError)


class Restarts:
    """The starts that a run has left.

    Attributes:
        left: ``trainer.max_restarts`` without those that lost ranks and busy devices have used up.
    """

    def __init__(self, max_restarts: int) -> None:
        self.left = max_restarts
        self._is_halved = False

    def after(self, error: ResourceError, config: Config) -> Config | None:
        """The config of the next start after an error; None if there is no further one.

        A full device has its micro-batches halved, once, for ranks that cannot do it alone as others wait for them. A
        device that is busy while an engine starts in this very process is not tried again: what that engine has left
        holds memory too.
        """
        if isinstance(error, DeviceMemoryError):
            return self._halved(config) if error.microbatches_help else None
        if isinstance(error, DeviceBusyError) and config.cluster.name == "local":
            return None
        self.left -= 1
        return config if self.left >= 0 else None

    def _halved(self, config: Config) -> Config | None:
        budget = config.learner.tokens_per_microbatch // 2
        if self._is_halved or config.cluster.num_learner_ranks == 1 or not budget:
            return None
        self._is_halved = True
        smaller = config.learner.model_copy(update={"tokens_per_microbatch": budget})
        return config.model_copy(update={"learner": smaller})
