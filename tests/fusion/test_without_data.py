"""Operations are run without data to learn their shapes: those that read values are refused with what to do."""

import pytest
import torch

import octavo
from octavo import ops
from tests.support.custom_operations import Doubled, computes, define, fused, quadruple, stepped
from tests.support.linear_oracle import spiky
from tests.support.sequentials import H
from tests.support.steps import assert_equal, compiled, step


def only_positive(x):
    return x if x.sum() > 0 else 2 * x


PEEKS = {
    "item": lambda x: x * x.abs().max().item(),
    "bool": lambda x: only_positive(x).clone(),
    "sizes": lambda x: x[x > 0],
}


@pytest.mark.parametrize("wrap", [lambda m: m, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("make", PEEKS.values(), ids=PEEKS)
def test_compute_that_reads_values_is_a_type_error_that_says_what_to_do(make, wrap):
    op = define({"op_forward_compute": staticmethod(lambda config, inputs: (make(inputs.x), ()))}, Doubled, "Peeking")()
    for model in (op, octavo.Sequential(ops.ConstantScale(1.0), op)):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"Peeking's compute .* without data .* or define op_abstract") as refused:
            wrap(model)(spiky(4, H))
        assert wrap is compiled or isinstance(refused.value, TypeError)


def test_what_reads_values_and_says_its_shapes_runs():
    body = {
        "op_forward_compute": staticmethod(lambda config, inputs: (2 * only_positive(inputs.x), ())),
        "op_abstract": staticmethod(lambda config, inputs: (torch.empty_like(inputs.x), ())),
    }
    op, x, dy = define(body, Doubled)(), spiky(4, H).abs(), spiky(4, H, seed=2)
    assert_equal(step(op, x, dy), [2 * x, 2 * dy])
    assert_equal(step(op, x, dy, call=compiled(op)), [2 * x, 2 * dy])


@pytest.mark.parametrize("make", [PEEKS["item"], PEEKS["bool"]], ids=["item", "bool"])
def test_a_backward_that_reads_values_is_said_where_a_graph_asks_for_shapes(make):
    backward = staticmethod(lambda config, saved, dy, wants: (make(dy),))
    op = define({"op_backward": backward}, Doubled, "Peeking")()
    stepped(op)  # in eager mode it has data
    with pytest.raises(Exception, match=r"Peeking's backward .* without data"):
        stepped(op, compiled(op))


def test_a_fused_operation_that_reads_values_is_a_type_error():
    model = quadruple(fused("Peeking", **computes(lambda x: 4 * x * x.abs().max().item())))
    with pytest.raises(TypeError, match=r"Peeking.fuser_forward_compute .* without data"):
        stepped(model)


def fails(*_):
    raise KeyError("mine")


FAILING = {"op_forward_compute": "compute", "op_forward_save_ctx": "save_ctx", "op_abstract": "op_abstract"}


@pytest.mark.parametrize("name", FAILING)
def test_what_an_operation_raises_without_data_names_it(name):
    op = define({name: staticmethod(fails)}, Doubled, "Failing")()
    with pytest.raises(KeyError) as caught:
        op(spiky(4, H))
    assert f"Raised by Failing's {FAILING[name]}, which is run without data" in "".join(caught.value.__notes__)


def test_what_a_fused_operation_raises_without_data_names_it():
    for which, name in (("compute", "fuser_forward_compute"), ("save", "fuser_forward_save_ctx")):
        with pytest.raises(KeyError) as caught:
            stepped(quadruple(fused("Failing", **{which: fails})))
        assert f"Raised by Failing.{name}" in "".join(caught.value.__notes__)
