"""Log-probs under the sampler's distribution, with entropy, in chunks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mmrl.engine.device import LOGITS_CHUNK_BYTES
from mmrl.ops import logprobs as module
from mmrl.ops.logprobs import chunked_logprobs, token_logprobs

NOTHING_BANNED = torch.zeros(7, dtype=torch.bool)


def test_by_hand_with_temperature_and_a_banned_id():
    logits = torch.tensor([[math.log(1.0), math.log(4.0), math.log(9.0), 100.0]])
    banned = torch.tensor([False, False, False, True])
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]), banned, 2.0)  # square roots: 1, 2, 3
    assert logprobs.item() == pytest.approx(math.log(2 / 6))
    assert entropy.item() == pytest.approx(-sum(p * math.log(p) for p in (1 / 6, 2 / 6, 3 / 6)))


def test_gradients_are_finite_where_ids_are_banned_and_zero_for_them():
    logits = torch.randn(5, 7, requires_grad=True)
    banned = NOTHING_BANNED.clone()
    banned[[2, 6]] = True
    logprobs, _ = token_logprobs(logits, torch.tensor([0, 1, 3, 4, 5]), banned, 0.7)
    logprobs.sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[:, banned] == 0).all() and (logits.grad[:, ~banned] != 0).all()


def test_half_precision_logits_are_scored_in_float32():
    logits = torch.randn(4, 7).bfloat16()
    logprobs, entropy = token_logprobs(logits, torch.arange(4), NOTHING_BANNED, 1.0)
    expected = logits.double().log_softmax(-1)
    assert logprobs.dtype == entropy.dtype == torch.float32
    np.testing.assert_allclose(logprobs, expected.diagonal(), rtol=1e-6)


def test_a_certain_distribution_has_no_entropy():
    logits = torch.tensor([[0.0, 1e4, 0.0, 0.0, 0.0, 0.0, 0.0]])
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]), NOTHING_BANNED, 1.0)
    assert logprobs.item() == 0 and entropy.item() == 0


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 100])
def test_chunks_change_neither_values_nor_gradients(chunk_tokens):
    head = torch.nn.Linear(6, 7, bias=False).double()
    hidden = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 7, (10,))
    coefficients = torch.randn(10, dtype=torch.float64)
    logprobs, entropy = chunked_logprobs(head, hidden, targets, NOTHING_BANNED, 0.8, chunk_tokens=chunk_tokens)
    found = torch.autograd.grad((logprobs * coefficients).sum(), [hidden, head.weight])
    expected = (head(hidden) / 0.8).log_softmax(-1)
    torch.testing.assert_close(logprobs, expected.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=head(hidden) / 0.8).entropy())
    picked = (expected.gather(1, targets[:, None])[:, 0] * coefficients).sum()
    torch.testing.assert_close(found, torch.autograd.grad(picked, [hidden, head.weight]))


def test_without_entropies_the_logprobs_and_their_gradient_are_the_same():
    logits, targets = torch.randn(5, 7, requires_grad=True), torch.arange(5)
    found = []
    for entropy in (True, False):
        logprobs, entropies = token_logprobs(logits, targets, NOTHING_BANNED, 0.7, entropy=entropy)
        assert len(entropies) == 5 * entropy
        found.append((logprobs, *torch.autograd.grad(logprobs.square().sum(), logits)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_entropies_have_a_gradient_only_if_asked():
    logits = torch.randn(5, 7, requires_grad=True)
    _, entropy = token_logprobs(logits, torch.arange(5), NOTHING_BANNED, 1.0)
    assert not entropy.requires_grad
    _, entropy = token_logprobs(logits, torch.arange(5), NOTHING_BANNED, 1.0, entropy_gradient=True)
    assert entropy.requires_grad
    with torch.no_grad():
        _, entropy = token_logprobs(logits, torch.arange(5), NOTHING_BANNED, 1.0, entropy_gradient=True)
    assert not entropy.requires_grad


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_entropys_gradient_is_that_over_the_ids_that_are_not_banned(temperature):
    banned = NOTHING_BANNED.clone()
    banned[[2, 6]] = True
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    coefficients = torch.tensor([-3.0, 0.5, 2.0, -0.1, 7.0], dtype=torch.float64)  # above 1: nothing may overflow
    _, entropy = token_logprobs(logits, torch.tensor([0, 1, 3, 4, 5]), banned, temperature, entropy_gradient=True)
    (found,) = torch.autograd.grad((entropy * coefficients).sum(), logits)
    probabilities = (logits[:, ~banned] / temperature).softmax(-1)
    expected = -(probabilities * probabilities.log()).sum(-1)
    torch.testing.assert_close(entropy, expected)
    torch.testing.assert_close(found, torch.autograd.grad((expected * coefficients).sum(), logits)[0])
    assert (found[:, banned] == 0).all()


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 100])
def test_chunks_do_not_change_the_gradient_of_entropies_and_logprobs_together(chunk_tokens):
    head = torch.nn.Linear(6, 7, bias=False).double()
    hidden = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    targets, banned = torch.randint(0, 6, (10,)), NOTHING_BANNED.clone()
    banned[6] = True
    a, b = torch.randn(2, 10, dtype=torch.float64)
    logprobs, entropy = chunked_logprobs(
        head, hidden, targets, banned, 0.8, chunk_tokens=chunk_tokens, entropy_gradient=True
    )
    found = torch.autograd.grad((a * logprobs + b * entropy).sum(), [hidden, head.weight])
    whole = torch.distributions.Categorical(logits=head(hidden)[:, :6] / 0.8)
    expected = torch.autograd.grad((a * whole.log_prob(targets) + b * whole.entropy()).sum(), [hidden, head.weight])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("grad", [True, False])
def test_never_more_than_a_chunk_of_logits_at_once(grad):
    sizes = []

    def head(hidden):
        sizes.append(len(hidden))
        return hidden @ torch.ones(6, 7)

    hidden = torch.randn(10, 6, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        logprobs, _ = chunked_logprobs(head, hidden, torch.zeros(10).long(), NOTHING_BANNED, 1.0, chunk_tokens=4)
    assert sizes == [4, 4, 2]
    if grad:
        logprobs.sum().backward()
        assert sorted(sizes) == [2, 2, 4, 4, 4, 4]  # once more in the backward pass, not kept


@pytest.mark.parametrize("block_tokens", [1, 3, 4, 5])
def test_blocks_of_a_chunk_change_neither_values_nor_gradients(block_tokens, monkeypatch):
    logits, targets = torch.randn(10, 7, requires_grad=True), torch.randint(0, 7, (10,))

    def scored():
        logprobs, entropy = token_logprobs(logits, targets, NOTHING_BANNED, 0.8, entropy_gradient=True)
        return logprobs, entropy, torch.autograd.grad((logprobs * entropy.square()).sum(), logits)[0]

    whole = scored()
    monkeypatch.setitem(module.BLOCK_BYTES, "cpu", block_tokens * 7 * 4)
    assert len(list(module._blocks(logits))) == -(-10 // block_tokens)
    assert all(torch.equal(one, other) for one, other in zip(whole, scored(), strict=True))


def test_chunks_and_blocks_of_a_published_vocabulary_are_a_plain_softmax():
    vocabulary, width = 151_936, 8
    chunk_tokens = LOGITS_CHUNK_BYTES["cpu"] // (4 * vocabulary)
    rows = chunk_tokens + 7
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(width, vocabulary, bias=False)
    hidden = torch.randn(rows, width, generator=generator, requires_grad=True)
    targets = torch.randint(0, vocabulary - 300, (rows,), generator=generator)
    weights = torch.randn(rows, generator=generator)
    banned = torch.arange(vocabulary) >= vocabulary - 300
    blocks = list(module._blocks(torch.empty(chunk_tokens, vocabulary, device="cpu")))
    assert len(blocks) > 100 and blocks[-1].start < chunk_tokens  # of three tokens each
    logprobs, entropy = chunked_logprobs(head, hidden, targets, banned, 0.7, chunk_tokens=chunk_tokens)
    found = torch.autograd.grad((logprobs * weights).sum(), [hidden, head.weight])
    expected = [torch.zeros_like(hidden), torch.zeros_like(head.weight)]
    for part in torch.arange(rows).split(64):
        table = (head(hidden[part])[:, ~banned] / 0.7).log_softmax(-1)
        picked = table.gather(1, targets[part, None])[:, 0]
        torch.testing.assert_close(logprobs[part], picked, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropy[part], -(table.exp() * table).sum(-1), atol=1e-4, rtol=1e-5)
        gradients = torch.autograd.grad((picked * weights[part]).sum(), [hidden, head.weight])
        for whole, gradient in zip(expected, gradients, strict=True):
            whole += gradient
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-5
