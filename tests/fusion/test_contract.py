"""Writing operations: what a class must define, when its functions run, what they may see and return."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import octavo
from octavo import ops, values
from octavo.quant import QTensor, Tensorwise
from octavo.quant.grouped import GroupedTensor, quantize_groups
from octavo.quant.groups import split
from tests.support.custom_operations import Doubled, Legacy, Power, Powered, Take, define
from tests.support.linear_oracle import assert_same, spiky
from tests.support.recorded_operators import hides_writes, recorded, without_gradients
from tests.support.sequentials import Graphs, H, M, batch, fill, mlp, recipes, residual, unfused
from tests.support.steps import assert_equal, compiled, step


def compute(config, inputs):
    return 2 * inputs.x, ()


def save_ctx(config, inputs, y, fresh):
    return ()


def backward(config, saved, dy, wants):
    return (2 * dy,)


def legacy(self, ctx, x):
    return 2 * x


def legacy_backward(self, ctx, dy):
    return 2 * dy, ()


SPLIT = {
    "op_forward_compute": staticmethod(compute),
    "op_forward_save_ctx": staticmethod(save_ctx),
    "op_backward": staticmethod(backward),
}
OLD = {"op_forward": legacy, "op_backward": legacy_backward}


def without(body, *names):
    return {name: value for name, value in body.items() if name not in names}


# -- half an operation is none -----------------------------------------------------------------------------------------


HALVES = {
    "compute without save_ctx": (without(SPLIT, "op_forward_save_ctx"), "op_forward_save_ctx"),
    "save_ctx without compute": (without(SPLIT, "op_forward_compute"), "op_forward_compute"),
    "no backward": (without(SPLIT, "op_backward"), "op_backward"),
    "both ways at once": ({**SPLIT, "op_forward": legacy}, "op_forward"),
    "the old way without backward": (without(OLD, "op_backward"), "op_backward"),
    "a method that sees the module": ({**SPLIT, "op_forward_compute": lambda self, config, inputs: None}, "static"),
    "extra inputs and only op_ forms": ({**SPLIT, "num_extra_inputs": 1}, "fuser_forward_compute"),
    "extra outputs and only op_ forms": ({**SPLIT, "num_extra_outputs": 1}, "fuser_forward_compute"),
}


@pytest.mark.parametrize(("body", "says"), HALVES.values(), ids=HALVES)
def test_half_an_operation_is_a_type_error_that_names_the_class_and_what_is_missing(body, says):
    with pytest.raises(TypeError, match=says) as refused:
        define(body)
    assert "Made" in str(refused.value)


PAIR = {
    "fuser_forward_compute": staticmethod(lambda configs, inputs: (inputs[0].x, ((), ()), ((), ()))),
    "fuser_forward_save_ctx": staticmethod(lambda configs, inputs, outputs, fresh: ((), ())),
}
FUSED_HALVES = {
    "compute without save_ctx": (without(PAIR, "fuser_forward_save_ctx"), "fuser_forward_save_ctx"),
    "save_ctx without compute": (without(PAIR, "fuser_forward_compute"), "fuser_forward_compute"),
    "both ways at once": ({**PAIR, "fuser_forward": staticmethod(lambda ctxs, inputs: None)}, "fuser_forward"),
    "nothing": ({}, "fuser_"),
}


@pytest.mark.parametrize(("body", "says"), FUSED_HALVES.values(), ids=FUSED_HALVES)
def test_half_a_fused_operation_is_a_type_error_too(body, says):
    with pytest.raises(TypeError, match=says) as refused:
        define(body, ops.FusedOperation)
    assert "Made" in str(refused.value)


EXTRA_HALVES = {
    "compute without save_ctx": "fuser_forward_save_ctx",
    "save_ctx without compute": "fuser_forward_compute",
    "no backward": "fuser_backward",
}


@pytest.mark.parametrize("missing", EXTRA_HALVES.values(), ids=EXTRA_HALVES)
def test_half_an_operation_with_extra_inputs_is_a_type_error(missing):
    body = {name: vars(Take)[name] for name in (*PAIR, "fuser_backward")} | {"num_extra_inputs": 1}
    define(body)
    with pytest.raises(TypeError, match=missing):
        define(without(body, missing))


WITH_EXTRAS = {name: vars(Take)[name] for name in (*PAIR, "fuser_backward")}


@pytest.mark.parametrize("given", [SPLIT, OLD, {"op_backward": SPLIT["op_backward"]}], ids=["split", "legacy", "half"])
def test_an_operation_with_op_and_fuser_functions_is_a_type_error(given):
    with pytest.raises(TypeError, match="Made defines"):
        define({**WITH_EXTRAS, **given})


def test_the_nearer_of_op_and_fuser_functions_runs():
    body = {
        "fuser_forward_compute": staticmethod(lambda config, inputs: (3 * inputs.x, (), ())),
        "fuser_forward_save_ctx": staticmethod(lambda config, inputs, outputs, fresh: ()),
        "fuser_backward": staticmethod(lambda config, saved, grads, wants: (3 * grads[0],)),
    }
    x, dy = spiky(4, H), spiky(4, H, seed=2)
    wide = define(body, Doubled)
    assert_equal(step(wide(), x, dy), [3 * x, 3 * dy])
    assert_equal(step(define(SPLIT, wide)(), x, dy), [2 * x, 2 * dy])


NAMES = {
    "a bare string": ({"params": "gain"}, r"params is a tuple of names, got 'gain'. Write \('gain',\)"),
    "a bare keyword": ({"kwargs": "factor"}, r"kwargs is a tuple of names, got 'factor'. Write \('factor',\)"),
    "nothing": ({"params": None}, "params is a tuple of names, got None"),
    "x": ({"params": ("x",)}, "params has 'x', which its inputs have already"),
    "twice": ({"params": ("gain", "gain")}, "params has 'gain', which its inputs have already"),
    "in both": ({"params": ("gain",), "kwargs": ("gain",)}, "kwargs has 'gain', which its inputs have already"),
    "an extra input": ({"kwargs": ("extra0",)}, "kwargs has 'extra0', which its inputs have already"),
    "no name": ({"params": ("a b",)}, "params has names of attributes .* got 'a b'"),
    "a hidden name": ({"params": ("_gain",)}, "params has names of attributes .* got '_gain'"),
    "a number": ({"kwargs": (3,)}, "kwargs has names of attributes .* got 3"),
}


@pytest.mark.parametrize(("body", "says"), NAMES.values(), ids=NAMES)
def test_names_of_inputs_are_checked_when_a_class_is_defined(body, says):
    for functions in (SPLIT, OLD):
        with pytest.raises(TypeError, match=rf"Made\.{says}"):
            define({**functions, **body})


def test_names_of_inputs_may_be_a_list():
    assert define({**SPLIT, "kwargs": ["factor"]}).op_keywords == ("factor",)


@pytest.mark.parametrize("body", [SPLIT, OLD], ids=["split", "legacy"])
def test_a_whole_operation_runs_alone(body):
    x, dy = spiky(4, H), spiky(4, H, seed=2)
    op = define(body)()
    assert_equal(step(op, x, dy), [2 * x, 2 * dy])


# -- who inherits what -------------------------------------------------------------------------------------------------


def test_one_half_may_be_inherited_and_the_other_overridden():
    class Tripled(Doubled):
        @staticmethod
        def op_forward_compute(config, inputs):
            return 3 * inputs.x, ()

    class Kept(Doubled):
        @staticmethod
        def op_forward_save_ctx(config, inputs, y, fresh):
            return (inputs.x,)

        @staticmethod
        def op_backward(config, saved, dy, wants):
            return (dy * saved[0],)

    x, dy = spiky(4, H), spiky(4, H, seed=2)
    assert_equal(step(Tripled(), x, dy), [3 * x, 2 * dy])
    assert_equal(step(Kept(), x, dy), [2 * x, dy * x])


def test_a_subclass_that_defines_op_forward_runs_that():
    class Old(Doubled):
        def op_forward(self, ctx, x):
            ctx.factor = 3
            return ctx.factor * x

        def op_backward(self, ctx, dy):
            return ctx.factor * dy, ()

    x, dy = spiky(4, H), spiky(4, H, seed=2)
    assert_equal(step(Old(), x, dy), [3 * x, 3 * dy])
    model = octavo.Sequential(Doubled(), Old())
    assert_equal(step(model, x, dy), [6 * x, 6 * dy])
    assert model.explain(x).alone == ("Old: it is a legacy operation (op_forward)",)


def test_a_legacy_forward_has_a_backward_of_its_own():
    with pytest.raises(TypeError, match=r"Made runs op_forward, and its op_backward .* for a split forward"):
        define({"op_forward": legacy}, Doubled)
    with pytest.raises(TypeError, match="Made runs op_forward_compute, and its op_backward is that of Legacy"):
        define(without(SPLIT, "op_backward"), Legacy)


def test_a_subclass_without_a_body_is_its_parent():
    op = define({}, Powered)(H)
    x, dy = spiky(4, H), spiky(4, H, seed=2)
    assert_equal(step(op, x, dy), step(Powered(H), x, dy))


def multiplied(factor):
    class Multiplied(Doubled):
        @staticmethod
        def op_forward_compute(config, inputs):
            return factor * inputs.x, ()

    return Multiplied


def test_two_classes_of_one_name_and_one_text_are_two_classes():
    x = spiky(4, H)
    model = octavo.Sequential(multiplied(3)(), multiplied(5)())
    assert torch.equal(multiplied(3)()(x), 3 * x)
    assert torch.equal(model(x), 5 * (3 * x))
    assert torch.equal(compiled(model)(x), 5 * (3 * x))


# -- custom operations work --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [2, 3])
@pytest.mark.parametrize("lead", [(4,), (2, 3)], ids=str)
def test_a_custom_operation_against_float64(exponent, lead):
    op = fill(Powered(H, exponent))
    x, dy = spiky(*lead, H, size=3.0), spiky(*lead, H, seed=2)
    leaves = [t.detach().double().requires_grad_() for t in (x, op.gain)]
    y = op.formula(*leaves)
    want = [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]
    for found, b in zip(step(op, x, dy), want, strict=True):
        torch.testing.assert_close(found.double(), b, rtol=1e-4, atol=1e-4)


def test_wants_say_what_is_wanted():
    seen = []

    class Unchanged(Powered):
        @staticmethod
        def op_backward(config, saved, dy, wants):
            seen.append((wants.x, wants.gain, wants.factor))
            return Powered.op_backward(config, saved, dy, wants)

    op, x, dy = Unchanged(H), spiky(4, H), spiky(4, H, seed=2)
    step(op, x, dy)
    step(op, x, dy, frozen=(0,))
    op.gain.requires_grad_(False)
    step(op, x, dy)
    assert seen == [(True, True, False), (False, True, False), (True, False, False)]


def test_a_standalone_custom_operation_is_one_node_each_way():
    op, graphs = fill(Powered(H)), Graphs()
    twin, call = copy.deepcopy(op), compiled(op, graphs)
    for seed in range(2):
        x, dy = spiky(4, H, seed=seed), spiky(4, H, seed=9)
        assert_equal(step(op, x, dy, call=call), step(twin, x, dy))
    assert graphs.runs() == (1, 1)


def test_an_operation_that_cannot_run_on_fakes_says_what_it_makes():
    class ThroughNumpy(Doubled):
        @staticmethod
        def op_forward_compute(config, inputs):
            return torch.from_numpy(2 * inputs.x.detach().numpy()), ()

        @staticmethod
        def op_abstract(config, inputs):
            return torch.empty_like(inputs.x), ()

    op, x, dy = ThroughNumpy(), spiky(4, H), spiky(4, H, seed=2)
    want = [2 * x, 2 * dy]
    assert_equal(step(op, x, dy), want)
    assert_equal(step(op, x, dy, call=compiled(op)), want)


# -- nodes keep their promises -----------------------------------------------------------------------------------------


CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
CHECKED = {
    "custom": lambda: fill(Powered(H)),
    "mlp": lambda: mlp("fp8-current", bias=True),
    "mlp, unfused": lambda: unfused(mlp("fp8-current")),
    "mlp, nvfp4": lambda: mlp("nvfp4"),
    "residual": lambda: residual("fp8-block"),
}


@pytest.mark.parametrize("build", CHECKED.values(), ids=CHECKED)
def test_operators_pass_their_own_tests(build):
    model, (x, dy) = build(), batch()
    calls = recorded(model, x.requires_grad_(), dy)
    assert {"octavo.run.default", "octavo.run_bwd.default"} <= {str(func) for func, _ in calls}
    for func, args in calls:
        checks = CHECKS[1:] if hides_writes(func, args) else CHECKS
        torch.library.opcheck(func, without_gradients(args), test_utils=checks)


# -- when and where functions run --------------------------------------------------------------------------------------


class Counted(Powered):
    calls = 0

    @staticmethod
    def op_forward_save_ctx(config, inputs, y, fresh):
        Counted.calls += 1
        return Powered.op_forward_save_ctx(config, inputs, y, fresh)


@pytest.mark.parametrize(
    ("wrap", "exponents"), [(lambda op: op, (11, 12)), (octavo.Sequential, (13, 14))], ids=["alone", "in a Sequential"]
)
def test_save_ctx_runs_a_constant_number_of_times_for_a_compilation_and_never_in_a_step(wrap, exponents):
    found = []
    for steps, exponent in zip((1, 5), exponents, strict=True):  # another exponent: nothing is remembered of it
        torch._dynamo.reset()
        Counted.calls, op = 0, wrap(Counted(H, exponent))
        call = compiled(op)
        for seed in range(steps):
            step(op, spiky(4, H, seed=seed), spiky(4, H, seed=9), call=call)
        found.append(Counted.calls)
    assert found[0] == found[1]
    assert 1 <= found[0] <= 4


def test_save_ctx_sees_no_data_while_a_graph_is_traced():
    kinds = set()

    class Unchanged(Powered):
        @staticmethod
        def op_forward_save_ctx(config, inputs, y, fresh):
            kinds.update(type(t).__name__ for t in (inputs.x, inputs.gain, y, *fresh))
            return Powered.op_forward_save_ctx(config, inputs, y, fresh)

    op = octavo.Sequential(Unchanged(H))
    step(op, spiky(4, H), spiky(4, H, seed=9), call=compiled(op))
    assert kinds.isdisjoint({"Tensor", "Parameter"}), kinds


def test_forward_without_data_gives_shapes_and_changes_nothing():
    model = mlp("fp8-delayed", bias=True)
    before = {k: v.clone() for k, v in (*model.state_dict().items(), *octavo.state_dict(model).items())}
    with FakeTensorMode(allow_non_fake_inputs=True):
        shapes = [tuple(model(torch.empty(m, H)).shape) for m in (3, 5)]
    assert shapes == [(3, H), (5, H)]
    after = {**model.state_dict(), **octavo.state_dict(model)}
    for key, value in before.items():
        assert_same(after[key], value, key)


@recipes(["fp8-current", "fp8-delayed"])
def test_backward_runs_as_its_forward_did_whatever_is_in_force_by_then(recipe):
    model, (x, dy) = mlp(None), batch()
    twin = copy.deepcopy(model)

    def run(m, around):
        leaf = x.clone().requires_grad_()
        with octavo.autocast(recipe):
            y = m(leaf)
        with octavo.autocast(around):
            y.backward(dy)
        return [y.detach(), leaf.grad, *(p.grad for p in m.parameters())]

    assert_equal(run(model, "nvfp4"), run(twin, recipe))


def test_config_is_asked_for_at_forward_and_backward_has_the_one_of_its_forward():
    op, x, dy = Powered(H, 2), spiky(4, H), spiky(4, H, seed=2)
    want = step(Powered(H, 2), x, dy)
    leaf = x.clone().requires_grad_()
    y = op(leaf)
    op.exponent = 3
    y.backward(dy)
    assert_equal([y.detach(), leaf.grad, op.gain.grad], want)
    assert_equal(step(op, x, dy), step(Powered(H, 3), x, dy))


def test_equal_configs_share_a_graph_and_others_do_not():
    call = compiled(lambda block, x: block(x))
    blocks = [octavo.Sequential(Powered(H, e), ops.Bias(H)) for e in (2, 2, 2, 3)]
    x = spiky(4, H)
    for block in blocks[:3]:
        call(block, x).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert_same(call(blocks[3], x).detach(), blocks[3](x).detach())
    assert counters["stats"]["unique_graphs"] == 2


# -- backward and the module -------------------------------------------------------------------------------------------


def parameterised():
    return fill(
        octavo.Sequential(
            ops.LayerNorm(H), octavo.Linear(H, H, recipe="fp8-current"), ops.Bias(H), Powered(H), ops.RMSNorm(H),
            octavo.Linear(H, H),
        )
    )  # fmt: skip


@pytest.mark.parametrize("rules", [(), None], ids=["fused", "unfused"])
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_backward_needs_no_parameter_of_the_module(how, rules):
    model = octavo.Sequential(*parameterised(), rules=rules)
    x, dy = spiky(M, H, size=3.0), spiky(M, H, seed=2)
    want = step(copy.deepcopy(model), x, dy)
    leaf, owned = x.clone().requires_grad_(), [p for _, p in model.named_parameters()]
    y = model(leaf)
    for op in model:
        for name, p in list(op.named_parameters()):
            if how == "deleted":
                delattr(op, name)
            else:
                setattr(op, name, nn.Parameter(torch.full_like(p, float("nan"))))
    y.backward(dy)
    assert_equal([y.detach(), leaf.grad, *(p.grad for p in owned)], want)


def test_a_parameter_changed_in_place_before_backward_is_noticed():
    op, x = Powered(H), spiky(4, H).requires_grad_()
    y = op(x)
    with torch.no_grad():
        op.gain.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()


# -- types -------------------------------------------------------------------------------------------------------------


def codes_of(x):
    return Tensorwise().quantize(x)


def groups_of(x):
    return quantize_groups(x, Tensorwise(), None, split(torch.tensor([x.shape[0]]), x.shape[0]))[0]


class Codes(Doubled):
    """Saves codes of x; backward multiplies by what they stand for."""

    @staticmethod
    def op_forward_compute(config, inputs):
        return inputs.x * inputs.x / 2, (codes_of(inputs.x), None)

    @staticmethod
    def op_forward_save_ctx(config, inputs, y, fresh):
        assert isinstance(fresh[0], QTensor) and fresh[1] is None
        return fresh

    @staticmethod
    def op_backward(config, saved, dy, wants):
        assert isinstance(saved[0], QTensor) and saved[1] is None
        return (dy * saved[0].dequantize(),)


class Grouped(Doubled):
    @staticmethod
    def op_forward_compute(config, inputs):
        return inputs.x * inputs.x / 2, (groups_of(inputs.x),)

    @staticmethod
    def op_forward_save_ctx(config, inputs, y, fresh):
        assert isinstance(fresh[0], GroupedTensor)
        return fresh

    @staticmethod
    def op_backward(config, saved, dy, wants):
        assert isinstance(saved[0], GroupedTensor)
        return (dy * saved[0].dequantize(),)


@pytest.mark.parametrize("cls", [Codes, Grouped])
@pytest.mark.parametrize("wrap", [lambda op: op, lambda op: octavo.Sequential(op, ops.Identity())])
def test_codes_may_be_handed_on_and_saved(cls, wrap):
    op, x, dy = wrap(cls()), spiky(M, H), spiky(M, H, seed=2)
    want = [x * x / 2, dy * codes_of(x).dequantize()]
    assert_equal(step(op, x, dy), want)
    if cls is Codes:  # the reference for groups reads sizes, which a graph on a CPU has not
        assert_equal(step(op, x, dy, call=compiled(op)), want)


NOT_TENSORS = {"dict": {"a": 1}, "list": [torch.ones(1)], "dtype": torch.float32}


@pytest.mark.parametrize("wrong", NOT_TENSORS.values(), ids=NOT_TENSORS)
@pytest.mark.parametrize("where", ["fresh", "saved"])
def test_anything_else_is_a_type_error_that_names_the_operation(wrong, where):
    class Sloppy(Doubled):
        @staticmethod
        def op_forward_compute(config, inputs):
            return 2 * inputs.x, (wrong,) if where == "fresh" else ()

        @staticmethod
        def op_forward_save_ctx(config, inputs, y, fresh):
            return (wrong,) if where == "saved" else ()

    x = spiky(4, H).requires_grad_()
    for op in (Sloppy(), octavo.Sequential(ops.Identity(), Sloppy())):
        with pytest.raises(TypeError, match="Sloppy"):
            op(x)


def test_a_config_that_is_no_value_is_a_type_error():
    class Loose(Doubled):
        def op_config(self):
            return {"factor": 2}

    with pytest.raises(TypeError, match="Loose"):
        Loose()(spiky(4, H))


def test_a_config_is_what_functions_get():
    seen = []

    class Unchanged(Powered):
        @staticmethod
        def op_forward_save_ctx(config, inputs, y, fresh):
            seen.append(config)
            return Powered.op_forward_save_ctx(config, inputs, y, fresh)

    Unchanged(H, 5)(spiky(4, H).requires_grad_())
    assert set(seen) == {Power(5)} == {values.parse("tests-power(exponent=5)")}


# -- the old way -------------------------------------------------------------------------------------------------------


def test_a_legacy_operation_works_eagerly_alone_and_between_others():
    op, (x, dy) = fill(Legacy(H)), (spiky(4, H), spiky(4, H, seed=2))
    twin = Powered(H)
    twin.load_state_dict(op.state_dict())
    for found, want in zip(step(op, x, dy), step(twin, x, dy), strict=True):
        torch.testing.assert_close(found, want)
    model = octavo.Sequential(ops.ConstantScale(2.0), op, ops.Bias(H), octavo.Linear(H, H))
    other = octavo.Sequential(copy.deepcopy(model[0]), twin, *copy.deepcopy(list(model[2:])))
    for found, want in zip(step(model, x, dy), step(other, x, dy), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_a_legacy_operation_without_gradients():
    op, x = fill(Legacy(H)), spiky(4, H)
    with torch.no_grad():
        assert torch.equal(octavo.Sequential(op)(x), x * x * op.gain)


@pytest.mark.parametrize("wrap", [lambda op: op, lambda op: octavo.Sequential(ops.Bias(H), op)], ids=["alone", "in"])
def test_under_fullgraph_a_legacy_operation_is_an_error_with_its_reason(wrap):
    with pytest.raises(Exception, match="op_forward"):
        compiled(wrap(Legacy(H)))(spiky(4, H))


def test_a_legacy_operation_that_is_not_strict_breaks_the_graph_once():
    op = fill(Legacy(H))
    op.strict = False
    model = octavo.Sequential(ops.Bias(H), op, ops.ConstantScale(2.0))
    twin, (x, dy) = copy.deepcopy(model), (spiky(4, H), spiky(4, H, seed=2))
    graphs = Graphs()
    call = torch.compile(model, backend=graphs)
    for _ in range(2):
        assert_equal(step(model, x, dy, call=call), step(twin, x, dy))
    assert len(graphs.forward) == 2  # before it and after it
    assert any("op_forward" in why for why in counters["graph_break"])
