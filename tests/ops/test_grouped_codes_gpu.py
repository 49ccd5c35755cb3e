"""A GroupedLinear on a GPU whose x and dy arrive as codes: the bits of the rows, also captured with changing sizes."""

import pytest
import torch

import octavo
from octavo.quant import GradientCodes
from tests.support.coded_gradients import Combine
from tests.support.experts import same_seed
from tests.support.linear_oracle import assert_same
from tests.support.recipe_traits import STATELESS
from tests.support.waiting import no_waiting

pytestmark = pytest.mark.gpu
stateless = pytest.mark.parametrize("recipe", STATELESS)
ROWS, K, N, SPLITS = 700, 256, 384, (300, 0, 245, 90)


def experts(recipe):
    torch.manual_seed(5)
    layer = octavo.GroupedLinear(4, K, N, recipe=recipe, device="cuda", dtype=torch.bfloat16)
    same_seed(layer)
    return layer


def batch(splits=SPLITS):
    """x, dy and sizes. Rows past the last group are NaN."""
    x = torch.randn(ROWS, K, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(ROWS, N, device="cuda", dtype=torch.bfloat16)
    x[sum(splits) :] = dy[sum(splits) :] = float("nan")
    return x, dy, torch.tensor(splits, device="cuda")


def coded(recipe, x, dy, sizes):
    """x and dy as the layer would quantize them in its first step."""
    gemms = octavo.recipe(recipe).linear()
    draws = gemms.dgrad.left.is_stochastic or gemms.wgrad.left.is_stochastic
    seed = torch.arange(7, -1, -7, device="cuda") if draws else None  # 7 and step 0, as of a fresh layer
    return (
        gemms.fprop.left.quantize_groups(x, sizes, column=gemms.wgrad.right),
        gemms.dgrad.left.quantize_groups(dy, sizes, seed=seed, column=gemms.wgrad.left),
    )


def plain_step(layer, x, dy, sizes):
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layer(leaf, sizes)
    y.backward(dy)
    return y.detach(), leaf.grad, layer.weight.grad


def coded_step(layer, recipe, x, dy, sizes):
    layer.zero_grad()
    leaf, gradient_codes = x.clone().requires_grad_(), GradientCodes()
    x_codes, dy_codes = coded(recipe, leaf, dy, sizes)
    y = layer(x_codes, dy_codes=gradient_codes)
    Combine.apply(y, gradient_codes, dy_codes).backward(torch.zeros_like(dy))
    return y.detach(), leaf.grad, layer.weight.grad


@stateless
def test_codes_have_the_bits_of_the_rows_that_were_quantized(recipe):
    used = sum(SPLITS)
    x, dy, sizes = batch()
    want = plain_step(experts(recipe), x, dy, sizes)
    found = coded_step(experts(recipe), recipe, x, dy, sizes)
    assert_same(found[0][:used], want[0][:used])
    assert_same(found[1][:used], want[1][:used])
    assert_same(found[2], want[2])


@stateless
def test_a_step_of_codes_does_not_wait_for_the_device(recipe):
    layer, (x, dy, sizes) = experts(recipe), batch()
    coded_step(layer, recipe, x, dy, sizes)
    with no_waiting():
        coded_step(layer, recipe, x, dy, sizes)


@stateless
def test_a_captured_step_of_codes_follows_the_sizes(recipe):
    layer, (x, dy, sizes) = experts(recipe), batch()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            coded_step(layer, recipe, x, dy, sizes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = coded_step(layer, recipe, x, dy, sizes)
    for splits in ((0, 90, 300, 245), (700, 0, 0, 0), (1, 2, 3, 4), (0, 0, 0, 0), (175, 175, 175, 175)):
        for tensor, fresh in zip((x, dy, sizes), batch(splits), strict=True):
            tensor.copy_(fresh)
        graph.replay()
        want = plain_step(experts(recipe), x, dy, sizes)
        assert_same(found[0][: sum(splits)], want[0][: sum(splits)])
        assert_same(found[1][: sum(splits)], want[1][: sum(splits)])
        assert_same(found[2], want[2])
