"""Split layers whose group has one rank: the plain layers' calls, graphs and bits, and nothing is sent."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd

import octavo
from octavo.communication import collectives
from octavo.communication.groups import size_of
from octavo.errors import UnsupportedConfig
from octavo.recipes import SHIPPED
from tests.support.training import seeded

M, K, N = 64, 128, 64
MODES = (("column", False), ("column", True), ("row", False), ("row", True))
BLOCKS = ("LayerNormLinear", "LayerNormMLP", "column GroupedLinear", "row GroupedLinear", "SumGradient", "AllGather")


@pytest.fixture
def group(monkeypatch):
    """A group of this process alone, over which nothing may be sent."""

    def sent(kind, *rest):
        raise AssertionError(f"a {kind} of one rank")

    monkeypatch.setattr(collectives, "sent", sent)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group([0])
    if dist.is_initialized():
        dist.destroy_process_group()


linear = partial(seeded, octavo.Linear, K, N, dtype=torch.bfloat16)


def block(kind, group):
    """A block that is split over a group, or not for None; and how it is called."""
    torch.manual_seed(0)
    common = {"dtype": torch.bfloat16, "recipe": "fp8-block"}
    split = {"tp_group": group}
    if kind == "LayerNormLinear":
        split |= {"parallel_mode": "column", "sequence_parallel": True}
        model = octavo.LayerNormLinear(K, N, **common, **(split if group else {}))
    elif kind == "LayerNormMLP":
        split |= {"set_parallel_mode": True, "sequence_parallel": True}
        model = octavo.LayerNormMLP(K, 2 * K, activation="swiglu", **common, **(split if group else {}))
    elif kind.endswith("GroupedLinear"):
        split |= {"parallel_mode": kind.split()[0]}
        model = octavo.GroupedLinear(2, K, N, **common, **(split if group else {}))
    else:
        own = octavo.Linear(K, N, **common)
        model = octavo.Sequential(getattr(octavo.ops, kind)(group), own) if group else octavo.Sequential(own)
    splits = torch.tensor([M // 4, 3 * M // 4])
    return model, (lambda x: model(x, splits)) if kind.endswith("GroupedLinear") else model


def step(model, call, x):
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    y.backward(torch.ones_like(y))
    return [y.detach(), leaf.grad, *[p.grad.clone() for p in model.parameters()]]


def operators(model, call, x):
    """The operators of an eager step, in order."""
    for _ in range(3):  # the driver records a call, and then replays it
        step(model, call, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        step(model, call, x)
    return [event.name for event in seen.events()]


def graphs(model, call, x):
    """The code of the graphs of a step, forward and backward."""
    torch._dynamo.reset()
    found = []

    def show(module, inputs):
        found.append(module.code)
        return module

    step(model, torch.compile(call, backend=aot_autograd(fw_compiler=show, bw_compiler=show), fullgraph=True), x)
    assert len(found) == 2
    return found


def compare(plain, split, x):
    """Both are a model and its call."""
    for a, b in zip(step(*split, x), step(*plain, x), strict=True):
        assert torch.equal(a, b)
    assert operators(*split, x) == operators(*plain, x)
    assert graphs(*split, x) == graphs(*plain, x)


SAMPLE = ("fp8-delayed", "fp8-block")


@pytest.mark.parametrize("recipe", [r if r in SAMPLE else pytest.param(r, marks=pytest.mark.slow) for r in SHIPPED])
@pytest.mark.parametrize(("mode", "sequence"), MODES)
def test_a_linear_is_the_plain_one(group, recipe, mode, sequence):
    plain = linear(recipe=recipe)
    again = mode == "column" and sequence
    split = linear(recipe=recipe, parallel_mode=mode, sequence_parallel=sequence, tp_group=group, gather_again=again)
    x = torch.randn(M, K).bfloat16()
    compare((plain, plain), (split, split), x)
    for layer in (plain, split):
        octavo.step(layer)
    assert torch.equal(split(x), plain(x))


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_is_the_plain_one(group, kind):
    compare(block(kind, None), block(kind, group), torch.randn(M, K).bfloat16())


@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP"])
def test_layers_of_one_rank_fuse_as_plain_ones_do(group, kind):
    x = torch.randn(M, K).bfloat16().requires_grad_()
    explanation = [block(kind, ranks)[0].explain(x) for ranks in (None, group)]
    assert explanation[0].fired == explanation[1].fired != ()
    assert explanation[0].alone == explanation[1].alone


def test_explain_says_of_a_layer_that_it_is_not_split(group):
    split = linear(recipe="fp8-block", parallel_mode="column", sequence_parallel=True, tp_group=group)
    (explanation,) = octavo.explain(torch.nn.Sequential(split), torch.ones(M, K)).layers
    assert explanation.parallel == ""


def test_a_linear_whose_group_is_gone_says_so(group):
    split = linear(recipe="fp8-block", parallel_mode="column", tp_group=group)
    grouped = octavo.GroupedLinear(2, K, N, parallel_mode="row", tp_group=group)
    dist.destroy_process_group()
    for call in (lambda: split(torch.ones(M, K)), lambda: grouped(torch.ones(M, K), [M, 0])):
        with pytest.raises(UnsupportedConfig, match=r"does not exist: torch\.distributed is not initialized"):
            call()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(UnsupportedConfig, match="has no process group named"):
        split(torch.ones(M, K))


def test_the_size_of_a_group_is_that_of_the_group_of_now():
    assert size_of("") == 1
    for backend, ranks in (("gloo", 1), ("fake", 4), ("fake", 2)):
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=ranks)
        try:
            own = dist.new_group([0])
            name = own.group_name
            assert [size_of(name), size_of(name), size_of(""), size_of("")] == [1, 1, ranks, ranks]
            dist.destroy_process_group(own)
            with pytest.raises(UnsupportedConfig, match="has no process group named"):
                size_of(name)
        finally:
            dist.destroy_process_group()
        assert size_of("") == 1
