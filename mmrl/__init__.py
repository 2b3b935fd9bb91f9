"""Reinforcement-learning post-training of vision-language models and text LLMs, with plugin algorithms.

    run = mmrl.train("config.yaml", {"trainer.steps": 20})
    run.metrics["eval/accuracy"]

Every name here is imported when it is first used; ``import mmrl`` itself imports nothing.
"""

from typing import TYPE_CHECKING, Any

from mmrl.system import old_names as _old_names
from mmrl.system.version import __version__

if TYPE_CHECKING:
    from mmrl.api.calls import Answer, Check, Evaluation, check, evaluate, export, train
    from mmrl.api.sweeps import sweep
    from mmrl.errors import (
        ConfigError,
        DataError,
        DeviceBusyError,
        DeviceMemoryError,
        HubError,
        HubUnreachableError,
        MMRLError,
        NumericsError,
        PluginError,
        RankLostError,
        ResourceError,
    )
    from mmrl.interfaces import (
        API_VERSION,
        Aggregation,
        AggregationMode,
        Algorithm,
        CorrectionMode,
        DatasetFacts,
        DatasetLoader,
        Environment,
        Finding,
        KLEstimator,
        Monitor,
        Needs,
        Plugin,
        PluginConfig,
        Refill,
        Reward,
        RunFacts,
        SampledRow,
        Scores,
        StepRecord,
        StepView,
        Tool,
        ToolError,
        Tracker,
        tool,
    )
    from mmrl.rollout.records.paging import GroupPages
    from mmrl.runs.evaluated import RecordedEvaluation, load_evaluation
    from mmrl.runs.reader import Metrics, Run, load_run
    from mmrl.runs.sweeps import Sweep, load_sweep
    from mmrl.types import (
        IMAGE_PLACEHOLDER,
        Batch,
        Call,
        Candidate,
        Content,
        Credit,
        EncodedPrompt,
        FinishReason,
        ImageRef,
        Message,
        Observation,
        PackedTokens,
        PlayedTurn,
        Prompt,
        RawImage,
        Rollout,
        RolloutGroup,
        Sample,
        Score,
        ScoredGroup,
        Segment,
        TokenLoss,
        Turn,
        Unscored,
    )

__all__ = [
    "API_VERSION",
    "IMAGE_PLACEHOLDER",
    "Aggregation",
    "AggregationMode",
    "Algorithm",
    "Answer",
    "Batch",
    "Call",
    "Candidate",
    "Check",
    "ConfigError",
    "Content",
    "CorrectionMode",
    "Credit",
    "DataError",
    "DatasetFacts",
    "DatasetLoader",
    "DeviceBusyError",
    "DeviceMemoryError",
    "EncodedPrompt",
    "Environment",
    "Evaluation",
    "Finding",
    "FinishReason",
    "GroupPages",
    "HubError",
    "HubUnreachableError",
    "ImageRef",
    "KLEstimator",
    "MMRLError",
    "Message",
    "Metrics",
    "Monitor",
    "Needs",
    "NumericsError",
    "Observation",
    "PackedTokens",
    "PlayedTurn",
    "Plugin",
    "PluginConfig",
    "PluginError",
    "Prompt",
    "RankLostError",
    "RawImage",
    "RecordedEvaluation",
    "Refill",
    "ResourceError",
    "Reward",
    "Rollout",
    "RolloutGroup",
    "Run",
    "RunFacts",
    "Sample",
    "SampledRow",
    "Score",
    "ScoredGroup",
    "Scores",
    "Segment",
    "StepRecord",
    "StepView",
    "Sweep",
    "TokenLoss",
    "Tool",
    "ToolError",
    "Tracker",
    "Turn",
    "Unscored",
    "__version__",
    "check",
    "evaluate",
    "export",
    "load_evaluation",
    "load_run",
    "load_sweep",
    "sweep",
    "tool",
    "train",
]
_HOMES = (
    *("errors", "types", "runs.reader", "runs.sweeps", "runs.evaluated", "rollout.records.paging"),
    *("interfaces", "api.calls", "api.sweeps"),
)
"""The modules that have these names, those that import least first."""

_old_names.install()


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        for home in _HOMES:
            if (found := getattr(import_module(f"mmrl.{home}"), name, None)) is not None:
                return globals().setdefault(name, found)
    raise AttributeError(f"module 'mmrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
