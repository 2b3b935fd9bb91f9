"""The error with which a run ends on a device that it does not suit."""

from __future__ import annotations

from mmrl.config.sections import Config
from mmrl.engine.device import DeviceKind, precision
from mmrl.engine.network.experts import experts_refusal
from mmrl.engine.network.features import asked_features
from mmrl.engine.network.folder import ModelFolder
from mmrl.errors import ConfigError


def device_refusal(
    folder: ModelFolder, config: Config, kind: DeviceKind, *, samples: bool = True, learns: bool = True
) -> ConfigError | None:
    """An error if the engines would not serve this model with this config on this kind of device.

    Args:
        samples: True if the run samples.
        learns: True if the run trains.
    """
    asked = asked_features(config, samples=samples, learns=learns)
    error = folder.family.refusal(asked, kind, precision(kind, config.model.dtype))
    if error is None and samples:
        error = experts_refusal(folder, config, kind, learns=learns)
    return error
