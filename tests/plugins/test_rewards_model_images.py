"""The reward model with images: the scores of plain transformers, from the tokens and pixels that training gives."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmrl.engine.network.family import FAMILIES
from mmrl.errors import ConfigError, PluginError
from mmrl.types import Candidate, EncodedPrompt, Message, Prompt, RawImage, Rollout
from mmrl_rewards.model import Model
from tests.proofs import families
from tests.reward_models import write_reward_model

SEEING = [each for each in families() if FAMILIES[each.values[0]].vision]
SIZES = [(84, 56), (140, 84), (56, 112), (224, 168), (56, 56)]
ANSWERS = [
    "7",
    "",
    "It is a red square. " * 9,
    "The <image> shows no circle.",
    "<think>\nhm\n</think>\n\nBlue.",
    "答案是红色",
]


def drawn(size, seed):
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return RawImage(file.getvalue(), f"image {seed}")


def ragged(count=20):
    """Rows of no, one and two images, some shared, and an answer to each."""
    rng = random.Random(0)
    for place in range(count):
        images = [drawn(SIZES[k % len(SIZES)], k % 7) for k in rng.sample(range(40), place % 3)]
        system = (Message("system", "You are strict."),) if place % 4 == 0 else ()
        text = "<image>" * (place % 3) + "What do you see? " * rng.randint(1, 9)
        if place % 3 == 2:
            text = f"Compare <image> with <image>{text.replace('<image>', '')}"
        prompt = Prompt(f"row {place}", (*system, Message("user", text)), images=tuple(images))
        yield prompt, rng.choice(ANSWERS) + " and so on" * rng.randint(0, 20)


def encoded(folder, rows, media):
    """Rollouts as a run of the policy in ``folder`` has them."""
    from mmrl.data.images import MediaStore
    from mmrl.engine.network.folder import ModelFolder
    from mmrl.engine.text.encoding import Encoder

    opened = ModelFolder.open(str(folder))
    store = MediaStore(media, opened.image_sizes(3136, 50176))
    encoder = Encoder(opened, store)
    prompts = [encoder.encode(prompt) for prompt, _ in rows]
    given = [Rollout(p, (), 0, answer, "stop", 1) for p, (_, answer) in zip(prompts, rows, strict=True)]
    return given, opened, store


def plain_scores(written, rollouts):
    """Each conversation alone through transformers' own processor call, template and class."""
    import torch
    import transformers
    from PIL import Image

    from mmrl.score_head import sequence_classification_class

    processor = transformers.AutoProcessor.from_pretrained(written)
    config = transformers.AutoConfig.from_pretrained(written)
    model = sequence_classification_class(config).from_pretrained(written, dtype=torch.float32).eval()
    for rollout in rollouts:
        turns = []
        images = iter(rollout.images)
        for message in rollout.messages:
            first, *rest = message.content.split("<image>") if rollout.images else [message.content]
            parts = [{"type": "text", "text": first}]
            for text in rest:
                parts += [{"type": "image", "image": Image.open(next(images).path)}, {"type": "text", "text": text}]
            turns.append({"role": message.role, "content": [p for p in parts if p.get("text", True)]})
        turns.append({"role": "assistant", "content": [{"type": "text", "text": rollout.text}] if rollout.text else []})
        inputs = processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
        inputs.pop("attention_mask")
        with torch.no_grad():
            hidden_SH = model.model(**inputs).last_hidden_state[0]
            yield inputs["input_ids"][0].tolist(), model.score(hidden_SH[-1]).item()


def made(path, **options):
    return Model(Model.Config(path=str(path), device="cpu", **options))


def trained_ids(folder, store, rows):
    """The tokens on which a run of ``bradley_terry`` trains each row with its answer."""
    from mmrl.engine.text.encoding import Encoder

    encoder = Encoder(folder, store)
    for prompt, answer in rows:
        row = replace(prompt, candidates=(Candidate(answer, 1.0), Candidate("No.", 0.0)))
        sample, _ = encoder.given(encoder.encode(row), closed=True)
        yield [*sample.prompt.token_ids.tolist(), *sample.token_ids.tolist()]


@pytest.mark.parametrize("family", families())
def test_it_reads_the_tokens_that_a_reward_model_is_trained_on(models, tmp_path, family):
    written = write_reward_model(models(family), tmp_path / "rm")
    rows = [row for row in ragged(8) if FAMILIES[family].vision or not row[0].images]
    given, folder, store = encoded(models(family), rows, tmp_path / "media")
    reward = made(written)
    read = [reward._conversations.written(rollout, {}).token_ids for rollout in given]
    assert read == list(trained_ids(folder, store, rows))


@pytest.mark.parametrize("family", SEEING)
def test_twenty_ragged_conversations_have_the_scores_of_plain_transformers_one_by_one(models, tmp_path, family):
    written = write_reward_model(models(family), tmp_path / "rm")
    given, folder, store = encoded(models(family), list(ragged()), tmp_path / "media")
    reward, seen = made(written, batch_size=8), {}
    scores = reward.score(given)
    expected = list(plain_scores(written, given))
    for rollout, (ids, _) in zip(given, expected, strict=True):
        assert reward._conversations.written(rollout, seen).token_ids == ids
    assert scores == pytest.approx([score for _, score in expected], abs=1e-4)
    assert np.ptp(scores) > 0.5
    order = random.Random(1).sample(range(len(given)), len(given))
    assert made(written, batch_size=3).score([given[k] for k in order]) == pytest.approx(
        [scores[k] for k in order], abs=1e-4
    )
    refs = {ref.hash: ref for rollout in given for ref in rollout.images}
    assert refs.keys() == seen.keys() and len(refs) > 3
    for ref in refs.values():  # the pixels and tokens that training gives
        pixels, _ = folder.images.read(store.load(ref))
        (mine,) = (value for name, value in seen[ref.hash].pixels.items() if name == "pixel_values")
        assert seen[ref.hash].token_ids == folder.images.expansion(ref.width, ref.height)
        mine = mine[0][: len(pixels)] if family == "gemma4" else mine  # the processor pads
        assert np.allclose(mine, pixels, atol=1e-6)


def test_another_picture_gives_another_score_and_dropped_ones_do_not(models, tmp_path):
    written = write_reward_model(models("qwen2_5_vl"), tmp_path / "rm")
    rows = [(Prompt("p", (Message("user", "<image>What?"),), images=(drawn((84, 84), k),)), "7") for k in (0, 1)]
    given, _, _ = encoded(models("qwen2_5_vl"), rows, tmp_path / "media")
    first, second = made(written).score(given)
    assert abs(first - second) > 1e-3
    row = Prompt("p", (Message("user", "What?"),))
    blind = EncodedPrompt(prompt=row, text="", token_ids=np.zeros(0, np.int32), images=())
    text = Rollout(blind, (), 0, "7", "stop", 1)
    assert made(written, images="drop").score(given) == pytest.approx(made(written).score([text]) * 2, abs=1e-5)
    tokens = len(made(written)._conversations.written(given[0], {}).token_ids)
    short = made(written, max_tokens=tokens - 1).score(given)
    assert [each.why for each in short] == [f"reads at most {tokens - 1} tokens, and the conversation has {tokens}"] * 2


def test_a_folder_that_sees_images_and_lacks_its_processor_or_template_is_refused(models, tmp_path):
    written = write_reward_model(models("qwen2_5_vl"), tmp_path / "rm")
    without = tmp_path / "without"
    without.mkdir()
    for path in Path(written).iterdir():
        if "processor" not in path.name:
            (without / path.name).symlink_to(path)
    with pytest.raises(ConfigError, match="the reward model's processor cannot be read"):
        made(without).prepare()
    hidden = written / "chat_template.jinja"
    hidden.rename(tmp_path / "chat.jinja")
    settings = json.loads((written / "tokenizer_config.json").read_text())
    assert "chat_template" not in settings
    with pytest.raises(ConfigError, match="the reward model has no chat template"):
        made(written).prepare()
    made(written, chat_template=str(tmp_path / "chat.jinja")).prepare()
    blind = tmp_path / "blind.jinja"
    blind.write_text("{% for m in messages %}{{ m['role'] }}{% endfor %}")
    rows = [(Prompt("p", (Message("user", "<image>What?"),), images=(drawn((84, 84), 0),)), "7")]
    given, _, _ = encoded(models("qwen2_5_vl"), rows, tmp_path / "media")
    with pytest.raises(PluginError, match="chat template writes 0 of 1 images"):
        made(written, chat_template=str(blind)).score(given)
    with pytest.raises(ConfigError, match="the reward model's chat template cannot be read"):
        made(written, chat_template=str(tmp_path / "none.jinja")).prepare()
