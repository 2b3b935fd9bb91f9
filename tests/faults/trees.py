"""An algorithm of the fake engine's runs whose episodes branch at turns, drawn from all episodes so far."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.interfaces import Aggregation, Algorithm, Branches, Needs, PluginConfig
from mmrl.ops.branching import generator, means_over_sharers, places
from mmrl.types import Batch, Branch, Credit, PackedTokens, Rollout, TokenLoss


class Trees(Algorithm):
    """Each token's advantage is the mean reward of the episodes that share it, less the batch's."""

    aggregation = Aggregation("seq-mean-token-mean")

    class Config(PluginConfig):
        rounds: int = 2
        """Rounds of branches."""
        per_round: int = 1
        """Branches of a group in each round."""
        latest: bool = False
        """True takes the last turn of the newest episode instead."""

    config: Config

    def needs(self) -> Needs:
        return Needs(branches=Branches(self.config.rounds, self.config.per_round))

    def branch(self, group: Sequence[Rollout], number: int) -> Sequence[Branch]:
        found = places(group)
        if self.config.latest:
            return found[-1:] * number
        return [found[place] for place in generator(group).integers(0, len(found), number)]

    def credit(self, batch: Batch) -> Credit:
        assert batch.branches is not None
        lengths = [len(mask) for mask in batch.masks]
        means = means_over_sharers(batch.branches, batch.rewards, lengths, batch.valid)
        middle = batch.rewards[batch.valid].mean() if batch.valid.any() else 0.0
        return Credit([(each - middle) * valid for each, valid in zip(means, batch.valid, strict=True)])

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        loss_T = -tokens.advantages_T * tokens.logprobs_T
        return TokenLoss(loss_T, {"policy": loss_T})


class Remembering(Trees):
    """Has a state."""

    def state(self) -> dict[str, int]:
        return {"steps": 1}


class Undecided(Trees):
    """Does not say where its episodes branch."""

    branch = Algorithm.branch
