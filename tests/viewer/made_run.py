"""A small run made by hand and written by mmrl's own writers: what a viewer may meet, hostile texts included.

python -m tests.viewer.made_run FOLDER
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mmrl.data.grid import ImageGrid
from mmrl.data.images import MediaStore
from mmrl.rollout.records.writing import write_groups
from mmrl.runs.checkpoints import Checkpoints
from mmrl.runs.directory import RunDirectory
from mmrl.system.redaction import Redactor
from mmrl.types import (
    Call,
    CreditedGroup,
    EncodedPrompt,
    FinishReason,
    ImageRef,
    Message,
    PlayedTurn,
    PreUpdateStatistics,
    Prompt,
    RawImage,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    Segment,
    Turn,
)

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"> </script><script>alert(1)</script> <b>bold</b> [a](javascript:1) "
    "bidi \u202egnp.exe\u202c, control \x1b[31m\x07\0, lone \ud800, lines \u2028\u2029, 数学 🙂 é"
)
"""A completion that attacks a page, a terminal and a script's text."""
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
SIZE = 4
"""Members of a group, without its greedy one."""
STEPS = (1, 2)
CONFIG = """\
model: {path: models/tiny, dtype: auto}
data:
  train: {name: table, path: data/shapes, split: train}
rewards:
- {name: exact, label: null, weight: 1.0}
- {name: format, label: null, weight: 0.2}
algorithm: {name: dapo, clip_low: 0.2, clip_high: 0.28}
environment: null
sampler: {group_size: 4, temperature: 1.0}
learner: {lr: 0.001, epochs: 2}
trainer: {steps: 2, prompts_per_step: 5, eval_metric: null, seed: 0}
trackers: []
"""
ORIGINS = {"learner.lr": "command line", "sampler.group_size": "examples/shapes.yaml:14", "rewards.0.weight": ""}


@cache
def tokenizer() -> Tokenizer:
    """A byte-level tokenizer of some hundred tokens."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    found.train_from_iterator(["the circle is red", "I look at the square. It is blue, so it is blue."], trainer)
    return found


def ids(text: str) -> np.ndarray:
    """The tokens of a text; of what UTF-8 cannot hold, those of a question mark."""
    return np.array(tokenizer().encode(text.encode(errors="replace").decode()).ids, np.int32)


def make_run(
    folder: Path,
    *,
    live: bool = False,
    credited: Callable[[CreditedGroup], CreditedGroup] = lambda group: group,
    metrics: Mapping[str, float] = MappingProxyType({}),
) -> Path:
    """Make a run of two steps and two attempts in an empty folder; returns it.

    Args:
        live: Leave the last attempt without an end.
        credited: Changes the groups that were learned from.
        metrics: Further ones of each step.
    """
    directory = RunDirectory.create(folder)
    media = MediaStore(directory.media, ImageGrid(28, 28 * 28, 280 * 280))
    directory.begin_attempt(None, command=["mmrl", "train", "shapes.yaml"], changes=[])
    directory.write_config(CONFIG)
    directory.write_origins(ORIGINS)
    directory.write_provenance({"mmrl": "0.3.0", "python": "3.11.2", "cpus": 2, "engine": {"device_name": "CPU"}})
    for step in (0, *STEPS):
        directory.append_metrics(step, {**_metrics(step), **(metrics if step else {})})
    _record(directory, media, 1, credited)
    Checkpoints(directory.checkpoints).write(1, fill)
    directory.event("dropped", prompt="shapes/99", reason="the image has no pixels")
    directory.end_attempt(10, "stopped by SIGTERM")
    directory.begin_attempt(1, command=["mmrl", "train", "shapes.yaml"], changes=["learner.lr: 0.01 -> 0.001"])
    directory.event("resumed", message="from step 1", step=1)
    directory.append_metrics(2, _metrics(2) | {"policy/entropy": math.nan, "eval/accuracy": 0.75})
    _record(directory, media, 2, credited)
    alarm = f"the reward pays length: correlation 0.71 {HOSTILE}"
    for _ in range(2):  # as after a kill in between; the page shows it once
        directory.event("alarm", step=2, monitor="length", message=alarm, values={"correlation": 0.71, "limit": 0.5})
    for step in (0, 2):
        _evaluate(directory, media, step)
    if not live:
        directory.end_attempt(0)
    directory.release()
    return folder


def fill(folder: Path) -> None:
    """Fill the folder of a checkpoint with what the viewer reads of it."""
    for name in ("model", "state"):
        (folder / name).mkdir()
    tokenizer().save(str(folder / "model" / "tokenizer.json"))
    (folder / "state" / "run.json").write_text("{}")


def _metrics(step: int) -> dict[str, float]:
    evaluation = {"eval/accuracy": 0.25 + 0.25 * step, "perf/eval_s": 1.5}
    trained = {
        "loss/total": 0.01 * (3 - 2 * step),
        "reward/mean": 0.3 + 0.1 * step,
        "reward/exact_mean": 0.25 * step,
        "policy/entropy": 1.0 / (step + 1),
        "length/completion_mean": 10.0 * step,
        "group/zero_signal_fraction": 0.2,
        "perf/generate_s": 3.0,
        "perf/update_s": 1.25,
        "perf/step_s": 5.0,
    }
    return evaluation if step == 0 else trained | (evaluation if step == 2 else {})


def _record(
    directory: RunDirectory, media: MediaStore, step: int, credited: Callable[[CreditedGroup], CreditedGroup]
) -> None:
    found = [credited(group) if group.trained else group for group in groups(media, step)]
    directory.write_rollouts(step, found, {})
    for update in (1, 2):
        samples = [(step - 1, f"shapes/{prompt}", member) for prompt in (0, 1, 2) for member in range(SIZE)]
        directory.append_ledger(step, 2 * step - 2 + update, samples)


def _evaluate(directory: RunDirectory, media: MediaStore, step: int) -> None:
    """The same questions, with pictures and with blank ones."""
    folder = directory.path / "evaluations"
    folder.mkdir(exist_ok=True)
    seen = [_scored(prompt_of(media, n, 0), ["red", "red"], [1.0 if n <= step else 0.0] * 2) for n in range(3)]
    blank = [_scored(prompt_of(media, n, 0, blank=True), ["grey", "red"], [0.0, float(n == 0)]) for n in range(3)]
    for name, some in (("step", seen), ("blank", blank)):
        with (folder / f"{name}-{step:06d}.parquet").open("wb") as file:
            write_groups(file, map(_untrained, some), {}, Redactor())


def groups(media: MediaStore, step: int) -> list[CreditedGroup]:
    """A mixed group, a hostile one, one without signal, one that was rejected, and one of episodes."""
    epoch = step - 1
    texts = ["the circle is red", "I look at the square. It is blue, so the answer is blue.", "数学 🙂 red", "red"]
    mixed = _scored(prompt_of(media, 0, epoch), texts, [1.2, 0.0, 1.2, 1.0], greedy="the circle is blue")
    hostile = _scored(prompt_of(media, 1, epoch, text=HOSTILE), [HOSTILE, "", "red " * 40, "blue"], [0, 1, 0, 0.2])
    same = _scored(prompt_of(media, 2, epoch), ["green"] * SIZE, [0.0] * SIZE)
    rejected = replace(_scored(prompt_of(media, 3, epoch), ["red"] * SIZE, [1.0] * SIZE), kept=False)
    return [
        _trained(mixed, step),
        _trained(hostile, step),
        _trained(same, step),
        _trained(episodes(media, epoch), step),
        _untrained(rejected),
    ]


def prompt_of(media: MediaStore, number: int, epoch: int, *, text: str = "", blank: bool = False) -> EncodedPrompt:
    """A prompt with a picture or two; each number has others."""
    question = text or f"What colour is shape {number}?"
    pictures = tuple(picture(media, number + 10 * other) for other in range(2 if number == 0 else 1))
    if blank:
        pictures = tuple(map(media.blank, pictures))
    marks = "<|vision_start|><|image_pad|><|vision_end|>" * len(pictures)
    rendered = f"<|im_start|>user\n{marks}{question}<|im_end|>\n<|im_start|>assistant\n"
    row = Prompt(
        id=f"shapes/{number}",
        messages=(Message("system", "Answer in one word."), Message("user", "<image>" * len(pictures) + question)),
        answer=["red", "blue", "red", "red", "goal"][number],
        columns={"difficulty": number, "unit": None},
        source="shapes" if number % 2 == 0 else "odd",
        choices=("red", "blue") if number == 3 else (),
    )
    return EncodedPrompt(prompt=row, text=rendered, token_ids=ids(rendered), images=pictures, epoch=epoch)


def picture(media: MediaStore, number: int) -> ImageRef:
    """A coloured shape; each number has another one."""
    import io

    image = Image.new("RGB", (56 + 28 * (number % 3), 56), "white")
    draw = ImageDraw.Draw(image)
    colour = ["red", "blue", "green", "orange", "purple"][number % 5]
    (draw.ellipse if number % 2 == 0 else draw.rectangle)((8 + number, 8, 40 + number, 44), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return media.add(RawImage(file.getvalue(), f"picture {number}"))


def _scored(
    prompt: EncodedPrompt, texts: Sequence[str], rewards: Sequence[float], *, greedy: str | None = None
) -> ScoredGroup:
    rollouts = tuple(_rollout(prompt, index, text) for index, text in enumerate(texts))
    right = np.minimum(np.floor(rewards), 1.0)
    partner = None
    if greedy is not None:
        one = replace(_rollout(prompt, 0, greedy), greedy=True)
        partner = ScoredGroup(
            RolloutGroup(prompt, (one,)),
            np.zeros(1),
            np.ones(1, np.bool_),
            {"exact": np.zeros(1), "format": np.zeros(1)},
            answers={"exact": [greedy.split()[-1]]},
        )
    return ScoredGroup(
        RolloutGroup(prompt, rollouts),
        np.array(rewards, np.float64),
        np.ones(len(texts), np.bool_),
        {"exact": right, "format": np.array(rewards) - right},
        partner,
        {"exact": [text.split()[-1] if text.split() else None for text in texts]},
        place=(0, int(prompt.id[-1])),
    )


def _rollout(prompt: EncodedPrompt, index: int, text: str) -> Rollout:
    cut: FinishReason = "length" if len(text) > 100 else "stop"
    tokens = ids(text + ("" if cut == "length" else "<|im_end|>"))
    logprobs = -np.linspace(0.01, 2.5, len(tokens), dtype=np.float32)
    return Rollout(
        prompt=prompt,
        segments=(Segment(tokens, True, logprobs),),
        index=index,
        text=text,
        finish_reason=cut,
        weight_version=prompt.epoch,
    )


def episodes(media: MediaStore, epoch: int) -> ScoredGroup:
    """Episodes of two and three turns with pictures and calls, and one whose environment failed at once."""
    prompt = prompt_of(media, 4, epoch, text="Walk to the goal.")
    played = [_episode(media, prompt, 0, 3), _episode(media, prompt, 1, 2)]
    failed = Rollout(
        prompt=prompt,
        segments=(),
        index=2,
        text="",
        finish_reason="failed",
        weight_version=epoch,
        failure="reset: TimeoutError: the world did not answer in 5 s",
    )
    rewards = [1.0, -0.1, 0.0]
    return ScoredGroup(
        RolloutGroup(prompt, (*played, failed)),
        np.array(rewards),
        np.array([True, True, False]),
        {"environment": np.array([1.0, -0.1, np.nan])},
        place=(0, 4),
    )


def _episode(media: MediaStore, prompt: EncodedPrompt, index: int, turns: int) -> Rollout:
    segments, played = list[Segment](), list[PlayedTurn]()
    for number in range(turns):
        is_last, text = number == turns - 1, f"I go right, turn {number}."
        calls: tuple[Call, ...] = (Call("move", {"to": "right", "steps": [number, HOSTILE]}),)
        if index == 1:
            calls = (Call("", None, "this is no JSON: {'to'"),)
        tokens = ids(text + "<|im_end|>")
        logprobs = -np.linspace(0.1, 0.9, len(tokens), dtype=np.float32)
        segments.append(Segment(tokens, True, logprobs, finish_reason="stop"))
        seen = picture(media, 20 + number)
        content: tuple[str | ImageRef, ...] = ("You see ", seen, "next.") if not is_last else ("The end.",)
        reward = (1.0 if index == 0 else -0.1) if is_last else 0.0
        turn = Turn(text, calls, number, "stop", 100 - 10 * number)
        info, began = {"place": [number, 1]}, 8 * number
        played.append(PlayedTurn(turn, content, "tool", reward, is_last, info, began, began + 5))
        if not is_last:
            inserted = ids("\n<|im_start|>tool\nYou see <|image_pad|>next.<|im_end|>\n")
            segments.append(Segment(inserted, False, np.zeros(len(inserted), np.float32), None, (seen,), "tool"))
    return Rollout(
        prompt=prompt,
        segments=tuple(segments),
        index=index,
        text=played[-1].turn.text,
        finish_reason="environment" if index == 0 else "turns",
        weight_version=prompt.epoch,
        episode=tuple(played),
        components={"goal": float(index == 0), "steps": None},
    )


def _trained(group: ScoredGroup, step: int) -> CreditedGroup:
    """The group after two optimizer steps, of which the second began with log-probs 0.1 higher."""
    deviation = group.rewards - group.rewards[group.valid].mean()
    advantages = [np.full(len(each.token_ids), value) for each, value in zip(group.rollouts, deviation, strict=True)]
    learner = [each.sampler_logprobs + np.float32(0.01 * step) for each in group.rollouts]
    entropy = [np.linspace(0.2, 1.4, len(each), dtype=np.float32) for each in learner]
    updates = [
        [PreUpdateStatistics(one, two), PreUpdateStatistics(one + np.float32(0.1), two)] if len(one) else []
        for one, two in zip(learner, entropy, strict=True)
    ]
    reference = [each - np.float32(0.2) for each in learner]
    return CreditedGroup(group, advantages, learner, True, reference, updates)


def _untrained(group: ScoredGroup) -> CreditedGroup:
    nothing: list[Any] = [np.zeros(0, np.float32) for _ in group.rollouts]
    zeros = [np.zeros(len(each.token_ids)) for each in group.rollouts]
    return CreditedGroup(group, zeros, nothing, updates=[[] for _ in group.rollouts])


if __name__ == "__main__":
    print(make_run(Path(sys.argv[1])))
