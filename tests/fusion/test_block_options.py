"""Options of the blocks that Transformer Engine's have too, return_bias of GroupedLinear, and its keywords refused."""

import pytest
import torch

import octavo
from octavo import ops
from octavo.errors import UnknownSetting, UnsupportedConfig
from tests.support.linear_oracle import assert_same, spiky
from tests.support.sequentials import fill
from tests.support.steps import assert_equal, compiled, step

pytestmark = pytest.mark.usefixtures("fresh_compiler")
RECIPES = ("fp8-block", "fp8-delayed")
SIZES = torch.tensor([5, 0, 9])


def norm_linear(recipe="fp8-block", **settings):
    return fill(octavo.LayerNormLinear(64, 32, normalization="RMSNorm", recipe=recipe, **settings))


def mlp(recipe="fp8-block", **settings):
    return fill(octavo.LayerNormMLP(64, 96, activation="swiglu", recipe=recipe, **settings))


BLOCKS = pytest.mark.parametrize("make", [norm_linear, mlp])


def last(block):
    return block[-1]


# -- return_bias -------------------------------------------------------------------------------------------------------


@BLOCKS
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_block_returns_its_bias_and_fuses_all_the_same(make, recipe):
    block, plain = make(recipe, return_bias=True), make(recipe)
    with torch.no_grad():
        last(plain).bias.zero_()
    for i in range(2):
        x, dy = spiky(16, 64, seed=i), spiky(16, last(plain).out_features, seed=i + 5)
        want = step(plain, x, dy)
        y, bias = block(x)
        assert bias is last(block).bias
        assert_same(y, want[0])
        found = step(block, x, dy, call=lambda x: block(x)[0])
        for (name, p), expected in zip(block.named_parameters(), want[2:], strict=True):
            if p is bias:
                assert p.grad is None
            else:
                assert_same(p.grad, expected, name)
        assert_same(found[1], want[1])
        graph = compiled(block)
        assert_equal(graph(x), block(x))
        octavo.step(block), octavo.step(plain)
    assert "norm-linear" in block.explain(x).fired or "mlp" in block.explain(x).fired


@BLOCKS
def test_a_block_without_a_bias_returns_none(make):
    y, bias = make(return_bias=True, bias=False)(spiky(16, 64))
    assert isinstance(y, torch.Tensor) and bias is None


def test_a_block_that_returns_its_bias_recomputes_too():
    block, plain = mlp(return_bias=True, activation_recompute=True), mlp(return_bias=True)
    x, dy = spiky(16, 64), spiky(16, 64, seed=3)
    found, want = (step(b, x, (dy, spiky(64))) for b in (block, plain))
    assert_equal(found, want)


def test_a_block_that_returns_its_bias_is_called_whole_in_a_sequential():
    model = octavo.Sequential(ops.ConstantScale(2.0), norm_linear(return_bias=True))
    y, bias = model(spiky(16, 64))
    assert y.shape == (16, 32) and bias is model[1].linear.bias


@pytest.mark.parametrize("single", [True, False])
def test_a_grouped_layer_returns_its_bias(single):
    layer = fill(octavo.GroupedLinear(3, 64, 32, recipe="fp8-block", return_bias=True, single_grouped_bias=single))
    plain = fill(octavo.GroupedLinear(3, 64, 32, recipe="fp8-block", bias=False))
    plain.weight.data.copy_(layer.weight.data)
    x = spiky(14, 64)
    y, bias = layer(x, SIZES)
    assert_same(y, plain(x, SIZES))
    assert bias is layer.bias if single else [id(b) for b in bias] == [id(getattr(layer, f"bias{i}")) for i in range(3)]
    assert_same(compiled(layer)(x, SIZES)[0], y)
    assert octavo.GroupedLinear(3, 64, 32, bias=False, return_bias=True)(x, SIZES)[1] is None
    with pytest.raises(UnsupportedConfig, match="adds no bias that it could scale"):
        octavo.GroupedLinear(3, 64, 32, return_bias=True, scale_bias=True)


# -- is_first_microbatch -----------------------------------------------------------------------------------------------


@BLOCKS
def test_microbatches_share_the_codes_of_the_weights(make):
    block, plain = make(), make()
    for i, first in enumerate((True, False, False)):
        x, dy = spiky(16, 64, seed=i), spiky(16, last(plain).out_features, seed=i + 5)
        want = step(plain, x, dy)
        assert_equal(step(block, x, dy, is_first_microbatch=first), want)
    assert_equal(step(block, x, dy, call=compiled(block), is_first_microbatch=True), want)
    with torch.no_grad():
        last(block).weight.add_(0.5)
    with pytest.raises(ValueError, match="weight"):
        block(x, is_first_microbatch=False)


# -- activations, recipes, parameters ----------------------------------------------------------------------------------


def test_numbers_of_the_activation():
    given = {"limit": 2.0, "alpha": 1.5, "glu_linear_offset": 0.0}
    block = mlp_of("clamped-swiglu", activation_params=given)
    assert (block.activation.limit, block.activation.alpha, block.activation.glu_linear_offset) == (2.0, 1.5, 0.0)
    x = spiky(16, 64)
    assert not torch.equal(block(x), mlp_of("clamped-swiglu")(x))
    with pytest.raises(UnsupportedConfig, match=r"keywords of octavo.ops.ClampedSwiGLU \(limit, alpha"):
        mlp_of("clamped-swiglu", activation_params={"beta": 1.0})


def mlp_of(activation, **settings):
    return fill(octavo.LayerNormMLP(64, 96, activation=activation, recipe="fp8-block", **settings))


@BLOCKS
@pytest.mark.parametrize("recipe", ["fp8-current(wgrad='bf16')", "fp8-block(backward='high_precision')"])
def test_a_wgrad_in_high_precision_runs_unfused(make, recipe):
    block = make(recipe)
    plain = octavo.Sequential(*make(recipe), rules=None)
    x, dy = spiky(16, 64), spiky(16, last(block).out_features, seed=5)
    found = step(block, x, dy)
    for a, b in zip(found, step(plain, x, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))
    assert "norm-linear" not in block.explain(x.requires_grad_()).fired
    assert_equal(step(block, x, dy, call=compiled(block)), found)


@BLOCKS
def test_parameters_are_initialised_anew(make):
    block = make()
    torch.manual_seed(3)
    block.reset_parameters()
    torch.manual_seed(3)
    twin = make()
    torch.manual_seed(3)
    twin.reset_parameters()
    for a, b in zip(block.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
    bound = last(block).in_features ** -0.5
    assert (block.norm.weight == 1).all() and float(last(block).weight.detach().abs().max()) <= bound


# -- keywords of Transformer Engine ------------------------------------------------------------------------------------

OTHERS = {
    "params_dtype": (torch.bfloat16, "Write dtype="),
    "init_method": (torch.nn.init.zeros_, "Initialise after construction"),
    "parameters_split": (("q", "k"), "weight.split"),
    "tp_size": (2, "tp_group="),
    "ub_overlap_ag": (True, "Collectives do not overlap"),
    "symmetric_ar_type": ("multimem", "Collectives do not overlap"),
    "return_layernorm_output_gathered": (True, "AllGather gathers them"),
    "name": ("fc1", "path in the model"),
    "get_rng_state_tracker": (None, "Seed all ranks alike"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [(octavo.Linear, (8, 8)), (octavo.GroupedLinear, (2, 8, 8)), (octavo.LayerNormLinear, (8, 8)),
     (octavo.LayerNormMLP, (8, 8))],
)  # fmt: skip
def test_a_keyword_of_another_library_says_what_to_write(kind, sizes, name):
    value, said = OTHERS[name]
    with pytest.raises(UnknownSetting, match=rf"{kind.__name__} has no setting '{name}'\. .*{said}"):
        kind(*sizes, **{name: value})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: octavo.Linear(8, 8, return_layernorm_output=True), "The blocks take it"),
        (lambda: octavo.LayerNormMLP(8, 8, checkpoint=True), "activation_recompute="),
        (lambda: octavo.GroupedLinear(num_gemms=2, in_features=8, out_features=8), "num_groups="),
        (lambda: ops.RMSNorm(8, sm_margin=4), "whole GPU"),
        (
            lambda: octavo.Linear(8, 8, recipie="fp8-block"),
            r"Did you mean 'recipe'\? It takes in_features, out_features",
        ),
        (lambda: ops.LayerNorm(8, epss=1.0), "Did you mean 'eps'"),
        (lambda: ops.RMSNorm(8, sequence_parallel=True), r"norm\.sum_gradients_over\(group\)"),
        (lambda: octavo.autocast("fp8-current", enabled=True), r"^autocast has no .*contextlib\.nullcontext\(\)"),
        (lambda: octavo.autocast(fp8_recipe="fp8-current"), "Write recipe="),
        (
            lambda: octavo.autocast("fp8-delayed", amax_reduction_group=None),
            r"octavo\.attach\(model, optimizer, group\)",
        ),
        (lambda: octavo.autocast("fp8-delayed", calibrating=True), "first step measures"),
        (lambda: octavo.moe.permute(torch.ones(2, 4), torch.ones(2, 1).long(), num_out_tokens=2), "capacity="),
        (lambda: octavo.moe.unpermute(torch.ones(2, 4), None, merging_probs=torch.ones(2, 1)), "Write probs="),
        (lambda: octavo.moe.route(torch.ones(2, 4), 2, use_pre_softmax=True), "Write normalize=False"),
        (lambda: octavo.recipe("fp8-delayed(amax_compute_algo='max')"), "Write algorithm="),
        (lambda: octavo.recipes.Delayed(reduce_amax=False), r"octavo\.attach\(model, optimizer, group\)"),
        (lambda: octavo.recipe("fp8-delayed(scaling_factor_compute_algo=None)"), "Write margin="),
        (lambda: octavo.recipe("fp8-delayed(interval=1)"), "after every step"),
    ],
)
def test_the_line_to_write(make, said):
    with pytest.raises(UnknownSetting, match=said):
        make()


@pytest.mark.parametrize("kind", [ops.RMSNorm, octavo.Linear, octavo.LayerNormLinear, octavo.LayerNormMLP])
def test_settings_go_by_name(kind):
    sizes = [8] if kind is ops.RMSNorm else [8, 8]
    given = 1e-6 if kind is not octavo.Linear else (True, None, torch.float32, "bf16", 0)
    rest = given if isinstance(given, tuple) else (given,)
    with pytest.raises(UnknownSetting, match=rf"^{kind.__name__} takes .* by position, got {len(sizes) + len(rest)}"):
        kind(*sizes, *rest)


def test_a_recipe_of_another_library_is_named_here():
    class DelayedScaling:
        pass

    for given in ("DelayedScaling", "DelayedScaling()", DelayedScaling()):
        with pytest.raises(UnsupportedConfig, match=r"Write 'fp8-delayed'\."):
            octavo.recipe(given)


def test_gradients_as_codes_say_where_they_are():
    layer = octavo.Linear(8, 8)
    with pytest.raises(UnsupportedConfig, match=r"dx leaves as codes where a fusion takes them"):
        layer(spiky(2, 8), fp8_grad=True)
    assert layer(spiky(2, 8), fp8_grad=False).shape == (2, 8)


def test_an_algorithm_that_is_a_function_says_what_to_write():
    with pytest.raises(UnsupportedConfig, match=r"'max' or 'most_recent', because a recipe is data"):
        octavo.recipes.Delayed(algorithm=torch.amax)


# -- the norm's output -------------------------------------------------------------------------------------------------


@BLOCKS
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("return_bias", [False, True])
def test_a_block_returns_the_output_of_its_norm(make, recipe, return_bias):
    block, plain = make(recipe, return_layernorm_output=True, return_bias=return_bias), make(recipe)
    if return_bias:
        with torch.no_grad():
            last(plain).bias.zero_()
    assert block.state_dict().keys() == plain.state_dict().keys()
    x, dy, dn = spiky(16, 64), spiky(16, last(plain).out_features, seed=5), spiky(16, 64, seed=6)

    def parts(x):
        y, *bias, normed = block(x)
        assert [id(b) for b in bias] == ([id(last(block).bias)] if return_bias else [])
        return y, normed

    def apart(x):
        normed = plain.norm(x)
        rest = octavo.Sequential(*list(plain)[1:], rules=None)
        return rest(normed), normed

    found, want = step(block, x, (dy, dn), call=parts), step(plain, x, (dy, dn), call=apart)
    for name, a, b in zip(("y", "norm", "dx"), found, want, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()), msg=name)
    for a, b in zip(block(x), compiled(block)(x), strict=True):
        assert_same(a, b)
    assert "norm-linear" not in block.explain(x).fired


def test_recomputation_returns_the_output_of_the_norm():
    block, plain = mlp(activation_recompute=True, return_layernorm_output=True), mlp(return_layernorm_output=True)
    x, dys = spiky(16, 64), (spiky(16, 64, seed=3), spiky(16, 64, seed=4))
    assert_equal(step(block, x, dys), step(plain, x, dys))


def test_memory_by_the_names_of_another_library():
    model = octavo.Sequential(octavo.GroupedLinear(3, 64, 32), octavo.GroupedLinear(3, 32, 64), rules=None)
    x, y, dx = spiky(14, 64).requires_grad_(), torch.empty(14, 64), torch.empty(14, 64)
    found = model(x, SIZES, SIZES, op_kwargs={0: {"grad_input": dx}, 1: {"output": y}})
    found.sum().backward()
    assert found.data_ptr() == y.data_ptr() and torch.equal(x.grad, dx)


def test_an_operation_that_has_another_name_elsewhere():
    with pytest.raises(AttributeError, match=r"Write octavo\.ops\.Linear\(\.\.\., bias=False\)"):
        ops.BasicLinear  # noqa: B018
    with pytest.raises(AttributeError, match=r"Write octavo\.ops\.ScaledClampedSwiGLU"):
        ops.ScaledClampedQGeGLU  # noqa: B018
    assert not hasattr(ops, "NoSuchOperation")
