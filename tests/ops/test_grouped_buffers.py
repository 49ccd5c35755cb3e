"""GroupedLinear with `out` and `dgrad_out`: written in place, tails left alone, and refused where they do not fit."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from octavo.recipes import SHIPPED
from tests.support.experts import (
    DTYPES,
    GIVEN,
    LAYOUTS,
    NAN,
    ROWS,
    SPARE,
    USED,
    K,
    N,
    batch,
    every,
    experts,
    grid,
    same_seed,
    sample,
    sizes,
    stacked,
    step,
)
from tests.support.linear_oracle import assert_same, spiky
from tests.support.recipe_traits import is_stochastic


@grid(SHIPPED, layout=LAYOUTS, given=GIVEN[::-1])
def test_buffers_are_written_in_place_and_keep_their_tails(recipe, layout, given):
    sentinel = NAN if len(given) == 2 else 7.0
    layer, twin = experts(recipe, **layout), experts(recipe, **layout)
    rooms = {"out": torch.full((80, N), sentinel), "dgrad_out": torch.full((80, K), sentinel)}
    buffers = {name: rooms[name][4 : 4 + ROWS] for name in given}
    for seed in range(3):
        x, dy = batch(seed=seed)
        want, leaf = step(twin, x, dy), x.clone().requires_grad_()
        layer.zero_grad()
        y = layer(leaf, sizes(), **buffers)
        assert (y.data_ptr() == rooms["out"][4:].data_ptr()) == ("out" in given)
        assert y.shape == (ROWS, N) and y.requires_grad
        assert_same(y.detach()[:USED], want["y"][:USED], "y")
        y.backward(dy)
        assert_same(leaf.grad[:USED], want["dx"][:USED], "x.grad")
        assert_same(stacked(layer), want["dw"], "dw")
        assert_same(stacked(layer, "bias"), want["db"], "db")
        for name, buffer in buffers.items():
            assert_same(buffer[:USED], want["y" if name == "out" else "dx"][:USED], name)
            around = torch.cat((rooms[name][:4], rooms[name][4 + USED :]))
            assert_same(around, torch.full_like(around, sentinel), f"around {name}")
            assert not buffer.requires_grad


@grid(["bf16", "fp8-current", "fp8-block"], dtype=DTYPES)
def test_buffers_of_every_dtype_with_scales_and_without_gradients(recipe, dtype):
    layer = experts(recipe, dtype=dtype, scale_bias=True)
    x, scales = batch(dtype=dtype)[0], spiky(ROWS, seed=4)
    want = layer(x, sizes(), scales=scales).detach()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            out = torch.full((ROWS, N), 7.0, dtype=dtype)
            y = layer(x, sizes(), out=out, scales=scales)
            assert y.data_ptr() == out.data_ptr()
            assert_same(out[:USED], want[:USED])
            assert (out[USED:] == 7).all()


@sample
def test_buffers_of_no_rows_and_of_leading_dims(recipe):
    layer = experts(recipe)
    empty = layer(torch.zeros(0, K), sizes((0, 0, 0)), out=torch.zeros(0, N))
    assert empty.shape == (0, N)
    (x, _), out = batch(spare=7), torch.full((54, N), 7.0)
    y = layer(x.view(2, 27, K), sizes(), out=out)
    assert y.shape == (2, 27, N) and y.data_ptr() == out.data_ptr()
    assert_same(out[:USED], layer(x, sizes()).detach()[:USED])


def wrong_buffers(columns):
    """(a buffer, what its refusal names)."""
    return {
        "rows": (torch.empty(ROWS + 1, columns), f"({ROWS + 1}, {columns})"),
        "columns": (torch.empty(ROWS, columns + 1), f"({ROWS}, {columns + 1})"),
        "one dim": (torch.empty(ROWS * columns), f"({ROWS * columns},)"),
        "three dims": (torch.empty(1, ROWS, columns), f"(1, {ROWS}, {columns})"),
        "dtype": (torch.empty(ROWS, columns, dtype=torch.bfloat16), "bfloat16"),
        "device": (torch.empty(ROWS, columns, device="meta"), "meta"),
        "strides": (torch.empty(columns, ROWS).T, "contiguous"),
        "requires_grad": (torch.empty(ROWS, columns, requires_grad=True), "requires_grad"),
    }


@grid(["bf16", "fp8-current", "nvfp4"], name=["out", "dgrad_out"], kind=list(wrong_buffers(K)))
def test_a_buffer_that_does_not_fit_is_a_value_error_with_what_was_found_and_what_is_needed(recipe, name, kind):
    columns = N if name == "out" else K
    buffer, found = wrong_buffers(columns)[kind]
    layer, (x, dy) = experts(recipe), batch()
    with pytest.raises(ValueError, match=name) as refused:
        layer(x.requires_grad_(), sizes(), **{name: buffer}).backward(dy)
    assert f"({ROWS}, {columns})" in str(refused.value) and "float32" in str(refused.value)
    assert found in str(refused.value)


@every
def test_a_gradient_buffer_where_x_wants_no_gradient_is_a_value_error(recipe):
    layer, (x, _) = experts(recipe), batch()
    with pytest.raises(ValueError, match="dgrad_out"):
        layer(x, sizes(), dgrad_out=torch.empty(ROWS, K))
    with torch.no_grad(), pytest.raises(ValueError, match="dgrad_out"):
        layer(x.requires_grad_(), sizes(), dgrad_out=torch.empty(ROWS, K))


@sample
def test_what_was_returned_is_used_again_detached_and_refused_as_it_is(recipe):
    layer, (x, dy), out = experts(recipe), batch(), torch.empty(ROWS, N)
    for _ in range(3):
        y = layer(x, sizes(), out=out)
        y.backward(dy)
        out = y.detach()
    with pytest.raises(ValueError, match="requires_grad"):
        layer(x, sizes(), out=y)


@every
def test_two_microbatches_in_flight_in_two_slices_of_one_allocation(recipe):
    layer, twin = experts(recipe), experts(recipe)
    rooms = torch.full((2 * ROWS + 9, N), 7.0), torch.full((2 * ROWS + 9, K), 7.0)
    data = [batch(seed=i) for i in range(2)]
    wants = [twin(x.requires_grad_(), sizes()) for x, _ in data]
    leaves = [x.detach().clone().requires_grad_() for x, _ in data]
    outputs = [
        layer(leaf, sizes(), **{name: room[9 + i * ROWS :][:ROWS] for name, room in zip(("out", "dgrad_out"), rooms,
              strict=True)}) for i, leaf in enumerate(leaves)
    ]  # fmt: skip
    for i in range(2):
        outputs[i].backward(data[i][1])
        wants[i].backward(data[i][1])
        assert_same(rooms[0][9 + i * ROWS :][:USED], wants[i].detach()[:USED])
        assert_same(rooms[1][9 + i * ROWS :][:USED], data[i][0].grad[:USED])
    assert_same(stacked(layer), stacked(twin))
    for room in rooms:
        for i in range(2):
            assert (room[9 + i * ROWS + USED :][:SPARE] == 7).all()


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "nvfp4"])
def test_an_input_with_two_consumers_gets_the_sum_and_the_buffer_one_share(recipe):
    layer, twin, (x, dy) = experts(recipe), experts(recipe), batch(poison=0.0)
    share = step(twin, x, dy)["dx"]
    same_seed(twin)
    buffer, leaf = torch.full((ROWS, K), 7.0), x.clone().requires_grad_()
    (inside := 2 * leaf).retain_grad()  # no leaf: its gradients meet before they go on
    y = layer(inside / 2, sizes(), dgrad_out=buffer)
    torch.autograd.backward((y, inside), (dy, torch.ones(ROWS, K)))
    assert_same(buffer[:USED], share[:USED])
    assert (buffer[USED:] == 7).all()
    assert_same(inside.grad[:USED], (share / 2 + 1)[:USED])
    buffer.fill_(7.0)
    leaf = x.clone().requires_grad_()
    torch.autograd.backward((layer(leaf, sizes(), dgrad_out=buffer), leaf * 3), (dy, torch.ones(ROWS, K)))
    same_seed(twin)
    step(twin, x, dy)
    second = step(twin, x, dy)["dx"] if is_stochastic(recipe) else share  # the second draw
    assert_same(leaf.grad[:USED], (second + 3)[:USED])
    assert_same(buffer[:USED], second[:USED])


def test_flops_do_not_depend_on_buffers_or_sizes():
    counts = set()
    for given in ({}, {"out": torch.zeros(ROWS, N)}):
        for splits in ([10, 5, 17], [10, 0, 17]):
            with FlopCounterMode(display=False) as counter:
                experts("nvfp4")(batch()[0].requires_grad_(), sizes(splits), **given)
            counts.add(counter.get_total_flops())
    assert counts == {2 * ROWS * K * N}
