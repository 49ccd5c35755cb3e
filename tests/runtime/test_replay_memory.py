"""When a call lets go of memory: a replay of its inputs and of what it makes, a node of what it saved."""

import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.multiprocessing.reductions import StorageWeakRef

import octavo
from octavo.fusion.rules import activation_bias, moe_experts
from octavo.runtime import call_cache as calls

K, N, ROWS = 64, 96, 32


def replayed(work, make):
    """The source of a call's recording, and its last result."""
    for _ in range(3):
        found = calls.run(("work",), make(), work)
    (source,) = calls.sources()
    return [line.strip() for line in source.splitlines()], found


def test_a_replay_empties_its_list_and_frees_an_input_after_its_last_use(device):
    alive = []

    def work(given):
        first = given[0] * 2
        return None, [first.sum() + given[1]]

    def make():
        given = [torch.ones(8, device=device), torch.ones(1, device=device)]
        alive.append(weakref.ref(given[0]))
        return given

    lines, found = replayed(work, make)
    assert "i0, i1, = tensors; tensors.clear()" in lines
    assert [line for line in lines if line.startswith("del")] == ["del i0", "del t0_0", "del i1, t1_0"]
    assert float(found[1][0]) == 17 and alive[-1]() is None
    given = make()
    calls.run(("work",), given, work)
    assert given == [] and alive[-1]() is None


def test_a_replay_allocates_right_before_the_first_use(device):
    def work(given):
        late, early = torch.empty(8, device=device), torch.empty(8, device=device)
        early.copy_(given[0])
        late.copy_(early * 2)
        return None, [late]

    lines, found = replayed(work, lambda: [torch.ones(8, device=device)])
    (early, late) = [i for i, line in enumerate(lines) if "((8,), (1,)" in line]
    assert early < next(i for i, line in enumerate(lines) if line == "del i0") < late
    assert torch.equal(found[1][0], torch.full((8,), 2.0, device=device))


def linear(device, recipe="fp8-block"):
    torch.manual_seed(0)
    return octavo.Linear(K, N, recipe=recipe, device=device, dtype=torch.bfloat16)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_graph_that_is_kept_runs_backward_again(device, recorded, monkeypatch):
    if not recorded:
        monkeypatch.setattr(calls, "DEVICES", set())
    layer, x = linear(device), torch.randn(ROWS, K, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(ROWS, N, device=device, dtype=torch.bfloat16)
    for _ in range(4):
        y = layer(x)
        first = torch.autograd.grad(y, [x, layer.weight], dy, retain_graph=True)
        again = torch.autograd.grad(y, [x, layer.weight], dy)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        with pytest.raises(RuntimeError, match="a second time"):
            torch.autograd.grad(y, [x, layer.weight], dy)


@contextmanager
def frames_evaluated():
    """Let torch.compile look at each frame, as in a function that it breaks: a call then keeps its arguments."""
    before = set_eval_frame(False)  # it runs graphs that it has, and makes none
    try:
        yield
    finally:
        set_eval_frame(before)


class Mixture(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.experts = octavo.moe.Experts(4, K, N, recipe="fp8-block", device=device, dtype=torch.bfloat16)

    def forward(self, x, indices, probs):
        return self.experts(x, indices, probs)


@pytest.mark.parametrize("way", ["eager", "compiled", "frames evaluated by torch.compile"])
def test_experts_let_go_of_h_before_the_gradients_of_weights(way, device, monkeypatch, fresh_compiler):
    """h is most of what is saved. What Inductor's code passes on, it does not keep."""
    alive, seen = [], []

    def cast(function, dy, inputs, *rest):
        alive.append(StorageWeakRef(inputs.x.untyped_storage()))
        return value(function, dy, inputs, *rest)

    def finish(*arguments):
        seen.append(alive[-1].expired())
        return dw(*arguments)

    value, dw = activation_bias.cast.value, moe_experts.matmul.finish
    monkeypatch.setattr(activation_bias.cast, "value", cast)
    monkeypatch.setattr(activation_bias.cast, "writes_dx", lambda *_: True)  # whatever a fast path proved before
    monkeypatch.setattr(moe_experts.matmul, "finish", finish)
    monkeypatch.setattr(calls, "DEVICES", set())  # as written: a replay is what was recorded
    module = Mixture(device)
    call = torch.compile(module, fullgraph=True) if way == "compiled" else module
    x = torch.randn(ROWS, K, device=device, dtype=torch.bfloat16, requires_grad=True)
    probs, indices = torch.rand(ROWS, 4, device=device).softmax(-1).topk(2)
    for _ in range(2):
        loss = call(x, indices, probs).square().sum()
        with frames_evaluated() if way == "frames evaluated by torch.compile" else nullcontext():
            loss.backward()
    assert seen == [True] * 4
