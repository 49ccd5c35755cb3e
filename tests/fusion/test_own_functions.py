"""Forward fusions over Octavo's own operations: they save what these save, without a word about its layout."""

import pytest
import torch

import octavo
from octavo import ops
from tests.support.custom_operations import Doubled
from tests.support.linear_oracle import spiky
from tests.support.sequentials import fill
from tests.support.steps import assert_equal, compiled, step

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class LinearDoubled(ops.FusedOperation):
    @staticmethod
    def fuser_forward_compute(configs, inputs):
        made = ops.own_forward(configs[0], inputs[0])
        return 2 * made.outputs[0], ((), ()), (made.intermediates, ())

    @staticmethod
    def fuser_forward_save_ctx(configs, inputs, outputs, intermediates):
        return ops.own_saved(configs[0], inputs[0], intermediates[0]), ()


class NormLinearDoubled(ops.FusedOperation):
    """The Linear is the second: its x is made inside."""

    @staticmethod
    def fuser_forward_compute(configs, inputs):
        norm = ops.own_forward(configs[0], inputs[0])
        made = ops.own_forward(configs[1], inputs[1]._replace(x=norm.outputs[0]))
        return 2 * made.outputs[0], ((), (), ()), (norm.intermediates, made.intermediates, ())

    @staticmethod
    def fuser_forward_save_ctx(configs, inputs, outputs, intermediates):
        return (*[ops.own_saved(*own) for own in zip(configs[:2], inputs[:2], intermediates[:2], strict=True)], ())


def pair(rules, recipe):
    return fill(octavo.Sequential(octavo.Linear(48, 32, recipe=recipe), Doubled(), rules=rules))


RECIPES = ("bf16", "fp8-block", "mxfp8", "nvfp4(stochastic=False)", "fp8-current(backward='dequantized')")
RULE = ops.Rule("linear-doubled", (octavo.Linear, Doubled), LinearDoubled)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_forward_over_a_linear(recipe):
    fused, unfused = pair((ops.Forward(RULE),), recipe), pair(None, recipe)
    x, dy = spiky(21, 48), spiky(21, 32, seed=4)
    assert fused.explain(x.requires_grad_()).fired == ("linear-doubled",)
    want = step(unfused, x, dy)
    assert_equal(step(fused, x, dy), want)
    assert_equal(step(fused, x, dy, call=compiled(fused)), want)
    with torch.no_grad():
        assert torch.equal(fused(x), want[0])
    fused[0].weight.requires_grad_(False), unfused[0].weight.requires_grad_(False)
    assert_equal(step(fused, x, dy)[:2], want[:2])


def test_an_operation_after_the_first():
    def model(rules):
        return fill(octavo.Sequential(ops.RMSNorm(48), octavo.Linear(48, 32, recipe="bf16"), Doubled(), rules=rules))

    rule = ops.Rule("norm-linear-doubled", (ops.RMSNorm, octavo.Linear, Doubled), NormLinearDoubled)
    fused, unfused = model((ops.Forward(rule),)), model(None)
    x, dy = spiky(21, 48), spiky(21, 32, seed=4)
    with pytest.raises(TypeError, match=r"only selects|is a forward fusion and saves"):
        step(fused, x, dy)  # the Linear's own x is saved in bf16, and made inside here: it must be handed over
    quantized = [octavo.Sequential(*m, rules=m.rules) for m in (fused, unfused)]
    for m in quantized:
        m[1].recipe = "fp8-block"
    assert_equal(step(quantized[0], x, dy), step(quantized[1], x, dy))


def test_what_is_none_of_octavos_is_refused():
    with pytest.raises(TypeError, match="own_forward takes the config of one of Octavo's operations, got None"):
        ops.own_forward(None, None)

    class Forgets(LinearDoubled):
        @staticmethod
        def fuser_forward_save_ctx(configs, inputs, outputs, intermediates):
            return ops.own_saved(configs[0], inputs[0]), ()

    rule = ops.Rule("forgets", (octavo.Linear, Doubled), Forgets)
    with pytest.raises(TypeError, match=r"intermediates to its backward, got 0\. Return octavo\.ops\.own_forward"):
        pair((ops.Forward(rule),), "fp8-block")(spiky(21, 48).requires_grad_())
