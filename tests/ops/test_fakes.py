"""Layers under FakeTensorMode: shapes without data, as a memory estimator runs them; no fake stays in a real layer."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import octavo
from tests.support.compiled_twins import batch, every, results
from tests.support.experts import ROWS, G, K, N, layouts
from tests.support.linear_oracle import assert_same, make, spiky
from tests.support.same_tensors import facts
from tests.support.state_tensors import named_state


@every
def test_a_layer_of_fakes_gives_fakes_and_leaves_none_behind(recipe):
    """Forward and backward on shapes alone, as a memory estimator runs them."""
    real = make(recipe, 17, 12)
    want = results(real, real, *batch(0, 9, 17, 12))
    with FakeTensorMode():
        layer = octavo.Linear(17, 12, recipe=recipe)
        found = results(layer, layer, torch.randn(9, 17), torch.randn(9, 12))
        if recipe != "bf16":
            q = layer(torch.randn(9, 17), fp8_output=True)
            assert all(isinstance(t, FakeTensor) for t in q.tensors())
    for name, value in want.items():
        assert isinstance(found[name], FakeTensor), name
        assert facts(found[name]) == facts(value), name
    again = make(recipe, 17, 12)
    assert_same(again(batch(0, 9, 17, 12)[0]).detach(), want["y"])


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "nvfp4"])
def test_fakes_stay_out_of_a_real_layer(recipe):
    layer = make(None)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, octavo.autocast(recipe):
        layer(mode.from_tensor(spiky(24, 48)), is_first_microbatch=True)
    assert not [name for name, buffer in named_state(layer) if isinstance(buffer, FakeTensor)]
    with octavo.autocast(recipe):
        assert type(layer(spiky(24, 48), is_first_microbatch=True)) is torch.Tensor


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "nvfp4"])
@pytest.mark.parametrize("what", ["plain", "out", "fused", "delayed", "cached"])
@layouts
def test_fake_tensors_go_through(layout, recipe, what):
    with FakeTensorMode():
        settings = {"fuse_wgrad_accumulation": what == "fused", "delay_wgrad_compute": what == "delayed"}
        layer = octavo.GroupedLinear(G, K, N, recipe=recipe, **settings, **layout)
        for p in layer._weight_parts():
            p.main_grad = torch.zeros(p.shape)
        x = torch.empty(ROWS, K, requires_grad=True)
        given = {"out": torch.empty(ROWS, N), "dgrad_out": torch.empty(ROWS, K)} if what == "out" else {}
        y = layer(x, torch.empty(G, dtype=torch.int64), True if what == "cached" else None, **given)
        y.sum().backward()
        assert y.shape == (ROWS, N) and x.grad.shape == (ROWS, K)
