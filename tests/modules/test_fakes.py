"""Layers under FakeTensorMode: shapes without data, as a memory estimator runs them; no fake stays in a real layer."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import octavo

G, K, N, R = 3, 32, 48, 32
EACH = {"single_grouped_weight": False, "single_grouped_bias": False}
each = pytest.mark.parametrize("layout", [{}, EACH], ids=["single", "per group"])


def make(seed=0, n=N, **settings):
    torch.manual_seed(seed)
    return octavo.GroupedLinear(G, K, n, **settings)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "nvfp4"])
@pytest.mark.parametrize("what", ["plain", "out", "fused", "delayed", "cached"])
@each
def test_fake_tensors_go_through(layout, recipe, what):
    with FakeTensorMode():
        settings = {"fuse_wgrad_accumulation": what == "fused", "delay_wgrad_compute": what == "delayed"}
        layer = make(recipe=recipe, **settings, **layout)
        for p in layer.weight_parts():
            p.main_grad = torch.zeros(p.shape)
        x = torch.empty(R, K, requires_grad=True)
        given = {"out": torch.empty(R, N), "dgrad_out": torch.empty(R, K)} if what == "out" else {}
        y = layer(x, torch.empty(G, dtype=torch.int64), True if what == "cached" else None, **given)
        y.sum().backward()
        assert y.shape == (R, N) and x.grad.shape == (R, K)
