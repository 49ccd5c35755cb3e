"""aux_loss of probabilities that the caller has: those of a router of its own."""

import pytest
import torch

from octavo import moe
from octavo.errors import UnsupportedConfig
from tests.support.steps import compiled

T, E, K = 24, 6, 2


def case():
    torch.manual_seed(0)
    logits = torch.randn(T, E, requires_grad=True)
    return logits, moe.route(logits, K)[1].detach()


def loss_and_gradient(function, tensor):
    loss = function(tensor)
    return loss, *torch.autograd.grad(loss, tensor)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_probabilities_of_the_logits_give_the_loss_of_the_logits(score):
    logits, index = case()
    probs = logits.softmax(-1) if score == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    want = loss_and_gradient(lambda t: moe.aux_loss(t, index, score=score), logits)
    found = moe.aux_loss(probs, index, score="given")
    torch.testing.assert_close((found, *torch.autograd.grad(found, logits)), want)


def test_against_the_formula_with_padding():
    _, index = case()
    probs, tokens = torch.rand(T, E).requires_grad_(), T - 5
    load = moe.counts(index, E, tokens)
    want = (load / (tokens * K) * probs[:tokens].mean(0)).sum() * E
    padded = probs.detach().clone()
    padded[tokens:] = float("nan")
    found = moe.aux_loss(padded.requires_grad_(), index, score="given", tokens=torch.tensor(tokens))
    torch.testing.assert_close(found, want)
    (gradient,) = torch.autograd.grad(found, padded)
    assert not gradient[tokens:].any()
    torch.testing.assert_close(gradient[0], load / (tokens * K) * E / tokens)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_graph_has_the_bits_of_eager_mode():
    logits, index = case()
    probs = logits.detach().softmax(-1).requires_grad_()
    want = loss_and_gradient(lambda t: moe.aux_loss(t, index, score="given"), probs)
    found = loss_and_gradient(compiled(lambda t: moe.aux_loss(t, index, score="given")), probs)
    assert all(map(torch.equal, found, want))


def test_a_router_has_no_such_score():
    logits, _ = case()
    with pytest.raises(UnsupportedConfig, match="score"):
        moe.route(logits, K, score="given")
