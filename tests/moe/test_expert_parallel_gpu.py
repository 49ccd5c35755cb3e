"""moe.ExpertParallel on a GPU, in a group of one rank: captured, without waiting, and through NCCL's own exchange."""

import pytest
import torch
import torch.distributed as dist

import octavo
from octavo import moe
from octavo.communication import all_to_all, collectives
from tests.support.linear_oracle import assert_same
from tests.support.steps import assert_equal
from tests.support.waiting import no_waiting

pytestmark = pytest.mark.gpu
E, D, N, T, K = 8, 256, 384, 300, 2


@pytest.fixture(scope="module")
def nccl():
    """A group of one rank."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def mixture(recipe, **settings):
    torch.manual_seed(0)
    return octavo.MoE(D, N, E, K, recipe=recipe, device="cuda", dtype=torch.bfloat16, **settings)


def batch(seed):
    """x and dy; a shift of x that differs from batch to batch moves all tokens to some experts."""
    generator = torch.Generator().manual_seed(seed + 100)
    x, dy = (torch.randn(T, D, generator=generator) for _ in range(2))
    if seed % 3:
        x += seed % 3 * torch.randn(1, D, generator=generator)
    return x.cuda().bfloat16(), dy.cuda().bfloat16() / T


def step(model, x, dy):
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.backward(dy)
    return [y.detach(), leaf.grad, *(p.grad for p in model.parameters())]


@pytest.mark.gpu_smoke
@pytest.mark.parametrize("engine", ["all-to-all", "padded", "symmetric"])
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8"])
def test_values_have_the_bits_of_a_dispatcher_within_the_process(nccl, recipe, engine):
    model = mixture(recipe, dispatcher=moe.ExpertParallel(nccl, engine=engine, payload="values"))
    twin = mixture(recipe, dispatcher=moe.LocalDispatch())
    for seed in range(3):
        assert_equal(step(model, *batch(seed)), step(twin, *batch(seed)), recipe)
        octavo.step(model)
        octavo.step(twin)


@pytest.mark.parametrize("engine", ["all-to-all", "padded", "symmetric"])
@pytest.mark.parametrize("recipe", ["fp8-rowwise", "fp8-block", "mxfp8"])
def test_codes_have_the_bits_of_values_in_y_and_dx(nccl, recipe, engine):
    """Row codes are those that the experts would cast; gradients of weights take columns from them."""
    model = mixture(recipe, dispatcher=moe.ExpertParallel(nccl, engine=engine, payload="codes"))
    found, want = step(model, *batch(1)), step(mixture(recipe, dispatcher=moe.LocalDispatch()), *batch(1))
    assert_equal(found[:2], want[:2], recipe)
    for a, b in zip(found[2:], want[2:], strict=True):
        assert (a - b).float().norm() <= 0.06 * b.float().norm()


@pytest.mark.gpu_smoke
@pytest.mark.parametrize("engine", ["padded", "symmetric"])
@pytest.mark.parametrize("payload", ["values", "codes"])
@pytest.mark.parametrize("capacity", [None, 200])
def test_a_step_waits_for_nothing_and_a_captured_one_follows_the_routing(nccl, engine, payload, capacity):
    settings = {"engine": engine, "payload": payload, "capacity": capacity}
    model, twin = (mixture("fp8-block", dispatcher=moe.ExpertParallel(nccl, **settings)) for _ in range(2))
    x, dy = batch(0)
    x.requires_grad_()

    def run():
        for p in (x, *model.parameters()):
            p.grad = None
        y = model(x)
        y.backward(dy)
        return y

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    with no_waiting():
        run()
    graph = torch.cuda.CUDAGraph()
    for p in (x, *model.parameters()):
        p.grad = None
    with torch.cuda.graph(graph):
        y = run()
    loads = set()
    for seed in range(6):
        data = batch(seed)
        with torch.no_grad():
            x.copy_(data[0])
        dy.copy_(data[1])
        graph.replay()
        want = step(twin, *data)
        assert_equal([y.detach(), x.grad, *(p.grad for p in model.parameters())], want, f"replay {seed}")
        loads.add(tuple(model.load.tolist()))
    dropped = model.overflow()
    assert len(loads) > 3 and dropped == twin.overflow() and (capacity is not None or dropped == 0)


def test_exact_numbers_are_refused_in_a_capture(nccl):
    model = mixture("fp8-block", dispatcher=moe.ExpertParallel(nccl))
    x, _ = batch(0)
    model(x)
    torch.cuda.synchronize()
    refused = pytest.raises(octavo.errors.UnsupportedConfig, match="reads on the host how many rows")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(x)


def test_the_exchange_of_a_graph_runs_over_nccl(nccl):
    """The group of one rank sends nothing in a layer; here NCCL does send."""
    x = torch.randn(64, D, device="cuda")
    operator = all_to_all.all_to_all_single
    found = collectives.sent("all-to-all", operator, "here", "", x.view(torch.uint8), [64], [64])
    assert_same(found.view(torch.float32), x)
    out = torch.empty_like(x)
    dist.all_to_all_single(out[:64], x[:64], [64], [64], group=nccl, async_op=True).wait()
    assert_same(out, x)


def test_one_rank_has_the_layer_of_one_process(nccl):
    assert type(mixture("fp8-block", ep_group=nccl).experts) is moe.Experts


def test_memory_that_ranks_share_is_not_made_in_a_capture(nccl):
    model = octavo.MoE(
        8 * D, N, E, K, recipe="bf16", dispatcher=moe.ExpertParallel(nccl, engine="symmetric"), device="cuda",
        dtype=torch.bfloat16,
    )  # fmt: skip
    x = torch.randn(8 * T, 8 * D, device="cuda", dtype=torch.bfloat16)
    refused = pytest.raises(octavo.errors.UnsupportedConfig, match="Call the layer once with as many tokens before")
    with refused, torch.no_grad(), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(x)


def test_processes_on_one_gpu_have_the_bits_of_one_process_or_say_why_not():
    """Over symmetric memory; a machine that does not map it for processes on one GPU is named in a sentence."""
    from benchmarks.expert_processes import compared

    for answer in compared(2, ["fp8-block"], True, 100)["ranks"]:
        assert "fp8-block, codes" in answer, answer
        for title, found in answer.items():
            refused = isinstance(found, str) and "symmetric memory does not map" in found
            assert refused or "gloo" in title or (found["right"] if isinstance(found, dict) else found is not False), (
                found
            )
