"""The needs of a model that reads images: a processor in its folder, and a transformers that is new enough."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mmrl.engine.network.family import Family
from mmrl.errors import ConfigError, ResourceError

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files of which a model that reads images has at least one."""


def check_processor(here: Path, family: Family, where: str) -> None:
    """Raises ConfigError if the folder of a model that reads images has no processor."""
    if any((here / name).is_file() for name in PROCESSORS):
        return
    raise ConfigError(
        f"a model of type {family.model_type} reads images, and its folder has no processor",
        where=where,
        possible=f"{' or '.join(PROCESSORS)} beside config.json",
        remedy="copy it, and the tokenizer, from the folder of the model that this one was trained from",
    )


def check_takes_image_features(body: Any, where: str) -> None:
    """Check that the body of a vision-language model takes the features that the vision tower made of its images.

    transformers before 5.18 drops them in silence, and the learner would train as if there were no images.

    Args:
        body: Class or instance.

    Raises:
        ResourceError: It does not.
    """
    if takes_image_features(body):
        return
    raise ResourceError(
        f"transformers {version('transformers')} is too old to train a model that reads images: it would drop them",
        where=where,
        possible="transformers 5.18 or later; models of text alone train with this one too",
        remedy="pip install 'transformers>=5.18,<5.20'",
    )


def takes_image_features(body: Any) -> bool:
    """True if the body of a vision-language model takes features of images; see ``check_takes_image_features``."""
    return "mm_encoder_outputs" in inspect.signature(body.forward).parameters


def trains_on_images() -> bool:
    """True if the installed transformers can train models on images; see ``check_takes_image_features``."""
    import transformers

    return takes_image_features(transformers.Qwen2_5_VLModel)
