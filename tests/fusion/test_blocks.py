"""octavo.LayerNormLinear and octavo.LayerNormMLP: Sequentials that are built for one, and that must fuse."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import ops
from octavo.errors import UnknownSetting, UnsupportedConfig
from octavo.kernels.activation import ACTIVATIONS
from tests.support.saved_bytes import Saved
from tests.support.sequentials import (
    FFN,
    Graphs,
    H,
    M,
    Reference,
    assert_near,
    batch,
    every,
    fill,
    quantized,
    recipes,
    reference_step,
)
from tests.support.steps import assert_equal, assert_state, compiled, step

NORMS = pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
BIASES = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
ACTS = ("swiglu", "gelu", "relu", "geglu", "srelu", "silu", "clamped-swiglu", "situglu")


def linear_block(recipe="fp8-current", n=FFN, **settings):
    return fill(octavo.LayerNormLinear(H, n, recipe=recipe, **settings))


def mlp_block(recipe="fp8-current", **settings):
    return fill(octavo.LayerNormMLP(H, FFN, recipe=recipe, **settings))


def kinds(block):
    return [type(op) for op in block.modules() if not list(op.children())]


# -- built -------------------------------------------------------------------------------------------------------------


@NORMS
@BIASES
def test_a_norm_and_a_linear(normalization, bias):
    block = octavo.LayerNormLinear(H, FFN, normalization=normalization, bias=bias, recipe="fp8-current")
    norm, linear = (op for op in block.modules() if not list(op.children()))
    assert isinstance(block, octavo.Sequential)
    assert type(norm) is getattr(ops, normalization) and type(linear) is octavo.Linear
    assert (linear.in_features, linear.out_features) == (H, FFN)
    assert (linear.bias is not None) == bias
    assert linear.recipe == octavo.recipe("fp8-current")


@NORMS
@pytest.mark.parametrize("activation", ACTS)
def test_a_norm_two_linears_and_an_activation(normalization, activation):
    block = octavo.LayerNormMLP(H, FFN, normalization=normalization, activation=activation, recipe="fp8-current")
    norm, first, act, second = (op for op in block.modules() if not list(op.children()))
    assert type(norm) is getattr(ops, normalization)
    assert activation == act.NAME
    gated = ACTIVATIONS[activation].gated
    assert (first.in_features, first.out_features) == (H, 2 * FFN if gated else FFN)
    assert (second.in_features, second.out_features) == (FFN, H)
    assert block(batch()[0]).shape == (M, H)


def test_settings_reach_the_norm():
    block = octavo.LayerNormLinear(H, FFN, eps=0.25, zero_centered_gamma=True, recipe="fp8-current")
    norm = next(op for op in block.modules() if isinstance(op, ops.LayerNorm))
    assert norm.eps == 0.25 and norm.zero_centered_gamma
    assert not norm.weight.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtype_and_device(dtype):
    for block in (
        octavo.LayerNormLinear(H, FFN, recipe="fp8-current", dtype=dtype, device="meta"),
        octavo.LayerNormMLP(H, FFN, recipe="fp8-current", dtype=dtype, device="meta"),
    ):
        assert {(p.dtype, p.device.type) for p in block.parameters()} == {(dtype, "meta")}


@pytest.mark.parametrize("wrong", [{"normalization": "BatchNorm"}, {"normalization": None}, {"eps": -1.0}])
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=r"norm|eps|Norm"):
        octavo.LayerNormLinear(H, FFN, recipe="fp8-current", **wrong)


def test_an_activation_that_is_none_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="swiglu"):
        octavo.LayerNormMLP(H, FFN, activation="swish", recipe="fp8-current")


# -- numbers -----------------------------------------------------------------------------------------------------------


@quantized
@NORMS
@BIASES
def test_a_linear_block_against_float64(recipe, normalization, bias):
    block, (x, dy) = linear_block(recipe, normalization=normalization, bias=bias), batch(out=FFN)
    for _ in range(2):
        found = step(block, x, dy)
        octavo.step(block)
    assert_near(found, reference_step(block, x, dy), recipe)


@quantized
@NORMS
def test_an_mlp_block_against_float64(recipe, normalization):
    block, (x, dy) = mlp_block(recipe, normalization=normalization), batch(2, 12)
    for _ in range(2):
        found = step(block, x, dy)
        octavo.step(block)
    assert_near(found, reference_step(block, x, dy), recipe)


@pytest.mark.parametrize("activation", ACTS)
def test_every_activation_against_float64(activation):
    block, (x, dy) = mlp_block("fp8-current", activation=activation, bias=True), batch()
    assert_near(step(block, x, dy), reference_step(block, x, dy), "fp8-current")


@quantized
def test_zero_centered_gamma_against_float64(recipe):
    block, (x, dy) = linear_block(recipe, zero_centered_gamma=True, normalization="RMSNorm"), batch(out=FFN)
    step(block, x, dy)
    octavo.step(block)
    assert_near(step(block, x, dy), reference_step(block, x, dy), recipe)


@quantized
def test_a_block_is_its_modules_one_after_the_other(recipe):
    block, (x, dy) = mlp_block(recipe, bias=True), batch()
    plain = nn.Sequential(*copy.deepcopy([op for op in block.modules() if not list(op.children())]))
    for seed in range(2):
        assert_equal(step(block, x + seed, dy), step(plain, x + seed, dy), f"step {seed}")
        octavo.step(block), octavo.step(plain)


# -- fused, or an error ------------------------------------------------------------------------------------------------


@quantized
@NORMS
def test_a_block_fuses(recipe, normalization):
    x = batch()[0].requires_grad_()
    assert "norm-linear" in linear_block(recipe, normalization=normalization).explain(x).fired
    assert set(mlp_block(recipe, normalization=normalization).explain(x).fired) & {"mlp", "activation-linear"}


@pytest.mark.parametrize("build", [linear_block, mlp_block], ids=["linear", "mlp"])
def test_a_fusion_that_is_refused_is_an_error_with_its_reason(build):
    block, x = build(), batch()[0][:20]
    size = x.shape[-1]
    block[0], x = type(block[0])((4, size)), x.view(5, 4, size)
    plain = octavo.Sequential(*copy.deepcopy([op for op in block.modules() if not list(op.children())]))
    sentences = {r.sentence for r in plain.explain(x.clone().requires_grad_()).refused}
    with pytest.raises(UnsupportedConfig) as refused:
        block(x.requires_grad_())
    assert any(sentence in str(refused.value) for sentence in sentences)


@pytest.mark.parametrize("build", [linear_block, mlp_block], ids=["linear", "mlp"])
def test_a_block_whose_norm_was_taken_out_no_longer_fuses_and_says_so(build):
    block = build()
    block[0] = nn.Identity()
    with pytest.raises(UnsupportedConfig, match="norm-linear"):
        block(batch()[0].requires_grad_())


@pytest.mark.parametrize("build", [linear_block, mlp_block], ids=["linear", "mlp"])
def test_where_nothing_is_quantized_there_is_nothing_to_fuse(build):
    for recipe in ("bf16", None):
        block, (x, dy) = build(recipe), batch(out=FFN if build is linear_block else H)
        assert_near(step(block, x, dy), reference_step(block, x, dy), "bf16")


@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8"])
def test_a_block_follows_an_ambient_recipe(recipe):
    block, own, (x, dy) = mlp_block(None), mlp_block(recipe), batch()

    def call(t):
        with octavo.autocast(recipe):
            return block(t)

    assert_equal(step(block, x, dy, call=call), step(own, x, dy))


# -- recompute ---------------------------------------------------------------------------------------------------------


@every
def test_recomputed_activations_give_the_same_bits(recipe):
    block, twin = mlp_block(recipe, activation_recompute=True), mlp_block(recipe)
    for seed in range(2):
        x, dy = batch(seed=seed)
        assert_equal(step(block, x, dy), step(twin, x, dy), f"step {seed}")
        octavo.step(block), octavo.step(twin)
    assert_state(block, twin)


def test_recomputing_keeps_less():
    kept = {}
    for recompute in (False, True):
        block = mlp_block("fp8-current", activation_recompute=recompute, dtype=torch.bfloat16)
        x = batch(256, dtype=torch.bfloat16)[0].requires_grad_()
        with Saved(block) as saved:
            y = block(x)
        y.sum().backward()
        kept[recompute] = saved.nbytes
    assert kept[True] < kept[False]


def test_recomputed_and_compiled():
    block = mlp_block("fp8-current", activation_recompute=True)
    twin, (x, dy) = copy.deepcopy(block), batch()
    assert_equal(step(block, x, dy, call=compiled(block)), step(twin, x, dy))


def test_inside_a_checkpoint():
    block = mlp_block("fp8-current", activation_recompute=True)
    twin, (x, dy) = copy.deepcopy(block), batch()
    assert_equal(step(block, x, dy, call=lambda t: checkpoint(block, t, use_reentrant=False)), step(twin, x, dy))


# -- state, gradients, graphs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [linear_block, mlp_block], ids=["linear", "mlp"])
def test_keys_are_the_names_of_parameters_and_loading_is_strict(build):
    block, other = build(bias=True), fill(build(bias=True), seed=30)
    assert list(block.state_dict()) == [name for name, _ in block.named_parameters()]
    other.load_state_dict(block.state_dict(), strict=True)
    x, dy = batch(out=block(batch()[0]).shape[-1])
    assert_equal(step(other, x, dy), step(block, x, dy))


def test_a_checkpoint_of_the_modules_loads_into_the_block():
    stock = fill(nn.Sequential(nn.LayerNorm(H), nn.Linear(H, FFN)))
    block = linear_block()
    values = [p.detach() for p in stock.parameters()]
    block.load_state_dict(dict(zip(block.state_dict(), values, strict=True)), strict=True)
    reference = Reference(block)
    torch.testing.assert_close(reference(batch()[0].double()), stock.double()(batch()[0].double()))


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
def test_a_block_adds_dw_to_main_grad_or_overwrites_it(overwrite):
    block, twin, (x, dy) = mlp_block(), mlp_block(), batch()
    for op in block.modules():
        if isinstance(op, octavo.Linear):
            op.fuse_wgrad_accumulation = True
            op.weight.main_grad = torch.full_like(op.weight, float("nan") if overwrite else 0.5)
            op.weight.overwrite_main_grad = overwrite
            op.weight.grad_added_to_main_grad = False
    step(block, x, dy), step(twin, x, dy)
    seen = 0
    for p, q in zip(block.parameters(), twin.parameters(), strict=True):
        if hasattr(p, "main_grad"):
            seen += 1
            assert torch.equal(p.main_grad, q.grad if overwrite else 0.5 + q.grad)
            assert p.grad_added_to_main_grad is True
    assert seen == 2


@pytest.mark.parametrize("build", [linear_block, mlp_block], ids=["linear", "mlp"])
@recipes(["fp8-delayed", "fp8-current", "nvfp4"])
def test_compiled_is_eager(build, recipe):
    block, graphs = build(recipe), Graphs()
    twin, call = copy.deepcopy(block), compiled(block, graphs)
    for seed in range(2):
        x, dy = batch(seed=seed, out=FFN if build is linear_block else H)
        assert_equal(step(block, x, dy, call=call), step(twin, x, dy), f"step {seed}")
        octavo.step(block), octavo.step(twin)
    assert graphs.runs()[0] == len(twin.explain(x.clone().requires_grad_()).runs)


def test_a_block_inside_a_sequential_is_flattened_and_still_fuses():
    block, (x, dy) = mlp_block(), batch()
    model = octavo.Sequential(
        ops.MakeExtraOutput(channel="r", output_to_caller=False), block, ops.AddExtraInput(source="r")
    )
    twin = copy.deepcopy(block)
    assert_equal(step(model, x, dy), step(twin, x, dy, call=lambda t: t + twin(t)))
    assert set(model.explain(x.clone().requires_grad_()).fired) & {"mlp", "activation-linear", "norm-linear"}


BLOCKS = pytest.mark.parametrize("block", [octavo.LayerNormLinear, octavo.LayerNormMLP])


@BLOCKS
@pytest.mark.parametrize(
    ("name", "meant"), [("keep_weight_code", "keep_weight_codes"), ("normalisation", "normalization")]
)
def test_an_unknown_setting_of_a_block_is_refused_by_the_blocks_name(block, name, meant):
    with pytest.raises(
        UnknownSetting, match=rf"^{block.__name__} has no setting '{name}'. Did you mean '{meant}'\?"
    ) as said:
        block(64, 32, **{name: True})
    assert "settings" not in str(said.value).split("It takes")[1]


@pytest.mark.parametrize("name", ["parallel_mode", "column_blocks"])
def test_a_setting_that_an_mlp_sets_itself_is_refused(name):
    with pytest.raises(UnknownSetting, match=f"LayerNormMLP has no setting '{name}'"):
        octavo.LayerNormMLP(64, 32, **{name: None})


def test_the_way_out_for_a_returned_bias_works():
    run = octavo.Sequential(octavo.ops.RMSNorm(64), octavo.Linear(64, 32, recipe="fp8-block", return_bias=True))
    y, bias = run(torch.ones(8, 64))
    assert y.shape == (8, 32) and bias is run[1].bias
