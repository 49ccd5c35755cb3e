"""The contract of the linear layer and of the grouped one, without a module around them: forward returns what abstract
describes, backward needs no more than save chose, inputs stay as they were, and a config is its string."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from octavo.ops import grouped_linear_layer
from octavo.ops.linear_layer import Buffers, Config, Inputs, layer
from octavo.quant import Tensorwise
from octavo.quant.casts import quantize_pair
from octavo.quant.quantizer import CastArgs
from octavo.recipes import SHIPPED, recipe
from octavo.runtime.contract import WeightCast
from tests.support.contract_checks import check_backward, check_forward, flatten, wants

M, K, N = 20, 33, 40
RECIPES = [*SHIPPED, "fp8-delayed(cold_start='current')", "mxfp8(backward='dequantized')", "fp8-block(wgrad='bf16')"]
GRADS = ["", "dx", "dw", "db", "dx dw", "dw db", "dx dw db"]


def inputs_for(config: Config, lead=(M,)) -> Inputs:
    """Random tensors, and codes where the config says they come as codes."""
    quant = config.quant
    x, w = torch.randn(*lead, K), torch.randn(N, K)
    x_codes = row = column = scaling = ()
    given = CastArgs(inverse_scale=torch.full((1,), 3.0)) if config.recipe.stateful else CastArgs()
    if config.recipe.stateful:
        scaling = tuple(torch.full((1,), v) for v in (2.0, 3.0, 4.0))
        if config.recipe.cold_start == "current":
            scaling = (*scaling, *(torch.tensor([n]) for n in (0, 1, 0)))
    if config.x == "codes":
        x_codes = tuple(quantize_pair(x, quant.fprop.left, None, given)[0].tensors())
    if config.weight != "plain":
        pair = quantize_pair(w, quant.fprop.right, quant.dgrad.right, given)
        row, column = (() if q is None else tuple(q.tensors()) for q in pair)
    bias = torch.randn(N) if config.bias_dtype else None
    seen = (torch.zeros(1), torch.zeros(1)) if config.observe else ()
    return Inputs(x, w, bias, x_codes, row, column, scaling, seen)


def configs():
    for name, grads, x, weight, observe, output in itertools.product(
        RECIPES, GRADS, ("plain", "codes"), ("plain", "codes"), (False, True), (False, True)
    ):
        subject = recipe(name)
        quantizes = subject.linear().fprop.mode == "quantized"
        if (x == "codes" or weight == "codes" or output) and not quantizes:
            continue
        if observe and not subject.stateful:
            continue
        yield Config(
            subject, bias_dtype="float32", **wants(grads), x=x, weight=weight, observe=observe, quantize_output=output
        )


ALL = list(configs())


# -- the same for groups -----------------------------------------------------------------------------------------------

ROWS, G = 40, 3
SIZES = (20, 0, 12)  # and a tail of eight rows
GROUPED_RECIPES = [*SHIPPED, "fp8-delayed(cold_start='current')", "fp8-block(backward='dequantized')"]
GROUPED_GRADS = ["", "dx", "dw", "db", "dx dw", "dx dw db ds"]


def buffers_for(config: Config) -> Buffers:
    seed = torch.tensor([5, 6]) if config.is_stochastic else None
    return Buffers(amax=torch.zeros(1) if config.observe else None, seed=seed)


def grouped_inputs(config: grouped_linear_layer.Config) -> grouped_linear_layer.Inputs:
    """Random tensors, and codes where the config says they come as codes."""
    x, weight, bias = torch.randn(ROWS, K), torch.randn(G, N, K), torch.randn(G, N)
    scaling = row = column = ()
    if config.recipe.stateful:
        scaling = tuple(torch.full((G,), v) for v in (2.0, 3.0, 4.0))
        if config.measures_x:
            scaling = (*scaling, *(torch.full((G,), n) for n in (0, 1, 0)))
    if config.weight != "plain":
        row, column = grouped_codes(config, weight, scaling[1:2])
    scales = torch.rand(ROWS) if config.scales_dtype else None
    seen = (torch.zeros(G), torch.zeros(G)) if config.observe else ()
    return grouped_linear_layer.Inputs(x, weight, bias, torch.tensor(SIZES), scales, None, row, column, scaling, seen)


def grouped_codes(config, weight, scaling):
    """Cached codes of a weight."""
    protos = grouped_linear_layer.layer.abstract_weight(config, weight)
    row, column = (() if p is None else tuple(p.empty().tensors()) for p in protos)
    grouped_linear_layer.layer.refresh(config, WeightCast(weight, row, column, scaling=scaling))
    return row, column


def grouped_configs(name):
    subject = recipe(name)
    quantizes = subject.linear().fprop.mode == "quantized"
    ways = (False, True) if subject.stateful else (False,)
    weights = ("plain", "codes") if quantizes else ("plain",)
    for grads, weight, observe in itertools.product(GROUPED_GRADS, weights, ways):
        measures = subject.stateful and subject.cold_start == "current"
        yield grouped_linear_layer.Config(
            subject, bias_dtype="float32", scales_dtype="float32", **wants(grads), weight=weight, observe=observe,
            measures_x=measures, measures_w=measures, measures_dy=measures,
        )  # fmt: skip


def grouped_buffers(config):
    seed = torch.tensor([5, 6]) if config.is_stochastic else None
    return grouped_linear_layer.Buffers(amax=torch.zeros(G) if config.observe else None, seed=seed)


LINEAR = SimpleNamespace(
    layer=layer, Config=Config, Buffers=Buffers, inputs=inputs_for, buffers=buffers_for, rows=M,
    configs=lambda name: [config for config in ALL if config.recipe == recipe(name)][::3],
)  # fmt: skip
GROUPED = SimpleNamespace(
    layer=grouped_linear_layer.layer, Config=grouped_linear_layer.Config, Buffers=grouped_linear_layer.Buffers,
    inputs=grouped_inputs, buffers=grouped_buffers, rows=ROWS, configs=grouped_configs,
)  # fmt: skip
LAYERS = {"linear": LINEAR, "grouped": GROUPED}


def layers(recipes_of_linear, recipes_of_groups):
    """A case for each layer and recipe."""
    return pytest.mark.parametrize(("kind", "name"), [
        *[pytest.param(LINEAR, name, id=f"linear-{name}") for name in recipes_of_linear],
        *[pytest.param(GROUPED, name, id=f"grouped-{name}") for name in recipes_of_groups],
    ])  # fmt: skip


def is_stochastic(name):
    return Config(recipe(name), **wants("dx dw")).is_stochastic


# -- what both layers keep ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(M,), (2, 3, 5), (0,)], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_forward_returns_what_abstract_describes(name, lead):
    for config in (c for c in ALL if c.recipe == recipe(name)):
        check_forward(layer, config, inputs_for(config, lead))


@pytest.mark.parametrize("name", GROUPED_RECIPES)
def test_forward_of_groups_returns_what_abstract_describes(name):
    for config in grouped_configs(name):
        check_forward(GROUPED.layer, config, grouped_inputs(config))


@layers(RECIPES, GROUPED_RECIPES)
def test_backward_needs_only_saved_tensors(kind, name):
    for config in kind.configs(name):
        if config.is_stochastic:
            continue  # two backwards draw different bits, see below
        inputs = kind.inputs(config)
        made = kind.layer.forward(config, inputs)
        check_backward(kind.layer, config, inputs, made, (torch.randn(kind.rows, N),), kind.buffers(config))


@layers(filter(is_stochastic, RECIPES), filter(is_stochastic, GROUPED_RECIPES))
def test_a_backward_advances_the_seed(kind, name):
    config = kind.Config(recipe(name), **wants("dx dw"))
    inputs, buffers = kind.inputs(config), kind.buffers(config)
    saved = kind.layer.save(config, inputs, kind.layer.forward(config, inputs))
    kind.layer.backward(config, saved, buffers, (torch.randn(kind.rows, N),))
    assert buffers.seed.tolist() == [5, 7]


def test_the_tail_is_zero():
    config = GROUPED.Config(recipe("bf16"), **wants("dx"))
    inputs = grouped_inputs(config)
    made = GROUPED.layer.forward(config, inputs)
    dy = torch.randn(ROWS, N)
    dx = GROUPED.layer.backward(config, GROUPED.layer.save(config, inputs, made), GROUPED.Buffers(), (dy,))[0]
    assert not made.outputs[0][sum(SIZES) :].any() and not dx[sum(SIZES) :].any()
    assert made.outputs[0][: sum(SIZES)].any() and dx[: sum(SIZES)].any()


@pytest.mark.parametrize("name", RECIPES)
def test_amaxes_are_kept_where_backward_casts_by_them(name):
    for x_columns, again, weight in itertools.product(("forward", "backward"), (False, True), ("plain", "codes")):
        if weight == "codes" and recipe(name).linear().fprop.mode != "quantized":
            continue
        config = Config(recipe(name), **wants("dx dw"), x_columns=x_columns, recompute_w_columns=again, weight=weight)
        inputs = inputs_for(config)
        made = check_forward(layer, config, inputs)
        saved = layer.save(config, inputs, made)
        x_measured, w_measured = (
            isinstance(quantizer, Tensorwise) and not recipe(name).stateful
            for quantizer in (recipe(name).linear().fprop.left, recipe(name).linear().fprop.right)
        )
        assert (saved.x_amax is not None) == (x_measured and x_columns == "backward")
        assert (saved.w_amax is not None) == (w_measured and again and weight == "plain")
        assert saved.x_amax is None or saved.x_amax.tolist() == [[inputs.x.abs().max()]]
        assert saved.w_amax is None or saved.w_amax.tolist() == [[inputs.weight.abs().max()]]


@pytest.mark.parametrize("name", RECIPES)
def test_backward_lives_on_what_save_kept_and_gives_a_gradient_for_each_input(name):
    for config in (c for c in ALL if c.recipe == recipe(name)):
        inputs = inputs_for(config)
        before = [t.clone() for t in flatten(inputs._replace(running_amaxes=()))]
        made = layer.forward(config, inputs)
        saved = layer.save(config, inputs, made)
        known = {
            id(t) for t in [*flatten(inputs), *made.outputs, *made.auxiliary, *made.intermediates] if t is not None
        }
        assert all(t is None or id(t) in known for t in saved), config
        seed = torch.tensor([5, 6]) if config.is_stochastic else None
        buffers = Buffers(amax=torch.zeros(1) if config.observe else None, seed=seed)
        grads = layer.backward(config, saved, buffers, (torch.randn(M, N),))
        assert len(grads) == len(inputs)
        wanted = config.wants_dx, config.wants_dw, config.wants_db
        for is_wanted, grad, shape in zip(wanted, grads, ((M, K), (N, K), (N,)), strict=False):
            assert (grad is not None) == is_wanted, config
            assert grad is None or tuple(grad.shape) == shape
        for old, new in zip(before, flatten(inputs._replace(running_amaxes=())), strict=True):
            assert torch.equal(old.float(), new.float()), config
        assert seed is None or seed.tolist() == [5, 7]
        if config.observe and (config.dy_pair[0] or config.dy_pair[1]):
            assert buffers.amax.item() > 0


@pytest.mark.parametrize("name", [name for name in RECIPES if recipe(name).stateful])
def test_running_amaxes_are_raised_and_never_lowered(name):
    config = Config(recipe(name), observe=True)
    inputs = inputs_for(config)
    seen = torch.zeros(2)
    layer.forward(config, inputs._replace(running_amaxes=seen.unbind()))
    assert seen.tolist() == [inputs.x.abs().max(), inputs.weight.abs().max()]
    seen.fill_(99)
    layer.forward(config, inputs._replace(running_amaxes=seen.unbind()))
    assert seen.tolist() == [99, 99]


@layers(RECIPES, GROUPED_RECIPES)
def test_a_deferred_dw_is_the_one_that_backward_returns(kind, name):
    check_deferred(kind, name)


@layers([name for name in RECIPES if recipe(name).linear().fprop.mode == "quantized"], [])
def test_a_deferred_dw_of_codes_is_the_one_that_backward_returns(kind, name):
    check_deferred(kind, name, x="codes")


def check_deferred(kind, name, **given):
    """dW from the buffers that forward returns, and that backward fills."""
    now, later = (kind.Config(recipe(name), **wants("dw"), **given, deferred_wgrad=how) for how in ("", "buffers"))
    inputs, dy = kind.inputs(now), torch.randn(kind.rows, N)
    saved = kind.layer.save(now, inputs, kind.layer.forward(now, inputs))
    dw = kind.layer.backward(now, saved, kind.buffers(now), (dy,))[1]
    made = check_forward(kind.layer, later, inputs)
    saved = kind.layer.save(later, inputs, made)
    assert kind.layer.backward(later, tuple(saved), kind.buffers(later), (dy,)) == (None,) * len(inputs)
    start, stop = later.deferred_span
    tensors = [t for group in made for t in group if t is not None][start:stop]
    codes = inputs.x_codes if kind is LINEAR else ()
    operands = kind.layer.deferred_operands(later, tuple(tensors), codes, inputs.weight)
    assert torch.equal(kind.layer.weight_gradient(later, operands, None), dw)


@pytest.mark.parametrize("kind", LAYERS.values(), ids=LAYERS)
def test_no_gradient_in_no_gradient_out(kind):
    config = kind.Config(recipe("fp8-current"), **wants("dx dw"))
    inputs = kind.inputs(config)
    saved = kind.layer.save(config, inputs, kind.layer.forward(config, inputs))
    assert kind.layer.backward(config, saved, kind.Buffers(), (None,)) == (None,) * len(inputs)


def test_a_config_is_its_string():
    for config in ALL[::17]:
        assert layer.config(config.key) == config
        assert layer.config(config.key) is layer.config(config.key)


def test_a_layer_keeps_no_more_than_one_orientation_of_codes():
    """x's column and w's, in FP8 an element a byte; nothing of x itself."""
    config = Config(recipe("fp8-current"), **wants("dx dw"))
    inputs = inputs_for(config)
    saved = [t for t in layer.save(config, inputs, layer.forward(config, inputs)) if t is not None]
    assert sum(t.numel() * t.element_size() for t in saved) == K * M + 4 + K * N + 4
