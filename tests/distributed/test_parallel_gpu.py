"""Split layers on a GPU: one rank captured, bit for bit the plain layer; and two processes on one device."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import octavo
from octavo.ops.quantized import Quantized
from octavo.recipes import SHIPPED
from tests.support.processes import ROOT
from tests.support.recipe_traits import is_stochastic

pytestmark = pytest.mark.gpu

M, K, N = 256, 512, 384
MODES = [("column", False), ("column", True), ("row", False), ("row", True)]


@pytest.fixture(scope="module")
def nccl():
    """A group of one rank."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(recipe, **settings):
    torch.manual_seed(0)
    return octavo.Linear(K, N, device="cuda", dtype=torch.bfloat16, recipe=recipe, **settings)


def tensors():
    torch.manual_seed(1)
    return [torch.randn(M, n, device="cuda", dtype=torch.bfloat16) for n in (K, N)]


def step(layer, call, x, dy):
    layer.weight.grad = layer.bias.grad = None
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    y.backward(dy)
    return [t.detach().clone() for t in (y, leaf.grad, layer.weight.grad, layer.bias.grad)]


def captured(layer, x, dy):
    """The results of a step that is replayed from a CUDA graph."""
    leaf = x.clone().requires_grad_()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            layer.weight.grad = layer.bias.grad = leaf.grad = None
            layer(leaf).backward(dy)
    side.synchronize()
    layer.weight.grad = layer.bias.grad = leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(leaf)
        y.backward(dy)
    for t in (y, leaf.grad, layer.weight.grad, layer.bias.grad):
        t.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return [t.detach().clone() for t in (y, leaf.grad, layer.weight.grad, layer.bias.grad)]


def equal(found, right):
    return [torch.equal(a, b) for a, b in zip(found, right, strict=True)]


deterministic = [recipe for recipe in SHIPPED if not is_stochastic(recipe)]


@pytest.mark.parametrize("recipe", deterministic)
@pytest.mark.parametrize(("mode", "sequence"), MODES)
def test_one_rank_captured_is_the_plain_layer(recipe, mode, sequence):
    x, dy = tensors()
    plain = make(recipe)
    split = make(recipe, parallel_mode=mode, sequence_parallel=sequence)
    right = captured(plain, x, dy)
    assert equal(captured(split, x, dy), right) == [True] * 4
    assert equal(step(split, split, x, dy), step(plain, plain, x, dy)) == [True] * 4


@pytest.fixture
def forced(monkeypatch):
    """The parallel path with its collectives, over one rank."""
    monkeypatch.setattr(Quantized, "_split_over_ranks", lambda self: self.parallel)


@pytest.mark.usefixtures("nccl", "forced")
@pytest.mark.parametrize("recipe", deterministic)
@pytest.mark.parametrize(("mode", "sequence"), MODES)
def test_collectives_of_one_rank_are_captured_too(recipe, mode, sequence):
    x, dy = tensors()
    plain, split = make(recipe), make(recipe, parallel_mode=mode, sequence_parallel=sequence)
    right = step(plain, plain, x, dy)
    found = captured(split, x, dy)
    # a row layer adds its bias to y in bf16, after the sum
    assert equal(found, right)[1:] == [True] * 3
    assert (found[0].float() - right[0].float()).abs().max() <= 2**-6 * right[0].float().abs().max()
    if mode == "column":
        assert torch.equal(found[0], right[0])


@pytest.mark.usefixtures("nccl", "forced")
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "fp8-delayed"])
@pytest.mark.parametrize(("mode", "sequence"), MODES)
@pytest.mark.parametrize("compiler", ["default", "reduce-overhead"])
def test_compiled_has_the_bits_of_eager_and_skips_no_cuda_graph(recipe, mode, sequence, compiler):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    x, dy = tensors()
    split = make(recipe, parallel_mode=mode, sequence_parallel=sequence)
    twin = make(recipe, parallel_mode=mode, sequence_parallel=sequence)
    call = torch.compile(split, fullgraph=True, mode=compiler)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        found = step(split, call, x, dy)
        right = step(twin, twin, x, dy)
        assert equal(found, right) == [True] * 4
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_two_processes_on_one_device_say_what_works(tmp_path):
    """Each result is True or the error. Only gloo's own collectives must work; the rest is reported."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.distributed.two_on_one_gpu", str(tmp_path / "store")]
    processes = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=300)[0] for process in processes]
    print(said[0], [process.returncode for process in processes])
    report = json.loads(said[0].splitlines()[-1])
    assert report["gloo all-reduce of CUDA tensors"] is report["gloo all-gather of CUDA bytes"] is True
