"""Updates on ranks that hold rows together, or on one that holds whole rows; each runs in a fork.

Groups of ranks have different rows, and each rank of a group the same ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch

from mmrl.config.load import from_mapping
from mmrl.data.images import MediaStore
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.packed_inputs import PackedInputs
from mmrl.engine.network.policy import gathered
from mmrl.engine.rank import RankEngine
from mmrl.engine.spec import EngineSpec
from mmrl.engine.text.encoding import Encoder
from mmrl.interfaces import Aggregation
from mmrl.ops.objective import training_rows
from mmrl.plugin_host import registry
from mmrl.types import EncodedPrompt, Message, Prompt, Sample, Segment
from tests.conftest import tower_passes
from tests.engine.critics import critic_rows
from tests.engine.sharded_ranks import ADVANTAGES, episodes, noise, samples
from tests.engine.test_learner import first_moment

Kind = Literal["samples", "episodes", "short"]


@dataclass(frozen=True)
class Case:
    """A step.

    Attributes:
        model: A model's folder.
        kind: ``episodes`` have holes, and images in their observations if the model reads any; ``short`` ones are rows
            of one token, and of two.
        size: Ranks that hold a row together.
        role: The network that learns.
        sections: Of the config, beside the model's.
    """

    model: Path
    kind: Kind = "samples"
    size: int = 1
    role: str = "policy"
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """The results of a rank's update.

    Attributes:
        scores: Log-probs or values of its samples, by their numbers; likewise ``single`` of each in a row of its own.
        gradient: Of all ranks.
        statistics: The log-probs or values that the update has found, by the samples' numbers.
        cut_images: Cuts between ranks, of all rows, that go through an image.
        patches: Patches or tiles that its vision tower reads in the update.
        seen: The pixels of a prompt's images, as the check of a start sees them, and the rows of features.
    """

    scores: dict[int, list[float]]
    single: dict[int, list[float]]
    gradient: dict[str, torch.Tensor]
    statistics: dict[int, list[float]]
    metrics: dict[str, float]
    cut_images: int
    patches: int
    seen: tuple[list[bytes], int]


def short_samples(folder: ModelFolder) -> list[Sample]:
    """Prompts of one token, completions of one, two and three; a row has all of them but the last token."""
    allowed = np.setdiff1d(np.arange(folder.vocabulary.size), folder.vocabulary.banned)[:32].astype(np.int32)

    def sample(number: int, length: int) -> Sample:
        prompt = EncodedPrompt(
            prompt=Prompt(f"{number}", ()), text="", token_ids=allowed[number : number + 1], images=()
        )
        return Sample(prompt, (Segment(allowed[8 : 8 + length], True, np.zeros(length, np.float32)),))

    return [sample(number, length) for number, length in enumerate((1, 2, 1, 3, 1, 1, 2))]


def config_of(case: Case, ranks: int, mixture: bool) -> dict[str, Any]:
    """The sections of a case's config."""
    sections: dict[str, Any] = {
        "model": {"path": str(case.model), "dtype": "float32"},
        "data": {"train": {"name": "table"}},
        "algorithm": {"name": "import:tests.engine.critics:Valued" if case.role == "critic" else "grpo"},
        "learner": {
            "lr": 1e-30,
            "max_grad_norm": 1e9,
            "tokens_per_microbatch": 60 if ranks > 1 else 10_000,
            "sequence_parallel_size": case.size,
            "zero_stage": 3 if ranks > 1 else 0,
            "router_aux_loss_coef": 0.05 if mixture else 0.0,
            "deepspeed": {"optimizer": {"params": {"betas": [0.0, 0.999]}}},
        },
        "cluster": {"name": "ray", "ranks": ranks} if ranks > 1 else {},
        **({"critic": {"lr": 1e-30, "head": "normal"}} if case.role == "critic" else {}),
    }
    return sections | {name: sections.get(name, {}) | values for name, values in case.sections.items()}


def learned(case: Case, kinds: Sequence[Kind], folder: Path) -> Iterator[Found]:
    """An optimizer step of a case on rows of each kind. A step moves no weight, and the next moment has none of it."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    opened = ModelFolder.open(str(case.model))
    config = from_mapping(config_of(case, ranks, opened.family.mixture))
    media = MediaStore(folder / f"media-{ranks}-{rank}", opened.image_sizes(3136, 50176))
    algorithm = registry.create("algorithm", config.algorithm)
    engine = RankEngine(EngineSpec(config, opened, media, algorithm, 1, with_sampler=False), "cpu")
    for kind in kinds:
        made = (
            short_samples(opened)
            if kind == "short"
            else {"samples": samples, "episodes": episodes}[kind](opened, media)
        )
        if config.learner.routing != "own":
            made = [with_experts(sample, number) for number, sample in enumerate(made)]
        yield stepped(engine, case, made, opened, media)


def stepped(engine: RankEngine, case: Case, made: Sequence[Sample], opened: ModelFolder, media: MediaStore) -> Found:
    """One optimizer step."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    masks = [sample.mask for sample in made]
    advantages = [np.full(len(mask), value) for mask, value in zip(masks, ADVANTAGES, strict=True)]
    order = np.arange(len(made))
    rows = training_rows(made, masks, {"advantages": advantages}, order, Aggregation("token-mean"), order.tolist())
    if case.role == "critic":
        rows = dict(enumerate(critic_rows(made)))
    groups = ranks // case.size
    own = [number for number in rows if min(number % 3, groups - 1) == rank // case.size]
    with engine.learning() as learner:
        network: Any = learner.network(case.role)
        draw_adapters(network.policy)
        cuts = count_cut_images(network, opened.image_token_id)
        passes = tower_passes(network.policy.model, opened.family) if opened.family.vision else []
        scores, single = (network.score([made[number] for number in own], way=way) for way in ("packed", "single"))
        learner.forget_images()
        passes.clear()
        result = network.update([rows[number] for number in own])
        patches = sum(passes)
        gradient = first_moment(SimpleNamespace(policy=network.policy, trained=network))
    statistics = result.vpreds if case.role == "critic" else result.logprobs
    return Found(
        *({number: values.tolist() for number, values in zip(own, each, strict=True)} for each in (scores, single)),
        {name: values.clone() for name, values in gradient.items()},
        {number: values.tolist() for number, values in zip(own, statistics, strict=True)},
        dict(result.metrics),
        len(cuts),
        patches,
        look(engine, opened, media),
    )


def with_experts(sample: Sample, seed: int) -> Sample:
    """The sample with two of eight experts for each token, in two layers, that were drawn."""
    rng = np.random.default_rng(seed)
    drawn = rng.permuted(np.tile(np.arange(8), (sample.num_tokens - 1, 2, 1)), axis=-1)[..., :2]
    return replace(sample, experts=drawn)


def draw_adapters(policy: Any) -> None:
    """Give second factors of adapters values: they begin at zero, and then the first ones have no gradient."""
    generator = torch.Generator().manual_seed(1)
    for adapter in policy.adapted:
        _, second = adapter.factors.values()
        with gathered(second, changes=True):
            if second.numel():
                second.data.copy_(0.1 * torch.randn(second.shape, generator=generator))


def count_cut_images(network: Any, image_token_id: int) -> list[int]:
    """The places, one for each, of later cuts that go through an image."""
    cuts: list[int] = []

    def note(_: Any, args: Any) -> None:
        if isinstance(args[0], PackedInputs):
            is_image_S = args[0].model_inputs["input_ids"][0] == image_token_id
            inner = network.group.bounds(len(is_image_S))[1:-1]
            cuts.extend(place for place in inner if is_image_S[place - 1] and is_image_S[place])

    network.policy.register_forward_pre_hook(note)
    return cuts


def look(engine: RankEngine, folder: ModelFolder, media: MediaStore) -> tuple[list[bytes], int]:
    """The sorted patches or tiles, and the features, that a learner has of a prompt with two images."""
    if not folder.family.vision:
        return [], 0
    prompt = Prompt("two", (Message("user", "<image> and <image>"),), (noise(60, 90), noise(120, 60)))
    (sight,) = engine.look([Encoder(folder, media).encode(prompt)])
    rows = [row for call in sight.pixels for row in call]
    return sorted(row.tobytes().rstrip(b"\0") for row in rows), sum(sight.num_features)


def learn(_: Any, cases: Sequence[Case], folder: Path) -> list[Found]:
    """The steps of some cases, one after the other; those that differ in their rows alone share an engine."""
    torch.distributed.init_process_group("gloo")
    found: list[Found] = []
    for case, alike in itertools.groupby(cases, lambda case: replace(case, kind="samples")):
        found += learned(case, [each.kind for each in alike], folder)
    torch.distributed.destroy_process_group()
    return found
