"""One conversation, one score: in the learner, in the reward ``model``, and in plain transformers."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.rollout.batch import rollouts_of
from mmrl_rewards.model import Model
from tests.engine.test_reward_updates import PlainScore, bradley_terry, groups_of, read

FULL = pytest.mark.full


CASES = [
    ("qwen2_5_vl", False),
    *(pytest.param(name, False, marks=FULL) for name in ("qwen3_vl", "internvl", "gemma4", "qwen3")),
    *(pytest.param(name, True, marks=FULL) for name in ("qwen2_5_vl", "internvl", "qwen3")),
]
"""Family, and True if the token for padding ends texts; in Gemma that token also stands for images in some layers."""


@pytest.mark.parametrize(("family", "pads"), CASES)
def test_ragged_conversations_have_one_score(family, pads, bench, start, plain, tmp_path):
    setting = bench(family)
    samples = rollouts_of([group for groups in groups_of(setting)[:2] for group in groups])[:20]
    assert len({sample.num_tokens for sample in samples}) > 10
    engine = start(bench=setting, algorithm=bradley_terry(), learner={"tokens_per_microbatch": 200})
    with engine.learning() as learner:
        learned = learner.network("reward").final_values(samples)
        learner.save(tmp_path)
    folder = tmp_path / "reward/model"
    last = int(samples[0].token_ids[-1])
    if pads:
        shutil.copytree(folder, tmp_path / "padded")
        folder = tmp_path / "padded"
        config = json.loads((folder / "config.json").read_text())
        for each in (config, config.get("text_config", {})):
            each |= {"pad_token_id": last, "eos_token_id": last}
        (folder / "config.json").write_text(json.dumps(config))

    reward = Model(Model.Config(path=str(folder), batch_size=3, device="cpu"))
    reward.prepare()
    seen: dict[Any, Any] = {}
    for sample in samples:
        ids = reward._conversations.written(sample, seen).token_ids
        assert list(ids) == [*sample.prompt.token_ids.tolist(), *sample.token_ids.tolist()]
    rewarded = reward.score(samples)

    model = read(folder)
    reader = PlainScore(plain(setting.folder.path), model.score.weight.detach())
    expected = []
    with torch.no_grad():
        for sample in samples:
            inputs = reader.inputs(sample, setting.media)
            inputs.pop("token_type_ids", None)
            assert int(inputs["input_ids"][0, -1]) == last
            expected.append(float(model.score(model.base_model(**inputs).last_hidden_state[0, -1])))
    np.testing.assert_allclose(learned, expected, atol=1e-4)
    np.testing.assert_allclose(rewarded, expected, atol=1e-4)
    assert np.std(expected) > 0.01
