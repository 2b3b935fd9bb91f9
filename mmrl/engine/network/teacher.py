"""Folders of teachers and critics: whether the policy's token ids and images mean the same to them.

A teacher is asked for the log-probs of completions that the policy wrote, as token ids, and a critic for the values of
their states. So each must read an id as the policy writes it, and have as many tokens of an image.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from mmrl.config.critic import CriticConfig
from mmrl.config.reference import Teacher
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.reward_model import check_score
from mmrl.errors import ConfigError, DataError

SIZES = ((64, 48), (1200, 900))
"""Two images, in pixels, of which a teacher must have as many tokens as the policy; also of the smallest there is."""
Noun = Literal["teacher", "critic"]


def open_teacher(
    teacher: Teacher, policy: ModelFolder, pixels: tuple[int, int], *, with_weights: bool = True
) -> ModelFolder:
    """The folder of a teacher that can read what the policy reads and writes; see ``as_teacher``.

    Args:
        pixels: Fewest and most pixels of an image.
        with_weights: True if a folder must hold them.

    Raises:
        ConfigError: It cannot be opened, is quantised, or does not agree with the policy.
        HubError: The hub does not give it.
    """
    folder = _opened(teacher.key, teacher.path, teacher.revision, policy, with_weights)
    for disagreement in disagreements(policy, folder, pixels, "teacher"):
        raise disagreement
    return as_teacher(policy, folder)


def open_critic(
    critic: CriticConfig, policy: ModelFolder, pixels: tuple[int, int], *, with_weights: bool = True
) -> ModelFolder | None:
    """As ``open_teacher``, of a critic that begins from another folder than the policy's; None if it does not.

    Raises:
        ConfigError: As there; or its files have a head that does not fit.
    """
    if critic.path is None:
        return None
    folder = _opened("critic", critic.path, critic.revision, policy, with_weights)
    for disagreement in disagreements(policy, folder, pixels, "critic"):
        raise disagreement
    if with_weights and folder.commit is None:  # a model on the hub is looked at where its files are
        check_score(folder)
    return as_teacher(policy, folder)


def reopened(path: str, policy: ModelFolder, key: str = "reference") -> ModelFolder:
    """The folder of a teacher or critic, known to agree with the policy, at its place on another machine."""
    return as_teacher(policy, _opened(key, path, None, policy, with_weights=True))


def _opened(key: str, path: str, revision: str | None, policy: ModelFolder, with_weights: bool) -> ModelFolder:
    """The folder, whose template no text is made with: one without a template may have the run's."""
    return ModelFolder.open(
        path,
        revision,
        trust_remote_code=policy.trust_remote_code,
        with_weights=with_weights,
        template=replace(policy.template, options={}),
        key=key,
    )


def as_teacher(policy: ModelFolder, folder: ModelFolder) -> ModelFolder:
    """The folder with the policy's token ids: a softmax is over those that the policy may sample, and no others.

    A teacher or critic may have another number of rows in its embedding.
    """
    own, size = policy.vocabulary, int(folder.config.get_text_config().vocab_size)
    banned = set(range(size)) - sampled_ids(policy)
    return replace(folder, vocabulary=replace(own, size=size, banned=tuple(sorted(banned))))


def sampled_ids(policy: ModelFolder) -> set[int]:
    """The token ids that a policy may sample."""
    return set(range(policy.vocabulary.size)) - set(policy.vocabulary.banned)


def disagreements(
    policy: ModelFolder, folder: ModelFolder, pixels: tuple[int, int], noun: Noun
) -> Iterator[ConfigError]:
    """Errors of a teacher or critic that cannot read what the policy reads and writes, the most telling first.

    Args:
        pixels: Fewest and most pixels of an image.
    """
    where = f"{folder.key}.path: {folder.name}"
    own, other = policy.family, folder.family
    if (method := folder.quantized_by) is not None:
        yield ConfigError(
            f"the {noun}'s weights are stored quantised ({method}), and the learner does not unpack such weights",
            where=where,
            possible="a model with weights in bfloat16, float16 or float32",
            remedy="name the model that it was quantised from",
        )
    if other.model_type != own.model_type and other.vision:
        text = ", or a text model for rows without images" if noun == "teacher" else ""
        yield ConfigError(
            f"the {noun} is of type {other.model_type}, and the policy of type {own.model_type}: they read images in "
            "other ways",
            where=where,
            possible=f"models of type {own.model_type}{text}",
            remedy=f"choose a {noun} of the policy's family",
        )
    if noun == "critic" and own.vision and not other.vision:
        yield ConfigError(
            f"the critic reads text alone ({other.model_type}), and the policy reads images",
            where=where,
            possible=f"models of type {own.model_type}",
            remedy="choose a critic of the policy's family, or remove critic.path",
        )
    yield from _of_ids(policy, folder, where, noun)
    if own.vision and other.vision:
        yield from _of_images(policy, folder, where, pixels, noun)


def _of_ids(policy: ModelFolder, folder: ModelFolder, where: str, noun: Noun) -> Iterator[ConfigError]:
    """An error that names the first token id which means another text to a teacher or critic."""
    size = int(folder.config.get_text_config().vocab_size)
    read = policy.family.banned_tokens if folder.family.vision else ()  # they stand in prompts, around an image
    known = policy.tokenizer.get_vocab()
    ids = sorted(sampled_ids(policy) | {known[token] for token in read if token in known})
    pairs = zip(_tokens(policy.tokenizer, ids), _tokens(folder.tokenizer, ids), strict=True)
    for number, (mine, its) in zip(ids, pairs, strict=True):
        if mine != its or number >= size:
            meant = "no token" if its is None or number >= size else repr(its)
            yield ConfigError(
                f"token id {number} is {mine!r} to the policy, and {meant} to the {noun}",
                where=where,
                possible=f"a {noun} whose tokenizer has the same id for each token that the policy reads or writes",
                remedy=f"choose a {noun} of the policy's model series; other sizes of one series share their tokenizer",
            )


def _tokens(tokenizer: Any, ids: list[int]) -> list[str | None]:
    """The token of each id; None where there is none."""
    known = {number: token for token, number in tokenizer.get_vocab().items()}
    return [known.get(number) for number in ids]


def _of_images(
    policy: ModelFolder, folder: ModelFolder, where: str, pixels: tuple[int, int], noun: Noun
) -> Iterator[ConfigError]:
    """Errors about images: the token ids that stand for one, in two sizes."""
    own, other = (each.image_sizes(*pixels) for each in (policy, folder))
    sizes = [(0, 0)]
    with suppress(DataError):  # the limits leave room for some shapes alone
        sizes += [own.size(*given) for given in SIZES]
    for size in sizes:
        mine, its = policy.images.expansion(*size), folder.images.expansion(*size)
        if mine == its and (size == (0, 0) or other.size(*size) == size):
            continue
        what = f"an image of {size[0]}x{size[1]} pixels"
        if len(mine) != len(its):
            what = f"{what} is {len(mine)} tokens to the policy, and {len(its)} to the {noun}"
        else:
            what = f"{what} is not the same to the {noun} as to the policy"
        yield ConfigError(
            what,
            where=where,
            possible=f"a {noun} with the same sizes of patches, of tiles and of the square that becomes a token",
            remedy=f"choose a {noun} of the policy's model series",
        )
