"""octavo.inspect: its numbers are those of the casts and GEMMs that ran, and it changes nothing but what it may."""

import copy
import math
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.errors import UnsupportedConfig, UnsupportedDtype
from octavo.inspection import inspected_layer
from octavo.inspection.measure import Call
from octavo.inspection.statistics import BINS, LOWEST
from octavo.recipes import SHIPPED
from tests.support import dispatched_experts
from tests.support.inspected import Counted, by_tensor, cosine, pair, train
from tests.support.recipe_traits import QUANTIZED, has_four_bits


def gradients(model):
    return [p.grad for p in model.parameters()]


# -- the numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", SHIPPED)
def test_the_model_computes_the_same_bits_while_it_is_inspected(recipe):
    model, x = pair(recipe), torch.randn(2, 20, 64)
    twin = copy.deepcopy(model)
    with octavo.inspect(model):
        y = train(model, x)
    assert torch.equal(y, train(twin, x))
    assert all(map(torch.equal, gradients(model), gradients(twin)))


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_results_are_compared_with_float32_products_of_the_same_tensors(recipe):
    layer, x = octavo.Linear(64, 96, bias=False, recipe=recipe), torch.randn(40, 64, requires_grad=True)
    with octavo.inspect(layer) as report:
        y = layer(x)
        dy = torch.randn_like(y)
        y.backward(dy)
    found, w = by_tensor(report, ""), layer.weight.detach()
    exact = {"y": x @ w.T, "dx": dy @ w, "dw": dy.T @ x}
    made = {"y": y, "dx": x.grad, "dw": layer.weight.grad}
    for name in exact:
        assert found[name].cosine == pytest.approx(cosine(made[name], exact[name]), abs=1e-9)
        assert found[name].amax == made[name].abs().max().item()
        noise = (made[name] - exact[name]).double().square().sum() / exact[name].double().square().sum()
        assert found[name].sqnr == pytest.approx(-10 * math.log10(noise.item()), abs=1e-3)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"])
def test_casts_are_measured_as_the_quantizers_make_them(recipe):
    layer, x = octavo.Linear(64, 96, recipe=recipe), torch.randn(40, 64) * torch.logspace(-9, 0, 64)
    with octavo.inspect(layer) as report:
        layer(x)
    quant, row = octavo.recipe(recipe).linear(), by_tensor(report, "")["x"]
    values = quant.fprop.left.quantize(x).dequantize()
    assert row.cast == str(quant.fprop.left)
    assert row.underflow == ((values == 0).double().mean().item()) > 0
    noise = (values - x).double().square().sum() / x.double().square().sum()
    assert row.sqnr == pytest.approx(-10 * math.log10(noise.item()), abs=1e-6)
    assert (row.nonfinite, row.amax) == (0, x.abs().max().item())
    assert row.saturated == 0 or (has_four_bits(recipe) and row.saturated < 0.01)  # a small scale is rounded, too


def test_histograms_count_calls_and_values_by_power_of_two():
    layer = octavo.Linear(64, 32, recipe="mxfp8")
    with octavo.inspect(layer) as report:
        for scale in (1.0, 1.0, 2.0**10):
            layer(torch.full((4, 64), scale))
    row = by_tensor(report, "")["x"]
    assert len(row.amaxes) == len(row.scales) == BINS
    assert (sum(row.amaxes), sum(row.scales)) == (3, 3 * 4 * 64)
    assert row.amaxes[-LOWEST] == 2 and row.amaxes[10 - LOWEST] == 1
    scale = octavo.quant.MX().quantize(torch.ones(1, 32))
    power = int(scale.scale.item()) - 127
    assert row.scales[power - LOWEST] == 2 * 4 * 64


def test_values_beyond_the_largest_code_are_counted_and_rounding_is_not():
    layer = octavo.Linear(16, 16, recipe="fp8-delayed(cold_start='one')")  # the first multiplier is 1
    with octavo.inspect(layer) as report:
        layer(torch.tensor([[448.0, 463.0, -500.0, 1.0] * 4]))
    assert by_tensor(report, "")["x"].saturated == 0.25


def test_values_that_are_not_finite_are_counted_and_left_out_of_the_rest():
    layer, x = octavo.Linear(64, 32, recipe="mxfp8"), torch.randn(64, 64)
    x[0, 0], x[0, 1] = math.inf, math.nan
    with octavo.inspect(layer) as report:
        layer(x)
    row = by_tensor(report, "")["x"]
    assert row.nonfinite == 2 / x.numel()
    assert row.amax == x[1:].abs().max().item() or row.amax == x[0, 2:].abs().max().item()
    assert 20 < row.sqnr < 60


def test_delayed_scaling_is_measured_with_the_scale_in_use():
    layer, x = octavo.Linear(64, 32, recipe="fp8-delayed"), torch.randn(16, 64)
    train(layer, x)
    octavo.step(layer)
    with octavo.inspect(layer) as report:
        layer(16 * x)
    assert by_tensor(report, "")["x"].saturated > 0.3


def test_a_tensor_that_is_not_quantized_has_no_cast():
    layer = octavo.Linear(64, 32, recipe="fp8-current(dgrad='bf16')")
    with octavo.inspect(layer) as report:
        train(layer, torch.randn(8, 64, requires_grad=True))
    rows = by_tensor(report, "")
    assert rows["x"].cast and not rows["dy"].cast
    assert rows["dy"].underflow is None and rows["dy"].sqnr is None
    assert rows["dx"].cosine == pytest.approx(1, abs=1e-6) and rows["dw"].cosine < 0.9999


def test_nothing_stands_out_in_bf16():
    model = pair("bf16")
    with octavo.inspect(model) as report:
        train(model, torch.randn(20, 64))
    assert report.findings() == []
    assert {row.cast for row in report.rows()} == {""}


# -- the ways a layer runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("settings", [{}, {"single_grouped_weight": False}, {"tail": "untouched"}], ids=str)
def test_groups_are_measured_alone_and_without_the_tail(recipe, settings):
    torch.manual_seed(0)
    layer = octavo.GroupedLinear(3, 40, 24, recipe=recipe, **settings)
    x, sizes = torch.randn(50, 40, requires_grad=True), torch.tensor([10, 0, 30])
    x.data[40:] = math.nan
    with octavo.inspect(layer) as report:
        y = layer(x, sizes)
        dy = torch.randn_like(y)
        y.backward(dy)
    rows, w = by_tensor(report, ""), layer._whole_weight().detach()
    exact = torch.cat([x[:10] @ w[0].T, x[10:40] @ w[2].T]) + torch.cat(
        [_bias(layer, 0).expand(10, 24), _bias(layer, 2).expand(30, 24)]
    )
    assert rows["y"].cosine == pytest.approx(cosine(y[:40], exact), abs=1e-6)
    assert rows["dx"].cosine == pytest.approx(
        cosine(x.grad[:40], torch.cat([dy[:10] @ w[0], dy[10:40] @ w[2]])), abs=1e-6
    )
    assert rows["x"].amax == x[:40].abs().max().item()
    assert all(row.nonfinite == 0 for row in rows.values())
    assert report.findings() == []


def _bias(layer, group):
    return layer.bias.detach()[group]


def test_a_block_runs_unfused_and_explain_says_so():
    block, x = octavo.LayerNormMLP(64, 96, recipe="mxfp8"), torch.randn(32, 64, requires_grad=True)
    before = block.explain(x)
    with octavo.inspect(block) as report:
        train(block, x)
        inside = block.explain(x)
    assert before.fired and not inside.fired
    assert inside.alone == ("Linear: octavo.inspect watches its tensors",) * 2
    assert block.explain(x).fired == before.fired
    assert set(by_tensor(report, "fc1")) == set(by_tensor(report, "fc2")) == {"x", "w", "dy", "y", "dx", "dw"}


def test_a_mixture_of_experts_is_inspected():
    model, x = octavo.MoE(64, 64, 4, 2, recipe="fp8-block"), torch.randn(32, 64, requires_grad=True)
    with octavo.inspect(model) as report:
        train(model, x)
    assert {row.layer for row in report.rows()} == {"experts.fc1", "experts.fc2"}
    assert all(row.cosine > 0.999 for row in report.rows() if row.cosine is not None)
    assert report.findings() == []


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "nvfp4"])
def test_experts_round_other_values_in_the_block_and_are_as_exact(recipe):
    """Their fused operation casts another dy. Both gradients are equally far from those without quantization."""
    plain, x, dy = octavo.MoE(64, 64, 4, 2, recipe="bf16"), torch.randn(128, 64), torch.randn(128, 64)
    own, twin = octavo.MoE(64, 64, 4, 2, recipe=recipe), octavo.MoE(64, 64, 4, 2, recipe=recipe)
    for model in (own, twin):
        model.load_state_dict(plain.state_dict())
    with octavo.inspect(own):
        y = own(x)
        y.backward(dy)
    fused = twin(x)
    fused.backward(dy)
    plain(x).backward(dy)
    assert torch.equal(y, fused)
    for right, inside, outside in zip(
        plain.experts.parameters(), own.experts.parameters(), twin.experts.parameters(), strict=True
    ):
        errors = [((p.grad - right.grad).norm() / right.grad.norm()).item() for p in (inside, outside)]
        assert not torch.equal(inside.grad, outside.grad)
        assert errors[0] == pytest.approx(errors[1], rel=0.05)


def test_experts_with_delayed_scales_are_measured_with_the_scales_in_use():
    """A mixture's second layer has no history of dy's amaxes when it runs unfused."""
    model, x = octavo.MoE(64, 64, 4, 2, recipe="fp8-delayed"), torch.randn(64, 64, requires_grad=True)
    for scale in (1.0, 1.0, 0.01):
        (scale * model(x)).square().mean().backward()
        octavo.step(model)
    with octavo.inspect(model) as report:
        train(model, x)
    assert by_tensor(report, "experts.fc2")["dy"].sqnr > 24
    assert by_tensor(report, "experts.fc1")["x"].sqnr > 28


def test_converted_experts_of_another_package_are_inspected(monkeypatch):
    monkeypatch.setitem(sys.modules, dispatched_experts.PACKAGE, dispatched_experts.package())
    experts = dispatched_experts.Gated(dispatched_experts.Config())
    octavo.convert(experts, "mxfp8")
    twin = copy.deepcopy(experts)
    arguments, dy = dispatched_experts.call()
    with octavo.inspect(experts) as report:
        experts(*arguments).backward(dy)
    twin(*arguments).backward(dy)
    assert {row.layer for row in report.rows()} == {"octavo.fc1", "octavo.fc2"}
    assert report.findings() == []
    for p, q in zip(experts.parameters(), twin.parameters(), strict=True):
        assert (p.grad - q.grad).norm() < 0.1 * q.grad.norm()


@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_weights_held_as_codes_are_inspected(kind):
    layer = octavo.Linear(64, 64, recipe="fp8-block")
    arguments = ()
    if kind == "grouped":
        layer, arguments = octavo.GroupedLinear(2, 64, 64, recipe="fp8-block"), (torch.tensor([8, 8]),)
    octavo.quantize_weights(layer)
    with octavo.inspect(layer) as report:
        layer(torch.randn(16, 64, requires_grad=True), *arguments).square().mean().backward()
    rows = by_tensor(report, "")
    assert rows["w"].underflow is None and rows["w"].sqnr is None
    assert rows["w"].amax > 0 and sum(rows["w"].scales) == layer._whole_weight().numel()
    assert rows["dx"].cosine > 0.999


def test_cached_codes_of_a_weight_are_measured_as_they_are():
    layer, x = octavo.Linear(64, 64, recipe="fp8-block"), torch.randn(16, 64)
    with octavo.inspect(layer) as report:
        layer(x, is_first_microbatch=True)
        fine = by_tensor(report, "")["w"].sqnr
        layer._codes.parts(layer, "row")[1].mul_(4)
        report.reset()
        layer(x, is_first_microbatch=False)
    assert fine > 30 > 0 > by_tensor(report, "")["w"].sqnr


def test_codes_between_layers_keep_their_gradient():
    layers = nn.ModuleList([octavo.Linear(64, 64, recipe="fp8-block") for _ in range(2)])
    twins, x = copy.deepcopy(layers), torch.randn(16, 64, requires_grad=True)
    for own, block in ((layers, octavo.inspect(layers)), (twins, torch.enable_grad())):
        with block as report:
            own[1](own[0](x, fp8_output=True)).square().mean().backward()
        if own is layers:
            found = report
    assert all(map(torch.equal, gradients(layers), gradients(twins)))
    assert set(by_tensor(found, "1")) == {"x", "w", "dy", "y", "dx", "dw"}
    assert by_tensor(found, "1")["x"].sqnr is None  # only codes arrived


@pytest.mark.parametrize("setting", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
def test_a_weight_gradient_that_goes_elsewhere_is_measured(setting):
    layer, x = octavo.Linear(64, 32, recipe="nvfp4", **{setting: True}), torch.randn(16, 64)
    layer.weight.main_grad = torch.zeros(32, 64)
    with octavo.inspect(layer) as report:
        train(layer, x)
        layer.backward_dw()
    made = layer.weight.main_grad if setting == "fuse_wgrad_accumulation" else layer.weight.grad
    assert by_tensor(report, "")["dw"].amax == made.abs().max().item()


def test_checkpoints_torch_autocast_and_ambient_recipes():
    layer, x = octavo.Linear(64, 64), torch.randn(16, 64, requires_grad=True)
    with octavo.inspect(layer) as report, octavo.autocast("mxfp8"), torch.autocast("cpu", torch.bfloat16):
        checkpoint(layer, x, use_reentrant=False, context_fn=_same_blocks).float().square().mean().backward()
    assert by_tensor(report, "")["x"].cast == "mx"
    assert by_tensor(report, "")["dx"].calls == 1
    assert x.grad.dtype == torch.float32


def _same_blocks():
    return octavo.autocast("mxfp8"), octavo.autocast("mxfp8")


HOST_READS = ("aten._local_scalar_dense.default", "aten.nonzero.default", "aten.masked_select.default")


@pytest.mark.parametrize("recipe", SHIPPED)
def test_measuring_reads_nothing_back(recipe, monkeypatch):
    """The host would wait for a GPU, and a CUDA graph could not capture it."""
    counted = Counted()
    for name in ("record_forward", "record_backward"):
        monkeypatch.setattr(Call, name, _in_mode(getattr(Call, name), counted))
    monkeypatch.setattr(
        inspected_layer, "record_input_gradient", _in_mode(inspected_layer.record_input_gradient, counted)
    )
    model, x = pair(recipe), torch.randn(20, 64, requires_grad=True)
    train(model, x)
    with octavo.inspect(model):
        train(model, x)
    assert sum(counted.calls.values()) > 100
    assert {name: counted.calls[name] for name in HOST_READS} == dict.fromkeys(HOST_READS, 0)


def _in_mode(function, mode):
    def inside(*arguments):
        with mode:
            return function(*arguments)

    return inside


# -- off, and the report -----------------------------------------------------------------------------------------------


def test_a_gradient_in_codes_is_not_measured_however_it_is_passed():
    layer, sizes = octavo.GroupedLinear(2, 64, 64, recipe="fp8-block"), torch.tensor([8, 8])
    with octavo.inspect(layer) as report:
        x = torch.randn(16, 64, requires_grad=True)
        layer(x, sizes, None, None, None, None, octavo.quant.GradientCodes())
        layer(x, sizes, dy_codes=octavo.quant.GradientCodes())
    assert {row.calls for row in report.rows()} == {0}


def test_a_batch_without_rows_is_measured():
    model = pair()
    with octavo.inspect(model) as report:
        model(torch.randn(0, 64)).sum().backward()
    assert {row.calls for row in report.rows()} == {1}
    assert report.findings() == []


def test_every_counts_the_steps_of_an_optimizer():
    model, x = pair(), torch.randn(20, 64)
    optimizer, other = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(pair().parameters(), 0.1)
    with octavo.inspect(model, every=3) as report:
        for _ in range(7):
            train(model, x)
            train(model, x)  # a second microbatch
            optimizer.step()
            other.step()
    assert {row.calls for row in report.rows()} == {2 * 3}
    assert "over 7 steps, one of 3 measured" in str(report)


def test_the_report_is_text_a_flat_dict_and_a_page(tmp_path):
    model = pair("nvfp4")
    with octavo.inspect(model) as report:
        train(model, torch.randn(20, 64))
        inside = report.to_dict()
    assert inside == report.to_dict()
    assert inside["2/dx/cosine"] > 0.9 and inside["0/x/underflow"] > 0
    assert all(type(value) is float and math.isfinite(value) for value in inside.values())
    assert str(report).splitlines()[4].split()[:4] == ["tensor", "format", "underflow", "saturated"]
    assert "0: nvfp4, 1 call" in str(report).splitlines()
    report.save_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert text.count("<svg") == 4 and "http" not in text and len(text) < 10**6  # the worst tensors


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: octavo.inspect(nn.Linear(4, 4)).__enter__(), "this Linear has none. Call octavo.convert"),
        (lambda: octavo.inspect("model"), "takes a model"),
        (lambda: octavo.inspect(pair().to("meta")).__enter__(), "0 is on the meta device"),
        (lambda: octavo.inspect(pair(), every=0), "an int from 1 up, got 0"),
    ],
)
def test_inspect_refuses_in_a_sentence(call, says):
    with pytest.raises(UnsupportedConfig, match=says):
        call()


def test_what_is_no_tensor_is_refused_as_without_inspection():
    layer = octavo.Linear(16, 8, recipe="mxfp8")
    with octavo.inspect(layer), pytest.raises(UnsupportedDtype, match="Linear takes a tensor, got tuple"):
        layer((torch.randn(4, 16),))


def test_the_error_of_the_weight_is_that_of_the_weights_own_cast():
    layer, x = octavo.Linear(64, 40, recipe="fp8-current"), torch.randn(40, 64) * torch.logspace(-9, 0, 64)
    with octavo.inspect(layer) as report:
        layer(x)
    w = layer.weight.detach()
    values = octavo.recipe("fp8-current").linear().fprop.right.quantize(w).dequantize()
    noise = (values - w).double().square().sum() / w.double().square().sum()
    assert by_tensor(report, "")["w"].sqnr == pytest.approx(-10 * math.log10(noise.item()), abs=1e-6)
