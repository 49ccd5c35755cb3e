"""Corners where a run could differ from its operations called one by one."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

import octavo
from octavo import ops
from tests.fuser.models import recipes, step

W = 16


def linear(**settings):
    return octavo.Linear(W, W, **settings)


def rows(n=8):
    return torch.randn(n, W)


def compiled(model):
    return torch.compile(model, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("wrap", [lambda m: m, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("after", [ops.GELU, lambda: ops.ConstantScale(2.0), lambda: ops.RMSNorm(W)])
def test_a_first_layer_whose_only_gradient_is_in_a_buffer(wrap, after):
    torch._dynamo.reset()
    layer = linear(bias=False, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(W, W)
    model, x = octavo.Sequential(layer, after()), rows()
    want = torch.autograd.grad(model[1](x @ layer.weight.T).sum(), layer.weight)[0]
    wrap(model)(x).sum().backward()
    torch.testing.assert_close(layer.weight.main_grad, want)


def test_a_first_layer_whose_gradient_is_put_off():
    layer = linear(bias=False, delay_wgrad_compute=True)
    octavo.Sequential(layer, ops.GELU())(rows()).sum().backward()
    layer.backward_dw()
    assert layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("missing", [False, True])
def test_a_layer_that_no_gradient_reaches_is_not_said_to_have_one(missing):
    first, last = linear(fuse_wgrad_accumulation=True), linear(fuse_wgrad_accumulation=True)
    model = octavo.Sequential(first, ops.MakeExtraOutput(), last)
    for layer in (first, last):
        layer.weight.grad_added_to_main_grad = False
        layer.weight.main_grad = torch.zeros(W, W)
    if missing:
        del last.weight.main_grad
    _, extra = model(rows().requires_grad_())
    extra.sum().backward()
    assert first.weight.grad_added_to_main_grad and first.weight.main_grad.abs().sum() > 0
    assert not last.weight.grad_added_to_main_grad


class LinearGelu(ops.FusedOperation):
    @staticmethod
    def fuser_backward(configs, saved, grads, wants):
        h, x, w = saved[1][0], saved[0][0], saved[0][3]
        dh = torch.ops.aten.gelu_backward(grads[0], h, approximate="tanh")
        return (dh @ w, dh.T @ x, dh.sum(0), *[None] * 5), (None,) * 4


@pytest.mark.parametrize("wrap", [lambda m: m, compiled], ids=["eager", "compiled"])
def test_a_rule_of_somebody_elses_leaves_other_layers_their_buffers(wrap):
    torch._dynamo.reset()
    last = linear(fuse_wgrad_accumulation=True)
    last.weight.main_grad = torch.zeros(W, W)
    rule = ops.Backward(ops.Rule("mine", (octavo.Linear, ops.GELU), LinearGelu))
    model = octavo.Sequential(linear(), ops.GELU(), last, rules=(rule,))
    assert model.explain(rows().requires_grad_()).fired == ("mine",)
    wrap(model)(rows().requires_grad_()).sum().backward()
    assert last.weight.main_grad.abs().sum() > 0
    assert model[0].weight.grad.abs().sum() > 0


def test_a_module_replaced_by_attribute_is_the_one_that_runs():
    model, new, x = octavo.LayerNormMLP(W, 32), octavo.Linear(W, 32), rows()
    model(x)
    model.fc1 = new
    model(x).sum().backward()
    assert new.weight.grad is not None


def test_a_forward_of_somebody_elses_is_called():
    class Zero(octavo.Linear):
        def forward(self, x):
            return super().forward(x) * 0

    model = octavo.Sequential(Zero(W, W), ops.GELU())
    assert model(rows()).abs().sum() == 0
    assert any("forward is not Octavo's" in why for why in model.explain(rows()).alone)


def test_a_rule_for_a_subclass_would_fire_on_its_parent():
    class Mine(ops.GELU):
        pass

    with pytest.raises(octavo.errors.UnsupportedConfig, match="Activation"):
        ops.Rule("mine", (octavo.Linear, Mine), LinearGelu)


def test_a_rule_without_a_side_is_refused():
    with pytest.raises(octavo.errors.UnsupportedConfig, match="Forward"):
        octavo.Sequential(linear(), ops.GELU(), rules=(ops.Rule("mine", (octavo.Linear, ops.GELU), LinearGelu),))


def test_what_is_required_must_fire_in_every_run_that_has_it():
    parts = [ops.RMSNorm(W), linear(recipe="fp8-current"), nn.Identity(), ops.RMSNorm(W), linear()]
    with pytest.raises(octavo.errors.UnsupportedConfig, match="norm-linear"):
        octavo.Sequential(*parts, require="norm-linear")(rows())


def test_an_explanation_calls_no_hooks_and_writes_to_no_buffer():
    grouped, called = octavo.GroupedLinear(2, W, W), []
    model = octavo.Sequential(ops.GELU(), grouped)
    model[0].register_forward_hook(lambda *_: called.append(1))
    buffer = torch.full((8, W), 7.0)
    said = model.explain(rows(), torch.tensor([3, 5]), op_kwargs={1: {ops.OUTPUT_BUFFER_KEY: buffer}})
    assert called == [] and (buffer == 7).all()
    assert "GELU: it has hooks" in said.alone


@recipes(["fp8-delayed", "nvfp4"])
def test_state_that_is_made_while_a_graph_is_traced(recipe):
    torch._dynamo.reset()
    model = octavo.Sequential(ops.RMSNorm(W), linear())
    call = compiled(model)
    with octavo.autocast(recipe):
        call(rows()).sum().backward()
    torch._dynamo.reset()
    cold = octavo.Sequential(ops.RMSNorm(W), linear(recipe="fp8-current"))
    assert compiled(cold)(rows(), op_kwargs={1: {"is_first_microbatch": True}}).shape == (8, W)


@pytest.mark.parametrize("first", [[], [linear()]], ids=["at the start", "later"])
def test_two_forks_in_a_row(first):
    torch._dynamo.reset()
    model = octavo.Sequential(*first, ops.MakeExtraOutput(), ops.MakeExtraOutput(), ops.GELU())
    x, dys = rows(), [rows() for _ in range(3)]
    for a, b in zip(step(model, x, dys), step(model, x, dys, call=compiled(model)), strict=True):
        torch.testing.assert_close(a, b)


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
        octavo.Sequential(ops.RMSNorm(W), linear(recipe="fp8-current")),
        ops.GELU(),
        ops.RMSNorm(W),
        linear(),
    ):
        for x in (rows(), rows().view(2, 4, W)):
            model(x.requires_grad_()).add_(1).sum().backward()


def test_blocks_under_torch_autocast_and_with_an_ambient_recipe():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert octavo.LayerNormMLP(W, 32, recipe="fp8-current")(rows()).dtype == torch.bfloat16
    block = octavo.LayerNormMLP(W, 32, activation_recompute=True)
    with octavo.autocast("fp8-current"):
        y = block(rows().requires_grad_())
    y.sum().backward()
    assert block.fc1.weight.grad is not None


def test_gradients_that_are_views_or_the_same_twice():
    class Twice(ops.BasicOperation):
        params = ("gain",)

        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(8, W))

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


def test_an_addition_in_place_to_a_channel_is_refused():
    with pytest.raises(octavo.errors.UnsupportedConfig, match="writes to its extra input"):
        octavo.Sequential(ops.MakeExtraOutput(channel="r"), linear(), ops.AddExtraInput(in_place=True, source="r"))


def test_a_number_has_no_columns():
    with pytest.raises(octavo.errors.UnsupportedShape, match=r"got \(\)"):
        octavo.Sequential(ops.GELU(), linear())(torch.tensor(1.0))


def test_a_fuser_counts_its_extra_inputs():
    fuser = ops.OperationFuser([ops.AddExtraInput(), ops.GELU()])
    with pytest.raises(octavo.errors.UnsupportedConfig, match="1 extra inputs"):
        fuser(rows())


class Halves(ops.FusedOperation):
    """x / 2 + bias, in one piece."""

    @staticmethod
    def fuser_forward(ctxs, inputs):
        ctxs[0].save_for_backward(inputs[0].x)
        ctxs[1].factor = 0.5
        return inputs[0].x * 0.5 + inputs[1].bias

    @staticmethod
    def fuser_backward(ctxs, dy):
        assert ctxs[0].saved_tensors[0].shape == dy.shape
        return (dy * ctxs[1].factor,), (None, dy.sum(0))


def test_a_fused_forward_in_one_piece():
    rule = ops.Joint(ops.Rule("halves", (ops.ConstantScale, ops.Bias), Halves))
    parts = (ops.GELU(), ops.ConstantScale(0.5), ops.Bias(W), ops.SiLU())
    model, twin = octavo.Sequential(*parts, rules=(rule,)), octavo.Sequential(*copy.deepcopy(parts), rules=None)
    assert model.explain(rows()).fired == ("halves",)
    x, dy = rows(), rows()
    for a, b in zip(step(model, x, dy), step(twin, x, dy), strict=True):
        torch.testing.assert_close(a, b)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="fuser_forward"):
        compiled(model)(x)


class Largest(ops.BasicOperation):
    """x again, and where its largest column is."""

    num_extra_outputs = 1

    @staticmethod
    def fuser_forward_compute(config, inputs):
        return inputs.x * 1, (inputs.x.argmax(-1),), ()

    @staticmethod
    def fuser_forward_save_ctx(config, inputs, outputs, fresh):
        return ()

    @staticmethod
    def fuser_backward(config, saved, grads, wants):
        return (grads[0] * 1,)


class Roll(ops.BasicOperation):
    """x, its columns turned by an integer for each row."""

    num_extra_inputs = 1

    @staticmethod
    def _at(x, turn, sign):
        return (torch.arange(x.shape[-1], device=x.device) + sign * turn[..., None]) % x.shape[-1]

    @staticmethod
    def fuser_forward_compute(config, inputs):
        return inputs.x.gather(-1, Roll._at(inputs.x, inputs.extra0, 1)), (), ()

    @staticmethod
    def fuser_forward_save_ctx(config, inputs, outputs, fresh):
        return (inputs.extra0,)

    @staticmethod
    def fuser_backward(config, saved, grads, wants):
        assert not wants.extra0
        return grads[0].gather(-1, Roll._at(grads[0], saved[0], -1)), None


@pytest.mark.parametrize("wrap", [lambda m: m, compiled], ids=["eager", "compiled"])
def test_a_channel_of_integers_wants_no_gradient(wrap):
    torch._dynamo.reset()
    model = octavo.Sequential(
        Largest().set_extra_output_channel(0, "at", output_to_caller=False), Roll().set_extra_input_channel(0, "at")
    )
    x = rows().requires_grad_()
    y = wrap(model)(x)
    assert (y[:, 0] == x.max(-1).values).all()
    y[:, 0].sum().backward()
    assert torch.equal(x.grad, torch.nn.functional.one_hot(x.argmax(-1), W).float())


def test_what_is_required_has_to_exist():
    with pytest.raises(octavo.errors.UnsupportedConfig, match="no rule has that name"):
        octavo.Sequential(ops.RMSNorm(W), linear(recipe="fp8-current"), require="nrom-linear")(rows())


@pytest.mark.parametrize(
    "settings", [{"pattern": (ops.GELU(),)}, {"conditions": ops.Condition("a", bool, "b")}], ids=str
)
def test_a_rule_says_what_it_is_made_of(settings):
    with pytest.raises(octavo.errors.UnsupportedConfig, match="tuple of"):
        ops.Rule("mine", **{"pattern": (octavo.Linear, ops.GELU), "op": LinearGelu, **settings})
