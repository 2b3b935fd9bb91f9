"""Documents: all text is learned, and images in between are read; the learner's step is that of plain transformers."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.engine.network.family import FAMILIES
from mmrl.errors import DataError
from mmrl.step.forward import judged
from mmrl.step.gather import Comparisons, Given, Rollouts
from mmrl.step.learn import LearnSettings, finished, learn
from mmrl.system.clock import Clock
from mmrl.types import DOCUMENT, Message, Prompt
from mmrl_algorithms.sft import SFT
from tests.engine.test_learner import EXPOSED, STILL, first_moment, norm

VISION = [name for name, family in FAMILIES.items() if family.vision]
SPELLED = {"internvl": "<IMG_CONTEXT>", "gemma4": "<|image|>"}
"""An image in a text, as a family's processor takes it; others as Qwen's models."""


def document(text: str, *images, name: str = "page") -> Prompt:
    return Prompt(name, (Message(DOCUMENT, text),), images)


def spelled(prompt, processor, family="qwen2_5_vl") -> dict:
    """A document as transformers alone would be given it."""
    image = SPELLED.get(family, "<|vision_start|><|image_pad|><|vision_end|>")
    tokenizer = getattr(processor, "tokenizer", processor)
    text = prompt.messages[0].content.replace("<image>", image) + tokenizer.eos_token
    images = [Image.open(io.BytesIO(raw.data)) for raw in prompt.images]
    inputs = processor(text=[text], **({"images": images} if images else {}), return_tensors="pt")
    inputs.pop("token_type_ids", None)
    return inputs


@pytest.fixture(scope="module")
def documents(picture) -> list[Prompt]:
    """One that begins with a picture and shows two others, one that begins with text, and one without a picture."""
    shown = document("<image> is a 7. See <image><image>!", picture(56, 56), picture(84, 56, 1), picture(56, 84, 2))
    between = document("The digit <image> is 3, and 3+4 is 7.", picture(56, 56, 3), name="between")
    return [shown, between, document("what is 3+4? It is 7.", name="text")]


def test_a_step_is_plain_autograds_with_labels_on_all_text(vision, plain, start, documents):
    count = len(documents)
    config = vision.config(sampler={"temperature": 1.0}, algorithm={"name": "sft"}, trainer={"prompts_per_step": count})
    algorithm = SFT(SFT.Config())
    source = Given(config, algorithm, vision.encoder, None, None)  # it neither scores nor tells
    made = [source.make(prompt) for prompt in documents]
    found = source.gather(1, lambda count: [(0, sample) for sample in made], Clock())
    reference = plain(vision.folder.path)
    reference.model.zero_grad()
    losses = []
    for prompt in documents:
        inputs = spelled(prompt, reference.processor)
        ids = inputs["input_ids"][0]
        logits = reference.model(**inputs).logits[0].float()
        table = logits.index_fill(1, torch.tensor(reference.banned), float("-inf")).log_softmax(-1)
        at = torch.tensor([k for k in range(1, len(ids)) if int(ids[k]) not in reference.banned])
        losses.append(-table[at - 1].gather(1, ids[at][:, None])[:, 0])
    torch.cat(losses).mean().backward()
    assert [int(each.mask.sum()) for each in found.rollouts] == [len(loss) for loss in losses]
    expected = {name: p.grad for name, p in reference.model.named_parameters() if p.grad is not None}
    settings = {"max_grad_norm": 1e9, "lr": STILL, "deepspeed": EXPOSED}
    with start(learner=settings, sampler={"temperature": 1.0}, algorithm=algorithm).learning() as learner:
        held_out = judged(found.learned, algorithm, learner, LearnSettings())
        result = finished(learn(found.learned, algorithm, learner, LearnSettings.of(config, frozenset(), 1)))
        gradient = first_moment(learner)
    assert held_out.metrics == pytest.approx({"loss": result.metrics["loss/total"]}, abs=1e-6)
    assert result.metrics["loss/total"] == pytest.approx(float(torch.cat(losses).mean()), abs=1e-5)
    difference = {name: gradient[name] - expected[name] for name in gradient if name in expected}
    assert norm(difference) / norm(expected) < 1e-5
    for group, rollout, loss in zip(result.groups, found.rollouts, losses, strict=True):
        (values,), mask = group.logprobs, rollout.mask
        np.testing.assert_allclose(values[mask], -loss.detach(), atol=1e-5)


@pytest.mark.parametrize("as_on_hub", [False, True], ids=["", "as on the hub"])
@pytest.mark.parametrize("family", VISION)
def test_tokens_are_those_of_the_models_own_processor(family, as_on_hub, bench, documents):
    setting = bench(family, as_on_hub)
    for prompt in documents:
        encoded = setting.encoder.encode(prompt)
        sample = setting.encoder.demonstrate(encoded)
        expected = spelled(prompt, setting.folder.processor, family)["input_ids"][0].tolist()
        assert [*sample.prompt.token_ids, *sample.token_ids] == encoded.token_ids.tolist() == expected
        assert setting.encoder.num_tokens(prompt) == len(expected)
        assert sample.all_images == encoded.images and len(encoded.images) == len(prompt.images)
        banned = np.isin(expected, setting.folder.vocabulary.banned)
        learned = [*np.zeros(len(sample.prompt.token_ids), bool), *sample.mask]
        first_text = 0 if prompt.messages[0].content.startswith("<image>") else 1
        assert np.flatnonzero(learned).tolist() == np.flatnonzero(~banned)[first_text:].tolist()


def test_a_text_model_learns_a_document_from_its_first_token_on_where_the_tokenizer_writes_a_begin(bench):
    setting = bench("llama", True)
    tokenizer, text = setting.folder.tokenizer, "what is 3+4? <image>"
    sample = setting.encoder.demonstrate(setting.encoder.encode(document(text)))
    begin, *ids = tokenizer(text)["input_ids"]
    assert sample.prompt.token_ids.tolist() == [begin] == [tokenizer.bos_token_id]
    assert sample.mask.all() and sample.token_ids.tolist() == [*ids, tokenizer.eos_token_id]


def test_documents_without_text_or_with_tokens_of_the_model_are_bad_rows(vision, picture):
    with pytest.raises(DataError, match="no text to learn"):
        vision.encoder.num_tokens(document(" <image>\n", picture(56, 56)))
    with pytest.raises(DataError, match="special tokens of the model") as caught:
        vision.encoder.num_tokens(document("one<|im_end|>two"))
    assert caught.value.possible == "no <|im_end|>"


def test_documents_are_learned_by_sft_and_neither_sampled_nor_compared(vision, documents):
    config, needs = vision.config(), SFT(SFT.Config()).needs()
    Given.check_row(documents[0], config, needs, vision.encoder)
    with pytest.raises(DataError, match="nothing can be sampled"):
        Rollouts.check_row(documents[0], config, needs, vision.encoder)
    with pytest.raises(DataError, match="no candidates"):
        Comparisons.check_row(documents[0], config, needs, vision.encoder)
