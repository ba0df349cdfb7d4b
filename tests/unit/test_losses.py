"""The losses against what they say in words (CASES 22)."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.support import random_model, small_config
from v41lib.training.losses import balance_experts, index_loss, next_token_loss


def test_next_token_loss_is_a_weighted_mean_in_nats() -> None:
    logits = torch.zeros(1, 3, 4)
    logits[0, 1, 2] = math.log(5)  # 5 of 8
    targets, weight = torch.tensor([[0, 2, 1]]), torch.tensor([[1.0, 4.0, 0.0]])
    expected = (math.log(4) + 4 * math.log(8 / 5)) / 5
    assert float(next_token_loss(logits, targets, weight)) == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match=r"weight is zero everywhere"):
        next_token_loss(logits, targets, torch.zeros(1, 3))


def test_index_loss_is_the_divergence_from_the_compressed_part_of_attention() -> None:
    attention = torch.tensor([[[[0.1, 0.2, 0.0], [0.3, 0.0, 0.0]]]])  # [1,1,2 heads,3]; the rest went elsewhere
    scores = torch.tensor([[[0.5, -1.0, 7.0]]])
    absent = torch.tensor([[[False, False, True]]])
    target, guess = torch.tensor([0.4, 0.2]) / 0.6, torch.tensor([0.5, -1.0]).softmax(0)
    expected = float((target * (target / guess).log()).sum())
    assert float(index_loss(scores, attention, absent)) == pytest.approx(expected, abs=1e-6)
    perfect = torch.cat((target.log(), torch.tensor([9.0]))).view(1, 1, 3)
    assert float(index_loss(perfect, attention, absent)) == pytest.approx(0, abs=1e-6)


def test_a_query_without_a_key_has_no_loss() -> None:
    attention = torch.zeros(1, 2, 1, 2)
    attention[0, 1, 0] = torch.tensor([0.2, 0.6])
    scores = torch.zeros(1, 2, 2, requires_grad=True)
    absent = torch.tensor([[[True, True], [False, False]]])
    loss = index_loss(scores, attention, absent)
    alone = float(index_loss(scores[:, 1:], attention[:, 1:], absent[:, 1:]).detach())
    assert float(loss.detach()) == pytest.approx(alone / 2) and alone > 0  # the mean is over both queries
    loss.backward()
    assert scores.grad is not None and torch.isfinite(scores.grad).all() and not scores.grad[0, 0].any()
    nobody = index_loss(scores[:, :1], attention[:, :1], absent[:, :1])
    assert float(nobody.detach()) == 0
    nobody.backward()
    assert torch.isfinite(scores.grad).all()


def test_attention_that_reads_nothing_far_is_no_target() -> None:
    loss = index_loss(torch.randn(1, 1, 2), torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 2, dtype=torch.bool))
    assert float(loss) == 0


def test_the_target_gets_no_gradient() -> None:
    attention = torch.rand(1, 1, 1, 3, requires_grad=True)
    scores = torch.randn(1, 1, 3, requires_grad=True)
    index_loss(scores, attention, torch.zeros(1, 1, 3, dtype=torch.bool)).backward()
    assert attention.grad is None and scores.grad is not None


def test_biases_move_towards_the_underloaded() -> None:
    model = random_model(small_config())
    before = model.blocks[3].ffn.gate.bias.clone()
    other = model.blocks[2].ffn.gate.bias.clone()
    balance_experts(model, {3: torch.tensor([10, 2, 4, 4])}, 0.001)
    moved = model.blocks[3].ffn.gate.bias - before
    torch.testing.assert_close(moved, torch.tensor([-0.001, 0.001, 0.001, 0.001]))
    balance_experts(model, {3: torch.tensor([5, 5, 5, 5])}, 0.001)
    torch.testing.assert_close(model.blocks[3].ffn.gate.bias - before, moved)
    assert torch.equal(model.blocks[2].ffn.gate.bias, other)
