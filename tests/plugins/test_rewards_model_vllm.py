"""Reward models in vLLM: whether its pooling runner serves the folders that mmrl writes, family by family."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mmrl.engine.network.family import FAMILIES
from mmrl.types import EncodedPrompt, ImageRef, Message, Prompt, Rollout
from mmrl_rewards.model import Model
from tests.reward_models import write_reward_model

PAGE = Path(__file__).parents[2] / "plugins" / "README.md"
EQUAL = "serves it"
NO_SCORE = "There is no module or parameter named 'score'"
OUTCOMES = {
    "qwen2": EQUAL,
    "qwen3": EQUAL,
    "qwen3_moe": EQUAL,
    "llama": EQUAL,
    "qwen3_vl": EQUAL,
    "qwen3_vl_moe": EQUAL,
    "gemma4": EQUAL,
    "qwen3_5": "There is no module or parameter named 'visual'",
    "qwen2_vl": NO_SCORE,
    "qwen2_5_vl": NO_SCORE,
    "internvl": NO_SCORE,
}
"""By family: ``EQUAL`` if it gives transformers' scores, else a part of the error with which it stops."""
RENAMED = ("qwen2_vl", "qwen2_5_vl")
"""Families that it serves once the score has the name ``VLLM_NAME``."""
VLLM_NAME = "language_model.score.weight"
SERVE = """
import json, sys
from vllm import LLM
from vllm.pooling_params import PoolingParams
folder, request = sys.argv[1], json.loads(sys.argv[2])
if "image" in request:
    from PIL import Image
    request["multi_modal_data"] = {"image": Image.open(request.pop("image"))}
served = LLM(model=folder, runner="pooling", dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=2,
             kv_cache_memory_bytes=2**26)
raw = PoolingParams(use_activation=False)
print("SCORE", served.classify([request], pooling_params=raw)[0].outputs.probs[0])
"""


def served(folder, request):
    """vLLM's score, or what it has written instead."""
    asked = [sys.executable, "-c", SERVE, str(folder), json.dumps(request)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    found = re.search(r"^SCORE (\S+)", done.stdout, re.MULTILINE)
    return float(found[1]) if found else done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("family", OUTCOMES)
def test_vllm_serves_reward_models_of_some_families_on_a_cpu_in_float32(models, tmp_path, family):
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    from mmrl.score_head import sequence_classification_class

    folder, ids = write_reward_model(models(family), tmp_path / "rm"), list(range(20, 40))
    config = transformers.AutoConfig.from_pretrained(folder)
    model = sequence_classification_class(config).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits.item()
    found = served(folder, {"prompt_token_ids": ids})
    if OUTCOMES[family] == EQUAL:
        assert found == pytest.approx(expected, abs=1e-4)
        return
    assert OUTCOMES[family] in str(found)
    if family in RENAMED:
        weights = load_file(folder / "model.safetensors")
        weights[VLLM_NAME] = weights.pop("score.weight")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        assert served(folder, {"prompt_token_ids": ids}) == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma4"])
def test_vllm_scores_an_image_as_the_reward_model_does_but_gemma_4_without(models, tmp_path, family):
    from PIL import Image

    folder, image = write_reward_model(models(family), tmp_path / "rm"), tmp_path / "image.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (84, 112, 3), np.uint8)).save(image)
    asked = Message("user", "<image>What is it?")
    prompt = EncodedPrompt(
        prompt=Prompt("p", (asked,)),
        text="",
        token_ids=np.zeros(0, np.int32),
        images=(ImageRef("h", 112, 84, str(image)),),
    )
    reward = Model(Model.Config(path=str(folder), device="cpu"))
    (expected,) = reward.score([Rollout(prompt, (), 0, "A lamp.", "stop", 1)])
    written = reward._conversations
    text = written.fill([written.read(asked), written.read(Message("assistant", "A lamp."), has_images=False)])
    found = served(folder, {"prompt": text, "image": str(image)})
    if family == "gemma4":
        assert "Multi-modal processor not available for text-only models" in found
    else:
        assert found == pytest.approx(expected, abs=1e-4)


def test_the_page_has_these_outcomes():
    cells = dict(re.findall(r"^\| `(\w+)` \| (serves it[^|]*|stops: [^|]+) \|$", PAGE.read_text(), re.MULTILINE))
    assert cells.keys() == OUTCOMES.keys() <= FAMILIES.keys()
    for family, outcome in OUTCOMES.items():
        assert outcome in cells[family]
    assert VLLM_NAME in PAGE.read_text()
