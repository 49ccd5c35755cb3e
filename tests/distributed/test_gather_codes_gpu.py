"""On a GPU, over NCCL with one rank: FSDP2's hooks of weights that are gathered as codes, compiled too, and a backward
in two passes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import octavo
from octavo.distributed import gather_codes
from octavo.recipes import SHIPPED
from tests.support.linear_oracle import assert_same
from tests.support.split_backward import needs_split_backward

pytestmark = pytest.mark.gpu

M, K, N, STEPS = 256, 512, 1024, 4


@pytest.fixture(scope="module")
def nccl():
    """A group of one rank."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def built(recipe, codes, policy=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K)).cuda()
    octavo.convert(model, recipe)
    if codes:
        gather_codes(model)
    settings = {"mesh": init_device_mesh("cuda", (1,)), "mp_policy": policy or MixedPrecisionPolicy()}
    for layer in model:
        if isinstance(layer, octavo.Linear):
            fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def losses(model, compiled=False):
    call = torch.compile(model) if compiled else model
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(STEPS):
        for microbatch in range(2):
            torch.manual_seed(10 * step + microbatch)
            loss = (call(torch.randn(M, K, device="cuda")) - 1).square().mean()
            loss.backward()
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        octavo.step(model, dist.group.WORLD)
    return torch.stack(found)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "fp8-block", "nvfp4"])
def test_codes_train_as_values(nccl, recipe):
    model = built(recipe, True)
    assert_same(losses(model), losses(built(recipe, False)), "losses")
    assert [layer._sharded.casts for layer in model if isinstance(layer, octavo.Linear)] == [STEPS, STEPS]


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block"])
def test_a_compiled_model_trains_close(nccl, recipe):
    eager, compiled = losses(built(recipe, True)), losses(built(recipe, True), compiled=True)
    assert (eager - compiled).abs().max() < 1e-2 * eager.max()


def captured_losses(model, replays=True):
    """Two steps run eagerly, the others are replays of one graph of a whole step, or run eagerly too."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, capturable=True)
    x, found = torch.empty(M, K, device="cuda"), []

    def step():
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        octavo.step(model, dist.group.WORLD)
        return loss.detach()

    def filled(number):
        torch.manual_seed(number)
        x.copy_(torch.randn(M, K, device="cuda"))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for number in range(2 if replays else 2 * STEPS):
            filled(number)
            found.append(step())
    side.synchronize()
    if replays:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss = step()
        for number in range(2, 2 * STEPS):
            filled(number)
            graph.replay()
            found.append(loss.clone())
        torch.cuda.synchronize()
    return torch.stack(found)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "fp8-block"])
def test_replays_of_a_captured_step_cast_the_shard_that_they_find(nccl, recipe):
    codes, values = (captured_losses(built(recipe, with_codes)) for with_codes in (True, False))
    eager = captured_losses(built(recipe, True), replays=False)
    assert_same(codes, eager, "losses of replays and of eager steps")
    assert_same(codes, values, "losses of codes and of values")
    assert len(set(codes.tolist())) == 2 * STEPS  # the shard changes, and x


def test_octavos_optimizer_writes_to_shards(nccl):
    found = []
    for codes in (True, False):
        model = built("fp8-block", codes)
        optimizer, own = octavo.optim.AdamW(model.parameters(), lr=0.01), []
        for step in range(STEPS):
            torch.manual_seed(step)
            loss = (model(torch.randn(M, K, device="cuda")) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            own.append(loss.detach())
        found.append(torch.stack(own))
    assert_same(*found, "losses")


@needs_split_backward
@pytest.mark.parametrize("recipe", SHIPPED)
def test_two_passes_are_one_backward(recipe):
    results = []
    for split in (False, True):
        torch.manual_seed(0)
        layer = octavo.LayerNormMLP(K, N, activation="swiglu", recipe=recipe, device="cuda", dtype=torch.bfloat16)
        x, dy = (torch.randn(M, K, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for _ in range(4):  # recorded, and replayed where backward is whole
            leaf = x.clone().requires_grad_()
            y = layer(leaf * 1)
            layer.zero_grad()
            if split:
                (dx,), groups = stage_backward_input([y], [dy], [leaf], layer.parameters())
                stage_backward_weight(layer.parameters(), groups)
            else:
                y.backward(dy)
                dx = leaf.grad
        results.append((dx, [p.grad for p in layer.parameters()], octavo.state_dict(layer)))
    (dx, grads, state), (other, others, another) = results
    assert_same(other, dx, "dx")
    for mine, theirs in zip(others, grads, strict=True):
        assert_same(mine, theirs, "a parameter's gradient")
    for name in state:
        assert_same(another[name], state[name], name)
