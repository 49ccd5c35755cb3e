"""Constants of a plan: keywords of a call, and values that compute hands to backward, that are no tensors."""

import enum

import pytest
import torch

import octavo
from octavo import ops
from octavo.errors import UnsupportedConfig
from tests.support.custom_operations import Powered, define
from tests.support.linear_oracle import spiky
from tests.support.sequentials import H, fill
from tests.support.steps import assert_equal, compiled, step


def made(
    compute, save=lambda config, inputs, y, fresh: (), backward=lambda config, saved, dy, wants: (2 * dy,), **more
):
    functions = {"op_forward_compute": compute, "op_forward_save_ctx": save, "op_backward": backward}
    return define({**{name: staticmethod(f) for name, f in functions.items()}, **more})


def all_of_it(config, inputs, y, fresh):
    return fresh


FACTORS = (2.0, 3, -0.5)


def powered():
    return fill(octavo.Sequential(ops.Identity(), Powered(H), ops.ConstantScale(2.0)))


def stepped_with(model, x, dy, factor, call=None):
    return step(model, x, dy, call=lambda x: (call or model)(x, op_kwargs={1: {"factor": factor}}))


@pytest.mark.parametrize("factor", FACTORS)
def test_a_number_gives_what_a_tensor_of_it_gives(factor):
    model, x, dy = powered(), spiky(4, H), spiky(4, H, seed=2)
    want = stepped_with(model, x, dy, torch.tensor(float(factor)))
    found = stepped_with(model, x, dy, factor)
    assert_equal(found, want)
    assert_equal(step(model[1], x, dy, call=lambda x: model[1](x, factor=factor)),
                 step(model[1], x, dy, call=lambda x: model[1](x, factor=torch.tensor(float(factor)))))  # fmt: skip


@pytest.mark.usefixtures("fresh_compiler")
def test_a_graph_has_a_number_as_a_constant():
    model, x, dy = powered(), spiky(4, H), spiky(4, H, seed=2)
    graph = compiled(model)
    for factor in (*FACTORS, *FACTORS):  # the second time none is traced
        assert_equal(stepped_with(model, x, dy, factor, graph), stepped_with(model, x, dy, factor))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(FACTORS)


@pytest.mark.usefixtures("fresh_compiler")
@torch._dynamo.config.patch(recompile_limit=3)
def test_a_number_that_keeps_changing_stops_at_torchs_limit_and_a_tensor_has_one_graph():
    model, x = powered(), spiky(4, H)
    graph = torch.compile(model, backend="aot_eager")
    limit = torch._dynamo.config.recompile_limit
    for i in range(limit + 2):
        graph(x, op_kwargs={1: {"factor": 1.0 + i}})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= limit
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for i in range(limit + 2):
        found = graph(x, op_kwargs={1: {"factor": torch.tensor(1.0 + i)}})
    assert torch.equal(found, model(x, op_kwargs={1: {"factor": float(limit + 2)}}))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_plans_of_values_are_bounded():
    from octavo.fusion.custom import custom_plan

    model, x = powered(), spiky(4, H)
    before, custom_plan.MOST_PLANS = custom_plan.MOST_PLANS, len(custom_plan._stage_plans) + 3
    try:
        for i in range(8):
            model(x, op_kwargs={1: {"factor": 100.0 + i}})
        assert len(custom_plan._stage_plans) <= custom_plan.MOST_PLANS
    finally:
        custom_plan.MOST_PLANS = before


def test_equal_numbers_of_other_kinds_are_other_constants():
    seen = []

    def compute(config, inputs):
        seen.append(repr(inputs.mode))
        return 2 * inputs.x, ()

    op = made(compute, kwargs=("mode",))()
    for mode in (1, True, 1.0, "1", 0.0, -0.0, (1, "a"), octavo.formats.E4M3, octavo.recipe("fp8-block")):
        op(spiky(4, H), mode=mode)
        assert seen[-1] == repr(mode)


class Stored(enum.Enum):
    SIZES = "sizes"
    OFFSETS = "offsets"


def stored(kind):
    """An operation whose compute hands over a tensor, and a word that says which of two it is."""

    def compute(config, inputs):
        return inputs.x * 2, (inputs.x + 1, kind)

    def backward(config, saved, dy, wants):
        kept, said = saved
        assert said == (kind.value if isinstance(kind, enum.Enum) else kind)
        return (2 * dy + 0 * kept,)

    return made(compute, all_of_it, backward)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", [Stored.OFFSETS.value, 3, True, 0.5, ("a", 1)], ids=str)
def test_a_word_or_a_number_reaches_backward(kind):
    model, x, dy = octavo.Sequential(ops.ConstantScale(0.5), stored(kind)()), spiky(4, H), spiky(4, H, seed=3)
    found = step(model, x, dy)
    torch.testing.assert_close(found[1], dy)
    assert_equal(step(model, x, dy, call=compiled(model)), found)


def test_an_enum_is_passed_by_its_value():
    with pytest.raises(TypeError, match=r"such as the \.value of an Enum"):
        stored(Stored.SIZES)()(spiky(4, H))
    with pytest.raises(TypeError, match="a Tensor, QTensor"):
        stored((torch.ones(1),))()(spiky(4, H))


def test_a_number_that_follows_from_data_or_from_the_number_of_rows_is_refused():
    def by_rows(config, inputs):
        return inputs.x * 2, (inputs.x.shape[0],)

    with pytest.raises(RuntimeError, match="return what follows from data or sizes as a tensor"):
        made(by_rows, all_of_it)()(spiky(4, H))


def test_what_no_plan_can_hold_is_refused():
    model, x = powered(), spiky(4, H)
    for factor in (object(), [1], (1, torch.ones(1)), {1: 2}):
        with pytest.raises(TypeError, match="takes factor as a tensor, or as a bool"):
            model(x, op_kwargs={1: {"factor": factor}})
    with pytest.raises(UnsupportedConfig, match=r"Powered\.factor is nan"):
        model(x, op_kwargs={1: {"factor": float("nan")}})


def test_a_fused_operation_sees_constants_too():
    class Fused(ops.FusedOperation):
        @staticmethod
        def fuser_forward_compute(configs, inputs):
            return inputs[0].x ** 2 * inputs[0].gain * (inputs[0].factor * 2.0), ((), ()), ((), ())

        @staticmethod
        def fuser_forward_save_ctx(configs, inputs, outputs, fresh):
            return (inputs[0].x, inputs[0].gain, inputs[0].factor), ()

        @staticmethod
        def fuser_backward(configs, saved, grads, wants):
            x, gain, factor = saved[0]
            dh = grads[0] * 2.0 * factor
            return {"x": dh * gain * 2 * x, "gain": (dh * x**2).sum(0)}, {}

    rule = ops.Rule("powered-scale", (Powered, ops.ConstantScale), Fused)
    model = octavo.Sequential(*powered(), rules=(ops.Joint(rule),))
    x, dy = spiky(4, H), spiky(4, H, seed=2)
    assert model.explain(x, op_kwargs={1: {"factor": 3.0}}).fired == ("powered-scale",)
    want = stepped_with(octavo.Sequential(*model, rules=None), x, dy, 3.0)
    for found, expected in zip(stepped_with(model, x, dy, 3.0), want, strict=True):
        torch.testing.assert_close(found, expected)
