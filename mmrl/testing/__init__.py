"""The kit with which anyone checks a plugin, from its own tests; nothing here needs a model or a device.

    from mmrl.testing import check_algorithm, check_dataset, check_environment, check_monitor, check_reward, replay

- ``check_algorithm``, ``check_reward``, ``check_dataset``, ``check_environment`` and ``check_monitor`` take a plugin's
  name, its class, or the plugin, and raise PluginError with the first rule that it breaks, the values that show it, and
  what to do. `mmrl plugins --check` calls them for installed plugins.
- ``alarms_of`` gives the alarms of a monitor on metrics that are made by hand.
- ``make_rollouts`` makes rollouts from texts, for a reward's own tests.
- ``read_rollouts`` reads the rollouts of any RUN/rollouts file, to try a reward on a policy's real completions, as
  `mmrl rewards test` does.
- ``replay`` gives an algorithm's advantages, loss and gradient on recorded numbers, to be compared with a paper's or
  with those of another implementation.
"""

from mmrl.rollout.records import read_rollouts
from mmrl.testing.algorithms import check_algorithm
from mmrl.testing.datasets import check_dataset
from mmrl.testing.environments import check_environment
from mmrl.testing.monitors import alarms_of, check_monitor
from mmrl.testing.playback import Replay, replay
from mmrl.testing.rewards import check_reward
from mmrl.testing.rollouts import make_rollouts

__all__ = [
    "Replay",
    "alarms_of",
    "check_algorithm",
    "check_dataset",
    "check_environment",
    "check_monitor",
    "check_reward",
    "make_rollouts",
    "read_rollouts",
    "replay",
]
