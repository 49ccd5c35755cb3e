"""Inputs of a GroupedLinear: strides, leading dims, sizes, dtypes and devices, taken or refused in a sentence."""

import pytest
import torch

import octavo
from octavo.errors import UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.recipes import SHIPPED
from tests.support.experts import (
    ROWS,
    SPLITS,
    USED,
    G,
    K,
    N,
    assert_steps,
    batch,
    every,
    experts,
    grid,
    same_seed,
    sizes,
    stacked,
    step,
)
from tests.support.linear_oracle import assert_same

# -- strides and leading dims ------------------------------------------------------------------------------------------


FORMS = {
    "expanded over rows": lambda dy: dy[:1].expand_as(dy),
    "expanded over columns": lambda dy: dy[:, :1].expand_as(dy),
    "one number": lambda dy: dy[0, 0].expand_as(dy),
    "transposed": lambda dy: dy.T.contiguous().T,
    "every second column": lambda dy: torch.stack((dy, dy + 1), -1)[..., 0],
    "inside a larger one": lambda dy: torch.cat((dy, dy), 1)[:, :N],
}


@grid(SHIPPED, form=FORMS)
def test_a_gradient_of_any_strides(recipe, form):
    layer, twin = experts(recipe), experts(recipe)
    x, dy = batch()
    dy = form(dy)
    assert not dy.is_contiguous()
    assert_steps(step(layer, x, dy), step(twin, x, dy.contiguous()))


@every
def test_a_sum_of_the_rows_in_use(recipe):
    layer, twin, (x, _) = experts(recipe), experts(recipe), batch()
    layer(x, sizes())[:USED].sum().backward()
    want = step(twin, x, torch.ones(ROWS, N))
    assert_same(stacked(layer), want["dw"])
    assert_same(stacked(layer, "bias"), want["db"])


@every
def test_an_input_of_any_strides_and_leading_dims(recipe):
    layer, (x, dy) = experts(recipe), batch(spare=7)
    want = step(layer, x, dy)
    for form in (x.T.contiguous().T, torch.stack((x, x), -1)[..., 0]):
        same_seed(layer)
        assert_steps(step(layer, form, dy), want)
    same_seed(layer)
    found = step(layer, x.view(2, 27, K), dy.view(2, 27, N))
    assert found["y"].shape == (2, 27, N)
    assert_steps({n: t.view(want[n].shape) for n, t in found.items()}, want)


# -- sizes -------------------------------------------------------------------------------------------------------------


WRONG_SIZES = {
    "too few": [30, 17], "too many": [30, 0, 17, 0], "none": [], "a matrix": torch.tensor([[30, 0, 17]]),
    "one number": torch.tensor(47), "int16": torch.tensor([30, 0, 17], dtype=torch.int16),
    "uint8": torch.tensor([30, 0, 17], dtype=torch.uint8), "bool": torch.tensor([True, False, True]),
    "float": torch.tensor([30.0, 0.0, 17.0]), "nothing": None, "floats in a list": [30.0, 0.0, 17.0],
    "lists in a list": [[30, 0, 17]],
}  # fmt: skip


@grid(["bf16", "fp8-current", "nvfp4"], wrong=WRONG_SIZES)
def test_sizes_of_the_wrong_number_or_kind_are_refused(recipe, wrong):
    layer = experts(recipe)
    with pytest.raises((UnsupportedShape, UnsupportedDtype)):
        layer(batch()[0], wrong)


IMPOSSIBLE = {
    "negative": ([30, -1, 17], r"got \[30, -1, 17\]"),
    "more than the rows": ([30, 1, ROWS], rf"at most the {ROWS} rows"),
    "a sum beyond int64": ([2**62, 2**62, 2**62], r"got \[4611686018427387904, "),
}  # fmt: skip
CALLS = {
    "a list": lambda layer, x, values: layer(x, values),
    "int64": lambda layer, x, values: layer(x, torch.tensor(values)),
    "compiled": lambda layer, x, values: torch.compile(layer, backend="aot_eager")(x, torch.tensor(values)),
    "in a run": lambda layer, x, values: octavo.Sequential(layer, octavo.ops.GELU())(x, torch.tensor(values)),
    "a function": lambda layer, x, values: octavo.grouped_linear(x, layer.weight, values, recipe=layer.recipe),
    "codes": lambda layer, x, values: octavo.quant.Block1D().quantize_groups(x, torch.tensor(values)),
    "on meta": lambda layer, x, values: layer.to("meta")(x.to("meta"), values),
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("wrong", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_sizes_that_cannot_be_are_refused_where_their_values_are_at_hand(call, wrong):
    values, message = wrong
    with pytest.raises(UnsupportedShape, match=message):
        call(experts("fp8-current"), batch()[0], values)


@pytest.mark.parametrize("size", [2**63, -(2**63) - 1, 10**30])
def test_sizes_in_a_list_that_int64_does_not_hold_are_refused(size):
    with pytest.raises(UnsupportedShape, match=r"m_splits .* got \[30, "):
        experts("fp8-current")(batch()[0], [30, size, 0])


def test_a_mask_in_a_list_is_no_list_of_sizes():
    with pytest.raises(UnsupportedDtype, match=r"list of integers, got \[True, False, True\]"):
        experts("fp8-current")(batch()[0], [True, False, True])


@pytest.mark.parametrize("call", [experts("bf16"), octavo.Sequential(experts("bf16"))], ids=["alone", "in a run"])
def test_sizes_without_values_are_refused(call):
    with pytest.raises(UnsupportedDevice, match="Group sizes on the meta device have no values"):
        call(batch()[0], torch.empty(G, dtype=torch.int64, device="meta"))


@every
def test_a_list_and_either_integer_are_the_same_sizes(recipe):
    layer, (x, _) = experts(recipe), batch()
    want = layer(x, sizes())
    for splits in (list(SPLITS), SPLITS, sizes().int(), torch.tensor([SPLITS, SPLITS]).T[:, 0]):
        assert_same(layer(x, splits), want)


# -- features and dtypes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "nvfp4"])
def test_a_wrong_number_of_features_is_refused(recipe):
    with pytest.raises(UnsupportedShape, match=r"(?s)48.*47|47.*48"):
        experts(recipe)(torch.zeros(ROWS, 47), sizes())
    with pytest.raises(UnsupportedDtype, match="float64"):
        experts(recipe)(torch.zeros(ROWS, K, dtype=torch.float64), sizes())


def test_dtypes_that_nothing_takes_are_named():
    for layer in (experts("bf16").double(), octavo.GroupedLinear(G, K, N, dtype=torch.float64)):
        with pytest.raises(UnsupportedDtype, match="float64"):
            layer(batch()[0], sizes())


def test_no_features_at_all():
    layer = octavo.GroupedLinear(G, 0, N)
    assert torch.equal(layer(torch.zeros(ROWS, 0), sizes())[:30], layer.bias[0].expand(30, N))


@pytest.mark.parametrize("groups", [0, 5000])
def test_a_number_of_groups_that_none_can_have_is_refused(groups):
    with pytest.raises(UnsupportedShape, match=f"got {groups}"):
        octavo.GroupedLinear(groups, K, N)


def test_the_meta_device():
    layer = octavo.GroupedLinear(G, K, N, device="meta")
    y = layer(torch.empty(ROWS, K, device="meta"), torch.empty(G, dtype=torch.int64, device="meta"))
    assert y.shape == (ROWS, N) and y.is_meta
