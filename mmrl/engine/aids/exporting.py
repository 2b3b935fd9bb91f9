"""Writes a model folder anew, in another precision if wanted, and checks that it gives the source's log-probs.

The model is in memory once, in float32 and on the CPU: first the source, then the written folder. Configuration files
are copied byte by byte; in config.json the element type alone is changed.
"""

from __future__ import annotations

import io
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from mmrl.data.images import MediaStore
from mmrl.engine.learner.collation import Collator
from mmrl.engine.learner.learner_state import SavedState
from mmrl.engine.network import adapters, quantization
from mmrl.engine.network.folder import ModelFolder, kept_files
from mmrl.engine.network.policy import Policy, load_policy
from mmrl.engine.network.reward_model import RewardLoading, is_reward_model
from mmrl.engine.network.template import TemplateChoice
from mmrl.engine.network.vision import ImageInputs
from mmrl.engine.network.weights import Failures, save_weights
from mmrl.engine.text.encoding import Encoder
from mmrl.errors import ConfigError, NumericsError
from mmrl.ops.parity import LIMITS, Gap
from mmrl.system import failpoints
from mmrl.types import EncodedPrompt, FloatArray, Message, Prompt, RawImage, Sample, Segment

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Element types by their names in safetensors."""
PIXELS = (3136, 200704)
"""Least and most of an image of the samples."""
SAMPLES = (
    ("What is 12 + 30?", "12 + 30 = 42, so the answer is \\boxed{42}.", ()),
    ("Say where the river Öre flows, in one sentence.", "It flows through the north of Sweden to the sea: 瑞典。", ()),
    ("<image>What colour is the shape?", "The shape is a red square on white.", ((168, 112),)),
    ("<image> and <image>: which one is wider?", "The first one is.", ((140, 84), (60, 130))),
)
"""Question, completion, and the sizes of its images."""


@dataclass(frozen=True, slots=True)
class Export:
    """The outcome of an export.

    Attributes:
        stored: Element type of the source's weights, most of them.
        masters: Weights that were taken from the optimizer's float32 ones.
        size_bytes: Bytes of all files of weights.
        kept: Names of the files that were copied.
        samples: Samples that were compared, with ``tokens`` log-probs.
        gap: Between the source and the written folder, rounding included.
        is_rounded: True if weights were rounded to the type.
        reads_images: True if the model reads images.
        scores: True of a reward model, of which scores were compared, one of each sample.
    """

    stored: str
    dtype: str
    weights: int
    masters: int
    files: int
    size_bytes: int
    kept: tuple[str, ...]
    samples: int
    tokens: int
    gap: Gap
    is_rounded: bool
    reads_images: bool
    scores: bool


@dataclass(frozen=True, slots=True)
class _Reading:
    """The built-in samples as a folder reads them: all token ids, and the log-probs of the completions, or a reward
    model's scores of them."""

    token_ids: tuple[tuple[int, ...], ...]
    logprobs: FloatArray


def export_model(
    source: Path,
    state: Path | None,
    target: Path,
    media: Path,
    *,
    dtype: str | None,
    shard_bytes: int | None = None,
    base: str | None = None,
) -> Export:
    """Write the model in ``source`` to ``target``, read it again, and compare; an adapter is merged into its model.

    Args:
        state: ``state/`` of the checkpoint that ``source`` belongs to: another element type than the stored one is
            then made from the optimizer's float32 weights, where there are any.
        target: An empty folder.
        media: A folder for the samples' images.
        dtype: One of ``DTYPES``; None for the stored one, or the adapter's: the weights then are those that its run
            has sampled with. In float32 an adapter's sums are not rounded, as they have not been for any sampler.
        shard_bytes: Most bytes of a file of weights, and of the memory that writing takes beside the model.
        base: The model that an adapter adapts, if not the one that the adapter names.

    Raises:
        ConfigError: The folder cannot be exported.
        NumericsError: The written folder gives other log-probs than the source, or the weights do not fit the type.
        ResourceError: The disk is full.
    """
    adapter = source if adapters.is_adapter(source) else None
    folder = _open(source, base)
    stored = _stored(folder)
    written = dtype or _element(stored, adapter)
    policy, masters = _load(folder, adapter), 0
    if state and adapter is None and set(stored) != {written}:
        masters = _take_masters(policy, SavedState(state), stored)
    before, scores = _read(folder, policy, media), bool(policy.scored_by)
    if adapter is not None:
        del policy  # its adapters are beside its weights; before the next one is loaded
        policy = _merged(folder, adapter)
    _write(policy, folder, target, written, shard_bytes)
    weights = len(list(policy.model.parameters()))
    exact = written == "float32" or (set(stored) == {written} and adapter is None)
    wanted = before if exact else _read(folder, _rounded(policy, getattr(torch, written)), media)
    if adapter is not None and written == _element(stored, adapter):  # rounded as they were for the run itself
        before, exact = wanted, True
    del policy  # before the next one is loaded
    again = ModelFolder.open(str(target))
    after = _read(again, _load(again), media)
    _compare(wanted, after)
    gap = Gap.between([before.logprobs], [after.logprobs])
    sizes = [path.stat().st_size for path in target.glob("*.safetensors")]
    kept = tuple(kept_files(Path(folder.path)))
    counts = len(before.token_ids), len(before.logprobs)
    first, read = stored.most_common(1)[0][0], folder.family.vision
    return Export(first, written, weights, masters, len(sizes), sum(sizes), kept, *counts, gap, not exact, read, scores)


def export_adapter(source: Path, target: Path, media: Path, *, base: str | None = None) -> Export:
    """Write an adapter's folder to ``target`` without merging it, read it again, and compare.

    Raises:
        ConfigError: The folder holds no adapter, or the model that it adapts is not there.
    """
    if not adapters.is_adapter(source):
        raise ConfigError("there is no adapter to export", where=str(source), remedy="leave out --adapter")
    folder = _open(source, base)
    before = _read(folder, _load(folder, source), media)
    files = (adapters.CONFIG, adapters.WEIGHTS, *kept_files(source))
    failpoints.reach("export.begin")
    for name in files:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)
    failpoints.reach("export.filled")
    gap = _compare(before, _read(folder, _load(folder, target), media))
    with safe_open(target / adapters.WEIGHTS, "pt") as weights:
        keys = list(weights.keys())
        stored = {code: name for name, code in DTYPES.items()}[weights.get_slice(keys[0]).get_dtype()]
    size, counts = (target / adapters.WEIGHTS).stat().st_size, (len(before.token_ids), len(before.logprobs))
    read = folder.family.vision
    scores = is_reward_model(source)
    return Export(stored, stored, len(keys), 0, 1, size, files[2:], *counts, gap, False, read, scores)


def write_merged(adapter: Path, target: Path) -> None:
    """Write the whole model of an adapter's folder, to be loaded once: ``export_model`` without the comparison.

    Raises:
        ConfigError: The model that it adapts is missing, or is another one.
        ResourceError: The disk is full.
    """
    folder = _open(adapter, None)
    _write(_merged(folder, adapter), folder, target, _element(_stored(folder), adapter), None)


def _element(stored: Counter[str], adapter: Path | None) -> str:
    """The stored weights' element type, or the adapter's: its run has computed in it."""
    own = "" if adapter is None else str(adapters.dtype(adapter)).removeprefix("torch.")
    return own if own in DTYPES else stored.most_common(1)[0][0]


def _open(source: Path, base: str | None) -> ModelFolder:
    """The model in a folder, or the one that the folder's adapter adapts.

    Raises:
        ConfigError: It is missing, or the adapter has a vocabulary of its own.
    """
    if not adapters.is_adapter(source):
        if base is not None:
            what = "there is no adapter, which alone has a base"
            raise ConfigError(what, where=str(source), remedy="leave out --base")
        try:
            return ModelFolder.open(str(source))
        except ConfigError as error:
            error.where = str(source)  # and not the config's model.path
            raise
    _, name, revision = adapters.read_config(source)
    try:
        folder = ModelFolder.open(base or name, None if base else revision).fetched()
    except ConfigError as error:
        error.what = f"the model that the adapter adapts cannot be opened: {error.what}"
        error.where, error.remedy = str(source / adapters.CONFIG), "put it back, or `mmrl export` with its --base"
        raise
    return _as_adapted(folder, source) if (source / "tokenizer_config.json").is_file() else folder


def _as_adapted(folder: ModelFolder, adapter: Path) -> ModelFolder:
    """The model's folder with the chat template that an adapter comes with, which its run has trained on.

    Raises:
        ConfigError: The adapter has another vocabulary.
    """
    from transformers import AutoProcessor, AutoTokenizer

    own = AutoTokenizer.from_pretrained(adapter)
    if own.get_vocab() != folder.tokenizer.get_vocab():
        raise ConfigError(
            "the adapter comes with a vocabulary that is not its model's",
            where=str(adapter),
            remedy="give the model's folder the adapter's tokenizer files first",
        )
    renderer = AutoProcessor.from_pretrained(adapter) if folder.family.vision else own
    text = getattr(renderer, "chat_template", None)
    if not isinstance(text, str) or text == folder.template_source:
        return folder
    choice = TemplateChoice(text, file=str(adapter))
    return ModelFolder.open(folder.name, folder.commit, template=choice).fetched()


def _load(folder: ModelFolder, adapter: Path | None = None) -> Policy:
    """The folder's model in float32, which holds every type of stored weights exactly; adapters are beside them.

    The weights that an adapter adapts are as its run computed with them: in its element type, quantised if they were.
    """
    lora = None if adapter is None else adapters.read_config(adapter)[0]
    parts = () if lora else ("vision", "projector", "language")
    options = _loading(folder, adapter) | ({} if adapter is None else _rounding(adapter))
    policy = load_policy(folder, "cpu", "float32", freeze=parts, temperature=1.0, lora=lora, adapter=adapter, **options)
    return policy if adapter is None else _rounded(policy, adapters.dtype(adapter))


def _merged(folder: ModelFolder, adapter: Path) -> Policy:
    """The model with the adapter merged into the weights that its run has adapted, not rounded afterwards."""
    frozen = ("vision", "projector", "language")
    options = _loading(folder, adapter) | _rounding(adapter)
    policy = load_policy(folder, "cpu", "float32", freeze=frozen, temperature=1.0, **options)
    adapters.merge(_rounded(policy, adapters.dtype(adapter)).model, adapter)
    return policy


def _loading(folder: ModelFolder, adapter: Path | None) -> dict[str, Any]:
    """The option of ``load_policy`` that reads a reward model as what it is."""
    return {"loading": RewardLoading()} if is_reward_model(adapter or Path(folder.path)) else {}


def _rounding(adapter: Path) -> dict[str, Any]:
    """Options of ``load_policy`` that give the weights which the adapter's run has adapted."""
    return {"quantize": True, "rounded_as": adapters.dtype(adapter)} if quantization.read(adapter) else {}


def _stored(folder: ModelFolder) -> Counter[str]:
    """Elements of each type in the folder's weights."""
    names = {code: name for name, code in DTYPES.items()}
    found: Counter[str] = Counter()
    for file in folder.files():
        if not file.endswith(".safetensors"):
            continue
        with safe_open(Path(folder.path, file), "pt") as weights:
            for key in weights.keys():  # noqa: SIM118
                part = weights.get_slice(key)
                if part.get_dtype() not in names:
                    raise ConfigError(
                        f"the weight {key} is stored as {part.get_dtype()}",
                        where=str(Path(folder.path, file)),
                        possible=", ".join(DTYPES),
                        remedy="export the model that this one was quantised from",
                    )
                found[names[part.get_dtype()]] += int(np.prod(part.get_shape()))
    return found


@torch.no_grad()
def _take_masters(policy: Policy, state: SavedState, stored: Counter[str]) -> int:
    """Put the optimizer's float32 weights in place of the weights rounded from them; returns their number."""
    rounded = getattr(torch, stored.most_common(1)[0][0])
    weights, count = dict(policy.model.named_parameters()), 0
    for name, master in state.masters():
        if not torch.equal(master.to(rounded).float(), weights[name]):
            raise NumericsError(
                f"the optimizer's float32 weight {name} does not round to the model's",
                where="state/ and model/ of the checkpoint",
                remedy="export it as it is stored, without --dtype",
            )
        weights[name].copy_(master)
        count += 1
    return count


def _write(policy: Policy, folder: ModelFolder, target: Path, dtype: str, shard_bytes: int | None) -> None:
    failpoints.reach("export.begin")
    element = getattr(torch, dtype)
    for name, weight in policy.model.named_parameters():
        if not torch.isfinite(weight.to(element)).all() and torch.isfinite(weight).all():
            raise NumericsError(
                f"{name} has a value of {float(weight.abs().max()):.3g}, which {dtype} cannot hold",
                where=f"weights as {dtype}",
                possible=", ".join(DTYPES),
                remedy="choose bfloat16 or float32",
            )
    failures = Failures("the export")
    save_weights(policy, element, target, failures, shard_bytes)
    if failures.first:
        raise failures.first
    folder.save_files(target)
    folder.save_config(target, dtype, policy.scored_by)
    for path in target.glob("*.safetensors"):  # which safetensors lets nobody else read
        shutil.copymode(target / "config.json", path)
    failpoints.reach("export.filled")


@torch.no_grad()
def _read(folder: ModelFolder, policy: Policy, media: Path) -> _Reading:
    """The samples through the folder's own chat template, tokenizer and processor."""
    store = MediaStore(media, folder.image_sizes(*PIXELS))
    encoder = Encoder(folder, store)
    samples = [
        _completed(encoder.encode(Prompt(text, (Message("user", text),), tuple(map(_draw, sizes)))), answer, folder)
        for text, answer, sizes in SAMPLES
        if folder.family.vision or not sizes
    ]
    images, scores = ImageInputs(folder, store), bool(policy.scored_by)
    collate = Collator(folder, policy.model.base_model, images, "cpu", torch.float32, keeps_last=scores)
    found = policy(collate(samples))
    values = found if scores else found[0]
    return _Reading(tuple((*map(int, s.prompt.token_ids), -1, *map(int, s.token_ids)) for s in samples), values.numpy())


def _completed(prompt: EncodedPrompt, answer: str, folder: ModelFolder) -> Sample:
    """The prompt with an answer right behind it, also where the template has begun a thought."""
    ids = [*folder.tokenizer(answer, add_special_tokens=False)["input_ids"], folder.vocabulary.eos[0]]
    return Sample(prompt, (Segment(np.array(ids, np.int32), True, np.zeros(len(ids), np.float32)),))


def _draw(size: tuple[int, int]) -> RawImage:
    """A red rectangle with a gradient, on white."""
    from PIL import Image

    width, height = size
    pixels = np.full((height, width, 3), 255, np.uint8)
    inner = pixels[height // 4 : -height // 4, width // 4 : -width // 4]
    inner[:] = [220, 20, 20]
    inner[..., 2] = np.linspace(0, 200, inner.shape[1])
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return RawImage(buffer.getvalue(), f"drawn {width}x{height}")


@torch.no_grad()
def _rounded(policy: Policy, dtype: torch.dtype) -> Policy:
    """The policy, its weights rounded to an element type in place."""
    for weight in policy.model.parameters():
        weight.copy_(weight.to(dtype))
    return policy


def _compare(before: _Reading, after: _Reading) -> Gap:
    """The gap between two readings of the same weights.

    Raises:
        NumericsError: They are not the same.
    """
    if before.token_ids != after.token_ids:
        raise NumericsError(
            "the written folder reads the samples as other tokens than the source does",
            where="its tokenizer, chat template or processor",
            remedy="this is a bug in mmrl; please report it with the versions that `mmrl doctor` prints",
        )
    gap = Gap.between([before.logprobs], [after.logprobs])
    limits = LIMITS["float32"]
    if gap.verdict(limits) == "stop":
        raise NumericsError(
            f"log-probs from the source and from the written folder disagree: mean {gap.abs_mean:.2e}, "
            f"max {gap.abs_max:.2e} nats",
            where=f"{len(before.logprobs)} tokens of {len(before.token_ids)} built-in samples",
            possible=limits.told(),
            remedy="nothing was exported: report this, with the versions that `mmrl doctor` prints",
        )
    return gap
