"""Gated delta-rule layers over packed rows, against a recurrence token by token in float64 and against leaks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.engine.network.layout import PackedLayout
from mmrl.engine.network.linear_attention import PackedDeltaNet, packed_delta_rule
from mmrl.ops.packing import Span, Unit

WIDTH, TAPS = 24, 4
ROWS = {
    "one": [Unit((0,), 5, (3,))],
    "groups": [Unit((0, 1, 2), 7, (4, 0, 9)), Unit((3,), 2, (6,)), Unit((4, 5), 1, (1, 12))],
    "a prompt shorter than the convolution": [Unit((0, 1), 1, (2, 5)), Unit((2, 3), 2, (1, 1))],
    "long": [Unit((0, 1), 150, (90, 20)), Unit((2, 3, 4), 33, (200, 40, 41))],  # past blocks of short chunks
}


def spans_of(units: list[Unit]) -> list[Span]:
    spans, start = [], 0
    for unit in units:
        spans += unit.spans(start)
        start += unit.tokens
    return spans


@pytest.fixture(scope="module")
def layer() -> Any:
    """transformers' layer, with moderate decays."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        hidden_size=WIDTH,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        linear_conv_kernel_dim=TAPS,
    )
    made = Qwen3_5GatedDeltaNet(config, 0)
    with torch.no_grad():
        made.A_log.uniform_(-3, 0)
    return made


def recurrence(q: Any, k: Any, v: Any, decay: Any, beta: Any, state: Any) -> tuple[Any, Any]:
    """(S, V, D) read from a state of (V, D, D), and the last state; all in float64, one token after the other."""

    def unit(x: Any) -> Any:
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    q, k = unit(q.double()) / q.shape[-1] ** 0.5, unit(k.double())
    out = []
    for t in range(len(q)):
        state = decay[t].double().exp()[:, None, None] * state
        missing = v[t].double() - torch.einsum("vd,vde->ve", k[t], state)
        state = state + torch.einsum("vd,ve->vde", k[t], beta[t].double()[:, None] * missing)
        out.append(torch.einsum("vd,vde->ve", q[t], state))
    return torch.stack(out) if out else v.double(), state


@pytest.mark.parametrize("row", ROWS)
def test_states_are_those_of_a_recurrence_that_begins_anew_for_each_prompt(row):
    spans = spans_of(ROWS[row])
    tokens = sum(span.length for span in spans)
    torch.manual_seed(1)
    shapes = [(tokens, 2, 8), (tokens, 2, 8), (tokens, 2, 6), (tokens, 2), (tokens, 2)]
    inputs = [torch.randn(shape) for shape in shapes]
    inputs[3], inputs[4] = -inputs[3].abs() * 0.2, inputs[4].sigmoid()
    inputs = [x.requires_grad_() for x in inputs]
    found = packed_delta_rule(*inputs, PackedLayout(spans, "cpu", torch.float32))
    weights = torch.randn_like(found)
    got = torch.autograd.grad((found * weights).sum(), inputs)

    ends: dict[int, Any] = {}
    out = []
    for span in spans:
        begin = ends[span.prefix_start] if span.prefix_length else torch.zeros(2, 8, 6, dtype=torch.float64)
        values, end = recurrence(*(x[span.start : span.start + span.length] for x in inputs), begin)
        ends.setdefault(span.start, end)
        out.append(values)
    expected = torch.cat(out)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    np.testing.assert_allclose(found.detach(), expected.detach(), atol=1e-5)
    for one, other in zip(got, wanted, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


@pytest.mark.parametrize("row", ROWS)
def test_a_packed_layer_is_transformers_layer_on_each_sample_alone(row, layer):
    units = ROWS[row]
    spans = spans_of(units)
    torch.manual_seed(2)
    row_1SW = torch.randn(1, sum(unit.tokens for unit in units), WIDTH, requires_grad=True)
    packed = PackedDeltaNet(layer)
    found = packed(row_1SW, layout=PackedLayout(spans, "cpu", torch.float32))[0]
    start = 0
    for unit in units:
        first = start + unit.prompt_tokens
        prompt = row_1SW[:, start:first]
        for length in unit.completions:
            completion = row_1SW[:, first : first + length]
            alone = layer(torch.cat([prompt, completion], 1))[0]
            np.testing.assert_allclose(found[start : start + unit.prompt_tokens].detach(),
                                       alone[: unit.prompt_tokens].detach(), atol=1e-5)  # fmt: skip
            np.testing.assert_allclose(found[first : first + length].detach(),
                                       alone[unit.prompt_tokens :].detach(), atol=1e-5)  # fmt: skip
            first += length
        start += unit.tokens
    assert packed.state_dict().keys() == layer.state_dict().keys()


def test_nothing_leaks_from_a_sample_to_the_next_one_as_it_does_in_transformers_own_packed_call(layer):
    torch.manual_seed(3)
    first, second = torch.randn(1, 9, WIDTH), torch.randn(1, 6, WIDTH)
    alone = layer(second)
    ends = torch.tensor([0, 9, 15], dtype=torch.int32)
    row = torch.cat([first, second], 1)
    leaking = layer(row, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=9, max_length_k=9)[:, 9:]
    layout = PackedLayout([Span(0, 9), Span(9, 6)], "cpu", torch.float32)
    ours = PackedDeltaNet(layer)(row, layout=layout)[:, 9:]
    assert (leaking - alone).abs().max() > 1e-2 * alone.abs().max()
    np.testing.assert_allclose(ours.detach(), alone.detach(), atol=1e-6)


@pytest.mark.full
@pytest.mark.proves("vllm", family="qwen3_5", precision="bfloat16")
def test_in_bfloat16_vllm_and_the_learner_agree_as_far_as_it_goes_after_an_update(models, warm_mmrl, picture, tmp_path):
    (tmp_path / "0.png").write_bytes(picture(64, 64).data)
    (tmp_path / "reward.py").write_text(
        "def spread(rollouts):\n    return [float(r.token_ids.sum()) for r in rollouts]\n"
    )
    problems = [("<image>What digit is this?", ["0.png"]), ("what is 3+4?", []), ("and 5+6" * 40, [])]
    rows = [{"problem": text, "images": images, "answer": "7"} for text, images in problems]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"path": str(models("qwen3_5", True)), "dtype": "bfloat16"},
        "data": {"train": {"name": "table", "path": str(tmp_path / "rows.jsonl")}, "max_prompt_tokens": 400},
        "rewards": [{"name": f"{tmp_path / 'reward.py'}:spread"}],
        "algorithm": {"name": "grpo"},
        "sampler": {"group_size": 4, "max_new_tokens": 12},
        "learner": {"lr": 1e-3},
        "trainer": {"steps": 2, "prompts_per_step": 3, "run_dir": str(tmp_path / "run")},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    done = warm_mmrl("train", tmp_path / "run.yaml")
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    assert len(steps) == 2
    assert all(step["mismatch/logprob_abs_mean"] < 0.003 for step in steps)
