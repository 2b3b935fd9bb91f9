"""The records that travel through a run, one per stage, frozen; arrays are ragged numpy, never padded.

    Prompt -> EncodedPrompt -> Rollout -> RolloutGroup -> ScoredGroup -> Batch -> TrainingRow
                                                            (as it is recorded) -> CreditedGroup

Shape letters: ``B`` rollouts in a batch, ``G`` rollouts of one group, ``P`` prompt tokens, ``T`` tokens of one
completion (or, for torch tensors in ``PackedTokens``, the completion tokens of a micro-batch).
"""

from mmrl.types.arrays import BoolArray, FloatArray, ImageArray, IntArray
from mmrl.types.batch import Batch, BranchedRows, Credit, CreditedGroup, PreUpdateStatistics
from mmrl.types.inspection import ImageReport, Inspection, WeightReport, worst
from mmrl.types.packed import PackedTokens, PackedView, TokenLoss, TrainingRow
from mmrl.types.prompt import (
    DOCUMENT,
    IMAGE_PLACEHOLDER,
    THOUGHT_NAMES,
    Candidate,
    Content,
    EncodedPrompt,
    GroupKey,
    ImageRef,
    Message,
    Prompt,
    RawImage,
    SampleKey,
    earlier_turns,
)
from mmrl.types.rollout import (
    ENVIRONMENT,
    GIVEN,
    NO_VERSION,
    SCORE,
    TRUNCATED,
    Branch,
    Call,
    Experience,
    FinishReason,
    Observation,
    PlayedTurn,
    Rollout,
    RolloutGroup,
    Sample,
    ScoredGroup,
    Segment,
    Turn,
    before_turn,
    policy_turns,
)
from mmrl.types.score import Score, Spans, Unscored

__all__ = [
    "DOCUMENT",
    "ENVIRONMENT",
    "GIVEN",
    "IMAGE_PLACEHOLDER",
    "NO_VERSION",
    "SCORE",
    "THOUGHT_NAMES",
    "TRUNCATED",
    "Batch",
    "BoolArray",
    "Branch",
    "BranchedRows",
    "Call",
    "Candidate",
    "Content",
    "Credit",
    "CreditedGroup",
    "EncodedPrompt",
    "Experience",
    "FinishReason",
    "FloatArray",
    "GroupKey",
    "ImageArray",
    "ImageRef",
    "ImageReport",
    "Inspection",
    "IntArray",
    "Message",
    "Observation",
    "PackedTokens",
    "PackedView",
    "PlayedTurn",
    "PreUpdateStatistics",
    "Prompt",
    "RawImage",
    "Rollout",
    "RolloutGroup",
    "Sample",
    "SampleKey",
    "Score",
    "ScoredGroup",
    "Segment",
    "Spans",
    "TokenLoss",
    "TrainingRow",
    "Turn",
    "Unscored",
    "WeightReport",
    "before_turn",
    "earlier_turns",
    "policy_turns",
    "worst",
]
