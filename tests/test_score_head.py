"""The class of a reward model, and the place at which a score is read."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from mmrl.engine.network.family import FAMILIES
from mmrl.errors import ConfigError
from mmrl.score_head import LAST, SCORE, as_reward_model, score_place, sequence_classification_class, skipped_token
from tests.proofs import families
from tests.reward_models import generating, with_score, write_reward_model


@pytest.mark.parametrize("family", families())
def test_a_policys_body_takes_a_score_and_is_the_same_after_it_was_saved(models, tmp_path, family):
    import torch
    import transformers

    policy = generating(models(family))
    model = with_score(policy)  # loads the body key by key
    written = write_reward_model(models(family), tmp_path / "rm")
    config = transformers.AutoConfig.from_pretrained(written)
    again, found = sequence_classification_class(config).from_pretrained(
        written, dtype=torch.float32, output_loading_info=True
    )
    assert not any(found.values())
    ids = torch.arange(20, 33)[None]
    with torch.no_grad():
        scores = [each.eval()(input_ids=ids).logits.item() for each in (model, again)]
        hidden_H = policy.eval().base_model(input_ids=ids).last_hidden_state[0, -1]
    expected = (hidden_H @ model.score.weight[0]).item()
    assert scores == pytest.approx([expected] * 2, abs=1e-5)
    assert abs(expected) > 0.1
    weights = {id(parameter) for parameter in again.parameters()}
    assert len(weights) == len(list(policy.base_model.parameters())) + 1  # the score, and no head of words
    facts = json.loads((written / "config.json").read_text())
    assert (facts["architectures"], facts["num_labels"]) == ([type(model).__name__], 1)
    assert config.num_labels == 1 and again.score.weight.shape == (1, config.get_text_config().hidden_size)


def test_transformers_own_class_is_taken_where_there_is_one():
    import transformers

    names = {}
    for family in FAMILIES:
        made = sequence_classification_class(transformers.AutoConfig.for_model(family))
        names[family] = made.__name__
        assert made.is_custom_code() is False  # else transformers would not read the family's names of weights
    own = {family for family, name in names.items() if hasattr(transformers, name)}
    assert own == {"qwen3_5", "qwen3_5_text", "qwen2", "qwen3", "qwen3_moe", "llama"}
    assert names["qwen2_5_vl"] == "Qwen2_5_VLForSequenceClassification"
    assert names["internvl"] == "InternVLForSequenceClassification"


def test_a_type_without_a_body_is_refused():
    with pytest.raises(ConfigError, match="no model of type 'none' to which a score could be added"):
        sequence_classification_class(SimpleNamespace(model_type="none"))


def test_a_folder_of_a_reward_model_says_so_and_keeps_the_rest():
    written = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "id2label": {"0": "a", "1": "b"}, "x": 1}
    assert as_reward_model(written, "Qwen2ForSequenceClassification") == {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForSequenceClassification"],
        "x": 1,
        "num_labels": 1,
        "mmrl_score": {"reads": "last"},
    }


def config(pad, eos, **further):
    import transformers

    return transformers.AutoConfig.for_model("qwen2", pad_token_id=pad, eos_token_id=eos, **further)


@pytest.mark.parametrize(
    ("pad", "eos", "further", "place"),
    [
        (9, 9, {}, 1),  # one token for both: transformers trained it to look before the padding
        (9, [8, 9], {}, 1),
        (9, 8, {}, 4),
        (None, 9, {}, 4),
        (9, 9, {SCORE: LAST}, 4),
        (9, 8, {SCORE: LAST}, 4),
    ],
)
def test_where_a_score_is_read(pad, eos, further, place):
    skipped = skipped_token(config(pad, eos, **further))
    for ids in ([5, 7, 9, 9, 9], np.array([5, 7, 9, 9, 9], np.int32)):
        assert score_place(ids, skipped) == place
    assert score_place([9, 9], skipped) == (0 if skipped == 9 else 1)
    assert score_place([9, 5], skipped) == 1


def test_a_rule_that_is_not_known_is_refused():
    with pytest.raises(ConfigError, match=r"the score is read at \{'reads': 'mean'\}"):
        skipped_token(config(9, 9, **{SCORE: {"reads": "mean"}}))
