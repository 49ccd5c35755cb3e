"""GroupedLinear over several calls: refused, failed halfway, backward twice, two microbatches in flight, inference."""

import pytest
import torch

import octavo
from octavo.errors import Unsupported
from octavo.recipes import SHIPPED
from tests.support.experts import (
    LAYOUTS,
    ROWS,
    SPLITS,
    USED,
    Alone,
    K,
    N,
    assert_steps,
    batch,
    cached_codes,
    every,
    experts,
    grid,
    same_seed,
    sample,
    sizes,
    slices,
    stacked,
    step,
)
from tests.support.linear_oracle import assert_same


@every
def test_a_refused_forward_leaves_everything_as_it_was(recipe):
    layer, (x, dy) = experts(recipe, scale_bias=True), batch()
    ones, leaf = torch.ones(ROWS), x.clone().requires_grad_()
    step(layer, x, dy, is_first_microbatch=True, scales=ones)
    kept, codes = octavo.state_dict(layer), cached_codes(layer)
    for bad in (
        {"m_splits": [1, 2]}, {"m_splits": sizes().float()}, {"out": torch.zeros(ROWS, N + 1)},
        {"dgrad_out": torch.zeros(ROWS + 1, K)}, {"scales": torch.ones(ROWS + 1)}, {"scales": None},
    ):  # fmt: skip
        with pytest.raises(Unsupported):
            layer(leaf, **{"m_splits": sizes(), "scales": ones, "is_first_microbatch": True, **bad}).backward(dy)
        if "dgrad_out" not in bad:  # which may be found out in backward
            for key, value in octavo.state_dict(layer).items():
                assert_same(value, kept[key], f"{bad} {key}")
    for name, codes_then in codes.items():
        assert torch.equal(cached_codes(layer)[name], codes_then)


@grid(SHIPPED, where=["before", "after"])
def test_a_step_after_one_that_failed_halfway_is_clean(recipe, where):
    """Backward stops before it reaches the layer, or after it has left it."""
    layer, twin, (x, dy) = experts(recipe), experts(recipe), batch()
    for model in (layer, twin):
        leaf = x.clone().requires_grad_()
        y = model(leaf, sizes())

        def fail(_):
            raise RuntimeError("halfway")

        if model is layer:
            (y if where == "before" else leaf).register_hook(fail)
            with pytest.raises(RuntimeError, match="halfway"):
                y.backward(dy)
        elif where == "after":
            y.backward(dy)
        del y
    if where == "before":
        for model in (layer, twin):  # a counter may stand elsewhere after a backward that never came
            same_seed(model)
    assert_steps(step(layer, x, dy), step(twin, x, dy))


@grid(SHIPPED, layout=LAYOUTS)
def test_a_second_backward_adds_what_it_adds_to_a_linear(recipe, layout):
    """The same again, or another draw where rounding is stochastic; a third has nothing left to go by."""
    layer, (x, dy) = experts(recipe, **layout), batch()
    alone, leaf, parts = Alone(layer, recipe), x.clone().requires_grad_(), []
    y = layer(leaf, sizes())
    y.backward(dy, retain_graph=True)
    y.backward(dy)
    for linear, rows in zip(alone.linears, slices(SPLITS), strict=True):
        parts.append(x[rows].clone().requires_grad_())
        want = linear(parts[-1])
        want.backward(dy[rows], retain_graph=True)
        want.backward(dy[rows])
    assert_same(leaf.grad[:USED], torch.cat([part.grad for part in parts]))
    assert_same(stacked(layer), torch.stack([linear.weight.grad for linear in alone.linears]))
    assert_same(stacked(layer, "bias"), torch.stack([linear.bias.grad for linear in alone.linears]))
    with pytest.raises(RuntimeError):
        y.backward(dy)


@every
def test_two_microbatches_in_flight(recipe):
    layer = experts(recipe)
    alone = Alone(layer, recipe)
    data = [((30, 0, 17), batch(seed=1)), ((5, 40, 2), batch((5, 40, 2), seed=2))]
    leaves = [x.clone().requires_grad_() for _, (x, _) in data]
    outputs = [layer(leaf, sizes(splits)) for leaf, (splits, _) in zip(leaves, data, strict=True)]
    wants = [  # forwards first there too: counters and amaxes see the same order
        [(linear, x[rows].clone().requires_grad_(), dy[rows]) for linear, rows in
         zip(alone.linears, slices(splits), strict=True)] for splits, (x, dy) in data
    ]  # fmt: skip
    runs = [[(linear(leaf), leaf, dy) for linear, leaf, dy in want] for want in wants]
    for y, leaf, run, (_, (_, dy)) in reversed(list(zip(outputs, leaves, runs, data, strict=True))):
        y.backward(dy)
        for one, _, part in run:
            one.backward(part)
        assert_same(y.detach()[:USED], torch.cat([one.detach() for one, _, _ in run]))
        assert_same(leaf.grad[:USED], torch.cat([alone_leaf.grad for _, alone_leaf, _ in run]))
    assert_same(stacked(layer), torch.stack([linear.weight.grad for linear in alone.linears]))
    assert_same(stacked(layer, "bias"), torch.stack([linear.bias.grad for linear in alone.linears]))


@every
def test_inference_is_training_without_the_gradients(recipe):
    layer, (x, _) = experts(recipe), batch()
    want = layer(x, sizes()).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = layer(x, sizes())
        assert not found.requires_grad
        assert_same(found, want)


@sample
def test_sizes_overwritten_between_forward_and_backward_are_noticed_or_do_not_matter(recipe):
    layer, twin, (x, dy) = experts(recipe), experts(recipe), batch()
    want, static = step(twin, x, dy), sizes()
    y = layer(x, static)
    static.copy_(sizes((1, 2, 3)))
    try:
        y.backward(dy)
    except RuntimeError:
        return
    assert_same(stacked(layer), want["dw"])
