"""octavo.moe.Router: products in float32, eager and compiled, and what it refuses as x and as its weight."""

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import octavo
from octavo.errors import UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.moe import Router
from tests.support.linear_oracle import spiky
from tests.support.mixtures import D, E, T, batch
from tests.support.steps import relative_error

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def test_logits_are_float32_products():
    router = Router(D, E, dtype=torch.bfloat16)
    x, dy = batch(dtype=torch.bfloat16)[0].requires_grad_(), spiky(T, E, seed=3)
    saved = []
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        logits = router(x)
        logits.backward(dy)
    exact = [t.detach().double() for t in (x, router.weight)]
    assert logits.dtype == torch.float32 and relative_error(logits, exact[0] @ exact[1].T) < 1e-6
    assert relative_error(x.grad, dy.double() @ exact[1]) < 4e-3
    assert relative_error(router.weight.grad, dy.double().T @ exact[0]) < 4e-3
    assert {t.dtype for t in saved} == {torch.bfloat16}
    assert isinstance(router, nn.Linear) and router.bias is None


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


@dtypes
def test_torchs_transforms_and_tracer_take_a_router(dtype):
    router = Router(64, 8, dtype=dtype)
    x = torch.randn(3, 4, 64, dtype=dtype)
    y, dy = router(x), torch.randn(3, 4, 8)
    leaf = x.clone().requires_grad_()
    router(leaf).backward(dy)
    assert torch.equal(torch.func.vmap(router)(x), y)
    mapped = torch.compile(lambda x: torch.func.vmap(router)(x), fullgraph=True, backend="aot_eager")
    assert torch.equal(mapped(x), y)
    assert torch.equal(torch.func.grad(lambda x: (router(x) * dy).sum())(x), leaf.grad)
    weights = torch.stack([router.weight.detach(), 2 * router.weight.detach()])
    both = torch.func.vmap(lambda weight: torch.func.functional_call(router, {"weight": weight}, (x,)))(weights)
    assert torch.equal(both, torch.stack([y, 2 * y]))
    assert torch.equal(torch.func.jvp(router, (x,), (x,))[1], y)
    assert torch.equal(torch.jit.trace(router, (torch.ones(3, 4, 64, dtype=dtype),))(x), y)


@dtypes
@pytest.mark.parametrize("shape", [(17, 64), (2, 9, 64), (1, 64)], ids=str)
@pytest.mark.parametrize("experts", [8, 1])
def test_a_compiled_router_under_autocast_has_the_bits_of_an_eager_one(dtype, shape, experts, fresh_compiler):
    router = Router(64, experts, dtype=dtype)
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    dy, found = torch.randn(*shape[:-1], experts), []
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    for enabled in (False, True):
        for call in (router, compiled):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                logits = call(x)
            found.append((logits, *torch.autograd.grad(logits, [x, router.weight], dy)))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_a_compiled_router_is_one_node_each_way(fresh_compiler):
    router, nodes = Router(64, 8), []

    def keep(graph, _):
        nodes.append(
            [str(n.target) for n in graph.graph.nodes if n.op == "call_function" and "octavo" in str(n.target)]
        )
        return graph

    compiled = torch.compile(router, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    with torch.autocast("cpu", torch.bfloat16):
        compiled(torch.randn(4, 64, requires_grad=True)).sum().backward()
    assert [len(names) for names in nodes] == [1, 1]


def test_a_compiled_shared_gate_under_autocast_has_the_bits_of_an_eager_one(fresh_compiler):
    moe = octavo.MoE(64, 32, 4, 2, recipe="fp8-block", shared_ffn_size=32, shared_gate=True)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    x, found = torch.randn(17, 64, requires_grad=True), []
    for call in (moe, compiled):
        with torch.autocast("cpu", torch.bfloat16):
            y = call(x)
        found.append((y, *torch.autograd.grad(y.float().square().sum(), [x, *moe.parameters()])))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
