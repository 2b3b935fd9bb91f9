"""Which part of a model a parameter belongs to, and which token ids a model may write."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mmrl.engine.family import FAMILIES, family_of
from mmrl.engine.policy import load_policy
from mmrl.engine.vocabulary import Vocabulary
from mmrl.errors import ConfigError

QWEN = [
    ("model.visual.blocks.0.attn.qkv.weight", "vision"),
    ("model.visual.patch_embed.proj.weight", "vision"),
    ("model.visual.merger.mlp.0.weight", "projector"),
]
INTERN = [
    ("model.vision_tower.encoder.layer.0.lambda_1", "vision"),
    ("model.multi_modal_projector.linear_1.weight", "projector"),
]
LANGUAGE = [
    ("model.language_model.layers.0.mlp.up_proj.weight", "language"),
    ("model.language_model.embed_tokens.weight", "language"),
    ("lm_head.weight", "language"),
]


@pytest.mark.parametrize(
    ("family", "parameter", "part"),
    [
        (name, *case)
        for name, family in FAMILIES.items()
        if family.vision
        for case in (INTERN if name == "internvl" else QWEN) + LANGUAGE
    ],
)
def test_a_parameter_belongs_to_one_part(family, parameter, part):
    assert FAMILIES[family].part_of(parameter) == part


def test_the_deep_mergers_of_qwen3_vl_are_projectors():
    assert FAMILIES["qwen3_vl"].part_of("model.visual.deepstack_merger_list.0.norm.weight") == "projector"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_of_a_real_model_has_parameters_and_nothing_lies_outside(family, bench):
    folder = bench(family).folder
    model = load_policy(folder, "cpu", "float32", freeze=(), temperature=1.0).model
    parts = {folder.family.part_of(name) for name, _ in model.named_parameters()}
    assert parts == set(folder.family.parts)


@pytest.mark.parametrize(
    ("model_type", "message"), [("mamba", "'mamba' are not supported"), (None, "names no model_type")]
)
def test_an_unknown_family_is_refused_with_those_that_are_known(model_type, message):
    with pytest.raises(ConfigError, match=message) as caught:
        family_of(model_type, "some/model")
    assert "some/model" in caught.value.where
    assert all(f"{name} ({family.models})" in caught.value.possible for name, family in FAMILIES.items())
    assert "Qwen2.5" in caught.value.possible and "Llama 3" in caught.value.possible


def test_vision_tokens_and_padded_rows_are_banned_and_nothing_else(vision):
    folder = vision.folder
    tokenizer = folder.tokenizer
    padding = set(range(len(tokenizer), folder.vocabulary.size))
    words = {"<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"}
    assert len(padding) == 6
    assert set(folder.vocabulary.banned) == padding | set(tokenizer.convert_tokens_to_ids(list(words)))


def test_a_text_model_bans_padded_rows_only(bench):
    folder = bench("qwen2").folder
    assert set(folder.vocabulary.banned) == set(range(len(folder.tokenizer), folder.vocabulary.size))


def test_every_eos_of_generation_config_and_tokenizer_counts(vision):
    tokenizer = vision.folder.tokenizer
    assert vision.folder.vocabulary.eos == tuple(
        sorted(tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))
    )


@pytest.mark.parametrize(
    ("generation_eos", "config_eos", "eos"), [(5, None, (5, 7)), ([5, 6], 3, (3, 5, 6, 7)), (None, [4], (4, 7))]
)
def test_eos_ids_of_all_three_sources_are_joined(generation_eos, config_eos, eos):
    text = SimpleNamespace(vocab_size=10, eos_token_id=config_eos)
    tokenizer = SimpleNamespace(get_vocab=lambda: {str(i): i for i in range(8)}, eos_token_id=7, pad_token_id=None)
    vocabulary = Vocabulary.of(
        FAMILIES["qwen2"],
        SimpleNamespace(get_text_config=lambda: text),
        SimpleNamespace(eos_token_id=generation_eos),
        tokenizer,
    )
    assert vocabulary.eos == eos
    assert vocabulary.pad in eos
    assert vocabulary.banned == (8, 9)
