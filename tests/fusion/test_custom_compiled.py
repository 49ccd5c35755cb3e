"""Operations and fusions of one's own under a compiler: gradients that alias, extra outputs that are used or not, and
every example of the pages about writing operations, with each subset of its outputs used."""

import copy
import functools
import itertools

import pytest
import torch

import octavo
from octavo import ops
from octavo.runtime.contract import ForwardResult
from tests.support.custom_operations import Doubled, Take
from tests.support.operation_pages import PAGES, ran
from tests.support.sequentials import H, M, whole
from tests.support.steps import assert_equal, compiled_anew, step

BACKENDS = ("aot_eager", pytest.param("inductor", marks=pytest.mark.slow))
backends = pytest.mark.parametrize("backend", BACKENDS)


def subsets(count):
    """Which outputs are used: at least one."""
    return [used for used in itertools.product([True, False], repeat=count) if any(used)]


def assert_compiled_is_eager(model, inputs, backend="aot_eager"):
    """With each subset of its outputs used."""
    with torch.no_grad():
        outputs = model(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    call = compiled_anew(model, backend)
    for used in subsets(len(outputs)):
        dys = [
            whole(*t.shape, seed=70 + i) if here else None
            for i, (t, here) in enumerate(zip(outputs, used, strict=True))
        ]
        want = step(copy.deepcopy(model), inputs, dys)
        found = step(model, inputs, dys, call=call)
        # a gradient that nothing asked for is None in eager mode, and zeros in a graph
        assert_equal(
            found,
            [torch.zeros_like(f) if w is None and f is not None else w for f, w in zip(found, want, strict=True)],
            f"{used}",
        )


# -- gradients that alias ----------------------------------------------------------------------------------------------


class Summed(ops.FusedOperation):
    """Any row of ConstantScale(2) and AddExtraInput, forward alone: backward is theirs."""

    @staticmethod
    def fuser_forward_compute(configs, inputs):
        y = inputs[0].x
        for config, own in zip(configs, inputs, strict=True):
            y = y + own.extra if hasattr(own, "extra") else y * config.function.alpha
        return y, ((),) * len(configs), ((),) * len(configs)

    @staticmethod
    def fuser_forward_save_ctx(configs, inputs, outputs, fresh):
        return tuple(() if hasattr(own, "extra") else (None,) * 4 for own in inputs)


SCALE, ADD = ops.ConstantScale, ops.AddExtraInput
PATTERNS = {
    "the guide's": ((SCALE, ADD), (), ()),
    "add first": ((ADD, SCALE), (), ()),
    "two adds": ((ADD, ADD), (), ()),
    "adds around": ((ADD, SCALE, ADD), (), ()),
    "between others": ((SCALE, ADD), (Doubled, ADD), (ADD, Doubled)),
    "between adds": ((ADD, ADD), (ADD,), (ADD, ADD)),
    "before a Linear": ((ADD, ADD), (), (functools.partial(octavo.Linear, H, H, recipe="bf16"),)),
}


def built(kinds):
    return [kind(2.0) if kind is SCALE else kind() for kind in kinds]


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize(
    "frozen",
    [
        pytest.param((), id="all"),
        pytest.param((0,), id="x frozen", marks=pytest.mark.slow),
        pytest.param((1,), id="extra frozen", marks=pytest.mark.slow),
    ],
)
def test_a_forward_fusion_over_an_addition_compiles(name, frozen):
    pattern, before, after = PATTERNS[name]
    rule = ops.Forward(ops.Rule("summed", pattern, Summed))
    model = octavo.Sequential(*built(before), *built(pattern), *built(after), rules=(rule,))
    extra_inputs = sum(op.num_extra_inputs for op in model)
    inputs = [whole(M, H, seed=i) for i in range(1 + extra_inputs)]
    assert "summed" in model.explain(*[t.clone().requires_grad_() for t in inputs]).fired
    twin = octavo.Sequential(*copy.deepcopy(list(model)), rules=None)
    dy = whole(M, H, seed=50)
    want = step(twin, inputs, dy, frozen=frozen)
    assert_equal(step(model, inputs, dy, frozen=frozen), want, "fused")
    assert_equal(step(model, inputs, dy, call=compiled_anew(model), frozen=frozen), want, "compiled")


@pytest.mark.parametrize("wired", [(1,), (2,), (1, 2)], ids=str)
def test_a_forward_fusion_over_additions_of_which_some_are_from_a_channel(wired):
    """The gradient of one that comes from inside of the run is not returned, so that none can be taken from it."""

    def build(**settings):
        adds = [ADD(source="r") if i in wired else ADD() for i in range(3)]
        return octavo.Sequential(
            ops.MakeExtraOutput(channel="r", output_to_caller=False), Doubled(), *adds, SCALE(2.0), **settings
        )

    model = build(rules=(ops.Forward(ops.Rule("summed", (ADD, ADD, ADD, SCALE), Summed)),))
    inputs = [whole(M, H, seed=i) for i in range(1 + 3 - len(wired))]
    assert "summed" in model.explain(*[t.clone().requires_grad_() for t in inputs]).fired
    dy = whole(M, H, seed=50)
    want = step(build(rules=None), inputs, dy)
    assert_equal(step(model, inputs, dy), want, "fused")
    assert_equal(step(model, inputs, dy, call=compiled_anew(model)), want, "compiled")


def test_a_forward_fusion_over_an_addition_of_another_dtype_compiles():
    rule = ops.Forward(ops.Rule("summed", (SCALE, ADD), Cast))
    model = octavo.Sequential(SCALE(2.0), ADD(), rules=(rule,))
    inputs = whole(M, H, dtype=torch.bfloat16), whole(M, H, seed=1)
    dy = whole(M, H, seed=2, dtype=torch.bfloat16)
    twin = octavo.Sequential(SCALE(2.0), ADD(), rules=None)
    assert_equal(step(model, inputs, dy, call=compiled_anew(model)), step(twin, inputs, dy))


class Cast(Summed):
    @staticmethod
    def fuser_forward_compute(configs, inputs):
        y, *rest = Summed.fuser_forward_compute(configs, inputs)
        return y.to(inputs[0].x.dtype), *rest


class Kept(ops.BasicOperation):
    """x², whose gradient is made in forward, for a dy of ones, and returned as it is."""

    @staticmethod
    def op_forward_compute(config, inputs):
        return inputs.x * inputs.x, (2 * inputs.x,)

    @staticmethod
    def op_forward_save_ctx(config, inputs, y, fresh):
        return fresh

    @staticmethod
    def op_backward(config, saved, dy, wants):
        return saved


def test_a_backward_that_returns_what_was_saved_compiles():
    model, x, dy = octavo.Sequential(Kept(), Doubled()), whole(M, H), torch.full((M, H), 0.5)
    want = step(model, x, dy)
    assert torch.equal(want[1], 2 * x)
    assert_equal(step(model, x, dy, call=compiled_anew(model)), want)


# -- extra outputs -----------------------------------------------------------------------------------------------------


class Both(ops.BasicOperation):
    """2x, and 3x of another width beside it. Its backward counts on both gradients, as one may whose outputs are always
    used, and in a graph whenever one is."""

    num_extra_outputs = 1

    @staticmethod
    def fuser_forward_compute(config, inputs):
        return 2 * inputs.x, (3 * inputs.x.sum(-1, keepdim=True),), ()

    @staticmethod
    def fuser_forward_save_ctx(config, inputs, outputs, fresh):
        return ()

    @staticmethod
    def fuser_backward(config, saved, grads, wants):
        dy, dextra = grads
        return (2 * dy + 3 * dextra,)


class BothAndDoubled(ops.FusedOperation):
    @staticmethod
    def fuser_forward_compute(configs, inputs):
        return 4 * inputs[0].x, ((3 * inputs[0].x.sum(-1, keepdim=True),), ()), ((), ())

    @staticmethod
    def fuser_forward_save_ctx(configs, inputs, outputs, fresh):
        return (), ()

    @staticmethod
    def fuser_backward(configs, saved, grads, wants):
        dy, dextra = grads
        return (4 * dy + 3 * dextra,), (None,)


class BothAndDoubledBackward(ops.FusedOperation):
    fuser_backward = staticmethod(BothAndDoubled.fuser_backward)


class Widened(Take):
    """x + 5 · extra, of one column."""

    @staticmethod
    def fuser_backward(config, saved, grads, wants):
        (dy,) = grads
        return dy if wants.x else None, 5 * dy.sum(-1, keepdim=True) if wants.extra0 else None


def fused(side, operation):
    return octavo.Sequential(Doubled(), Both(), Doubled(), rules=(side(ops.Rule("both", (Both, Doubled), operation)),))


def hidden():
    return octavo.Sequential(
        Doubled(), Both().set_extra_output_channel(0, "e", output_to_caller=False), Doubled(),
        Widened().set_extra_input_channel(0, "e"),
    )  # fmt: skip


MODELS = {
    "alone": Both,
    "in a run": lambda: octavo.Sequential(Doubled(), Both(), Doubled()),
    "hidden": hidden,
    "two of them": lambda: octavo.Sequential(Both(), Doubled(), Both()),
    "fused backward": lambda: fused(ops.Backward, BothAndDoubledBackward),
    "fused both ways": lambda: fused(ops.Joint, BothAndDoubled),
}


@pytest.mark.parametrize("name", MODELS)
@backends
def test_a_backward_that_counts_on_every_gradient_compiles(name, backend):
    model, x = MODELS[name](), whole(M, H)
    outputs = model(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    dys = [whole(*t.shape, seed=3 + i) for i, t in enumerate(outputs)]
    call = compiled_anew(model, backend)
    assert_equal(step(model, x, dys, call=call), step(model, x, dys))
    for used in subsets(len(outputs)):  # of those that are not, a graph's are zeros
        some = [dy if here else None for dy, here in zip(dys, used, strict=True)]
        zeros = [dy if here else torch.zeros_like(dy) for dy, here in zip(dys, used, strict=True)]
        assert_equal(step(model, x, some, call=call), step(model, x, zeros), f"{used}")


def test_flops_of_such_a_backward_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    model = octavo.Sequential(octavo.Linear(H, H, recipe="bf16"), Both(), Doubled())
    x = whole(M, H).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        y, extra = model(x)
        (y.sum() + extra.sum()).backward()
    assert counter.get_total_flops() == 3 * 2 * M * H * H


# -- the pages ---------------------------------------------------------------------------------------------------------


class ScaleAdd(ops.FusedOperation):
    """ConstantScale and AddExtraInput as a step of a chain, as Octavo's own fused operations are."""

    op_name = "tests-scale-add"

    @staticmethod
    def step_forward(configs, inputs):
        x, extra = inputs[0].x, inputs[1].extra
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.add(extra, x, alpha=configs[0].function.alpha, out=y)
        return [ForwardResult((None,), (), ()), ForwardResult((y,), (), ())]


def shown_models():
    """Every operation, Sequential and fusion of the pages, with its outputs public where it has extra ones, and what it
    is called with."""
    n = {name: value for page in PAGES for name, value in ran(page, "eager").items()}
    rule, both = ops.Rule, ops.Joint
    x, extra = whole(6, 16), whole(6, 16, seed=1)

    def centered(**settings):
        return octavo.Sequential(
            n["Center"]().set_extra_output_channel(0, "mean"), n["Square"](),
            n["Uncenter"]().set_extra_input_channel(0, "mean"), **settings,
        )  # fmt: skip

    pattern, scaled = (n["Squash"], n["Gain"]), rule("a", (ops.ConstantScale, ops.AddExtraInput), ScaleAdd)
    return {
        "Tanh": (n["Tanh"](), (x,)),
        "SoftCap": (n["SoftCap"](16, 5.0), (x,)),
        "SoftCap, Linear": (octavo.Sequential(n["SoftCap"](16), octavo.Linear(16, 16, recipe="fp8-current")), (x,)),
        "Weighted": (octavo.Sequential(ops.ConstantScale(2.0), n["Weighted"]()), (x,)),
        "Center": (n["Center"](), (x,)),
        "Center, then another": (octavo.Sequential(n["Center"](), ops.GELU()), (x,)),
        "Uncenter": (n["Uncenter"](), (x, whole(6, 1, seed=2))),
        "centered, hidden": (n["centered"](), (x,)),
        "centered, public": (centered(), (x,)),
        "Sorted": (octavo.Sequential(n["Sorted"](), ops.ConstantScale(2.0)), (x,)),
        "forward fusion": (n["pair"](rules=(ops.Forward(rule("a", pattern, n["SquashGain"])),)), (x,)),
        "backward fusion": (n["pair"](rules=(ops.Backward(rule("a", pattern, n["SquashGainBackward"])),)), (x,)),
        "joint fusion": (n["pair"](rules=(both(rule("a", pattern, n["SquashGainJoint"])),)), (x,)),
        "fusion with a channel": (
            n["centered"](
                rules=(both(rule("a", (n["Center"], n["Square"], n["Uncenter"]), n["CenteredSquare"])),)
            ), (x,),
        ),
        "gradients by name": (octavo.Sequential(n["Shift"](16), n["Square"]()), (x,)),
        "fusion with a Linear": (n["squared"](), (x,)),
        "a step": (octavo.Sequential(ops.ConstantScale(0.5), ops.AddExtraInput(), rules=(ops.Forward(scaled),)),
                   (x, extra)),
    }  # fmt: skip


@backends
def test_every_example_of_the_pages_with_each_subset_of_its_outputs(backend):
    for name, (model, inputs) in shown_models().items():
        try:
            assert_compiled_is_eager(model, inputs, backend)
        except Exception as error:
            error.add_note(f"in the example {name!r}")
            raise


class Fails(ops.BasicOperation):
    @staticmethod
    def op_forward_compute(config, inputs):
        raise RuntimeError("of the user's own")

    @staticmethod
    def op_forward_save_ctx(config, inputs, y, fresh):
        return ()

    @staticmethod
    def op_backward(config, saved, dy, wants):
        return (dy,)


@pytest.mark.parametrize("rows", [128, 5])
@pytest.mark.parametrize("call", [lambda model: model, compiled_anew], ids=["eager", "compiled"])
def test_an_error_of_the_users_is_what_is_raised(call, rows):
    """128 rows are as many as a plan makes up."""
    with pytest.raises(Exception, match="of the user's own"):
        call(octavo.Sequential(Fails()))(torch.randn(rows, 16))
