"""octavo.inspect on a GPU: no step waits for the device, and captured steps record at each replay."""

import copy
import math

import pytest
import torch
from torch import nn

import octavo
from octavo.inspection import statistics
from octavo.inspection.measure import read
from octavo.quant import MX, NVFP4, Block1D, Block2D, Rowwise, Tensorwise
from octavo.recipes import SHIPPED
from tests.support.cuda_work import kernels_of
from tests.support.waiting import no_waiting

pytestmark = pytest.mark.gpu
every = pytest.mark.parametrize("recipe", SHIPPED)


def mlp(recipe):
    layers = [octavo.Linear(256, 256, recipe=recipe, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    return nn.Sequential(layers[0], nn.GELU(), layers[1])


def rows(number=64):
    return torch.randn(number, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)


def train(call, *inputs):
    for leaf in (*call.parameters(), inputs[0]):  # a gradient of the step before would lie in the memory of its graph
        leaf.grad = None
    call(*inputs).float().square().mean().backward()


def calls(report):
    return {row.calls for row in report.rows()}


@every
def test_a_step_does_not_wait_for_the_device(recipe):
    model, x = mlp(recipe), rows()
    with octavo.inspect(model) as report:
        train(model, x)  # compiles kernels, and probes
        with no_waiting():
            train(model, x)
    assert calls(report) == {2}
    assert report.findings() == []


@every
def test_the_numbers_are_those_of_a_cpu(recipe):
    model = mlp(recipe)
    twin, x = copy.deepcopy(model).cpu(), rows()
    with octavo.inspect(model) as report, octavo.inspect(twin) as want:
        model(x)
        twin(x.detach().cpu())
    found, numbers = report.to_dict(), want.to_dict()
    assert found.keys() == numbers.keys()
    for name in (f"0/{tensor}/{number}" for tensor in "xw" for number in ("underflow", "saturated", "amax")):
        assert name not in found or found[name] == numbers[name]
    assert found["2/y/cosine"] == pytest.approx(numbers["2/y/cosine"], abs=1e-3)


@pytest.mark.parametrize("spec", [Tensorwise(), Rowwise(), Block1D(), Block2D(), MX(), NVFP4()], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_counts_and_histograms_are_those_of_a_cpu(spec, deterministic):
    x = torch.randn(1000, 1111, device="cuda") * torch.logspace(-30, 9, 1000, device="cuda")[:, None]
    x[3, 3], x[4, 4], x[600:800] = math.nan, math.inf, 0.0
    codes = spec.quantize(x.cpu())
    found = []
    for device in ("cuda", "cpu"):
        parts = [t.to(device) for t in codes.tensors()]
        cast = read(spec.assemble(parts, codes.shape, torch.float32), x.shape[1])
        stats = torch.zeros(statistics.SHAPE, dtype=torch.float64, device=device)
        torch.use_deterministic_algorithms(deterministic)
        try:
            statistics.record_operand(stats, "x", x.to(device), cast)
            statistics.record_operand(stats, "w", x.to(device, torch.bfloat16), cast)
        finally:
            torch.use_deterministic_algorithms(False)
        statistics.record_result(stats, "y", x.to(device, torch.bfloat16), x.to(device))
        found.append(stats.cpu())
    sums = [statistics.SUMS.index(name) for name in ("signal", "noise", "cosine")]
    deficit = len(statistics.SUMS) + statistics.LARGEST.index("deficit")
    torch.testing.assert_close(found[0][:, sums], found[1][:, sums], rtol=1e-9, atol=0)
    torch.testing.assert_close(found[0][:, deficit], found[1][:, deficit], rtol=0, atol=1e-12)
    for stats in found:
        stats[:, [*sums, deficit]] = 0
    assert torch.equal(*found)


@every
def test_a_captured_step_records_at_each_replay(recipe):
    model, x = mlp(recipe), rows()
    with octavo.inspect(model) as report:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            train(model, x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            train(model, x)
        report.reset()
        for scale in (1.0, 2.0, 4.0):
            with torch.no_grad():
                x.fill_(scale)
            graph.replay()
        found = report.to_dict()
        assert calls(report) == {3}
    assert found["0/x/amax"] == 4.0


def test_groups_that_change_between_replays():
    layer = octavo.GroupedLinear(3, 256, 128, recipe="fp8-block", dtype=torch.bfloat16, device="cuda")
    x, sizes = rows(), torch.tensor([16, 16, 16], device="cuda")
    with octavo.inspect(layer) as report:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            train(layer, x, sizes)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            train(layer, x, sizes)
        report.reset()
        with torch.no_grad():
            x.fill_(1.0)
            x[32:] = 100.0
        for split in ([32, 0, 0], [16, 0, 16], [0, 0, 0]):
            sizes.copy_(torch.tensor(split))
            graph.replay()
        found = report.to_dict()
    assert found["model/x/amax"] == 1.0  # the tail is not read
    assert found["model/dx/cosine"] > 0.99


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_steps_record(mode):
    model, x = mlp("fp8-current"), rows()
    call = torch.compile(model, fullgraph=True, mode=mode)
    with octavo.inspect(model) as report:
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            train(call, x)
        assert calls(report) == {5}


@pytest.mark.gpu_smoke
def test_outside_of_the_block_the_same_kernels_are_launched():
    model, x = octavo.LayerNormMLP(256, 256, recipe="fp8-block", dtype=torch.bfloat16, device="cuda"), rows()
    for _ in range(4):
        train(model, x)
    before = kernels_of(lambda: train(model, x))
    with octavo.inspect(model):
        inside = kernels_of(lambda: train(model, x))
    for _ in range(4):
        train(model, x)
    assert kernels_of(lambda: train(model, x)) == before
    assert len(inside) > len(before)
