"""Probes of a reward model: scores that depend on the row, and a model that does not see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.config.load import from_mapping
from mmrl.data.grid import ImageGrid
from mmrl.data.images import MediaStore
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.text.encoding import Encoder
from mmrl.engine_api import Learner
from mmrl.errors import NumericsError
from mmrl.step.audit.start_audit import audit, cheap_rows
from mmrl.types import FloatArray, Sample


class Scored(Learner):
    """An engine whose reward model adds up tokens and images, and faults on request."""

    precision = "float32"

    def __init__(self, *, leaks: float = 0.0, sees: bool = True, role: str = "reward") -> None:
        self.networks: Any = {role: self}
        self._leaks, self._sees = leaks, sees

    def describe(self) -> dict[str, Any]:
        return {"model_type": "qwen2_5_vl", "max_images": 2, "sampler": None}

    @contextmanager
    def learning(self) -> Iterator[Learner]:
        yield self

    def final_values(self, samples: Sequence[Sample]) -> FloatArray:
        seen = [int(image.hash[:6], 16) / 2**24 if self._sees else 0.0 for s in samples for image in s.all_images[:1]]
        images = iter(seen)
        own = [s.token_ids.mean() / 100 + (next(images) if s.all_images else 0.0) for s in samples]
        return np.array(own, np.float32) + np.float32(self._leaks * (len(samples) > 1))

    def save(self, folder: Path) -> Any:
        raise AssertionError("nothing is trained")


@pytest.fixture
def probes(models: Callable[[str], Path], tmp_path: Path) -> Callable[[Any], Any]:
    folder = ModelFolder.open(str(models("qwen2_5_vl")))
    encoder = Encoder(folder, MediaStore(tmp_path, ImageGrid(28, 3136, 12544)))
    data = {"train": {"name": "table"}, "max_prompt_tokens": 200}
    config = from_mapping({"model": {"path": "m"}, "data": data, "algorithm": {"name": "a"}})
    return lambda engine: (engine, encoder, config)


def test_a_sound_reward_model_has_no_bad_row_and_no_row_about_a_sampler(probes: Any) -> None:
    rows = list(cheap_rows(*probes(Scored())))
    assert not [row for row in rows if row.verdict == "bad"]
    names = [row.probe for row in rows]
    assert "packed = one by one, no image" in names and "sight, another image" in names
    assert not [name for name in names if "sampler" in name]
    told: list[str] = []
    assert "probes of numbers and sight are well" in audit(*probes(Scored()), lambda kind, **fields: told.append(kind))
    assert not told


def test_scores_that_depend_on_other_conversations_stop_the_run(probes: Any) -> None:
    bad = [row for row in cheap_rows(*probes(Scored(leaks=0.01))) if row.verdict == "bad"]
    assert [row.probe for row in bad if row.probe.startswith("packed = one by one")]
    with pytest.raises(NumericsError, match="of the largest one from themselves one by one"):
        audit(*probes(Scored(leaks=0.01)), lambda kind, **fields: None)


def test_a_reward_model_that_sees_nothing_is_told_of(probes: Any) -> None:
    bad = [row for row in cheap_rows(*probes(Scored(sees=False))) if row.verdict == "bad"]
    assert [row.probe for row in bad] == ["sight, another image", "sight, the mark moved"]
    assert all("the model is blind" in row.found for row in bad)
