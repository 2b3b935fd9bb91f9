"""The real DeepSpeed learner: gradients, norms, what is frozen, what is refused."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mmrl.engine.device import IMAGE_FEATURE_BYTES
from mmrl.engine.learner import learner_settings
from mmrl.engine.learner.collation import Collator
from mmrl.engine.network.weights import Failures, save_model
from mmrl.engine.spec import EngineSpec
from mmrl.errors import ConfigError
from mmrl.interfaces import Aggregation, AggregationMode, Algorithm, Needs
from mmrl.ops.objective import training_rows
from mmrl.ops.packing import Item, plan_microbatches, units_of
from mmrl.plugin_host import registry
from mmrl.system.freed_memory import FreedMemory
from mmrl.types import TokenLoss, TrainingRow
from mmrl_algorithms.grpo import GRPO
from tests.cluster.process_ranks import on_each

LENGTHS = (4, 19, 7, 3, 11, 24, 6)
GROUPS = np.array([0, 0, 0, 1, 2, 2, 2])
ADVANTAGES = (1.0, -0.5, 2.0, 0.7, -1.5, 0.3, -0.8)
SLOW = pytest.mark.slow
FULL = pytest.mark.full
STAGES = [0, pytest.param(1, marks=FULL), pytest.param(2, marks=FULL), 3]
STILL = 1e-30
"""A learning rate that moves no float32 weight."""
EXPOSED = {"optimizer": {"params": {"betas": [0.0, 0.999]}}}
"""AdamW without memory: its first moment is the gradient."""
SMALL = {
    "reduce_bucket_size": 6000, "allgather_bucket_size": 6000, "stage3_prefetch_bucket_size": 2000,
    "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 40_000, "sub_group_size": 50_000,
}  # fmt: skip
"""Sizes of DeepSpeed that the tiny model exceeds: several buckets, weights larger than one, several groups."""


def case_of(setting: Any) -> SimpleNamespace:
    """Rows of uneven lengths with holes in their masks; the only row of prompt 1 is masked entirely."""
    rng = np.random.default_rng(0)
    samples = setting.samples(LENGTHS)
    masks = [rng.random(length) < 0.8 for length in LENGTHS]
    masks[3][:] = False
    return SimpleNamespace(
        samples=samples,
        masks=masks,
        tokens=[int(mask.sum()) for mask in masks],
        advantages=ADVANTAGES,
        groups=GROUPS,
    )


@pytest.fixture(scope="module")
def case(vision) -> SimpleNamespace:
    return case_of(vision)


def rows_of(case: Any) -> Callable[..., list[TrainingRow]]:
    """The case's rows, weighted in a mode."""

    def weigh(mode: str = "token-mean", constant: float | None = None) -> list[TrainingRow]:
        advantages = [np.full(len(mask), value) for mask, value in zip(case.masks, case.advantages, strict=True)]
        aggregation = Aggregation(mode, constant)
        indices = range(len(case.samples))
        return list(
            training_rows(
                case.samples, case.masks, {"advantages": advantages}, case.groups, aggregation, indices
            ).values()
        )

    return weigh


@pytest.fixture(scope="module")
def rows(case) -> Callable[..., list[TrainingRow]]:
    return rows_of(case)


def row_losses(case: Any, setting: Any, reference: Any) -> tuple[list[Any], list[dict[str, torch.Tensor]]]:
    """Each row's log-probs, and the gradient of its ``-A sum_t m_t log pi_t``, by plain autograd."""
    values, found = [], []
    for sample, mask, advantage in zip(case.samples, case.masks, case.advantages, strict=True):
        reference.model.zero_grad()
        logprobs = reference.logprobs(sample, setting.media)
        (-advantage * logprobs[torch.from_numpy(mask)].sum()).backward()
        values.append(logprobs.detach().numpy())
        named = reference.model.named_parameters()  # a text row has no gradient in the vision tower
        found.append({name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named})
    return values, found


@pytest.fixture(scope="module")
def row_gradients(case, vision, plain) -> list[dict[str, torch.Tensor]]:
    return row_losses(case, vision, plain(vision.folder.path))[1]


def first_moment(learner: Any) -> dict[str, torch.Tensor]:
    """AdamW's, of every trained parameter."""
    from deepspeed.utils import safe_get_full_optimizer_state

    named = {name: p for name, p in learner.policy.model.named_parameters() if p.requires_grad}
    state = learner.trained.engine.optimizer.state
    if any(hasattr(p, "ds_id") or hasattr(p, "_hp_mapping") for p in named.values()):  # with ZeRO
        return {name: safe_get_full_optimizer_state(p, "exp_avg") for name, p in named.items()}
    return {name: state[p]["exp_avg"] for name, p in named.items()}


def norm(gradient: Mapping[str, torch.Tensor]) -> float:
    return float(torch.stack([value.norm() for value in gradient.values()]).norm())


def weighted(row_gradients: list[dict[str, torch.Tensor]], weights: Any) -> dict[str, torch.Tensor]:
    return {name: sum(w * g[name] for w, g in zip(weights, row_gradients, strict=True)) for name in row_gradients[0]}


def expected_weights(mode: str, tokens: list[int]) -> list[float]:
    """By hand, for GROUPS, when row 3 has no token in the loss."""
    first, last = sum(tokens[:3]), sum(tokens[4:])
    return {
        "token-mean": [1 / sum(tokens)] * 7,
        "seq-mean-token-mean": [1 / (6 * n) if n else 0 for n in tokens],
        "seq-mean-token-sum": [1 / 6] * 7,
        "seq-mean-token-sum-norm": [1 / (6 * 32)] * 7,
        "prompt-mean-token-mean": [1 / (2 * first)] * 3 + [0] + [1 / (2 * last)] * 3,
    }[mode]


@pytest.fixture(scope="module", params=[(0, 1), (0, 4), (3, 1), (3, 4)], ids=lambda p: f"zero{p[0]}-{p[1]}parts")
def exposed(request, start, rows) -> Any:
    """A learner whose optimizer shows the gradient; micro-batches of 1 or 4 parts, recomputing activations or not."""
    stage, parts = request.param
    budget = 4096 if parts == 1 else 70
    samples = [row.sample for row in rows()]
    items = [Item(s.prompt.id, len(s.prompt.token_ids), len(s.token_ids)) for s in samples]
    assert len(plan_microbatches(units_of(items, budget), budget, lambda unit: unit.tokens)) == parts
    learner = {"zero_stage": stage, "max_grad_norm": 1e9, "lr": STILL, "deepspeed": EXPOSED}
    engine = start(learner={**learner, "tokens_per_microbatch": budget}, model={"gradient_checkpointing": stage == 3})
    with engine.learning() as learner:
        yield learner


@pytest.mark.parametrize(
    "mode",
    ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean-token-mean"],
)
def test_a_steps_gradient_is_plain_autograds_for_any_number_of_microbatches(mode, exposed, rows, row_gradients, case):
    constant = 32.0 if mode == "seq-mean-token-sum-norm" else None
    result = exposed.network("policy").update(rows(mode, constant))
    expected = weighted(row_gradients, expected_weights(mode, case.tokens))
    found = first_moment(exposed)
    assert found.keys() == expected.keys()
    difference = {name: found[name] - expected[name] for name in expected}
    assert norm(difference) < 1e-5 * norm(expected)
    assert result.metrics["policy/grad_norm"] == pytest.approx(norm(expected), rel=1e-5)


def test_the_loss_and_the_logprobs_do_not_depend_on_microbatches(exposed, rows, vision, plain, case):
    result = exposed.network("policy").update(rows())
    reference = plain(vision.folder.path)
    single = [reference.logprobs(row.sample, vision.media).detach().numpy() for row in rows()]
    np.testing.assert_allclose(np.concatenate(result.logprobs), np.concatenate(single), atol=1e-5)
    weights = expected_weights("token-mean", case.tokens)
    loss = -sum(w * a * n for w, a, n in zip(weights, ADVANTAGES, case.tokens, strict=True))
    assert result.metrics["loss/policy"] == pytest.approx(loss, rel=1e-5)  # the ratio is one everywhere


def test_a_step_on_text_alone_has_no_gradient_left_from_images(exposed, rows, row_gradients, case):
    exposed.network("policy").update(rows())
    text = [row for row in rows() if row.sample.prompt.id == "text"]
    result = exposed.network("policy").update(text)
    weights = [1 / sum(case.tokens) if index in (0, 6) else 0 for index in range(7)]
    expected, found = weighted(row_gradients, weights), first_moment(exposed)
    assert len(text) == 2
    assert norm({name: found[name] - expected[name] for name in expected}) < 1e-5 * norm(expected)
    assert result.metrics["policy/grad_norm"] == pytest.approx(norm(expected), rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reported_norm_is_the_gradients_before_clipping(stage, dtype, start, rows, row_gradients, case):
    true = norm(weighted(row_gradients, expected_weights("token-mean", case.tokens)))
    settings = {"zero_stage": stage, "max_grad_norm": 0.01, "lr": STILL, "deepspeed": EXPOSED}
    with start(learner=settings, model={"dtype": dtype}).learning() as learner:
        result = learner.network("policy").update(rows())
        assert result.metrics["policy/grad_norm"] == pytest.approx(true, rel=1e-5 if dtype == "float32" else 0.05)
        if dtype == "float32":
            assert norm(first_moment(learner)) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(("stage", "freeze"), [(0, ["vision"]), (3, ["vision", "language"]), (3, ["projector"])])
def test_frozen_parts_stay_and_the_others_move(stage, freeze, start, rows, vision):
    engine = start(learner={"zero_stage": stage, "lr": 1e-2}, model={"freeze": freeze})
    with engine.learning() as learner:
        before = {name: weight.clone() for name, weight in learner.policy.named_weights(torch.float32)}
        learner.network("policy").update(rows())
        after = dict(learner.policy.named_weights(torch.float32))
        moved = {name for name in before if not torch.equal(before[name], after[name])}
    part_of = vision.folder.family.part_of
    assert {part_of(name) for name in moved} == {"vision", "projector", "language"} - set(freeze)
    assert all(name in moved for name in before if part_of(name) not in freeze)


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=FULL)])
def test_a_tower_that_no_row_reaches_stays_and_is_saved_as_it_was(stage, start, bench, tmp_path):
    """Gemma 4's, for sound, with its bounds."""
    setting = bench("gemma4")
    engine = start(bench=setting, learner={"zero_stage": stage, "lr": 1e-2})
    with engine.learning() as learner:
        policy, failures = learner.policy, Failures()
        trained = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
        learner.network("policy").update(rows_of(case_of(setting))())
        save_model(policy, setting.folder, tmp_path, failures)
    assert failures.first is None
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (setting.folder.path, tmp_path))
    unused = {name for name in before if not setting.folder.family.uses(name)}
    assert before.keys() == after.keys() and len(unused) > 50 and any(name.endswith("input_max") for name in unused)
    assert not trained & unused
    assert all(before[name].numpy().tobytes() == after[name].numpy().tobytes() for name in unused)
    assert not any(torch.equal(before[name], after[name]) for name in trained & before.keys())
    assert json.loads((tmp_path / "config.json").read_text())["audio_config"]["model_type"] == "gemma4_audio"


def test_a_step_without_rows_changes_nothing(exposed):
    version = exposed.weight_version
    result = exposed.network("policy").update([])
    assert exposed.weight_version == version
    assert result.metrics == {"lr": STILL} and result.logprobs == []


def told(result: Any) -> tuple[Any, ...]:
    return result.metrics, np.concatenate(result.logprobs).tobytes()


class Vertical(Algorithm):
    """A loss of 0 whose gradient is not finite."""

    aggregation = Aggregation("token-mean")

    def credit(self, batch: Any) -> Any:
        raise NotImplementedError

    def loss(self, tokens: Any) -> TokenLoss:
        return TokenLoss((tokens.logprobs_T - tokens.logprobs_T.detach()).abs().sqrt())


def test_a_sum_of_many_gradients_in_bfloat16_is_told_of_once(start, rows, monkeypatch):
    monkeypatch.setattr(learner_settings, "LOSSY_SUM", 2)
    settings = {"learner": {"zero_stage": 1, "tokens_per_microbatch": 70}, "model": {"dtype": "bfloat16"}}
    with start(**settings).learning() as learner:
        first, second = learner.network("policy").update(rows()), learner.network("policy").update(rows())
    number = int(first.metrics["perf/microbatches"])
    assert first.notice.startswith(f"DeepSpeed sums the gradients of {number} micro-batches in bfloat16 at ZeRO 1")
    assert number >= 2 and not second.notice


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=SLOW)])
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_not_finite_takes_no_step_and_leaves_no_trace(stage, dtype, start, rows, monkeypatch):
    settings = {"learner": {"zero_stage": stage, "tokens_per_microbatch": 70}, "model": {"dtype": dtype}}
    with start(**settings).learning() as learner:
        expected = [told(learner.network("policy").update(rows())) for _ in range(2)]
    with start(**settings).learning() as learner:
        broken = rows()
        broken[2].advantages[:] = np.inf
        first = learner.network("policy").update(broken)
        assert first.fault.startswith("the loss is not finite: prompt ids ") and "two" in first.fault
        found = [told(learner.network("policy").update(rows()))]
        with monkeypatch.context() as patch:
            patch.setattr(learner.trained, "_algorithm", Vertical({}))
            second = learner.network("policy").update(rows())
        assert second.fault == "the gradient's norm is " + ("nan" if stage == 0 else "inf")
        for result in (first, second):
            assert result.metrics["lr"] and all(np.isfinite(value) for value in result.metrics.values())
        assert learner.weight_version == 1
        assert [*found, told(learner.network("policy").update(rows()))] == expected  # as if there had been neither
        assert learner.weight_version == 2


def count_images(module: torch.nn.Module) -> list[int]:
    """How many images each later pass through the module's vision tower has."""
    passes: list[int] = []

    def note(_: Any, args: Any, options: Any) -> None:
        passes.append(len(options["grid_thw"]))

    module.model.base_model.visual.register_forward_pre_hook(note, with_kwargs=True)
    return passes


@pytest.mark.parametrize("stage", [0, 3])
def test_each_image_goes_through_a_trained_tower_once_per_row(stage, start, rows):
    with start(learner={"zero_stage": stage}).learning() as learner:
        passes = count_images(learner.policy)
        learner.network("policy").update(rows())
        assert passes == [3]  # prompts of no, one and two images, with 3, 2 and 2 completions


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.full)])
def test_a_frozen_tower_sees_each_image_once_a_step(stage, start, rows, case, monkeypatch):
    settings = {"algorithm": {"kl": {"coef": 0.1}}, "model": {"freeze": ["vision", "projector"]}}
    settings["learner"] = {"zero_stage": stage, "lr": STILL, "tokens_per_microbatch": 70}

    def step(engine: Any) -> tuple[list[int], list[Any]]:
        with engine.learning() as learner:
            passes = count_images(learner.policy)
            reference = count_images(learner.network("reference").policy)
            known = learner.network("policy").score(case.samples), learner.network("reference").score(case.samples)
            weighted = [replace(row, constants={"kl_coef": 0.1}) for row in rows()]
            reference_of = {id(sample): values for sample, values in zip(case.samples, known[1], strict=True)}
            weighted = [
                replace(row, columns={**row.columns, "reference_logprobs": reference_of[id(row.sample)]})
                for row in weighted
            ]
            results = [learner.network("policy").update(weighted) for _ in range(2)]
            found = [*known[0], *known[1], *(values for result in results for values in result.logprobs)]
        return passes + reference, [*found, *(result.metrics["policy/grad_norm"] for result in results)]

    engine = start(**settings)
    passes, found = step(engine)
    assert sum(passes) == 3 + 1  # and the blank one
    again, _ = step(engine)
    assert sum(again) == 3 + 1  # features are kept for one step
    monkeypatch.setitem(IMAGE_FEATURE_BYTES, "cpu", 0)
    passes, expected = step(start(**settings))
    assert sum(passes) > 12
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("room", [2**30, 12_000, 0])
def test_two_ranks_keep_features_of_different_images_in_step(room, vision, start_ranks, rows, row_gradients, case):
    """Room for all, for those of one rank, and for none."""
    learner = {"max_grad_norm": 1e9, "lr": STILL, "deepspeed": EXPOSED, "zero_stage": 3, "tokens_per_microbatch": 60}
    model = {"path": vision.folder.path, "dtype": "float32", "freeze": ["vision", "projector"]}
    cluster = {"name": "ray", "ranks": 2}
    config = vision.config(learner=learner, model=model, cluster=cluster)
    grpo = GRPO(GRPO.Config())
    group = start_ranks(EngineSpec(config, vision.folder, vision.media, grpo, 2, with_sampler=False))
    try:
        on_each(group, _limit_features, room)
        with group.learning() as learner:
            before = learner.network("policy").score(case.samples)
            result = learner.network("policy").update(rows())
            found = gradients(group)
    finally:
        group.close()
    weights = expected_weights("token-mean", case.tokens)
    expected = {name: value for name, value in weighted(row_gradients, weights).items() if name in found}
    assert found and not any(".visual." in name for name in found)
    assert norm({name: found[name] - expected[name] for name in expected}) < 1e-5 * norm(expected)
    kept = [values for values, mask in zip(before, case.masks, strict=True) if mask.any()]
    np.testing.assert_allclose(np.concatenate(result.logprobs), np.concatenate(kept), atol=1e-5)


def _limit_features(_: Any, room: int) -> None:
    from mmrl.engine import device

    device.IMAGE_FEATURE_BYTES["cpu"] = room


class EntropyBonus(Algorithm):
    """Nothing but the entropy, to be raised."""

    aggregation = Aggregation("token-mean")

    def needs(self) -> Needs:
        return Needs(entropy_gradient=True)

    def credit(self, batch: Any) -> Any:
        raise NotImplementedError

    def loss(self, tokens: Any) -> TokenLoss:
        return TokenLoss(-tokens.entropy_T)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_gradient_of_an_entropy_bonus_is_plain_autograds(stage, start, rows, case, vision, plain):
    reference = plain(vision.folder.path)
    entropy_sum = torch.zeros(())
    for sample, mask in zip(case.samples, case.masks, strict=True):
        images = [vision.media.load(ref) for ref in sample.prompt.images]
        table = reference.distribution(sample.prompt.text, images, sample.token_ids.tolist())[:-1]
        allowed = table[:, torch.isfinite(table[0])]
        entropy_sum = entropy_sum - (allowed.exp() * allowed).sum(-1)[torch.from_numpy(mask)].sum()
    mean = entropy_sum / sum(case.tokens)
    (-mean).backward()
    expected = {name: p.grad for name, p in reference.model.named_parameters()}
    settings = {"zero_stage": stage, "max_grad_norm": 1e9, "lr": STILL, "deepspeed": EXPOSED}
    settings["tokens_per_microbatch"] = 70
    with start(algorithm=EntropyBonus({}), learner=settings).learning() as learner:
        result = learner.network("policy").update(rows())
        found = first_moment(learner)
    assert norm({name: found[name] - expected[name] for name in expected}) < 1e-5 * norm(expected)
    assert result.metrics["policy/entropy"] == pytest.approx(mean.item(), rel=1e-5)
    assert result.metrics["loss/total"] == pytest.approx(-mean.item(), rel=1e-5)


def test_a_setting_that_deepspeed_does_not_take_is_told(start):
    settings = {"zero_optimization": {"overlap_comm": "maybe"}}
    with pytest.raises(ConfigError, match=r"DeepSpeed does not take overlap_comm: .*'maybe'"):
        start(learner={"zero_stage": 2, "deepspeed": settings})


def test_the_learning_rate_follows_its_schedule(start, rows):
    settings = {"lr": 1e-4, "warmup_steps": 2, "schedule": "linear"}
    with start(learner=settings, trainer={"steps": 4}).learning() as learner:
        rates = [learner.network("policy").update(rows()[:1]).metrics["lr"] for _ in range(4)]
        assert learner.weight_version == 4
    np.testing.assert_allclose(rates, [0.5e-4, 1e-4, 1e-4, 0.5e-4])


def test_the_reference_stays_the_initial_policy(start, rows, vision, plain, case):
    with start(algorithm={"kl": {"coef": 0.1}}, learner={"lr": 1e-2}).learning() as learner:
        before = learner.network("reference").score([row.sample for row in rows()])
        known = zip(rows(), before, strict=True)
        learner.network("policy").update(
            [
                replace(row, columns={**row.columns, "reference_logprobs": v}, constants={"kl_coef": 0.1})
                for row, v in known
            ]
        )
        reference, current = (
            learner.network("reference").score(case.samples),
            learner.network("policy").score(case.samples),
        )
    initial = plain(vision.folder.path)
    single = [initial.logprobs(sample, vision.media).detach() for sample in case.samples]
    np.testing.assert_allclose(np.concatenate(reference), torch.cat(single), atol=1e-5)
    assert np.abs(np.concatenate(current) - np.concatenate(reference)).max() > 1e-2


def test_logprobs_one_by_one_are_a_forward_each(exposed, case, monkeypatch):
    rows_of_a_forward = []
    collate = Collator.__call__

    def count(self: Collator, part: Any, *known: Any) -> Any:
        rows_of_a_forward.append(sum(sample is not exposed.trained._batches._idle for sample in part))
        return collate(self, part, *known)

    monkeypatch.setattr(Collator, "__call__", count)
    single = exposed.network("policy").score(case.samples, way="single")
    assert rows_of_a_forward == [1] * len(case.samples)
    packed = exposed.network("policy").score(case.samples)
    np.testing.assert_allclose(np.concatenate(single), np.concatenate(packed), atol=1e-5)
    assert [len(values) for values in packed] == list(LENGTHS)


def gradients(group: Any) -> dict[str, torch.Tensor]:
    """The ranks' gradient, gathered by all of them together."""
    first: dict[str, torch.Tensor] = on_each(group, moment_of)[0]
    return first


def moment_of(worker: Any) -> dict[str, torch.Tensor]:
    return first_moment(worker._owner)


@pytest.fixture(
    params=[
        pytest.param(("qwen2_5_vl", False), marks=SLOW, id="tied"),
        pytest.param(("qwen2_5_vl", True), id="untied"),
        pytest.param(("internvl", True), marks=SLOW, id="tiles"),
    ]
)
def many_chunks(request, bench, start_ranks, plain) -> Iterator[Any]:
    """Two ranks at ZeRO 3 that compute four tokens' logits at a time, and drop every gathered weight after its use."""
    setting = bench(*request.param)
    partition = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1000}
    learner = {"max_grad_norm": 1e9, "lr": STILL, "zero_stage": 3, "tokens_per_microbatch": 70}
    learner["deepspeed"] = EXPOSED | {"zero_optimization": partition}
    config = setting.config(learner=learner, cluster={"name": "ray", "ranks": 2})
    grpo = GRPO(GRPO.Config())
    group = start_ranks(EngineSpec(config, setting.folder, setting.media, grpo, 2, with_sampler=False))
    reference = plain(setting.folder.path)
    assert reference.model.get_output_embeddings().weight.numel() > partition["reduce_bucket_size"]
    yield SimpleNamespace(group=group, reference=reference, setting=setting)
    group.close()


def _limit_chunks(worker: Any) -> None:
    worker._owner.policy.head.chunk_tokens = 4


@pytest.mark.full
def test_ranks_with_different_numbers_of_head_chunks_find_the_gradient_of_one(many_chunks):
    """Each call of a module at ZeRO 3 is a collective: ranks with 3 and 2 chunks once waited for each other forever.

    Then one rank has text alone, and the other images.
    """
    case, group = case_of(many_chunks.setting), many_chunks.group
    single, gradients_of_rows = row_losses(case, many_chunks.setting, many_chunks.reference)
    weights, text = expected_weights("token-mean", case.tokens), {"text", "one"}
    with group.learning() as learner:
        on_each(group, _limit_chunks)
        np.testing.assert_allclose(
            np.concatenate(learner.network("policy").score(case.samples)), np.concatenate(single), atol=1e-5
        )
        for prompts in ({*text, "two"}, text):
            rows = [row for row in rows_of(case)() if row.sample.prompt.id in prompts]
            result, found = learner.network("policy").update(rows), gradients(group)
            present = [w * (s.prompt.id in prompts) for w, s in zip(weights, case.samples, strict=True)]
            expected = weighted(gradients_of_rows, present)
            assert found.keys() == expected.keys()
            assert norm({name: found[name] - expected[name] for name in expected}) < 1e-5 * norm(expected)
            assert result.metrics["policy/grad_norm"] == pytest.approx(norm(expected), rel=1e-5)


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3])
def two_ranks(request, vision, start_ranks) -> Iterator[Any]:
    """Two ranks; at ZeRO 3 they compute four tokens' logits at a time, each rank another number of times."""
    settings = EXPOSED | {"zero_optimization": SMALL}
    learner = {"max_grad_norm": 1e9, "lr": STILL, "deepspeed": settings, "zero_stage": request.param}
    learner["tokens_per_microbatch"] = 60
    # In the reward, the KL is in no gradient; the reference is there all the same.
    algorithm = {"name": "grpo", "kl": {"coef": 0.1, "where": "reward"}}
    cluster = {"name": "ray", "ranks": 2}
    config = vision.config(learner=learner, cluster=cluster, algorithm=algorithm)
    grpo = registry.create("algorithm", config.algorithm)
    group = start_ranks(EngineSpec(config, vision.folder, vision.media, grpo, 2, with_sampler=False))
    if request.param == 3:
        with group.learning():
            on_each(group, _limit_chunks)
    yield group
    group.close()


MODES = get_args(AggregationMode)
"""The driver weighs rows by them, and ranks know nothing of it: one has every choice of prompts, the others all."""
SHARES = [({"text", "one", "two"}, mode) for mode in MODES] + [({"text"}, MODES[0]), ({"text", "one"}, MODES[0])]


@pytest.mark.full
@pytest.mark.parametrize(("prompts", "mode"), SHARES)
def test_two_ranks_find_the_gradient_of_one(two_ranks, mode, prompts, rows, row_gradients, case):
    constant = 32.0 if mode.endswith("norm") else None
    part = [row for row in rows(mode, constant) if row.sample.prompt.id in prompts]
    present = [sample.prompt.id in prompts for sample in case.samples]
    weights = [w * p for w, p in zip(expected_weights(mode, case.tokens), present, strict=True)]
    with two_ranks.learning() as learner:
        result = learner.network("policy").update(part)
        found = gradients(two_ranks)
        np.testing.assert_allclose(
            np.concatenate(result.logprobs),
            np.concatenate(learner.network("policy").score([row.sample for row in part])),
            atol=1e-6,
        )
    expected = weighted(row_gradients, weights)
    assert norm({name: found[name] - expected[name] for name in expected}) < 1e-5 * norm(expected)
    assert result.metrics["policy/grad_norm"] == pytest.approx(norm(expected), rel=1e-5)
    terms = zip(weights, ADVANTAGES, case.tokens, strict=True)
    assert result.metrics["loss/policy"] == pytest.approx(-sum(w * a * n for w, a, n in terms), rel=1e-5)


@pytest.mark.full
def test_ranks_share_out_whole_groups(two_ranks, case):
    with two_ranks.learning() as learner:
        shares = learner.share(case.samples)
    prompts = [{case.samples[index].prompt.id for index in share} for share in shares]
    assert sorted(index for share in shares for index in share) == list(range(7))
    assert not prompts[0] & prompts[1] and all(prompts)


@pytest.mark.full
def test_two_ranks_score_as_one_with_a_reference_that_is_sharded_at_zero_3(two_ranks, case, vision, plain):
    with two_ranks.learning() as learner:
        found = [*learner.network("policy").score(case.samples), *learner.network("reference").score(case.samples)]
        wide = learner.network("policy").score(case.samples, way="wide")
        held = on_each(two_ranks, reference_bytes)
    alone = plain(vision.folder.path)
    single = [alone.logprobs(sample, vision.media).detach().numpy() for sample in case.samples]
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(single * 2), atol=1e-5)
    np.testing.assert_allclose(np.concatenate(wide), np.concatenate(single), atol=1e-5)
    whole = sum(4 * parameter.numel() for parameter in alone.model.parameters())
    (stage,) = {stage for stage, _ in held}
    expected = whole / 2 if stage == 3 else whole
    assert [size for _, size in held] == pytest.approx([expected] * 2, rel=1e-3)


def reference_bytes(worker: Any) -> tuple[int, int]:
    """The ZeRO stage, and what a rank's reference has of the weights."""
    own = [getattr(p, "ds_tensor", p) for p in worker._owner.network("reference").policy.parameters()]
    return worker._owner.trained._config.zero_stage, sum(tensor.nbytes for tensor in own)


@pytest.mark.parametrize("stage", STAGES[:3])
def test_nothing_keeps_a_learner_that_was_released(stage, start, rows):
    engine = start(learner={"zero_stage": stage})
    with engine.learning() as learner:
        learner.network("policy").update(rows())
        kept = weakref.ref(learner.policy)
        learner.release()
    del engine, learner
    gc.collect()
    assert kept() is None


def test_a_cpu_compiles_no_collective_of_deepspeeds(start):
    from deepspeed.comm import comm

    start()
    assert comm.cdb.shm_comm_op is None  # a C++ compiler would be needed, for a minute


def test_a_rank_gives_freed_memory_back_with_the_device(start, monkeypatch):
    engine, given_back = start(), list[FreedMemory]()
    monkeypatch.setattr(FreedMemory, "give_back", lambda freed: given_back.append(freed))
    with engine.learning():
        assert not given_back
    assert given_back == [engine._freed["learning"]]
