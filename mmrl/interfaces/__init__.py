"""The interfaces of plugins: Algorithm, Reward, DatasetLoader, Environment and Tracker.

A plugin is a class with a nested pydantic ``Config``, registered under an entry-point group:

    [project.entry-points."mmrl.rewards"]
    shortest = "my_package.shortest:Shortest"

``Config`` rejects unknown options, so a misspelt one is an error before anything starts. Import torch and other
heavy packages inside functions: options are validated on machines that lack them.
"""

from mmrl.interfaces.arguments import Arguments, ToolError
from mmrl.interfaces.environments import Environment, Tool, tool
from mmrl.interfaces.plugins import (
    API_VERSION,
    CORRECTION_BOUNDS,
    Aggregation,
    AggregationMode,
    Algorithm,
    CorrectionMode,
    DatasetFacts,
    DatasetLoader,
    KLEstimator,
    Needs,
    Plugin,
    PluginConfig,
    Refill,
    Reward,
    RunFacts,
    Scores,
    Starvation,
    Tracker,
    served_needs,
)

__all__ = [
    "API_VERSION",
    "CORRECTION_BOUNDS",
    "Aggregation",
    "AggregationMode",
    "Algorithm",
    "Arguments",
    "CorrectionMode",
    "DatasetFacts",
    "DatasetLoader",
    "Environment",
    "KLEstimator",
    "Needs",
    "Plugin",
    "PluginConfig",
    "Refill",
    "Reward",
    "RunFacts",
    "Scores",
    "Starvation",
    "Tool",
    "ToolError",
    "Tracker",
    "served_needs",
    "tool",
]
