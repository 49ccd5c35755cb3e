"""LayerNormLinear and LayerNormMLP split over ranks, against one process; and what fuses then."""

import pytest
import torch

import octavo
from tests.support.linear_shards import cut, joined
from tests.support.steps import relative_error

HIDDEN, FFN, TOKENS = 256, 512, 256
SUMS = 6e-3  # of y and gradients, rounded in parts
QUANTIZED = 0.08  # where a rank scales dy by its own amax


def block(kind, recipe, activation="swiglu", **settings):
    torch.manual_seed(3)
    if kind == "linear":
        return octavo.LayerNormLinear(HIDDEN, FFN, dtype=torch.bfloat16, recipe=recipe, **settings)
    return octavo.LayerNormMLP(
        HIDDEN, FFN, dtype=torch.bfloat16, recipe=recipe, activation=activation, normalization="RMSNorm", **settings
    )


def data(kind):
    g = torch.Generator().manual_seed(5)
    wide = FFN if kind == "linear" else HIDDEN
    return [torch.randn(TOKENS, n, generator=g).bfloat16() for n in (HIDDEN, wide)]


def step(model, call, x, dy, number, group=None):
    for _ in range(number):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.backward(dy)
        octavo.step(model, group)
    return y.detach(), leaf.grad, {name: p.grad.clone() for name, p in model.named_parameters()}


def _split(group, rank, kind, recipe, sequence, compiled, number, activation):
    settings = {"parallel_mode": "column"} if kind == "linear" else {"set_parallel_mode": True}
    model = block(kind, recipe, activation, sequence_parallel=sequence, tp_group=group, **settings)
    x, dy = data(kind)
    dy = cut(dy, group, 1) if kind == "linear" else dy
    if sequence:
        x = cut(x, group, 0)
        dy = dy if kind == "linear" else cut(dy, group, 0)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    found = step(model, call, x.contiguous(), dy.contiguous(), number, group)
    return *found, model.explain(x.contiguous().requires_grad_())


def check(ranks, kind, recipe, sequence, compiled=False, size=2, activation="swiglu"):
    number = 2 if recipe == "fp8-delayed" else 1
    model = block(kind, recipe, activation)
    y, dx, grads = step(model, model, *data(kind), number)
    found = ranks.run(_split, kind, recipe, sequence, compiled, number, activation, size=size)
    bound = QUANTIZED if recipe == "fp8-current" else SUMS
    own = [own[0] for own in found]
    made = torch.cat(own, 1) if kind == "linear" else torch.cat(own) if sequence else own[0]
    assert relative_error(made, y) <= SUMS
    dxs = [own[1] for own in found]
    assert relative_error(torch.cat(dxs) if sequence else dxs[0], dx) <= bound
    halves = 2 if kind == "mlp" and activation == "swiglu" else 1
    for name, right in grads.items():
        parts = [own[2][name] for own in found]
        if name.startswith(("linear.", "fc1.")):
            whole = joined(parts, halves, 0)
        elif name == "fc2.weight":
            whole = torch.cat(parts, 1)
        else:  # norm, fc2.bias: the same on all ranks
            assert all(torch.equal(part, parts[0]) for part in parts), name
            whole = parts[0]
        assert relative_error(whole, right) <= bound, name
    return found[0][3]


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "fp8-block"])
def test_two_ranks_compute_what_one_process_does(ranks, kind, sequence, recipe):
    check(ranks, kind, recipe, sequence)


@pytest.mark.parametrize(("kind", "sequence"), [("mlp", True), pytest.param("linear", True, marks=pytest.mark.slow)])
def test_a_graph_computes_what_a_split_block_computes(ranks, kind, sequence):
    check(ranks, kind, "fp8-block", sequence, compiled=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "fp8-delayed", "fp8-block", "fp8-rowwise", "mxfp8"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_every_recipe(ranks, kind, sequence, recipe, compiled, size, activation):
    check(ranks, kind, recipe, sequence, compiled, size, activation)


def test_the_activation_still_writes_the_codes_of_a_row_layer(ranks):
    explanation = check(ranks, "mlp", "fp8-block", True)
    assert explanation.fired == ("activation-linear",)
    assert [text for text in explanation.alone if text.startswith("Linear: its weight is split over ranks")]


def test_a_norm_over_split_features_is_refused():
    with pytest.raises(octavo.errors.UnsupportedConfig, match="the norm needs all of them"):
        octavo.LayerNormLinear(8, 8, parallel_mode="row")


def _pair(group, rank, recipe, sequence, compiled, steps):
    """A column layer, an activation and a row layer in a Sequential; with several steps, the last in a graph too."""
    torch.manual_seed(6)
    settings = {"dtype": torch.bfloat16, "recipe": recipe, "sequence_parallel": sequence, "tp_group": group}
    if group is None:
        settings |= {"sequence_parallel": False}
    modes = (None, None) if group is None else ("column", "row")
    model = octavo.Sequential(
        octavo.Linear(HIDDEN, FFN, parallel_mode=modes[0], **settings),
        octavo.ops.GELU(),
        octavo.Linear(FFN, HIDDEN, parallel_mode=modes[1], **settings),
    )
    x, dy = (cut(t, group, 0).contiguous() if sequence and group else t for t in data("mlp"))

    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    end = torch.compile(octavo.step, backend="aot_eager", fullgraph=True) if compiled and steps > 1 else octavo.step
    for _ in range(steps):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.backward(dy)
        end(model)
    return y.detach(), leaf.grad, model[0].weight.grad, model[2].weight.grad, model.explain(x).fired


@pytest.mark.parametrize(
    ("recipe", "sequence", "compiled"),
    [("fp8-block", False, False), ("fp8-block", False, True), ("fp8-delayed", False, False),
     ("fp8-delayed", True, False), pytest.param("fp8-delayed", False, True, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_pair_of_layers_in_a_sequential(ranks, recipe, sequence, compiled):
    steps = 3 if recipe == "fp8-delayed" else 1
    right = _pair(None, 0, recipe, False, False, steps)
    found = ranks.run(_pair, recipe, sequence, compiled, steps, size=2)
    for place in (0, 1):
        made = [own[place] for own in found]
        assert relative_error(torch.cat(made) if sequence else made[0], right[place]) <= SUMS
    assert relative_error(torch.cat([own[2] for own in found]), right[2]) <= SUMS
    assert relative_error(torch.cat([own[3] for own in found], 1), right[3]) <= SUMS
    assert all(own[4] == found[0][4] for own in found)
    if not sequence and not (compiled and steps > 1):  # nothing stands between the two; a graph's steps tell nobody
        assert found[0][4] == right[4] != ()
