"""octavo.moe.Router: what it refuses as x and as its weight, eager and as a part of a mixture."""

import pytest
import torch

import octavo
from octavo.errors import UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.moe import Router

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@dtypes
def test_a_weight_on_another_device_is_refused(dtype):
    with pytest.raises(UnsupportedDevice, match="x is on cpu and the weight on meta"):
        Router(64, 8, device="meta", dtype=dtype)(torch.randn(4, 64, dtype=dtype))
    with pytest.raises(UnsupportedDevice, match="x is on meta and the weight on cpu"):
        Router(64, 8, dtype=dtype)(torch.empty(4, 64, device="meta", dtype=dtype))


def test_a_mixture_on_another_device_names_x():
    with pytest.raises(UnsupportedDevice, match="x is on cpu and the weight on meta"):
        octavo.MoE(64, 96, 8, 2, expert_bias=True, device="meta")(torch.randn(4, 64))


@dtypes
def test_another_number_of_features_is_refused(dtype):
    router = Router(64, 8, dtype=dtype)
    for shape in ((4, 63), ()):
        with pytest.raises(UnsupportedShape, match=r"This Router takes inputs \[..., 64\], got"):
            router(torch.ones(shape, dtype=dtype))


def test_a_weight_in_float64_is_refused():
    with pytest.raises(UnsupportedDtype, match="Router takes its weight in float32, bfloat16 or float16, got"):
        Router(64, 8).double()(torch.randn(4, 64))
