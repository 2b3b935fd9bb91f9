"""Prompts in tokens: image tokens expanded, shortened again for vLLM, and rows that do not fit refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mmrl.engine.encoding import unexpanded
from mmrl.errors import DataError
from mmrl.types import Message, Prompt


@pytest.mark.parametrize("as_on_hub", [False, True], ids=["", "as on the hub"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_prompts_are_encoded_as_the_models_own_processor_does(family, as_on_hub, bench):
    setting = bench(family, as_on_hub)
    for prompt in setting.prompts:
        images = [setting.media.load(ref) for ref in prompt.images]
        pictures = {"images": images} if images else {}
        expected = setting.folder.processor(text=[prompt.text], **pictures)["input_ids"][0]
        assert prompt.token_ids.tolist() == list(expected)
        assert prompt.token_ids.dtype == np.int32


def test_a_first_token_that_template_and_tokenizer_both_write_comes_once(bench):
    setting = bench("llama", True)
    first = setting.folder.tokenizer.bos_token_id
    assert setting.folder.tokenizer("what")["input_ids"][0] == first
    assert setting.prompts[0].token_ids.tolist().count(first) == 1
    assert setting.prompts[0].token_ids[0] == first


def test_unexpanded_is_the_inverse_of_expansion(vision):
    for prompt in vision.prompts:
        expected = vision.folder.tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        assert unexpanded(prompt, vision.folder) == expected


def test_the_length_is_known_without_the_pixels(vision, picture):
    row = Prompt("row", (Message("user", "a <image> b <image>"),), (picture(60, 90), picture(300, 200)))
    assert vision.encoder.num_tokens(row) == len(vision.encoder.encode(row).token_ids)


def test_messages_keep_their_roles_and_the_text_ends_where_the_completion_starts(vision):
    row = Prompt("row", (Message("system", "Be brief."), Message("user", "2+2?")))
    assert vision.encoder.encode(row).text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2"])
def test_a_demonstration_ends_with_the_end_of_sequence_token(family, bench):
    setting = bench(family)
    sample = setting.encoder.demonstrate(replace(setting.prompts[0], demonstration="\\boxed{7}"))
    tokenizer = setting.folder.tokenizer
    assert tokenizer.decode(sample.token_ids[:-1]) == "\\boxed{7}"
    assert sample.token_ids[-1] == tokenizer.eos_token_id
    assert sample.mask.all()


def test_a_row_without_a_demonstration_is_named(vision):
    with pytest.raises(DataError, match="no demonstration") as caught:
        vision.encoder.demonstrate(vision.prompts[0])
    assert caught.value.where == "text"


@pytest.mark.parametrize("text", ["<image>", "<image><image><image>", "no place for it <|image_pad|><|image_pad|>"])
def test_placeholders_that_do_not_fit_the_images_are_a_data_error(text, vision, picture):
    row = Prompt("row 7", (Message("user", text),), (picture(56, 56), picture(56, 56, 1)))
    row = row if "pad" not in text else replace(row, images=())
    with pytest.raises(DataError, match=r"image tokens and \d images") as caught:
        vision.encoder.num_tokens(row)
    assert caught.value.where == "row 7"


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_an_image_row_is_refused_by_a_text_model(family, bench, picture):
    row = Prompt("row 7", (Message("user", "<image>what?"),), (picture(56, 56),))
    with pytest.raises(DataError, match="reads text only"):
        bench(family).encoder.encode(row)
