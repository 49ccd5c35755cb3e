"""Plans: when one is made, what it says of itself, and rules that users bring."""

import copy
import logging

import pytest
import torch

import octavo
from octavo import ops
from octavo.errors import UnsupportedConfig
from tests.support.custom_operations import Doubled, Powered
from tests.support.linear_oracle import assert_same
from tests.support.own_rules import X, fused_power, pair, rule
from tests.support.sequentials import H, M, batch, mlp, quantized, residual, unbiased, unfused
from tests.support.steps import assert_equal, step

# -- plans are remembered ----------------------------------------------------------------------------------------------


@pytest.fixture
def planned():
    """A Sequential with a rule whose condition is asked once for each plan; how often it was."""
    asked = []

    def holds(configs):
        asked.append(configs)
        return False

    rule = ops.Rule("never", (ops.RMSNorm, octavo.Linear), Nothing, (ops.Condition("never", holds, "It never does."),))
    layers = ops.RMSNorm(H), octavo.Linear(H, H)
    return octavo.Sequential(*layers, rules=(ops.Forward(rule),)), asked


class Nothing(ops.FusedOperation):
    @staticmethod
    def fuser_forward_compute(configs, inputs):
        raise AssertionError("not chosen")

    @staticmethod
    def fuser_forward_save_ctx(configs, inputs, outputs, fresh):
        raise AssertionError("not chosen")


def one_step(model, recipe="fp8-current", **given):
    with octavo.autocast(recipe):
        return step(model, *batch(**given))


def test_no_plan_is_made_in_steady_state(planned):
    model, asked = planned
    one_step(model)
    before = len(asked)
    assert before > 0
    for i in range(3):
        one_step(model, seed=i)
        step_in = batch(5 + i)
        with octavo.autocast("fp8-current"):
            step(model, *step_in)
    assert len(asked) == before


CHANGES = {
    "another recipe": lambda m: one_step(m, "mxfp8"),
    "a field of the recipe": lambda m: one_step(m, "fp8-current(pow2=True)"),
    "the backward of the recipe": lambda m: one_step(m, "fp8-current(backward='high_precision')"),
    "a history": lambda m: one_step(m, "fp8-delayed(history=4)"),
    "no gradients": lambda m: torch.no_grad()(lambda: m(batch()[0]))(),
    "a frozen weight": lambda m: (m[1].weight.requires_grad_(False), one_step(m)),
    "a dtype": lambda m: (m.bfloat16(), one_step(m, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_plan_is_made_for_what_matters(planned, change):
    model, asked = planned
    one_step(model)
    before = len(asked)
    change(model)
    assert len(asked) > before


def test_a_plan_is_made_for_another_length_of_the_history(planned):
    """A layer that has one window refuses another: its twin has it, or itself once it forgot the first."""
    model, asked = planned
    twin = octavo.Sequential(*copy.deepcopy(list(model)), rules=model.rules)
    one_step(model, "fp8-delayed(history=16)")
    before = len(asked)
    with pytest.raises(UnsupportedConfig, match="one window cannot follow"):
        one_step(model, "fp8-delayed(history=4)")
    assert len(asked) == before
    one_step(twin, "fp8-delayed(history=4)")
    assert len(asked) == before + 1
    assert [configs[1].recipe.history for configs in asked[-2:]] == [16, 4]
    octavo.revert(model), octavo.convert(model, "fp8-delayed(history=4)")
    found, want = step(model, *batch()), one_step(twin, "fp8-delayed(history=4)")
    assert len(asked) == before + 1  # the twin's, found again
    assert_equal(found, want)


def test_the_dtype_of_torchs_autocast_is_followed(planned):
    """Where it is x's, layers run together; where it would have them cast x, each by itself. Neither is made again."""
    model, asked = planned
    fused = octavo.Sequential(ops.RMSNorm(H), unbiased("fp8-current")).bfloat16()
    x, dy = batch(dtype=torch.bfloat16)
    for i, dtype in enumerate((torch.bfloat16, torch.float16, torch.bfloat16, torch.float16)):
        with torch.autocast("cpu", dtype):
            found = one_step(model, dtype=torch.bfloat16)
            explained = fused.explain(x.clone().requires_grad_())
            assert_equal(step(fused, x, dy.to(dtype)), step(unfused(fused), x, dy.to(dtype)), f"{i}")
        assert found[0].dtype == dtype
        assert len(asked) == 1
        together = dtype == x.dtype
        assert [run.ops for run in explained.runs] == (
            [("RMSNorm", "Linear")] if together else [("RMSNorm",), ("Linear",)]
        )
        assert explained.fired == (("norm-linear",) if together else ())
        assert ("torch.autocast casts what layers take" in str(explained)) != together
    one_step(model.bfloat16(), dtype=torch.bfloat16)
    assert len(asked) > 1  # another dtype of the weights is another plan


def test_a_plan_that_was_made_is_found_again(planned):
    model, asked = planned
    recipes = ("fp8-current", "mxfp8", "fp8-current(pow2=True)")
    for recipe in recipes:
        one_step(model, recipe)
    before = len(asked)
    for recipe in recipes:
        one_step(model, recipe)
    assert len(asked) == before


def test_changed_weights_and_state_make_no_plan(planned):
    model, asked = planned
    one_step(model, "fp8-delayed")
    octavo.step(model)  # the first step has a plan of its own
    one_step(model, "fp8-delayed")
    before = len(asked)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    octavo.step(model)
    model.load_state_dict(model.state_dict())
    one_step(model, "fp8-delayed")
    assert len(asked) == before


def test_a_recipe_that_changes_between_steps_is_followed():
    model = mlp(None)
    twin = copy.deepcopy(model)
    for recipe in ("fp8-current", "mxfp8", "fp8-current(pow2=True)", "fp8-current", "bf16"):
        found = one_step(model, recipe)
        with octavo.autocast(recipe):
            want = step(unfused(twin), *batch())
        assert_equal(found, want, recipe)


# -- training and inference in turn ------------------------------------------------------------------------------------


@quantized
def test_inference_in_between_leaves_the_weight_cache_of_training(recipe):
    model, twin, (x, dy) = mlp(recipe), mlp(recipe), batch()
    for i, first in enumerate((True, False, False)):
        given = {j: {"is_first_microbatch": first} for j in (1, 3)}
        found = step(model, x + i, dy, op_kwargs=given)
        assert_equal(found, step(twin, x + i, dy, op_kwargs=given), f"microbatch {i}")
        with torch.no_grad():
            y = model(x + i, op_kwargs={j: {"is_first_microbatch": False} for j in (1, 3)})
        assert_same(y, found[0], "inference")


# -- why, and why not --------------------------------------------------------------------------------------------------


def test_an_explanation_says_what_fired_what_did_not_and_why():
    model, x = mlp("bf16"), batch()[0].requires_grad_()
    explained = model.explain(x)
    refused = [r for r in explained.refused if r.rule == "norm-linear"]
    assert refused
    assert all(len(r.sentence) > 10 and r.condition and r.ops for r in explained.refused)
    text = str(explained)
    assert refused[0].sentence in text and "norm-linear" in text
    assert set(explained.fired).isdisjoint({"norm-linear"})


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
def test_an_explanation_has_every_operation_once_in_order(recipe):
    model, x = residual(recipe), batch()[0].requires_grad_()
    explained = model.explain(x)
    (run,) = explained.runs
    assert run.ops == ("MakeExtraOutput", "RMSNorm", "Linear", "SwiGLU", "Linear", "AddExtraInput")
    assert explained.alone == ()
    if recipe == "bf16":
        assert run.forward == ("fork", "norm", "linear", "activation", "linear-bias-add")
        assert run.backward == ("add", "linear", "activation", "linear", "add-rmsnorm")
    else:
        assert run.forward == ("fork", "norm-linear", "mlp", "add")
        assert run.backward == ("add", "mlp", "add-rmsnorm")
    text = str(explained)
    assert f"run of {', '.join(run.ops)}" in text
    assert f"forward   {' | '.join(run.forward)}" in text and f"backward  {' | '.join(run.backward)}" in text


def test_an_explanation_has_what_runs_together_and_what_runs_alone():
    """Runs end at other modules, at views and at codes; a Sequential inside is flattened."""
    model = octavo.Sequential(
        Doubled(), Powered(H), torch.nn.Tanh(), ops.RMSNorm(H), ops.Identity(), ops.GELU(), ops.Bias(H),
        ops.Reshape((-1, H)), ops.Quantize(recipe="mxfp8"), unbiased("mxfp8"),
        octavo.Sequential(ops.Bias(H), ops.ReLU()), ops.ConstantScale(2.0),
    )  # fmt: skip
    explained = model.explain(batch()[0].requires_grad_())
    assert [run.ops for run in explained.runs] == [
        ("Doubled", "Powered"), ("RMSNorm",), ("GELU", "Bias"), ("Quantize",), ("Linear",),
        ("Bias", "ReLU", "ConstantScale"),
    ]  # fmt: skip
    assert all(len(run.forward) == len(run.backward) == len(run.ops) for run in explained.runs)  # nothing fired
    assert [why.split(":")[0] for why in explained.alone] == ["Tanh", "Identity", "Reshape", "Quantize", "Linear"]
    text = str(explained)
    places = [text.index(f"run of {', '.join(run.ops)}\n") for run in explained.runs]
    assert places == sorted(places)
    assert all(f"by itself: {why}" in text for why in explained.alone)


def test_explaining_runs_nothing_and_remembers_nothing():
    model, (x, _) = mlp("fp8-delayed", bias=True), batch()
    before = octavo.state_dict(copy.deepcopy(model))
    model.explain(x.requires_grad_())
    after = octavo.state_dict(model)
    for key, value in before.items():
        assert_same(after[key], value, key)
    assert all(p.grad is None for p in model.parameters())


def test_what_is_required_and_fires_is_no_error():
    model = octavo.Sequential(ops.RMSNorm(H), unbiased("fp8-current"), require=("norm-linear",))
    assert model(batch()[0]).shape == (M, H)


def test_what_is_required_and_refused_is_an_error_with_the_condition():
    model = octavo.Sequential(ops.RMSNorm(H), unbiased("bf16"), require=("norm-linear",))
    sentence = next(
        r.sentence for r in octavo.Sequential(*model).explain(batch()[0].requires_grad_()).refused
        if r.rule == "norm-linear"
    )  # fmt: skip
    with pytest.raises(UnsupportedConfig, match="norm-linear") as refused:
        model(batch()[0])
    assert sentence in str(refused.value)


def test_what_is_required_and_is_no_rule_is_an_error():
    with pytest.raises(ValueError, match="norm-lienar"):
        octavo.Sequential(ops.RMSNorm(H), unbiased("fp8-current"), require=("norm-lienar",))(batch()[0])


def test_what_is_required_and_has_no_operations_is_an_error():
    with pytest.raises(UnsupportedConfig, match="norm-linear"):
        octavo.Sequential(unbiased("fp8-current"), require=("norm-linear",))(batch()[0])


def test_a_plan_is_logged_once(caplog):
    model = octavo.Sequential(ops.RMSNorm(H, eps=0.0625), unbiased("fp8-current"))  # planned by nobody else
    with caplog.at_level(logging.INFO, logger="octavo"):
        for _ in range(3):
            model(batch()[0])
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert said == ["run of RMSNorm, Linear: norm-linear"]


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
@pytest.mark.parametrize("compiles", [False, True])
def test_what_was_refused_is_logged_with_the_plan(caplog, recipe, compiles):
    model, x = residual(recipe), batch()[0]
    with caplog.at_level(logging.INFO, logger="octavo"):
        refused = model.explain(x.clone().requires_grad_()).refused
        assert len(refused) >= 3 and not caplog.records
        call = torch.compile(model, backend="aot_eager") if compiles else model
        for _ in range(3):
            call(x.clone().requires_grad_())
    said = [r.getMessage() for r in caplog.records]
    assert said[0].startswith("run of MakeExtraOutput, RMSNorm, Linear, SwiGLU, Linear, AddExtraInput: ")
    assert said[1:] == [
        f"{r.rule} on {', '.join(r.ops)} was refused: {r.sentence} ({r.condition})" for r in refused
    ]  # fmt: skip


# -- rules of one's own ------------------------------------------------------------------------------------------------


def test_a_rule_of_ones_own_is_chosen():
    model = pair(rules=(ops.Forward(rule()),))
    assert model.explain(X.clone().requires_grad_()).fired == ("both",)
    assert_equal(step(model, X, X), step(pair(rules=None), X, X))


def test_a_rule_of_one_sequential_is_no_rule_of_another():
    one, other = pair(rules=(ops.Forward(rule(factor=10)),)), pair()
    assert (one(X) == 360).all() and (other(X) == 36).all()
    assert other.explain(X).fired == ()


def test_the_first_of_two_rules_of_equal_length_is_chosen():
    rules = ops.Forward(rule("first", 10)), ops.Forward(rule("second", 100))
    assert (pair(rules=rules)(X) == 360).all()
    assert (pair(rules=rules[::-1])(X) == 3600).all()


def test_the_longest_of_two_rules_is_chosen():
    class Three(ops.FusedOperation):
        @staticmethod
        def fuser_forward_compute(configs, inputs):
            return 8 * inputs[0].x, ((), (), ()), ((), (), ())

        @staticmethod
        def fuser_forward_save_ctx(configs, inputs, outputs, fresh):
            return (), (), ()

    class Two(ops.FusedOperation):
        @staticmethod
        def fuser_forward_compute(configs, inputs):
            return 4 * inputs[0].x, ((), ()), ((), ())

        @staticmethod
        def fuser_forward_save_ctx(configs, inputs, outputs, fresh):
            return (), ()

    two = ops.Forward(ops.Rule("two", (Doubled,) * 2, Two))
    three = ops.Forward(ops.Rule("three", (Doubled,) * 3, Three))
    model = octavo.Sequential(*[Doubled() for _ in range(5)], rules=(two, three))
    assert sorted(model.explain(X).fired) == ["three", "two"]
    assert torch.equal(model(X), 32 * X)


def test_the_first_condition_that_fails_is_the_one_that_is_said():
    conditions = (
        ops.Condition("holds", lambda configs: True, "Never said."),
        ops.Condition("cubes", lambda configs: configs[1].exponent == 3, "It takes an exponent of 3."),
        ops.Condition("fails", lambda configs: False, "Not reached."),
    )
    (refused,) = pair(rules=(ops.Forward(rule(conditions=conditions)),)).explain(X).refused
    assert (refused.rule, refused.condition, refused.sentence) == ("both", "cubes", "It takes an exponent of 3.")


def test_a_condition_that_raises_is_named():
    def holds(configs):
        return configs[1].no_such_field

    model = pair(rules=(ops.Forward(rule(conditions=(ops.Condition("asks", holds, "Not reached."),))),))
    with pytest.raises(AttributeError, match="no_such_field") as caught:
        model(X)
    assert "the condition 'asks' of the rule 'both'" in "".join(caught.value.__notes__)


def test_the_names_of_octavos_rules_are_taken():
    taken = rule("norm-linear")
    for bring in (ops.register_forward_fusion, lambda r: pair(rules=(ops.Forward(r),))):
        with pytest.raises(UnsupportedConfig, match="'norm-linear' is the name of one of Octavo's own rules"):
            bring(taken)


def test_global_rules_come_and_go():
    leave = ops.register_forward_fusion(rule("everyone's", 10))
    try:
        assert (pair()(X) == 360).all()
        assert (pair(rules=None)(X) == 36).all()
        assert (pair(rules=(ops.Forward(rule("own", 100)),))(X) == 3600).all()
        first = ops.register_forward_fusion(rule("prepended", 1000), prepend=True)
        assert (pair()(X) == 36000).all()
        first()
        assert (pair()(X) == 360).all()
    finally:
        leave()
    assert (pair()(X) == 36).all()


@pytest.mark.parametrize("register", [ops.register_backward_fusion, ops.register_forward_backward_fusion])
def test_global_rules_of_the_other_kinds(register):
    class Backward(fused_power()):
        @staticmethod
        def fuser_backward(configs, saved, grads, wants):
            x, gain, _, power = saved[1]
            (dy,) = grads
            dx = 20 * dy * gain * configs[1].exponent * x ** (configs[1].exponent - 1)
            return (dx,), (None, (dy * power).sum(0) if wants[1].gain else None, None)

    if register is ops.register_backward_fusion:
        Backward = type("Only", (ops.FusedOperation,), {"fuser_backward": staticmethod(Backward.fuser_backward)})
    leave = register(ops.Rule("ten times", (Doubled, Powered), Backward))
    try:
        model = pair()
        assert model.explain(X.clone().requires_grad_()).fired == ("ten times",)
        found, want = step(model, X, X), step(pair(rules=None), X, X)
        assert_equal(found, [want[0], 10 * want[1], want[2]])
    finally:
        leave()


def test_a_subclass_of_an_operation_is_not_fused_by_its_parents_rules():
    class Special(Powered):
        @staticmethod
        def op_forward_compute(config, inputs):
            return -inputs.x, (inputs.x,)

    model = octavo.Sequential(Doubled(), Special(4), rules=(ops.Forward(rule()),))
    assert torch.equal(model(X), -2 * X)


# -- what a rule is made of --------------------------------------------------------------------------------------------


NOT_FUSED = {
    "an operation": Doubled, "a function": step, "the base": ops.FusedOperation, "nothing": None, "a name": "mlp",
}  # fmt: skip


@pytest.mark.parametrize("op", NOT_FUSED.values(), ids=NOT_FUSED)
def test_a_rule_takes_a_fused_operation(op):
    with pytest.raises(UnsupportedConfig, match=r"'mine' puts a class derived from FusedOperation .* got"):
        ops.Rule("mine", (Doubled, Powered), op)


def step_forward(configs, inputs):
    raise AssertionError("not run")


def test_a_step_and_functions_of_a_layer_are_two_kinds_of_fused_operations():
    body = {"step_forward": staticmethod(step_forward), "fuser_backward": staticmethod(step_forward)}
    with pytest.raises(TypeError, match=r"Mixed defines step_\* and fuser_\* functions"):
        type("Mixed", (ops.FusedOperation,), body)


@pytest.mark.parametrize("name", ["linear", "norm-linear"])
def test_a_step_takes_no_name_that_another_has(name):
    with pytest.raises(TypeError, match=f"Thief.op_name is '{name}', which belongs to another"):
        type("Thief", (ops.FusedOperation,), {"op_name": name, "step_forward": staticmethod(step_forward)})


def test_a_step_for_one_side_is_not_for_the_other():
    op = type("Step", (ops.FusedOperation,), {"step_forward": staticmethod(step_forward)})
    with pytest.raises(TypeError, match="Rule 'mine' is for backward, and Step defines no step_backward"):
        ops.Backward(ops.Rule("mine", (Doubled, Powered), op))


@pytest.mark.parametrize("name", [None, "", 3])
def test_a_rule_has_a_name(name):
    with pytest.raises(UnsupportedConfig, match=f"name is a string that is not empty, got {name!r}"):
        rule(name)


class BothSides(fused_power()):
    @staticmethod
    def fuser_backward(configs, saved, grads, wants):
        raise AssertionError("not run")


@pytest.mark.parametrize(("bring", "other"), [(ops.Forward, "backward"), (ops.Backward, "forward")])
def test_a_joint_operation_is_for_both_sides(bring, other):
    with pytest.raises(TypeError, match=f"BothSides defines a {other} too, which would never run"):
        bring(ops.Rule("mine", (Doubled, Powered), BothSides))


class OnePiece(ops.FusedOperation):
    @staticmethod
    def fuser_forward(ctxs, inputs):
        return 4 * inputs[0].x

    @staticmethod
    def fuser_backward(ctxs, dy):
        return (4 * dy,), (None,)


def test_what_inherits_a_fused_forward_in_one_piece_runs_it():
    class Again(OnePiece):
        @staticmethod
        def fuser_backward(ctxs, dy):
            return (40 * dy,), (None,)

    rules = (ops.Joint(ops.Rule("again", (Doubled, Doubled), Again)),)
    model = octavo.Sequential(Doubled(), Doubled(), rules=rules)
    assert_equal(step(model, X, X), [4 * X, 40 * X])


def test_a_backward_goes_with_its_own_kind_of_forward():
    with pytest.raises(TypeError, match=r"Late runs fuser_forward, and its fuser_backward is that of BothSides"):

        class Late(BothSides):
            @staticmethod
            def fuser_forward(ctxs, inputs):
                return None

    body = {name: staticmethod(getattr(BothSides, f"fuser_forward_{name}")) for name in ("compute", "save_ctx")}
    with pytest.raises(TypeError, match=r"Early runs fuser_forward_compute, and its fuser_backward is .* OnePiece"):
        type("Early", (OnePiece,), {f"fuser_forward_{name}": function for name, function in body.items()})


def test_a_fused_forward_in_one_piece_is_static():
    with pytest.raises(TypeError, match=r"Bound.fuser_forward must be a @staticmethod"):

        class Bound(ops.FusedOperation):
            def fuser_forward(self, ctxs, inputs):
                return None

            @staticmethod
            def fuser_backward(ctxs, dy):
                return None


def test_a_step_without_a_curve_is_named_by_what_it_does():
    """They are one layer, whose function is y = x."""
    model = octavo.Sequential(ops.Bias(8), ops.Dropout(0.5), ops.ConstantScale(2.0), ops.GELU())
    (run,) = model.explain(torch.ones(4, 8, requires_grad=True)).runs
    assert run.forward == ("bias", "dropout", "scale", "activation") and run.backward == run.forward[::-1]


def test_a_rule_that_fuses_a_cast_does_not_fire_without_a_cast():
    model, x = octavo.Sequential(ops.GELU(), octavo.Linear(32, 16, recipe="bf16")), torch.randn(8, 32)
    with torch.no_grad():  # nothing else speaks against it: no x is kept
        assert "activation-linear" not in model.explain(x).fired
