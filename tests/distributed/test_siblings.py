"""Column layers that read the same x (q, k and v; gate and up): one cast, one gather, one sum of dx."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.communication import shared_rows
from tests.support.siblings import (
    FFN,
    RECIPES,
    TOKENS,
    Attention,
    Projections,
    SwiGLU,
    data,
    split,
    stock,
    trained,
)
from tests.support.steps import relative_error
from tests.support.wire import Sent, Wire, received

SUMS = 8e-3  # dx in bf16, added before the ranks' sum or after


def sampled(recipes, *fast):
    """Parameters of a test: the others are slow."""
    return [pytest.param(one, marks=() if one in fast else pytest.mark.slow) for one in recipes]


def _sent(group, rank, kind, recipe, **more):
    x, size = data(kind, group), group.size()
    theirs, model = stock(kind, group), split(kind, group, recipe, **more)
    with Wire() as wire:
        trained(theirs, x)
    trained(model, x)  # in its first step fp8-delayed agrees on amaxes
    with Sent() as ours:
        trained(model, x)
    return received(ours.sent, size) / received(wire.sent, size), [name for name, *_ in ours.sent]


# bytes of stock bf16's: of SwiGLU, and of q, k and v. Where dw needs other codes than y, both are sent
BYTES = {
    "fp8-current": (0.751, 0.751), "fp8-delayed": (0.751, 0.751), "nvfp4(stochastic=False)": (0.9, 0.79),
    "fp8-rowwise": (1.01, 1.01), "fp8-block": (1.01, 1.02), "mxfp8": (1.01, 1.02), "bf16": (1.0, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("recipe", sampled(BYTES, "fp8-delayed", "fp8-block"))
def test_siblings_send_no_more_than_one_layer(ranks, recipe):
    for kind, most in zip((SwiGLU, Projections), BYTES[recipe], strict=True):
        for share, names in ranks.run(_sent, kind, recipe, size=2):
            assert share <= most, (kind, share)
            assert names.count("reduce_scatter_tensor") == (2 if kind is SwiGLU else 1)


# the same with row_codes_only, and how much larger the error of dw is than with codes by column
ROWS_ONLY = {
    "fp8-rowwise": (0.76, 0.76, 0.01), "fp8-block": (0.76, 0.76, 0.01), "mxfp8": (0.76, 0.76, 0.01),
    "nvfp4(stochastic=False)": (0.65, 0.65, 0.25),
}  # fmt: skip


def _rows_only(group, rank, recipe):
    """Bytes of stock bf16's, whether y is that of column codes, and errors of dx and dw, with those and without."""
    found = []
    for kind in (SwiGLU, Projections):
        share, _ = _sent(group, rank, kind, recipe, row_codes_only=True)
        (y, dx, dw), (own_y, own_dx, own_dw), (_, right_dx, right_dw) = (
            trained(split(kind, group, name, **more), data(kind, group))
            for name, more in ((recipe, {"row_codes_only": True}), (recipe, {}), ("bf16", {}))
        )
        errors = [relative_error(one, right_dx) for one in (dx, own_dx)]
        errors += [max(map(relative_error, one, right_dw)) for one in (dw, own_dw)]
        found.append((share, torch.equal(y, own_y), *errors))
    return found


@pytest.mark.parametrize("recipe", sampled(ROWS_ONLY, "fp8-block"))
def test_row_codes_alone_take_less_and_leave_y(ranks, recipe):
    for found in ranks.run(_rows_only, recipe, size=2):
        for most, (share, same, dx, own_dx, dw, own_dw) in zip(ROWS_ONLY[recipe], found, strict=False):
            assert share <= most and same
            assert dx <= 1.01 * own_dx and dw <= (1 + ROWS_ONLY[recipe][2]) * own_dw


def _rows_only_in_a_graph(group, rank, recipe):
    model = split(Projections, group, recipe, row_codes_only=True)
    y, dx, dw = trained(model, data(Projections, group))
    model.compile(backend="aot_eager", fullgraph=True)
    again, again_dx, again_dw = trained(model, data(Projections, group))
    return [torch.equal(y, again), relative_error(again_dx, dx) <= SUMS, *map(torch.equal, dw, again_dw)]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ROWS_ONLY)
def test_row_codes_alone_in_a_graph(ranks, recipe):
    for equal in ranks.run(_rows_only_in_a_graph, recipe, size=2):
        assert all(equal)


def _alike(group, rank, kind, recipe, sequence):
    """What a model computes whose layers share, and one whose layers do not."""
    found = []
    for shares in (True, False):
        model, find = split(kind, group, recipe, sequence), shared_rows.find
        if not shares:
            shared_rows.find = lambda layer, source, key: None
        try:
            y, dx, dw = trained(model, data(kind, group if sequence else None), 3)
        finally:
            shared_rows.find = find
        found.append((y, dx, dw, octavo.state_dict(model)))
    (y, dx, dw, state), (own_y, own_dx, own_dw, own_state) = found
    same = torch.equal(y, own_y), all(map(torch.equal, dw, own_dw)), relative_error(dx, own_dx)
    return *same, all(torch.equal(state[name], own_state[name]) for name in own_state)


@pytest.mark.parametrize("recipe", sampled(RECIPES, "fp8-delayed", "fp8-block"))
@pytest.mark.parametrize(("kind", "sequence"), [(SwiGLU, True), (Attention, True), (SwiGLU, False)])
def test_siblings_that_share_compute_what_they_would_each_by_itself(ranks, kind, recipe, sequence):
    for y, dw, dx, state in ranks.run(_alike, kind, recipe, sequence, size=2):
        assert y and dw and state
        assert dx <= SUMS


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [SwiGLU, Attention])
def test_four_ranks_that_share_compute_what_they_would_each_by_itself(ranks, kind, recipe):
    for y, dw, dx, state in ranks.run(_alike, kind, recipe, True, size=4):
        assert y and dw and state
        assert dx <= SUMS


# -- when rows are shared ----------------------------------------------------------------------------------------------


def _gathers(call):
    with Sent() as ours:
        y = call()
    return [name for name, *_ in ours.sent].count("all_gather_into_tensor"), y


def _cases(group, rank):
    """How many gathers of rows each way to call gate and up makes."""
    model = split(SwiGLU, group, "fp8-current")
    gate, up, down = model.gate, model.up, model.down
    x = data(SwiGLU, group)
    found = {
        "siblings": _gathers(lambda: (gate(x), up(x)))[0],
        "one layer twice": _gathers(lambda: (gate(x), gate(x)))[0],
    }
    found["copies"] = _gathers(lambda: (gate(x), up(x.clone())))[0]

    def overwritten():
        other = x.clone()
        y = gate(other)
        other.mul_(2)
        return y, up(other)

    found["overwritten"], (_, y) = _gathers(overwritten)
    right = torch.equal(y, up(x * 2))
    shared_rows.forget()
    with torch.autocast("cpu", torch.bfloat16):
        wide = x.float()
        found["autocast"] = _gathers(lambda: (gate(wide), up(wide)))[0]
    with torch.no_grad():
        found["without gradients"] = _gathers(lambda: (gate(x), up(x)))[0]
    with torch.inference_mode():
        given = x.clone()
        found["inference mode"] = _gathers(lambda: (gate(given), up(given)))[0]
    gate(x)
    kept = shared_rows._last.shared.rows.x
    down(torch.ones(TOKENS, FFN // group.size(), dtype=x.dtype))
    freed = [kept is not None, shared_rows._last.shared is None]
    other = x.clone()
    with torch.no_grad():
        gate(other)
    del other
    freed.append(shared_rows._last.shared.rows.x is None)
    return found, right, freed


def test_rows_are_shared_only_where_they_are_the_same(ranks):
    for found, right, freed in ranks.run(_cases, size=2):
        assert found == {
            "siblings": 1, "one layer twice": 2, "copies": 2, "overwritten": 2, "autocast": 1, "without gradients": 1,
            "inference mode": 2,
        }  # fmt: skip
        assert right and all(freed)


def _half_calibrated(group, rank):
    """Gathers of gate and up where a step has seen gate's x and not up's; up's y is that of a call by itself."""
    found = []
    for shares in (True, False):
        model, x = split(SwiGLU, group, "fp8-delayed"), data(SwiGLU, group)
        model.gate(x * 4)
        octavo.step(model.gate, group)
        shared_rows.forget()
        layers = (model.gate, model.up) if shares else (model.up,)
        found.append(_gathers(lambda layers=layers, x=x: [layer(x) for layer in layers]))
    (both, (*_, y)), (one, (*_, own)) = found
    return both, one, torch.equal(y, own)


def test_a_calibrated_layer_and_one_that_is_not_share_no_rows(ranks):
    assert ranks.run(_half_calibrated, size=2) == [(2, 1, True)] * 2


def _again(group, rank, recipe):
    """A model under activation checkpointing, and one that gathers again in backward, against the plain one."""
    found = []
    for way in ("plain", "checkpointed", "again"):
        model, x = split(SwiGLU, group, recipe), data(SwiGLU, group)
        if way == "again":
            for layer in (model.gate, model.up):
                layer.parallel = layer.parallel._replace(gather_again=True)
        call = model
        if way == "checkpointed":
            call = partial(checkpoint, model, use_reentrant=False)
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.sum().backward()
        found.append((y.detach(), leaf.grad, *[p.grad.to_local() for p in model.parameters()]))
    return [all(map(torch.equal, found[0], other)) for other in found[1:]]


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block"])
def test_rows_that_backward_makes_again_are_the_same(ranks, recipe):
    assert ranks.run(_again, recipe, size=2) == [[True, True]] * 2


def _dy(group, rank, recipe):
    """The gradients of a row layer that must not take codes of dy, against one that may."""
    found = []
    for way in ("plain", "hooked", "create_graph", "frozen", "anomaly"):
        model = split(SwiGLU, group, recipe)
        trained(model, data(SwiGLU, group))
        down, x = model.down, torch.ones(TOKENS, FFN // group.size(), dtype=torch.bfloat16)
        down.requires_grad_(way not in ("frozen", "anomaly"))  # anomaly mode cannot read gradients that are DTensors
        leaf = (x * torch.arange(FFN // group.size())).bfloat16().requires_grad_()
        with torch.autograd.set_detect_anomaly(way == "anomaly"):
            y = down(leaf)
            if way == "hooked":
                y.register_hook(lambda dy: dy * 1)
            y.sin().sum().backward(create_graph=way == "create_graph")
        found.append(leaf.grad.detach())
    return [torch.equal(found[0], other) for other in found[1:]], found[0].isfinite().all().item()


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed"])
def test_codes_of_dy_give_the_gradients_of_its_values(ranks, recipe):
    assert ranks.run(_dy, recipe, size=2) == [([True] * 4, True)] * 2
