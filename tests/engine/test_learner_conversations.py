"""Supervised training on whole conversations: the learner's step is that of plain transformers with masked labels."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.step.gather import Given
from mmrl.step.learn import LearnSettings, finished, learn
from mmrl.system.clock import Clock
from mmrl.types import Message, Prompt
from mmrl_algorithms.sft import SFT
from tests.engine.test_learner import EXPOSED, STILL, first_moment, norm

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def conversations(picture) -> list[Prompt]:
    """One with images in the question and in a tool's answer, and a shorter one of text."""
    shown = (picture(56, 56), picture(84, 56, 1), picture(56, 84, 2))
    seen = (
        Message("user", "<image>What digit is this?"),
        Message("assistant", CALL),
        Message("tool", "Here: <image><image>"),
        Message("assistant", "It may be 7."),
        Message("user", "Sure?"),
    )
    asked = Message("user", "what is 3+4?"), Message("assistant", "7"), Message("user", "and 4+5?")
    return [Prompt("seen", seen, shown, demonstration="It is 7."), Prompt("asked", asked, demonstration="9")]


def labelled(reference, prompt, turns):
    """(N, V) log-probs and (N,) targets of the assistant's tokens, of a row that transformers alone has made."""
    images = [Image.open(io.BytesIO(raw.data)) for raw in prompt.images]
    messages = []
    for message in (*prompt.messages, Message("assistant", prompt.demonstration)):
        parts = [[{"type": "image"}, {"type": "text", "text": text}] for text in message.content.split("<image>")]
        messages.append({"role": message.role, "content": [p for part in parts for p in part][1:]})
    text = reference.processor.apply_chat_template(messages, tokenize=False)
    inputs = reference.processor(text=[text], **({"images": images} if images else {}), return_tensors="pt")
    inputs.pop("token_type_ids", None)
    ids = inputs["input_ids"][0].tolist()
    head, end = reference.processor.tokenizer.encode("<|im_start|>assistant\n"), ids[-2]
    begins = [at + len(head) for at in range(len(ids)) if ids[at : at + len(head)] == head]
    learned = [at for begin in begins[-turns:] for at in range(begin, ids.index(end, begin) + 1)]
    logits = reference.model(**inputs).logits[0].float()
    table = logits.index_fill(1, torch.tensor(reference.banned), float("-inf")).log_softmax(-1)
    return table[[at - 1 for at in learned]], torch.tensor([ids[at] for at in learned])


@pytest.mark.parametrize(("turns", "counted"), [("all", 9), ("last", 1)])
def test_a_step_is_plain_autograds_with_labels_on_the_assistants_turns(
    turns, counted, vision, plain, start, conversations
):
    config = vision.config(
        sampler={"temperature": 1.0}, algorithm={"name": "sft", "turns": turns}, trainer={"prompts_per_step": 2}
    )
    algorithm = SFT(SFT.Config(turns=turns))
    source = Given(config, algorithm, vision.encoder, None, None)  # it neither scores nor tells
    made = [source.make(prompt) for prompt in conversations]
    found = source.gather(1, lambda count: [(0, sample) for sample in made], Clock())
    reference = plain(vision.folder.path)
    reference.model.zero_grad()
    losses = []
    for prompt in conversations:
        table, targets = labelled(reference, prompt, counted)
        losses.append(-table.gather(1, targets[:, None])[:, 0])
    torch.cat(losses).mean().backward()
    assert [int(each.mask.sum()) for each in found.rollouts] == [len(loss) for loss in losses]
    expected = {name: p.grad for name, p in reference.model.named_parameters() if p.grad is not None}
    settings = {"max_grad_norm": 1e9, "lr": STILL, "deepspeed": EXPOSED}
    with start(learner=settings, sampler={"temperature": 1.0}, algorithm=algorithm).learning() as learner:
        result = finished(learn(found.learned, algorithm, learner, LearnSettings.of(config, frozenset(), 1)))
        gradient = first_moment(learner)
    difference = {name: gradient[name] - expected[name] for name in gradient if name in expected}
    assert norm(difference) / norm(expected) < 1e-5
    for group, rollout, loss in zip(result.groups, found.rollouts, losses, strict=True):
        (values,), mask = group.logprobs, rollout.mask
        np.testing.assert_allclose(values[mask], -loss.detach(), atol=1e-5)
