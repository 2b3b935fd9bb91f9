"""A plan of ranks of which some sample and the others learn: each side without the other, and how long it waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mmrl.commands.plan.calibration import Seconds
from mmrl.config.cluster import ClusterConfig
from mmrl.config.sections import Config
from mmrl.engine.footprint import Footprint, PlannedModel, ceil2, floor2
from mmrl.errors import ConfigError, ResourceError, plural
from mmrl.runs.budget import gigabytes

FREE = 0.1
"""Share of a GPU that nobody uses from which a plan tells it."""
BETTER = 0.95
"""Share of a step's seconds from which another division of the ranks is worth a line."""


def divided(cluster: ClusterConfig, gpus: int, together: int) -> dict[str, int]:
    """The numbers of ranks on both sides for so many GPUs, in the config's proportion.

    Args:
        together: Ranks that share a copy of the sampler's weights.

    Raises:
        ConfigError: There are too few.
    """
    if gpus <= together:
        raise ConfigError(
            f"{plural(gpus, 'GPU')} cannot be divided: {together} of them sample together, and others learn",
            where=f"--gpus {gpus}",
            remedy=f"name {together + 1} or more, or set cluster.ranks in place of cluster.sampler_ranks",
        )
    wished = gpus * cluster.num_sampler_ranks / cluster.num_ranks
    copies = min(max(round(wished / together), 1), (gpus - 1) // together)
    return {"sampler_ranks": copies * together, "learner_ranks": gpus - copies * together}


def sampler_alone(config: Config, found: Footprint, memory: int) -> tuple[dict[str, Any], list[str]]:
    """The GPU of a rank that samples and never learns, as data and as lines.

    Raises:
        ResourceError: It is too small, or the config's share of it.
    """
    fraction = config.sampler.gpu_memory_utilization
    lowest, highest = ceil2(found.least_share() / memory), floor2(1 - found.runtime / memory)
    if not lowest <= fraction <= highest:
        larger = (
            "raise sampler.tensor_parallel_size, and cluster.sampler_ranks to a multiple of it, or take larger GPUs"
        )
        set_to = f"set sampler.gpu_memory_utilization={min(max(fraction, lowest), highest):g}"
        raise ResourceError(
            f"a rank that samples needs {gigabytes(found.least_share() + found.runtime)} of a GPU, which has "
            f"{gigabytes(memory)}",
            where=f"sampler.gpu_memory_utilization: {fraction:g}, of ranks that sample alone",
            remedy=larger if lowest > highest else set_to,
        )
    share = int(memory * fraction)
    cache = share - found.least_share(0)
    lines = [
        f"ranks that sample: {gigabytes(share + found.runtime)} of {gigabytes(memory)}; {gigabytes(cache)} of it are "
        f"cache, for {cache // found.sequence} of the longest sequences"
    ]
    if fraction < highest - FREE:
        lines.append(f"no learner is there: sampler.gpu_memory_utilization may be {highest:g} in place of {fraction:g}")
    return {"share": share, "cache": cache, "sequences": cache // found.sequence}, lines


def snapshots(config: Config, model: PlannedModel) -> tuple[int, str]:
    """Bytes of the weights that wait for the sampler in the memory of the learner's first machine, and a line on it."""
    count, each = config.trainer.staleness + 1, model.snapshot_bytes
    line = f"the first rank that learns keeps {plural(count, 'version')} of the weights for those that sample: "
    return count * each, line + f"{gigabytes(count * each)} of its machine's memory"


@dataclass(frozen=True, slots=True)
class Division:
    """Estimates of a step on ranks of two sides.

    Attributes:
        gather_s: Seconds of new weights at the sampler and of sampling; ``learn_s`` of log-probs and updates.
        step_s: Seconds of a step. With a lag the sides work beside each other, without one in turns.
    """

    sampler_ranks: int
    learner_ranks: int
    gather_s: float
    learn_s: float
    step_s: float

    @classmethod
    def of(cls, measured: Seconds, config: Config, sampler_ranks: int, learner_ranks: int) -> Division:
        """The estimate for other numbers of ranks than the config's, for which ``measured`` is."""
        cluster = config.cluster
        gather = measured.sync + measured.generate * cluster.num_sampler_ranks / sampler_ranks
        learn = (measured.logprob + measured.update) * cluster.num_learner_ranks / learner_ranks
        step = max(gather, learn) if config.trainer.staleness else gather + learn
        return cls(sampler_ranks, learner_ranks, gather, learn, step)

    @property
    def idle(self) -> tuple[float, float]:
        """Shares of a step in which those that sample wait, and those that learn."""
        return 1 - self.gather_s / self.step_s, 1 - self.learn_s / self.step_s


def divisions(measured: Seconds, config: Config) -> Iterator[Division]:
    """Every division of as many ranks as the config has."""
    total, together = config.cluster.num_ranks, config.sampler.ranks_together
    for ranks in range(together, total, together):
        yield Division.of(measured, config, ranks, total - ranks)


def waiting(measured: Seconds, config: Config) -> tuple[Mapping[str, Any], list[str]]:
    """Data and lines on the waits of split ranks in a step, on a better division, and on the same ranks in turns."""
    cluster, total = config.cluster, config.cluster.num_ranks
    own = Division.of(measured, config, cluster.num_sampler_ranks, cluster.num_learner_ranks)
    best = min(divisions(measured, config), key=lambda each: each.step_s)
    together = measured.sync + measured.generate * cluster.num_sampler_ranks / total
    together += (measured.logprob + measured.update) * cluster.num_learner_ranks / total
    sampler, learner = own.idle
    lines = [
        f"about {own.step_s:.3g} s a step with a lag of {config.trainer.staleness}: ranks that sample need "
        f"{own.gather_s:.3g} s and wait {sampler:.0%} of the time, those that learn need {own.learn_s:.3g} s and wait "
        f"{learner:.0%}"
    ]
    if best.step_s < BETTER * own.step_s:
        keys = f"cluster.sampler_ranks={best.sampler_ranks} cluster.learner_ranks={best.learner_ranks}"
        lines.append(f"{keys}: about {best.step_s:.3g} s")
    lines.append(
        f"cluster.ranks={total}, which sample and learn in turns: about {together:.3g} s. None of this counts how long "
        "the others wait for the longest completion"
    )
    data = {
        **asdict(own),
        "idle_sampler": sampler,
        "idle_learner": learner,
        "best": asdict(best),
        "in_turns_s": together,
    }
    return data, lines
