"""Reward models: a model's body with a linear score, as transformers' classes ``...ForSequenceClassification`` are.

A folder of one has in its config.json, beside what its body's has, the keys that ``as_reward_model`` writes. The weight
of the head is ``score.weight``, (1, H). The learner, the reward ``model`` and the tests take the class and the place of
a score from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.errors import ConfigError

SCORE = "mmrl_score"
"""The key of config.json that says where a score is read."""
LAST = {"reads": "last"}
"""Its value: at the last token of the text."""
CLASS = "ForSequenceClassification"
"""The end of the name of a class with a score."""
VALUE_HEADS = ("value_head.safetensors", "value_head.bin")
"""Files beside a policy with the score that LLaMA-Factory has trained on its last state; the second is not read."""
NO_SCORE = "generates text, a policy without a score head: as a reward model it lacks 1 weight, score.weight"
"""A clause on a policy's folder in a reward model's place. transformers, which reads it by other names, misses more."""
BEGIN_SCORE = "train a reward model from this folder and name what `mmrl export` writes of it, or name another one"
"""The way from there to a reward model."""


def sequence_classification_class(config: Any) -> Any:
    """The class of models with the body that a transformers config describes and a score.

    It is transformers' own where it has one. For the other families, most of those that read images among them, it is
    made as transformers makes its own: the mixin over the family's base class.

    Raises:
        ConfigError: transformers knows no body of this kind.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING
    from transformers.modeling_layers import GenericForSequenceClassification

    own = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if own is not None:
        return own
    body = MODEL_MAPPING.get(type(config), None)
    if not isinstance(body, type):
        raise ConfigError(
            f"transformers has no model of type {config.model_type!r} to which a score could be added",
            possible="a type that transformers' AutoModel loads",
        )
    base = next(each for each in body.__mro__ if each.__name__.endswith("PreTrainedModel"))
    # In the module of its body it counts as transformers' own, so files are read with the family's names of weights.
    namespace = {"__module__": body.__module__}
    return type(f"{body.__name__.removesuffix('Model')}{CLASS}", (GenericForSequenceClassification, base), namespace)


def as_reward_model(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The config.json of a reward model.

    Args:
        config: The config.json of the folder that its body is from.
        name: The name of its class.
    """
    kept = {key: value for key, value in config.items() if key not in ("id2label", "label2id", "problem_type")}
    return {**kept, "architectures": [name], "num_labels": 1, SCORE: dict(LAST)}


def skipped_token(config: Any) -> int | None:
    """The token at the end of a text behind which a model's score is read; None if it is read at the last token.

    A published model whose padding is also its end of a text was trained by transformers to look before it. One with
    a token of its own for padding reads the last token, as vLLM does, and so does one that says so.

    Args:
        config: The transformers config of its folder.

    Raises:
        ConfigError: The folder names another place.
    """
    rule = getattr(config, SCORE, None)
    if rule is not None:
        if rule != LAST:
            raise ConfigError(
                f"config.json says that the score is read at {rule!r}",
                where=SCORE,
                possible=f"{LAST!r}, or no such key",
                remedy="use the version of mmrl that wrote the folder",
            )
        return None
    text = config.get_text_config()
    padding: int | None = text.pad_token_id
    ends = text.eos_token_id
    return padding if padding in (ends if isinstance(ends, list) else [ends]) else None


def score_place(ids: Sequence[int], skipped: int | None) -> int:
    """The place in a text at which its score is read.

    Args:
        ids: The whole text.
        skipped: The answer of ``skipped_token``.
    """
    return next((place for place in reversed(range(len(ids))) if ids[place] != skipped), 0)
