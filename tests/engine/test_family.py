"""Which part of a model a parameter belongs to, and which token ids a model may write."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mmrl.engine.network.family import FAMILIES, Family, family_of
from mmrl.engine.network.features import PAGE, Limit, asked_features
from mmrl.engine.network.policy import load_policy
from mmrl.engine.network.vocabulary import Vocabulary
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
GEMMA = [
    ("model.vision_tower.encoder.layers.0.mlp.up_proj.linear.weight", "vision"),
    ("model.embed_vision.embedding_projection.weight", "projector"),
    ("model.audio_tower.layers.0.norm_out.weight", "unused"),
    ("model.embed_audio.embedding_projection.weight", "unused"),
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
        for case in {"internvl": INTERN, "gemma4": GEMMA}.get(name, QWEN) + LANGUAGE
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
    assert parts == {*folder.family.parts, *(("unused",) if folder.family.unused else ())}


@pytest.mark.parametrize(
    ("model_type", "message"), [("mamba", "'mamba' are not supported"), (None, "names no model_type")]
)
def test_an_unknown_family_is_refused_with_those_that_are_known(model_type, message):
    with pytest.raises(ConfigError, match=message) as caught:
        family_of(model_type, "some/model")
    assert "some/model" in caught.value.where
    assert caught.value.possible.splitlines()[1:] == [f"    {family.line}" for family in FAMILIES.values()]
    assert PAGE in caught.value.remedy and (Path(__file__).parents[2] / PAGE).is_file()
    assert "Qwen2.5" in caught.value.possible and "Llama 3" in caught.value.possible


@pytest.fixture
def limited() -> Family:
    """A family that reads text and shares no prompt; one sampler does not serve it on a CPU, the other nowhere."""
    limits = {"hf": Limit("refused", "no cache"), "vllm": Limit("refused", "not built", "cpu")}
    return Family("odd", "Odd 7B", shares_prefix=False, limits=limits)


def test_a_familys_line_has_its_limits_with_those_that_follow_from_other_fields(limited):
    assert limited.line == (
        "odd (Odd 7B): sampler `hf` refused: no cache; sampler `vllm` refused on a CPU: not built; "
        "shared prompt fallback: each completion is packed with a prompt of its own; "
        "vision once refused: reads text only"
    )
    assert FAMILIES["qwen2_vl"].line == "qwen2_vl (Qwen2-VL)"


@pytest.mark.parametrize(
    ("sampler", "device", "refused"),
    [("hf", "cpu", "hf"), ("hf", None, "hf"), ("vllm", "cpu", "vllm"), ("vllm", "cuda", ""), ("vllm", None, "")],
)
def test_a_run_that_asks_for_a_feature_that_is_refused_there_has_the_line_as_answer(sampler, device, refused, limited):
    config = SimpleNamespace(
        sampler=SimpleNamespace(name=sampler, tensor_parallel_size=2),
        learner=SimpleNamespace(share_prefix="auto", zero_stage=3, sequence_parallel_size=2),
        model=SimpleNamespace(lora=object()),
    )
    asked = asked_features(config)
    assert asked.keys() == {sampler, "tensor_parallel", "sharing", "zero_3", "sequence", "lora"}
    assert asked_features(config, samples=False).keys() == {"sharing", "zero_3", "sequence", "lora"}
    assert asked_features(config, learns=False).keys() == {sampler, "tensor_parallel"}
    error = limited.refusal(asked, device, None)
    if not refused:
        assert error is None  # a fallback refuses nothing
        return
    assert error.what.startswith(f"models of type odd have no sampler `{refused}`: ")
    assert error.where == f"sampler.name: {refused}" and error.possible == limited.line and PAGE in error.remedy


@pytest.mark.parametrize(
    ("device", "precision", "refused"),
    [("cpu", "float32", True), ("cpu", "bfloat16", False), ("cpu", None, False), ("cuda", "float32", False)],
)
def test_a_limit_may_be_that_of_one_precision(device, precision, refused):
    family = FAMILIES["qwen3_5_text"]
    error = family.refusal({"vllm": "sampler.name"}, device, precision)
    assert (error is not None) == refused and (error is None or "change this setting or model.dtype" in error.remedy)
    assert "sampler `vllm` refused on a CPU in float32: " in family.line


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
