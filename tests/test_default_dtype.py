"""torch.set_default_dtype changes no bit of what has a dtype of its own: the same layers, recipes and inputs give the
same outputs, gradients and state under every default."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import ops
from octavo.recipes import SHIPPED

DEFAULTS = (torch.bfloat16, torch.float16, torch.float64)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
SETTINGS = ("fp8-rowwise(pow2=False)", "fp8-block(scale='fp32')", "nvfp4(stochastic=False)", "mxfp8(rounding='even')")


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def filled(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for p in module.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float32) * 0.1)
    return module


def linear(recipe: str, settings: dict) -> tuple[nn.Module, list]:
    return filled(octavo.Linear(144, 80, recipe=recipe, **settings)), []


def grouped(recipe: str, settings: dict) -> tuple[nn.Module, list]:
    sizes = torch.tensor([17, 0, 40, 5], device=settings["device"])
    return filled(octavo.GroupedLinear(4, 144, 80, recipe=recipe, **settings)), [sizes]


def mlp(recipe: str, settings: dict) -> tuple[nn.Module, list]:
    block = octavo.LayerNormMLP(144, 96, normalization="RMSNorm", activation="swiglu", recipe=recipe, **settings)
    return filled(block), []


def small_operations(recipe: str, settings: dict) -> tuple[nn.Module, list]:
    layers = (ops.LayerNorm(144, **settings), ops.GELU(), octavo.Linear(144, 80, recipe=recipe, **settings), ops.ReLU())
    return filled(octavo.Sequential(*layers)), []


def mixture(recipe: str, settings: dict) -> tuple[nn.Module, list]:
    losses = {"score": "sqrtsoftplus", "expert_bias": True, "aux_loss_coef": 0.1, "z_loss_coef": 0.1}
    return filled(octavo.MoE(144, 96, 4, 2, recipe=recipe, shared_ffn_size=32, **losses, **settings)), []


def two_steps(make, recipe: str, device: str, compiled: bool = False) -> dict[str, Tensor]:
    """Everything that two steps leave behind."""
    torch.manual_seed(0)
    module, extra = make(recipe, {"device": device, "dtype": torch.bfloat16})
    call = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    left = {}
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(72, 144, generator=generator, dtype=torch.float32).to(device, torch.bfloat16).requires_grad_()
        y = call(x, *extra)
        y.backward(torch.randn(y.shape, generator=generator, dtype=torch.float32).to(y) * 0.01)
        octavo.step(module)
        left |= {f"aux_loss{step}": module.aux_loss.detach()} if isinstance(module, octavo.MoE) else {}
        left |= {f"y{step}": y.detach(), f"dx{step}": x.grad}
        left |= {f"{name}.grad{step}": p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    state = octavo.state_dict(module)
    return left | {f"state {name}": value for name, value in state.items() if isinstance(value, Tensor)}


def assert_same(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [linear, grouped, mlp, small_operations, mixture])
@pytest.mark.parametrize("recipe", [*SHIPPED, *SETTINGS])
def test_every_layer_and_recipe(recipe, make, device):
    want = two_steps(make, recipe, device)
    for dtype in DEFAULTS:
        with default(dtype):
            assert_same(two_steps(make, recipe, device), want)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-rowwise", "nvfp4"])
@pytest.mark.parametrize("make", [linear, grouped])
def test_compiled(recipe, make):
    want = two_steps(make, recipe, "cpu")
    torch.compiler.reset()
    with default(torch.float64):
        assert_same(two_steps(make, recipe, "cpu", compiled=True), want)


@pytest.mark.parametrize("recipe", SHIPPED)
def test_weights_held_as_codes_and_cached(recipe):
    def outputs() -> list[Tensor]:
        torch.manual_seed(0)
        layer, _ = linear(recipe, {"device": "cpu", "dtype": torch.bfloat16})
        x = torch.randn(8, 144, dtype=torch.float32).bfloat16()
        found = [layer(x, is_first_microbatch=True), layer(x, is_first_microbatch=False)]
        if recipe != "bf16":
            octavo.quantize_weights(layer)
            found.append(layer(x))
        return found

    want = outputs()
    for dtype in DEFAULTS:
        with default(dtype):
            for a, b in zip(outputs(), want, strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b)


def test_layers_without_a_dtype_take_the_default():
    with default(torch.bfloat16):
        assert octavo.Linear(16, 16, recipe="fp8-current").weight.dtype == torch.bfloat16
        assert ops.RMSNorm(16).weight.dtype == torch.bfloat16
