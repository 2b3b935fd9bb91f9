"""Models with a score in place of a policy's head: reward models and critics."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mmrl.engine.network.family import SCORE_WEIGHT
from mmrl.engine.network.folder import INDEX, ModelFolder
from mmrl.engine.network.layout import rows_at
from mmrl.engine.network.packed_inputs import PackedInputs, Reads, UniqueImages
from mmrl.engine.network.policy import Loading, Policy, empty_model
from mmrl.errors import ConfigError
from mmrl.score_head import BEGIN_SCORE, CLASS, NO_SCORE, VALUE_HEADS, sequence_classification_class

VALUE_WEIGHT = "v_head.summary.weight"
"""The score's name in a file of ``VALUE_HEADS``."""


class RewardModel(Policy):
    """A transformers model with a score, in the policy's place; its weights, adapters and images are the policy's kind.

    Args:
        model: As ``with_score`` makes it, or as its folder is read.
    """

    def forward(self, inputs: PackedInputs | UniqueImages) -> Any:
        """(N,) float32 scores after the last token of each sample; for images alone, their features."""
        if isinstance(inputs, UniqueImages):
            return self._image_features(inputs)
        assert inputs.last is not None, "rows without their last tokens have no scores"
        return self._read(inputs, inputs.last)

    def _read(self, inputs: PackedInputs, reads: Reads) -> torch.Tensor:
        """The head's values of some hidden states of a row."""
        return reads.whole(self.head(rows_at(self._hidden_states(inputs), reads.positions)))

    @property
    def scored_by(self) -> str:
        return type(self.model).__name__

    def _made_head(self, chunk_bytes: int) -> torch.nn.Module:
        return ScoreHead(self.model.score)


class Critic(RewardModel):
    """A reward model that is asked for the value of each state of a completion."""

    def forward(self, inputs: PackedInputs | UniqueImages) -> Any:
        """(T,) float32 values of the states that the row's completion tokens were chosen in.

        Rows that keep last tokens have (N,) values after these instead, as a reward model's; images alone have their
        features.
        """
        if isinstance(inputs, UniqueImages) or inputs.last is not None:
            return super().forward(inputs)
        return self._read(inputs, inputs.predicting)


class ScoreHead(torch.nn.Module):
    """A score's weight, as a module of its own for the reason of ``policy.Head``: every rank calls it once a row.

    The weight has the model's element type. The product is in float32, and no call of a BLAS: for a matrix of one row
    the last bit of that depends on the place of the weight in memory, which a resumed run does not repeat.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """(N,) float32 scores."""
        return (hidden_NH.float() * self.weight.float()).sum(-1)


class RewardLoading(Loading):
    """Reads reward models with their own score, also one that lies beside a policy, and others with a new one.

    Args:
        seed: Draws a new score; None for one of zeros.
        begins: False to refuse folders without a score.
    """

    made = RewardModel

    def __init__(self, seed: int | None = 0, *, begins: bool = True) -> None:
        self._seed, self._begins = seed, begins

    def read(self, folder: ModelFolder, options: dict[str, Any]) -> Any:
        beside = _score_file(Path(folder.path))
        if beside is None and self._has_class(folder):
            return read_reward_model(folder, options)
        model = with_score(super().read(folder, options), self._seed)
        if beside is not None:
            _put(_score_in(beside), model, f"{folder.key}.path: {folder.name}")
        return model

    def empty(self, folder: ModelFolder, options: dict[str, Any]) -> Any:
        if _score_file(Path(folder.path)) is not None or not self._has_class(folder):
            return with_score(super().empty(folder, options), self._seed)
        return empty_model(folder, options, sequence_classification_class)

    def _has_class(self, folder: ModelFolder) -> bool:
        """True if the folder's model is of a class with a score.

        Raises:
            ConfigError: It is not, and none may begin here.
        """
        found = _names_score(Path(folder.path))
        if not found and not self._begins:
            raise ConfigError(
                f"the folder holds a model that {NO_SCORE}",
                where=f"{folder.key}.path: {folder.name}",
                possible=f"a folder whose config.json names a class ...{CLASS}",
                remedy=BEGIN_SCORE,
            )
        return found


class CriticLoading(RewardLoading):
    """Reads critics, which are reward models in their files."""

    made = Critic


def is_reward_model(folder: Path) -> bool:
    """True if a folder holds a model with a score, by its config.json, by that of its adapter, or in a file beside it.

    Raises:
        ConfigError: The score lies in a file that is not read.
    """
    return _score_file(folder) is not None or _names_score(folder)


def _names_score(folder: Path) -> bool:
    """True if config.json, or that of an adapter, names a score."""
    for name, key in (("config.json", "architectures"), ("adapter_config.json", "modules_to_save")):
        if (folder / name).is_file():
            named = json.loads((folder / name).read_text(encoding="utf-8")).get(key) or []
            return any(str(each).endswith(CLASS) or each == "score" for each in named)
    return False


def with_score(model: Any, seed: int | None) -> Any:
    """The model with a score in place of its head, drawn from a normal distribution of deviation ``1 / sqrt(H)``.

    A body ends in a norm, so scores begin at a size of one. From a score of zero the body would have no gradient in the
    first step, and in later ones as small a one as the score's weight is: some hundred steps of a usual rate.

    Args:
        model: One that generates text; its body becomes the result's.
        seed: None for a score of zeros, so that a critic begins by predicting nothing.
    """
    model.config.num_labels = 1
    kind = sequence_classification_class(model.config)
    with torch.device("meta"):  # its own body takes no memory
        found = kind(model.config)
    setattr(found, found.base_model_prefix, model.base_model)
    width = found.score.weight.shape[1]
    found.score = torch.nn.Linear(width, 1, bias=False, dtype=model.dtype)
    drawn = torch.zeros(1, width)
    if seed is not None:
        drawn = torch.randn(1, width, generator=torch.Generator().manual_seed(seed)) / math.sqrt(width)
    found.score.weight.data.copy_(drawn)
    return found.eval()


def check_score(folder: ModelFolder) -> None:
    """See that the score of a folder that holds a model with one fits the model; reads no other weight.

    Raises:
        ConfigError: It does not, or the model has several labels.
    """
    path, where = Path(folder.path), f"{folder.key}.path: {folder.name}"
    if (beside := _score_file(path)) is not None:
        _check_width(_score_in(beside), int(folder.config.get_text_config().hidden_size), where)
    elif _names_score(path):
        _check_own_score(_config(folder), path, where)


def _check_own_score(config: Any, path: Path, where: str) -> None:
    """As ``check_score``, of a reward model's own."""
    if config.num_labels != 1:
        raise ConfigError(
            f"the model tells {config.num_labels} labels apart",
            where=where,
            possible="a reward model, which has one label: its score",
            remedy="name a reward model, or a model that generates text to begin one from",
        )
    width, shape = config.get_text_config().hidden_size, _score_shape(path)
    if shape != [1, width]:
        has = "lack its head" if shape is None else f"have a head of shape {shape}"
        raise ConfigError(
            f"the reward model's files {has}: {SCORE_WEIGHT} is (1, {width})",
            where=where,
            remedy="fetch the files again, or name the model that generates text to begin a new head",
        )


def read_reward_model(folder: ModelFolder, options: Mapping[str, Any]) -> Any:
    """A reward model with its own score.

    Raises:
        ConfigError: It has several labels, or its files lack weights or have others.
    """
    where, config = f"{folder.key}.path: {folder.name}", _config(folder)
    _check_own_score(config, Path(folder.path), where)
    kind = sequence_classification_class(config)
    model, found = kind.from_pretrained(folder.path, use_safetensors=True, output_loading_info=True, **options)
    if absent := sorted(found["missing_keys"]):
        raise ConfigError(
            f"the reward model's files lack {len(absent)} of its weights: {', '.join(absent[:5])}",
            where=where,
            remedy="name a complete folder of a reward model",
        )
    return model


def _score_file(folder: Path) -> Path | None:
    """The file with the score of a policy's folder in LLaMA-Factory's layout, such as Skywork-VL-Reward's.

    Raises:
        ConfigError: It belongs to an adapter, or is a pickle.
    """
    name, pickled = VALUE_HEADS
    if (folder / pickled).is_file() and not (folder / name).is_file():
        raise ConfigError(
            f"the score lies in {pickled}, which can run code when it is read",
            where=str(folder),
            possible=f"{name}",
            remedy="save the model again with safetensors",
        )
    if not (folder / name).is_file():
        return None
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"the score of an adapter lies in {name}",
            where=str(folder),
            possible=f"a whole model beside {name}",
            remedy="merge the adapter with the program that has written it",
        )
    return folder / name


def _score_in(file: Path) -> torch.Tensor:
    """(1, H) the score in a file beside a policy.

    The file has a bias too. All scores share it, so no comparison and no advantage within a group knows it, and it was
    never trained: it is left out.
    """
    from safetensors.torch import load_file

    weights = load_file(file)
    if VALUE_WEIGHT not in weights:
        raise ConfigError(
            f"{file.name} has no {VALUE_WEIGHT}",
            where=str(file),
            possible=f"it has {', '.join(sorted(weights)[:3])}",
        )
    return weights[VALUE_WEIGHT]


def _put(score: torch.Tensor, model: Any, where: str) -> None:
    """Give a model the weight of its score."""
    _check_width(score, model.score.weight.shape[1], where)
    model.score.weight.data.copy_(score)


def _check_width(score: torch.Tensor, width: int, where: str) -> None:
    """See that a score is (1, width)."""
    if score.shape != (1, width):
        raise ConfigError(
            f"the score has {'x'.join(map(str, score.shape))} weights, and the model 1 x {width}",
            where=where,
            remedy="put the file of the score beside the model that it belongs to",
        )


def _config(folder: ModelFolder) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder.path, trust_remote_code=folder.trust_remote_code)


def _score_shape(path: Path) -> list[int] | None:
    """The shape of the score's weight in a folder's files; None if there is none."""
    from safetensors import safe_open

    names = [file.name for file in path.glob("*.safetensors")]
    if (path / INDEX).is_file():
        names = [json.loads((path / INDEX).read_text())["weight_map"].get(SCORE_WEIGHT, "")]
    for name in filter(None, names):
        with safe_open(path / name, framework="numpy") as weights:
            if SCORE_WEIGHT in weights.keys():  # noqa: SIM118
                return list(weights.get_slice(SCORE_WEIGHT).get_shape())
    return None
