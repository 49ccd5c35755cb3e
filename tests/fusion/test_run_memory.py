"""Memory of a run: values are let go, results may be written to, gradients may be views or the same twice."""

import copy

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

import octavo
from octavo import ops
from tests.support.sequentials import H, linear, rows
from tests.support.steps import compiled, step


def test_values_that_nobody_keeps_are_let_go():
    places = []

    class Counted(ops.BasicOperation):
        @staticmethod
        def op_forward_compute(config, inputs):
            y = inputs.x + 1
            if not is_fake(y):
                places.append(y.data_ptr())
            return y, ()

        @staticmethod
        def op_forward_save_ctx(config, inputs, y, fresh):
            return ()

        @staticmethod
        def op_backward(config, saved, dy, wants):
            return (dy * 1,)

    octavo.Sequential(*[Counted() for _ in range(10)])(rows(4096).requires_grad_())
    assert len(places) == 10
    assert len(set(places)) < 10  # memory is used again within the run


def test_a_result_may_be_written_to():
    for model in (
        octavo.Sequential(ops.RMSNorm(H), linear(recipe="fp8-current")),
        ops.GELU(),
        ops.RMSNorm(H),
        linear(),
    ):
        for x in (rows(), rows().view(2, 4, H)):
            leaf, twin = x.clone().requires_grad_(), x.clone().requires_grad_()
            y, want = model(leaf), model(twin)
            y.add_(1).sum().backward()
            want.sum().backward()
            assert torch.equal(y, want + 1)
            assert torch.equal(leaf.grad, twin.grad)


def test_gradients_that_are_views_or_the_same_twice():
    class Twice(ops.BasicOperation):
        params = ("gain",)

        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(8, H))

        @staticmethod
        def op_forward_compute(config, inputs):
            return inputs.x + inputs.gain, ()

        @staticmethod
        def op_forward_save_ctx(config, inputs, y, fresh):
            return ()

        @staticmethod
        def op_backward(config, saved, dy, wants):
            return dy.view(dy.shape), dy

    torch._dynamo.reset()
    model, x, dy = octavo.Sequential(Twice(), ops.GELU()), rows(), rows()
    twin = copy.deepcopy(model)
    for a, b in zip(step(model, x, dy), step(twin, x, dy, call=compiled(twin)), strict=True):
        assert torch.equal(a, b)
