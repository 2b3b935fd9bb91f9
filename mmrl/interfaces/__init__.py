"""The interfaces of plugins: Algorithm, Reward, DatasetLoader, Environment, Monitor and Tracker.

A plugin is a class with a nested pydantic ``Config``, registered under an entry-point group:

    [project.entry-points."mmrl.rewards"]
    shortest = "my_package.shortest:Shortest"

``Config`` rejects unknown options, so a misspelt one is an error before anything starts. Import torch and other
heavy packages inside functions: options are validated on machines that lack them.
"""

from mmrl.interfaces.arguments import Arguments, ToolError
from mmrl.interfaces.datasets import DatasetFacts, DatasetLoader, SampledRow
from mmrl.interfaces.environments import Environment, Tool, tool
from mmrl.interfaces.monitors import (
    BASELINE_STEPS,
    Alarm,
    Baseline,
    Curve,
    Finding,
    Monitor,
    StepRecord,
    StepView,
)
from mmrl.interfaces.needs import Branches, Needs, Refill, Starvation
from mmrl.interfaces.plugins import (
    API_VERSION,
    CORRECTION_BOUNDS,
    Aggregation,
    AggregationMode,
    Algorithm,
    CorrectionMode,
    KLEstimator,
    NetworkName,
    Plugin,
    PluginConfig,
    RunFacts,
    SourceName,
    roles_of,
    served_needs,
)
from mmrl.interfaces.rewards import Reward, Scores
from mmrl.interfaces.trackers import ShownRollout, Tracker
from mmrl.interfaces.views import View

__all__ = [
    "API_VERSION",
    "BASELINE_STEPS",
    "CORRECTION_BOUNDS",
    "Aggregation",
    "AggregationMode",
    "Alarm",
    "Algorithm",
    "Arguments",
    "Baseline",
    "Branches",
    "CorrectionMode",
    "Curve",
    "DatasetFacts",
    "DatasetLoader",
    "Environment",
    "Finding",
    "KLEstimator",
    "Monitor",
    "Needs",
    "NetworkName",
    "Plugin",
    "PluginConfig",
    "Refill",
    "Reward",
    "RunFacts",
    "SampledRow",
    "Scores",
    "ShownRollout",
    "SourceName",
    "Starvation",
    "StepRecord",
    "StepView",
    "Tool",
    "ToolError",
    "Tracker",
    "View",
    "roles_of",
    "served_needs",
    "tool",
]
