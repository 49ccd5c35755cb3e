"""fuse_wgrad_accumulation="overwrite_first": the first microbatch replaces main_grad, the others add to it."""

import pytest
import torch

import octavo
from octavo.errors import UnsupportedConfig
from tests.support.linear_oracle import assert_same, spiky
from tests.support.steps import compiled

SIZES = torch.tensor([5, 0, 9])


def linear(setting):
    torch.manual_seed(0)
    return octavo.Linear(32, 48, recipe="fp8-block", fuse_wgrad_accumulation=setting), {}


def grouped(setting):
    torch.manual_seed(0)
    return octavo.GroupedLinear(3, 32, 48, recipe="fp8-block", fuse_wgrad_accumulation=setting), {"m_splits": SIZES}


def accumulated(make, setting, flags, start, call=lambda layer: layer):
    layer, given = make(setting)
    layer.weight.main_grad = torch.full_like(layer.weight, start)
    for i, first in enumerate(flags):
        y = call(layer)(spiky(14, 32, seed=i).requires_grad_(), is_first_microbatch=first, **given)
        y.backward(spiky(14, 48, seed=i + 5))
    return layer.weight.main_grad


@pytest.mark.parametrize("make", [linear, grouped])
@pytest.mark.usefixtures("fresh_compiler")
def test_the_first_replaces_what_is_there(make):
    flags = (True, False, False)
    want = accumulated(make, True, flags, 0.0)
    assert_same(accumulated(make, "overwrite_first", flags, float("nan")), want)
    assert_same(accumulated(make, "overwrite_first", flags, float("nan"), compiled), want)
    assert accumulated(make, True, flags, float("nan")).isnan().all()  # where it adds


@pytest.mark.parametrize("flags", [(None, None), (False, False)])
def test_a_call_that_is_not_the_first_adds(flags):
    assert_same(accumulated(linear, "overwrite_first", flags, 0.5), accumulated(linear, True, flags, 0.5))


def test_a_deferred_gradient_replaces_too():
    layer = octavo.Linear(32, 48, fuse_wgrad_accumulation="overwrite_first", delay_wgrad_compute=True)
    layer.weight.main_grad = torch.full_like(layer.weight, float("nan"))
    layer(spiky(14, 32), is_first_microbatch=True).sum().backward()
    layer.backward_dw()
    assert layer.weight.main_grad.isfinite().all()


def test_a_flag_on_the_device_and_an_unknown_setting_are_refused():
    layer, _ = linear("overwrite_first")
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    with pytest.raises(UnsupportedConfig, match="is_first_microbatch is a tensor"):
        layer(spiky(14, 32), is_first_microbatch=torch.tensor([1]))
    with pytest.raises(UnsupportedConfig, match=r"Linear\.fuse_wgrad_accumulation"):
        linear("first")
