"""Operations and rules that break their contract (P7-P9): refused when a run is planned, or an error that names it."""

import re

import pytest
from torch import nn

import octavo
from octavo import ops
from tests.fuser.custom import Doubled, Emit, Powered, Take
from tests.fuser.models import H, assert_unfused, fill
from tests.fuser.test_contract import define
from tests.modules.oracle import spiky

# -- P8, P9: wrong numbers ---------------------------------------------------------------------------------------------


COUNTS = {
    "gradients of an operation": (Doubled, "op_backward", lambda *_: ()),
    "too many gradients": (Doubled, "op_backward", lambda config, saved, dy, wants: (dy, dy)),
    "gradients of parameters": (Powered, "op_backward", lambda config, saved, dy, wants: (dy,)),
    "outputs": (Doubled, "op_forward_compute", lambda config, inputs: 2 * inputs.x),
    "extra outputs": (Emit, "fuser_forward_compute", lambda config, inputs: (2 * inputs.x, (), ())),
    "gradients of extra inputs": (Take, "fuser_backward", lambda config, saved, grads, wants: (grads[0],)),
}


BEFORE = {  # place -> what stands there first
    0: lambda: [],
    1: lambda: [ops.ConstantScale(2.0)],
    2: lambda: [ops.ConstantScale(1.0), ops.Identity()],
    3: lambda: [Doubled(), nn.Tanh(), Doubled()],
    5: lambda: [ops.Identity(), octavo.Sequential(Doubled(), ops.Reshape((-1, H)), Doubled()), nn.Tanh()],
}


@pytest.mark.parametrize("place", BEFORE)
@pytest.mark.parametrize("what", COUNTS)
def test_a_wrong_number_of_results_is_a_runtime_error_that_names_the_operation_and_its_place(what, place):
    cls, name, function = COUNTS[what]
    title = f"Miscounted{what.title().replace(' ', '')}At{place}"
    made = define({name: staticmethod(function)}, cls, title)
    op = made(H) if cls is Powered else made()
    model, x = octavo.Sequential(*BEFORE[place](), op, Doubled()), spiky(4, H).requires_grad_()
    extra = (x.detach(),) if cls is Take else ()
    with pytest.raises(RuntimeError) as refused:  # noqa: PT012
        y = model(x, *extra)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
    assert re.match(rf"Operation {place}: {title}\b", str(refused.value))


def test_a_fused_operation_that_answers_for_too_few_is_a_runtime_error():
    class Short(ops.FusedOperation):
        @staticmethod
        def fuser_forward_compute(configs, inputs):
            return 4 * inputs[0].x, ((),), ((),)

        @staticmethod
        def fuser_forward_save_ctx(configs, inputs, outputs, fresh):
            return (), ()

    rule = ops.Forward(ops.Rule("short", (Doubled, Doubled), Short))
    with pytest.raises(RuntimeError, match=r"Short|short"):
        octavo.Sequential(Doubled(), Doubled(), rules=(rule,))(spiky(4, H))


# -- P7: a forward-only fusion saves what its operations save ----------------------------------------------------------


def forward_only(name, fresh, saved):
    def compute(configs, inputs):
        x, (a, b) = inputs[0].x, (i.gain for i in inputs)
        first = x**2 * a
        return first**2 * b, ((), ()), fresh(x, x**2, first, first**2)

    body = {
        "fuser_forward_compute": staticmethod(compute),
        "fuser_forward_save_ctx": staticmethod(lambda configs, inputs, outputs, fresh: saved(inputs, fresh)),
    }
    fused = define(body, ops.FusedOperation, "Other" + name.title().replace(" ", ""))
    return ops.Forward(ops.Rule("two powers", (Powered, Powered), fused))


def as_unfused(i, f):
    return (i[0].x, i[0].gain, None, f[0][0]), (f[1][0], i[1].gain, None, f[1][1])


def all_of(x, a, first, b):
    return (a,), (first, b)


LAYOUTS = {  # name -> (what compute hands over, what is saved of it)
    "as its operations": (all_of, as_unfused),
    "fewer": (all_of, lambda i, f: (as_unfused(i, f)[0], ())),
    "in another order": (all_of, lambda i, f: ((i[0].gain, i[0].x, None, f[0][0]), as_unfused(i, f)[1])),
    "other shapes": (lambda x, a, first, b: ((a[:1].clone(),), (first, b)), as_unfused),
    "other dtypes": (lambda x, a, first, b: ((a.bfloat16(),), (first, b)), as_unfused),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_forward_only_rule_that_saves_something_else_is_refused_when_planned(name):
    rule, x, dy = forward_only(name, *LAYOUTS[name]), spiky(4, H, size=2.0), spiky(4, H, seed=2)
    model = fill(octavo.Sequential(Powered(H), Powered(H), rules=(rule,)))
    if name == "as its operations":
        assert model.explain(x.clone().requires_grad_()).fired == ("two powers",)
        assert_unfused(model, x, dy)
        return
    for call in (model.explain, model, model):
        with pytest.raises(TypeError, match="Other"):
            call(x.clone().requires_grad_())
