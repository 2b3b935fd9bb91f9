"""The error with which a run ends on a device that it does not suit."""

from __future__ import annotations

from mmrl.config.sections import Config
from mmrl.engine.device import DeviceKind, precision, sampler_looks_ahead
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
        error = experts_refusal(folder, config, kind, learns=learns) or window_refusal(folder, config, kind)
    return error


def window_refusal(folder: ModelFolder, config: Config, kind: DeviceKind) -> ConfigError | None:
    """An error if the sampler's attention does not let the tokens of an image see each other where the model wants it.

    vLLM would start all the same, and compute other log-probs (0.008 nats off on average, for a tiny model).
    """
    vision = folder.family.vision and folder.images.looks_ahead
    if config.sampler.name != "vllm" or not vision or sampler_looks_ahead(kind):
        return None
    return ConfigError(
        "the tokens of an image see each other in this model's layers with a sliding window, and vLLM's attention on a "
        "CPU cannot mask that",
        where="sampler.name: vllm",
        possible="sampler.name: hf; vLLM on a GPU; models whose config.json has no use_bidirectional_attention: vision",
        remedy="set sampler.name: hf",
    )
