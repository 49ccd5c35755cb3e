"""Linear on a GPU: the CPU's results within the bounds of FP8 accumulation, no waiting for the device, nothing useless
launched, and the same bits from a CUDA graph."""

import copy

import pytest
import torch

import octavo
from octavo.quant import Tensorwise
from octavo.recipes import SHIPPED
from tests.support.cuda_work import kernels_of
from tests.support.linear_oracle import Result, make, run, spiky
from tests.support.pairs import pairs
from tests.support.recipe_traits import QUANTIZED
from tests.support.waiting import no_waiting

pytestmark = pytest.mark.gpu

every = pytest.mark.parametrize("recipe", SHIPPED)
quantized = pytest.mark.parametrize("recipe", QUANTIZED)


def on_gpu(layer):
    return copy.deepcopy(layer).cuda()


def to_gpu(result: Result) -> Result:
    return Result(*(None if t is None else t.cpu() for t in vars(result).values()))


def assert_close(found, want, size, what, bias=0.0):
    """Tensor cores keep about 14 bits of a running sum, or promote it every 128, and may round it before the bias is
    added; both sides are rounded, to neighbours at worst. A wrong code or scale is far off."""
    bound = 1e-3 * size + 2**-7 * (want.double().abs() + bias) + 1e-30
    worst = ((found.double() - want.double()).abs() / bound).max().item()
    assert worst <= 1.0, f"{what}: {worst:.3g} of its bound"


@pytest.mark.gpu_smoke
@pairs(
    recipe=SHIPPED,
    size=[(256, 128, 384), (130, 272, 208), (17, 33, 50), (1, 16, 8)],
    dtype=[torch.bfloat16, torch.float32, torch.float16],
)
def test_the_gpu_agrees_with_the_cpu(recipe, dtype, size):
    m, k, n = size
    layer = make(recipe, k, n, dtype=dtype)
    x, dy = spiky(2, m, k, dtype=dtype, seed=3, size=8.0), spiky(2, m, n, dtype=dtype, seed=4, size=8.0)
    there = on_gpu(layer)
    want, found = run(layer, x, dy), to_gpu(run(there, x.cuda(), dy.cuda()))
    absolute = [t.reshape(-1, t.shape[-1]).double().abs() for t in (x, dy)]
    w = layer.weight.detach().double().abs()
    bias = layer.bias.detach().double().abs()
    assert_close(found.y, want.y, (absolute[0] @ w.T).view_as(want.y), "y", bias)
    assert_close(found.dx, want.dx, (absolute[1] @ w).view_as(want.dx), "dx")
    assert_close(found.dw, want.dw, absolute[1].T @ absolute[0], "dw")
    assert_close(found.db, want.db, absolute[1].sum(0), "db")


@every
def test_a_step_never_waits_for_the_device(recipe):
    layer = make(recipe, 256, 128, dtype=torch.bfloat16).cuda()
    x = spiky(64, 256, dtype=torch.bfloat16).cuda()
    dy = spiky(64, 128, dtype=torch.bfloat16).cuda()
    run(layer, x, dy)
    octavo.step(layer)
    with no_waiting():
        run(layer, x, dy)
        run(layer, x, dy, is_first_microbatch=True)
        run(layer, x, dy, is_first_microbatch=False)
        octavo.step(layer)
        octavo.refresh_weights(layer)


CASTS = {"all": 3, "frozen weight": 3, "frozen input": 3, "bias only": 2, "nothing": 2}


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_what_no_gradient_needs_is_not_launched(recipe):
    def launched(weight, x_grad, bias):
        layer = make(recipe, 256, 128, dtype=torch.bfloat16).cuda()
        layer.weight.requires_grad_(weight)
        layer.bias.requires_grad_(bias)
        x = spiky(64, 256, dtype=torch.bfloat16).cuda().requires_grad_(x_grad)
        dy = spiky(64, 128, dtype=torch.bfloat16).cuda()

        def step():
            y = layer(x)
            if y.requires_grad:
                y.backward(dy)

        return kernels_of(step)

    found = {
        "all": launched(True, True, True),
        "frozen weight": launched(False, True, True),
        "frozen input": launched(True, False, True),
        "bias only": launched(False, False, True),
        "nothing": launched(False, False, False),
    }
    assert {name: sum("_cast_kernel" in k for k in names) for name, names in found.items()} == CASTS
    total = {name: len(names) for name, names in found.items()}
    assert total["all"] > total["frozen weight"] > total["bias only"] > total["nothing"], total
    assert total["all"] > total["frozen input"] > total["bias only"], total


@pytest.mark.gpu_smoke
@every
def test_a_captured_step_replays_the_eager_bits(recipe):
    """Forward and backward in one graph, new data each replay; delayed state and random counters go along."""
    eager = make(recipe, 256, 128, dtype=torch.bfloat16).cuda()
    graphed = copy.deepcopy(eager)
    x = torch.zeros(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.zeros(64, 128, device="cuda", dtype=torch.bfloat16)

    def step(layer):
        for t in (x, *layer.parameters()):
            t.grad = None
        y = layer(x)
        y.backward(dy)
        return y

    warm = copy.deepcopy(graphed)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(warm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(graphed)
    grads = [t.grad for t in (x, *graphed.parameters())]
    for i in range(3):
        with torch.no_grad():
            x.copy_(spiky(64, 256, dtype=torch.bfloat16, seed=i))
            dy.copy_(spiky(64, 128, dtype=torch.bfloat16, seed=10 + i))
        graph.replay()
        found = [captured.clone(), *[g.clone() for g in grads]]
        y = step(eager)
        for a, b in zip(found, [y, x.grad, *[p.grad for p in eager.parameters()]], strict=True):
            assert torch.equal(a, b), i
        octavo.step(eager)
        octavo.step(graphed)
    for key, value in octavo.state_dict(eager).items():
        assert torch.equal(value, octavo.state_dict(graphed)[key]), key


def test_a_tensor_off_its_alignment_gets_a_kernel_of_its_own():
    """The same shapes and dtypes, 16-byte aligned first and then not."""
    spec = Tensorwise()
    storage = spiky(33, 64, dtype=torch.bfloat16).cuda().flatten()
    for offset in (0, 1, 0, 3):
        x = storage[offset : offset + 32 * 64].view(32, 64)
        for got, want in zip(spec.quantize_both(x), spec.quantize_both(x.cpu()), strict=True):
            assert torch.equal(got.codes.view(torch.uint8).cpu(), want.codes.view(torch.uint8))


@quantized
def test_cached_weights_stay_where_they_are_and_change_nothing(recipe):
    layer, plain = (make(recipe, 256, 128, dtype=torch.bfloat16).cuda() for _ in range(2))
    octavo.load_state_dict(plain, octavo.state_dict(layer))
    addresses = None
    for i, first in enumerate((True, False, True, False)):
        x, dy = spiky(64, 256, dtype=torch.bfloat16, seed=i).cuda(), spiky(64, 128, dtype=torch.bfloat16, seed=9).cuda()
        a, b = run(layer, x, dy, is_first_microbatch=first), run(plain, x, dy)
        for name, value in vars(a).items():
            assert torch.equal(value, getattr(b, name)), (i, name)
        held = [layer._hidden.get_buffer(name).data_ptr() for name in ("weight_row_codes", "weight_column_codes")]
        assert addresses in (None, held)
        addresses = held
