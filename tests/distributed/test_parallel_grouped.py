"""A GroupedLinear split over ranks by its features, against one process."""

import pytest
import torch

import octavo
from octavo.errors import Unsupported
from tests.distributed.shards import cut, error
from tests.distributed.test_parallel_blocks import joined

GROUPS, K, N, ROWS = 3, 256, 512, 96
SPLITS = (40, 0, 50)  # and a tail of 6 rows
SUMS = 6e-3


def layer(recipe, mode=None, group=None, **settings):
    torch.manual_seed(2)
    return octavo.GroupedLinear(
        GROUPS, K, N, dtype=torch.bfloat16, recipe=recipe, parallel_mode=mode, tp_group=group, **settings
    )


def data(scaled):
    g = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(ROWS, n, generator=g).bfloat16() for n in (K, N))
    return x, dy, torch.rand(ROWS, generator=g) if scaled else None


def step(module, call, x, dy, scales):
    x.requires_grad_()
    y = call(x, torch.tensor(SPLITS), scales=scales)
    y.backward(dy)
    return y.detach(), x.grad, module.weight.grad, module.bias.grad


def _split(group, rank, recipe, mode, compiled, scaled):
    module = layer(recipe, mode, group, scale_bias=scaled)
    x, dy, scales = data(scaled)
    x, dy = (x, cut(dy, group, 1)) if mode == "column" else (cut(x, group, 1), dy)
    call = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    return step(module, call, x.contiguous(), dy.contiguous(), scales)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-block"])
@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize(
    ("compiled", "scaled", "size"),
    [
        (False, True, 2),
        *[pytest.param(*case, marks=pytest.mark.slow) for case in ((True, False, 2), (False, False, 4))],
    ],
)
def test_ranks_compute_what_one_process_does(ranks, recipe, mode, compiled, scaled, size):
    module = layer(recipe, scale_bias=scaled)
    y, dx, dw, db = step(module, module, *data(scaled))
    found = list(zip(*ranks.run(_split, recipe, mode, compiled, scaled, size=size), strict=True))
    if mode == "column":
        assert torch.equal(torch.cat(found[0], 1), y)
        assert error(found[1][0], dx) <= SUMS
        assert torch.equal(torch.cat(found[2], 1), dw)
        assert torch.equal(torch.cat(found[3], 1), db)
    else:
        assert error(found[0][0], y) <= SUMS and not found[0][0][sum(SPLITS) :].any()
        assert torch.equal(torch.cat(found[1], 1), dx)
        assert torch.equal(torch.cat(found[2], 2), dw)
        assert error(found[3][0], db) <= SUMS


def _experts(group, rank):
    """Two layers and an activation of experts, as one run."""
    torch.manual_seed(4)
    settings = {"dtype": torch.bfloat16, "recipe": "fp8-block", "bias": False, "tp_group": group}
    model = octavo.Sequential(
        octavo.GroupedLinear(GROUPS, K, 2 * N, parallel_mode="column", column_blocks=2, **settings),
        octavo.ops.SwiGLU(),
        octavo.GroupedLinear(GROUPS, N, K, parallel_mode="row", **settings),
    )
    x, sizes = data(False)[0].requires_grad_(), torch.tensor(SPLITS)
    y = model(x, sizes, sizes)
    y.sum().backward()
    told = model.explain(x.detach().requires_grad_(), sizes, sizes)
    return y.detach(), x.grad, model[0].weight.grad, model[2].weight.grad, told.fired


def test_experts_between_a_column_and_a_row_layer_are_one_run(ranks):
    right = _experts(None, 0)
    found = ranks.run(_experts, size=2)
    for own in found:
        assert own[4] == right[4] != ()
        assert error(own[0], right[0]) <= SUMS and error(own[1], right[1]) <= SUMS
    assert torch.equal(joined([own[2] for own in found], 2, 1), right[2])
    assert torch.equal(torch.cat([own[3] for own in found], 2), right[3])


def _refused(group, rank):
    found = []
    x, sizes = torch.ones(ROWS, K, dtype=torch.bfloat16), torch.tensor(SPLITS)
    for call in (
        lambda: octavo.GroupedLinear(2, 8, 9, parallel_mode="column", tp_group=group),
        lambda: layer("bf16", "column", group)(x, sizes, dgrad_out=torch.empty_like(x)),
        lambda: layer("bf16", "row", group)(x[:, : K // 2], sizes, out=torch.empty(ROWS, N, dtype=x.dtype)),
    ):
        try:
            call()
        except Unsupported as problem:
            found.append(str(problem))
    return found


def test_what_cannot_be_split_is_refused(ranks):
    for uneven, dgrad_out, out in ranks.run(_refused, size=2):
        assert "9 do not divide by the 2 ranks" in uneven
        assert "dgrad_out is memory of one rank, and a column layer sums over ranks" in dgrad_out
        assert "out is memory of one rank, and a row layer sums over ranks" in out
