"""Boxes in the scales of datasets and models, and what `check` and `train` say of rows before they are scored."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from mmrl.errors import ConfigError
from mmrl.rollout.rewards.worker import call
from mmrl.testing import check_reward
from mmrl.testing.rollouts import make_rollouts
from mmrl.types import EncodedPrompt, ImageRef
from mmrl_rewards.iou import IoU

PHOTO = ImageRef("a" * 64, 252, 168, "a.png", (1600, 1200))
"""As the model sees it, and as the dataset has it."""
SMALL = ImageRef("b" * 64, 56, 56, "b.png", (56, 56))
OLDER = ImageRef("c" * 64, 252, 168, "c.png")
"""As a run before version 0.3.0 recorded it."""
BOXES: dict[Any, list[float]] = {
    "file": [800, 600, 1200, 900],
    "resized": [126, 84, 189, 126],
    1000: [500, 500, 750, 750],
    1: [0.5, 0.5, 0.75, 0.75],
    1024: [512, 512, 768, 768],
}
"""One box of the photo in each scale."""


def made(**options: Any) -> IoU:
    return IoU(IoU.Config(**options))


def scored(reward: IoU, answer: Any, text: str, *images: ImageRef) -> float | None:
    (score,) = call(reward, make_rollouts([text], answer=answer, images=images))
    return score


def prompts(*answers: Any, images: Any = (PHOTO,)) -> list[EncodedPrompt]:
    made = [make_rollouts(["7"], answer=each, question=f"row {k}", images=images) for k, each in enumerate(answers)]
    return [rollouts[0].prompt for rollouts in made]


@pytest.mark.parametrize("answer", BOXES, ids=str)
@pytest.mark.parametrize("reference", BOXES, ids=str)
def test_a_box_is_the_same_in_every_scale(reference, answer):
    reward = made(reference_scale=reference, answer_scale=answer)
    assert scored(reward, BOXES[reference], json.dumps(BOXES[answer]), PHOTO) == 1
    # Half as wide, in the answer's scale.
    x1, y1, x2, y2 = BOXES[answer]
    assert scored(reward, BOXES[reference], str([x1, y1, (x1 + x2) / 2, y2]), PHOTO) == pytest.approx(0.5)
    if reference != answer:
        assert scored(made(), BOXES[reference], json.dumps(BOXES[answer]), PHOTO) < 0.9


def test_without_scipy_no_worker_of_the_reward_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ConfigError, match="the package scipy, which is not installed") as caught:
        made().prepare()
    assert "mmrl-train[iou]" in caught.value.remedy


def test_a_right_answer_is_1_and_not_nearly_so():
    """Accuracy counts values of 1."""
    reward = made(reference_scale="file", answer_scale="resized")
    by = (252 / 1600, 168 / 1200, 252 / 1600, 168 / 1200)
    for x in range(0, 900, 37):
        box = [x, x, x + 411, x + 233]
        resized = [place * factor for place, factor in zip(box, by, strict=True)]
        assert scored(reward, box, str(resized), PHOTO) == 1


@pytest.mark.parametrize("answer", ["file", "resized", 1000, 1])
def test_boxes_by_size_are_converted_with_their_sizes(answer):
    x1, y1, x2, y2 = BOXES[answer]
    reward = made(boxes="xywh", reference_scale="file", answer_scale=answer)
    given = {"x": 800, "y": 600, "width": 400, "height": 300}
    for reference in ([800, 600, 400, 300], given):
        assert scored(reward, reference, f"[{x1}, {y1}, {x2 - x1}, {y2 - y1}]", PHOTO) == pytest.approx(1)


@pytest.mark.parametrize("answer", [[2, 2, 6, 6], [[2, 2, 6, 6], [8, 8, 9, 9]], '{"bbox_2d": [2, 2, 6, 6]}'])
def test_without_scales_and_where_nothing_is_resized_numbers_are_what_they_were(answer):
    text = "[2, 2, 6, 5]"
    plain = scored(made(), answer, text)
    assert scored(made(), answer, text, PHOTO) == scored(made(), answer, text, OLDER) == plain
    assert scored(made(reference_scale="file", answer_scale="resized"), answer, text, SMALL) == plain
    for scale in BOXES:
        assert scored(made(reference_scale=scale, answer_scale=scale), answer, text) == plain


def test_a_box_belongs_to_the_image_that_is_named():
    second = made(reference_scale="file", answer_scale="resized", image=2)
    assert scored(second, BOXES["file"], str(BOXES["resized"]), SMALL, PHOTO) == pytest.approx(1)
    assert scored(made(reference_scale="file", answer_scale="resized"), [1, 1, 9, 9], "[1, 1, 9, 9]", SMALL, PHOTO) == 1
    assert scored(second, BOXES["file"], str(BOXES["resized"]), PHOTO) is None  # there is no second one


def test_an_image_of_unknown_size_says_that_its_record_is_old():
    with pytest.raises(ValueError, match="has no size of the image's file"):
        scored(made(reference_scale="file", answer_scale="resized"), [1, 1, 9, 9], "[1, 1, 9, 9]", OLDER)
    assert scored(made(reference_scale="resized", answer_scale=1), BOXES["resized"], str(BOXES[1]), OLDER) == 1


@pytest.mark.parametrize("scale", [1000, 1000.0, "1000", 1, "1", "file", "resized", 1024])
def test_a_scale_may_be_a_number_or_the_text_of_one(scale):
    reward = made(reference_scale=scale, answer_scale=scale)
    check_reward(reward)
    assert reward.config.reference_scale == (scale if scale in ("file", "resized") else float(scale))


@pytest.mark.parametrize("scale", ["pixels", "original", 0, -1, True, "", [1000], 1e9])
def test_a_scale_that_is_none_is_refused(scale):
    with pytest.raises(ValueError, match="file, resized, or the number"):
        made(reference_scale=scale, answer_scale="resized")


def test_one_scale_alone_is_refused():
    with pytest.raises(ValueError, match="together"):
        made(answer_scale="resized")


WORDS = "resized picture", "pixels of the file", "reference_scale and answer_scale"


@pytest.mark.parametrize(
    ("options", "answers", "images", "told"),
    [
        # Nothing is said of the scale.
        ({}, [BOXES["file"]] * 4, (PHOTO,), ["4 of 4 rows", "row 0 ([800, 600, 1200, 900]", *WORDS, "fit file"]),
        ({}, [BOXES[1000], "no box"], (PHOTO,), ["1 of 1 rows", "1600x1200 resized to 252x168", "fit file, 1000"]),
        ({}, [BOXES[1]], (PHOTO,), [*WORDS, "reference answers fit 1"]),
        ({}, [BOXES["resized"]], (PHOTO,), ["fit file, resized, 1000"]),
        ({}, [[3000, 3000, 4000, 4000]], (PHOTO,), ["fit none of these"]),
        ({}, [[2, 2, 40, 40]], (SMALL,), []),
        ({}, [BOXES["file"]], (OLDER,), []),
        ({}, [BOXES["file"]], (), []),
        ({}, ["7", None, [1, 1, 1, 1]], (PHOTO,), []),
        # The scale is said, and the rows agree.
        ({"reference_scale": "file", "answer_scale": "resized"}, [BOXES["file"], [-1, 0, 1601, 1201]], (PHOTO,), []),
        ({"reference_scale": 1000, "answer_scale": 1000}, [BOXES[1000], [0, 0, 1000, 1000]], (PHOTO,), []),
        ({"reference_scale": 1, "answer_scale": "resized"}, [BOXES[1], [0, 0, 1, 1]], (PHOTO,), []),
        ({"reference_scale": 1000, "answer_scale": 1}, [BOXES[1000]], (), []),
        # It contradicts them.
        (
            {"reference_scale": 1, "answer_scale": "resized"},
            [BOXES[1], BOXES["file"]],
            (PHOTO,),
            ["reference_scale is 1,", "1 of 2 rows", "row 1 ([800, 600, 1200, 900]", "they fit file"],
        ),
        ({"reference_scale": 1000, "answer_scale": 1000}, [BOXES["file"]], (PHOTO,), ["is 1000,", "they fit file"]),
        ({"reference_scale": 1000, "answer_scale": 1000}, [BOXES[1]], (PHOTO,), ["is 1000,", "they fit 1)"]),
        (
            {"reference_scale": "file", "answer_scale": "resized"},
            [[0, 0, 1500, 1500]],
            (PHOTO,),
            ["reference_scale is file,", "1600x1200", "none of these", "mend the rows"],
        ),
        ({"reference_scale": "resized", "answer_scale": 1000}, [BOXES["file"]], (PHOTO,), ["is resized,", "fit file"]),
        ({"reference_scale": "file", "answer_scale": "resized"}, [BOXES[1]], (PHOTO,), ["is file,", "they fit 1)"]),
        # The image is missing, or nobody knows which one it is.
        (
            {"reference_scale": "file", "answer_scale": "resized"},
            [BOXES["file"]],
            (),
            ["1 of 1 rows have boxes and no image 1, such as row 0", "set image"],
        ),
        (
            {"reference_scale": "file", "answer_scale": "resized"},
            [BOXES["file"]],
            (PHOTO, SMALL),
            ["images of different sizes, such as row 0", "set image"],
        ),
        ({"reference_scale": "file", "answer_scale": "resized"}, [BOXES["file"]], (PHOTO, PHOTO), []),
        ({"reference_scale": "file", "answer_scale": "resized", "image": 1}, [BOXES["file"]], (PHOTO, SMALL), []),
    ],
)
def test_rows_whose_scale_is_not_said_or_is_another_one_are_told(options, answers, images, told):
    warnings = made(**options).check_rows(prompts(*answers, images=images))
    assert len(warnings) == bool(told)
    assert [words for words in told if words not in "".join(warnings)] == []


@pytest.mark.parametrize("answer", BOXES, ids=str)
@pytest.mark.parametrize("boxes", ["xyxy", "xywh"])
def test_a_right_answer_is_written_in_the_scale_of_answers_and_earns_all(boxes, answer):
    reference = [BOXES["file"], [10, 20, 30, 41]]
    reward = made(boxes=boxes, reference_scale="file", answer_scale=answer)
    for given in (reference, reference[0]):
        (prompt,) = prompts(given)
        text = reward.right_answer(prompt)
        if answer == "file":
            assert text is None  # the reference itself
        else:
            assert scored(reward, given, text, PHOTO) == pytest.approx(1, abs=1e-3)
    assert made().right_answer(prompt) is None and reward.right_answer(*prompts("7")) is None
