"""The overlap of a completion's boxes with the reference boxes, 0 to 1: intersections over unions, matched one to one.

Intersection over union is PASCAL VOC's measure (Everingham et al., IJCV 2010, doi:10.1007/s11263-009-0275-4, section
4.2); several boxes are matched so that the sum is largest (the assignment problem). The score is that sum over the
larger number of boxes, so that extra and missing boxes cost the same; a box without an area counts, and overlaps none.
With ``threshold``, a matched pair counts 1 if it reaches it, else 0.

``boxes.py`` says how boxes may be written, and in which scale. A rollout whose reference holds no box with an area is
unscorable.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from pydantic import Field

from mmrl.errors import ConfigError
from mmrl.types import EncodedPrompt, FloatArray, Rollout, Score
from mmrl_rewards.answers import first_read, reply_text
from mmrl_rewards.box_scale import Box
from mmrl_rewards.boxes import BoxReward, readings

_ROUNDING = 1e-9


class IoU(BoxReward):
    """Overlap with the reference boxes."""

    class Config(BoxReward.Config):
        threshold: float | None = Field(default=None, gt=0, le=1)
        """Overlap from which a box counts as found; null: the overlap itself is the score."""
        max_boxes: int = Field(default=100, gt=0)
        """Answers with more boxes score 0."""

    config: Config

    def prepare(self) -> None:
        _matching()

    def score_one(self, rollout: Rollout) -> Score | None:
        reference, by = self.references(rollout.answer), self.factors_for(rollout.images)
        if not reference or by is None:
            return None
        found = first_read(readings(reply_text(rollout)), self._answered) or []
        if not 0 < len(found) <= self.config.max_boxes:
            return 0.0
        return self._score(np.array(reference) * (*by, *by), np.array(found))

    def right_answer(self, prompt: EncodedPrompt) -> str | None:
        reference, by = self.references(prompt.prompt.answer), self.factors_for(prompt.images)
        if not reference or by is None or by == (1.0, 1.0):
            return None
        boxes = np.array(reference) * (*by, *by)
        if self.config.boxes == "xywh":
            boxes[:, 2:] -= boxes[:, :2]
        return json.dumps(boxes.round(6).tolist() if len(boxes) > 1 else boxes[0].round(6).tolist())

    def _answered(self, text: str) -> list[Box] | None:
        return (self.boxes_in(text) or None) if len(text) <= self.config.max_characters else None

    def _score(self, reference: FloatArray, found: FloatArray) -> float:
        overlap = overlaps(reference, found)
        if self.config.threshold is not None:
            overlap = (overlap >= self.config.threshold).astype(float)
        rows, columns = _matching()(overlap, maximize=True)
        return float(overlap[rows, columns].sum() / max(overlap.shape))


def _matching() -> Callable[..., Any]:
    """SciPy's solution of the assignment problem.

    Raises:
        ConfigError: SciPy is not installed.
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        what = "the reward iou matches boxes with the package scipy, which is not installed"
        raise ConfigError(what, where="rewards: iou", remedy="pip install 'mmrl-train[iou]'") from error
    found: Callable[..., Any] = linear_sum_assignment
    return found


def overlaps(one: FloatArray, other: FloatArray) -> FloatArray:
    """(N, M) intersections over unions of boxes (N, 4) and (M, 4)."""
    low = np.maximum(one[:, None, :2], other[None, :, :2])
    high = np.minimum(one[:, None, 2:], other[None, :, 2:])
    shared = np.prod(np.maximum(high - low, 0), axis=2)
    areas = [np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) for boxes in (one, other)]
    union: FloatArray = areas[0][:, None] + areas[1][None, :] - shared
    shares: FloatArray = np.where(shared > 0, shared / np.where(union > 0, union, 1), 0)
    # Boxes that were rescaled are off by the last digits, and accuracy is the share of value 1.
    shares[shares > 1 - _ROUNDING] = 1
    return shares
