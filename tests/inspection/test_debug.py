"""octavo.debug: one change concerns one GEMM, and every other result keeps its bits."""

import json

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnknownSetting, UnsupportedConfig, UnsupportedShape
from octavo.inspection.changes import Call, HighPrecision, Quantize
from octavo.quant import MX, NVFP4
from octavo.recipes import SHIPPED
from octavo.recipes.recipe import OPERANDS
from tests.support.linear_oracle import assert_same, spiky
from tests.support.steps import assert_equal, assert_state, compiled, step, update

pytestmark = pytest.mark.usefixtures("fresh_compiler")
RESULTS = ("y", "dx", "dw", "db")
CHANGES = {  # of each GEMM, and the results that differ
    "fprop": ("y",), "dgrad": ("dx",), "wgrad": ("dw",)
}  # fmt: skip
QUANTIZED = [name for name in SHIPPED if name != "bf16"]


def linear(recipe, **settings):
    torch.manual_seed(0)
    return octavo.Linear(64, 48, recipe=recipe, **settings)


def batch(i=0):
    return spiky(32, 64, seed=i), spiky(32, 48, seed=i + 5)


def differing(found, want):
    return tuple(name for name, a, b in zip(RESULTS, found, want, strict=True) if not torch.equal(a, b))


# -- one GEMM ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gemm", CHANGES)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_gemm_in_high_precision_has_the_bits_of_the_recipes_override(recipe, gemm):
    layer, other, plain = linear(recipe), linear(f"{recipe}({gemm}='bf16')"), linear(recipe)
    for i in range(3):
        with octavo.debug(layer, HighPrecision(gemm)):
            found = step(layer, *batch(i))
        want, own = step(other, *batch(i)), step(plain, *batch(i))
        at = RESULTS.index(CHANGES[gemm][0])
        assert_same(found[at], want[at])
        assert differing(found, own) == CHANGES[gemm]
        for each in (layer, other, plain):
            octavo.step(each)
    assert_state(layer, plain)


@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_block_whose_changes_are_over_has_the_bits_without_it(recipe):
    layer, plain = linear(recipe), linear(recipe)
    with octavo.debug(layer, [HighPrecision("wgrad", steps=(9, 10)), Call("fprop", tensor="x", function=nothing)]):
        for i in range(3):
            assert_equal(step(layer, *batch(i)), step(plain, *batch(i)))
            update(layer), update(plain)
    assert_state(layer, plain)
    assert type(layer) is octavo.Linear
    assert_equal(step(layer, *batch(3)), step(plain, *batch(3)))


def nothing(tensor, place):
    return None


# -- one tensor --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gemm", "tensor"), [(g, t) for g, two in OPERANDS.items() for t in two])
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "nvfp4"])
def test_another_quantizer_of_one_operand(recipe, gemm, tensor):
    layer, plain = linear(recipe), linear(recipe)
    other = MX() if recipe == "nvfp4" else NVFP4()  # MX and blocks of 128 have the same codes but where one underflows
    with octavo.debug(layer, Quantize(gemm, tensor=tensor, quantizer=other)):
        found = step(layer, *batch())
    assert differing(found, step(plain, *batch())) == CHANGES[gemm]


def test_another_quantizer_against_the_definition():
    layer = linear("fp8-block", bias=False)
    x, dy = batch()
    with octavo.debug(layer, [Quantize("fprop", tensor="x", quantizer=MX()), Quantize("wgrad", tensor="dy")]):
        y, _, dw = step(layer, x, dy)
    quant, w = octavo.recipe("fp8-block").linear(), layer.weight.detach()
    torch.testing.assert_close(y, MX().quantize(x).dequantize() @ quant.fprop.right.quantize(w).dequantize().T)
    torch.testing.assert_close(dw, dy.T @ quant.wgrad.right.quantize(x, 0).dequantize().T)


@pytest.mark.parametrize(
    ("gemm", "tensor"), [("fprop", "x"), ("fprop", "w"), ("fprop", "y"), ("dgrad", "dy"), ("dgrad", "w"),
                         ("dgrad", "dx"), ("wgrad", "dy"), ("wgrad", "x"), ("wgrad", "dw")],
)  # fmt: skip
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-block", "bf16"])
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_function_sees_and_replaces_one_tensor(recipe, gemm, tensor, mode):
    layer, plain, seen = linear(recipe), linear(recipe), []

    def halved(found, place):
        seen.append((tuple(found.shape), place))
        return found / 2

    x, dy = batch()
    with octavo.debug(layer, Call(gemm, tensor=tensor, function=halved)):
        found = step(layer, x, dy, call=compiled(layer) if mode == "compiled" else None)
    want = step(plain, x, dy)
    assert differing(found, want) == CHANGES[gemm]
    shape = {"x": (32, 64), "w": (48, 64), "dy": (32, 48), "y": (32, 48), "dx": (32, 64), "dw": (48, 64)}[tensor]
    assert [(s, p[1:]) for s, p in seen] == [(shape, (gemm, tensor, 0))]
    at = RESULTS.index(CHANGES[gemm][0])
    if tensor in ("dx", "dw") or gemm != "fprop":  # powers of two change codes' scales alone
        torch.testing.assert_close(found[at], want[at] / 2, rtol=0.2, atol=0.2 * float(want[at].abs().max()))
    if tensor in ("y", "dx", "dw"):
        assert_same(found[at], want[at] / 2)


def test_a_function_that_only_looks_gets_the_operands():
    layer, seen = linear("fp8-block"), {}
    changes = [
        Call(gemm, tensor=tensor, function=lambda found, place: seen.update({place.tensor: found.clone()}))
        for gemm, tensor in (("fprop", "x"), ("dgrad", "dy"))
    ]
    x, dy = batch()
    with octavo.debug(layer, changes):
        found = step(layer, x, dy)
    assert_same(seen["x"], x), assert_same(seen["dy"], dy)
    assert_equal(found, step(linear("fp8-block"), x, dy))


# -- models, modes and state -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_in_a_graph_the_step_is_asked_at_run_time(recipe):
    layer, eager = linear(recipe), linear(recipe)
    call, changes = compiled(layer), [HighPrecision("wgrad", steps=(1, 3)), Quantize("fprop", tensor="w", every=2)]
    for model, run in ((layer, call), (eager, eager)):
        with octavo.debug(model, changes) as debugging:
            model.found = []
            for i in range(3):
                model.found.append(step(model, *batch(i), call=run))
                octavo.step(model)
                debugging.next_step()
    for a, b in zip(layer.found, eager.found, strict=True):
        assert_equal(a, b)
    assert_state(layer, eager)


def test_an_optimizer_counts_steps():
    model = nn.Sequential(linear("fp8-block"))
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.0), []
    with octavo.debug(model, Call("fprop", tensor="y", function=lambda y, place: seen.append(place.step))):
        for _ in range(3):
            model(batch()[0]).sum().backward()
            optimizer.step()
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("make", [
    lambda: octavo.LayerNormMLP(64, 96, activation="swiglu", recipe="fp8-block"),
    lambda: octavo.Sequential(octavo.ops.RMSNorm(64), octavo.Linear(64, 48, recipe="fp8-block")),
])  # fmt: skip
def test_layers_inside_of_blocks(make):
    model = make()
    x = spiky(16, 64)
    plain = octavo.Sequential(*model, rules=None)
    want = plain(x)
    with octavo.debug(model, Call("fprop", tensor="y", function=lambda y, place: y * 0)) as debugging:
        y = model(x)
        assert "octavo.debug changes its tensors" in str(model.explain(x))
    assert debugging.layers and not torch.equal(y, want)
    assert torch.equal(y, last(model).bias.detach().expand(y.shape) * 0)
    fused = make()
    fused.load_state_dict(model.state_dict())
    assert_same(model(x), fused(x))


def last(model):
    return model[-1]


@pytest.mark.parametrize("form", ["codes", "cached", "main_grad", "frozen"])
def test_forms_of_weights(form):
    change = [HighPrecision("wgrad"), Call("dgrad", tensor="w", function=lambda w, place: w * 2)]
    settings = {"fuse_wgrad_accumulation": True} if form == "main_grad" else {}
    layer, other = linear("fp8-block", **settings), linear("fp8-block(wgrad='bf16')")
    x, dy = batch()
    given = {"is_first_microbatch": True} if form == "cached" else {}
    for each in (layer, other):
        if form == "codes":
            octavo.quantize_weights(each)
        each.weight.requires_grad_(form not in ("codes", "frozen"))
    layer.weight.main_grad = torch.ones(48, 64)
    with octavo.debug(layer, change):
        y, dx, dw, db = step(layer, x, dy, **given)
    want = step(other, x, dy)
    assert_same(y, want[0])
    torch.testing.assert_close(dx, 2 * want[1], rtol=1e-3, atol=1e-3 * float(want[1].abs().max()))
    if form == "main_grad":
        torch.testing.assert_close(layer.weight.main_grad, 1 + want[2])
    elif form != "cached":
        assert dw is None
    else:
        assert_same(dw, want[2])
    assert_same(db, want[3])


def test_codes_in_and_out():
    layer, first, x = linear("fp8-block"), octavo.Linear(64, 64, recipe="fp8-block"), batch()[0]
    q = first(x, fp8_output=True)
    with octavo.debug(layer, HighPrecision("fprop")):
        of_codes, codes = layer(q), layer(x, fp8_output=True)
    linear_of = nn.functional.linear
    torch.testing.assert_close(of_codes, linear_of(q.dequantize(), layer.weight, layer.bias), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(codes.dequantize(), linear_of(x, layer.weight, layer.bias), rtol=0.1, atol=0.5)


# -- files, and what does not fit --------------------------------------------------------------------------------------


def doubled(tensor, place):
    return tensor * 2


ENTRIES = [
    {"kind": "high_precision", "gemm": "wgrad", "layers": ["0", "2"], "steps": [0, 5]},
    {"kind": "quantize", "gemm": "fprop", "tensor": "x", "quantizer": "mx"},
    {"kind": "call", "gemm": "dgrad", "tensor": "dx", "function": f"{__name__}:doubled", "layers": "0"},
]
TOML = """
[[changes]]
kind = "high_precision"
gemm = "wgrad"
layers = ["0", "2"]
steps = [0, 5]
[[changes]]
kind = "quantize"
gemm = "fprop"
tensor = "x"
quantizer = "mx"
[[changes]]
kind = "call"
gemm = "dgrad"
tensor = "dx"
layers = "0"
function = "FUNCTION"
"""


@pytest.mark.parametrize("ending", [".toml", ".json"])
def test_changes_of_a_file(tmp_path, ending):
    path = tmp_path / f"changes{ending}"
    path.write_text(
        TOML.replace("FUNCTION", f"{__name__}:doubled") if ending == ".toml" else json.dumps({"changes": ENTRIES})
    )
    by_code = [HighPrecision("wgrad", ("0", "2"), (0, 5)), Quantize("fprop", tensor="x", quantizer=MX()),
               Call("dgrad", "0", tensor="dx", function=doubled)]  # fmt: skip
    found = []
    for changes in (path, by_code):
        model = nn.Sequential(linear("fp8-block"), nn.GELU(), octavo.Linear(48, 16, recipe="fp8-block"))
        with torch.no_grad():
            torch.manual_seed(1)
            model[2].reset_parameters()
        with octavo.debug(model, changes):
            found.append(step(model, batch()[0], spiky(32, 16)))
    assert_equal(*found)


@pytest.mark.parametrize(("text", "error", "said"), [
    ("{}", UnsupportedConfig, "has one key, changes"),
    ('{"changes": [{"kind": "log"}]}', UnsupportedConfig, "high_precision, quantize, call"),
    ('{"changes": [{"kind": "high_precision"}]}', UnsupportedConfig, "names its gemm"),
    ('{"changes": [{"kind": "high_precision", "gemm": "wgrad", "layer": "0"}]}', UnknownSetting, "mean 'layers'"),
    ('{"changes": [{"kind": "call", "gemm": "wgrad", "tensor": "x", "function": "no.module:f"}]}', UnsupportedConfig,
     "is not found"),
])  # fmt: skip
def test_a_file_that_does_not_fit(tmp_path, text, error, said):
    path = tmp_path / "changes.json"
    path.write_text(text)
    with pytest.raises(error, match=said):
        octavo.debug(linear("fp8-block"), path)


def test_changes_that_do_not_fit():
    for make, said in (
        (lambda: HighPrecision("forward"), "HighPrecision.gemm"),
        (lambda: Quantize("fprop", tensor="dy"), "Quantize.tensor of fprop"),
        (lambda: Quantize("fprop", tensor="x", quantizer="fp8-block"), "a quantizer of octavo.quant"),
        (lambda: Call("wgrad", tensor="y", function=nothing), "Call.tensor of wgrad"),
        (lambda: Call("wgrad", tensor="dw"), "Call.function"),
        (lambda: HighPrecision("fprop", steps=(1,)), "first, end"),
        (lambda: HighPrecision("fprop", every=0), "every"),
    ):
        with pytest.raises(UnsupportedConfig, match=said):
            make()


def test_models_that_do_not_fit():
    change = HighPrecision("wgrad")
    grouped = nn.Sequential(octavo.GroupedLinear(2, 8, 8), octavo.Linear(8, 8, delay_wgrad_compute=True))
    layer = linear("fp8-block")
    for model, changes, said in (
        (grouped, HighPrecision("wgrad", "0"), "0 is a GroupedLinear"),
        (grouped, change, "defers its weight gradient"),
        (layer, HighPrecision("wgrad", "fc1"), "names no octavo.Linear"),
        (layer, [], "octavo.debug takes changes"),
    ):
        with pytest.raises(UnsupportedConfig, match=said), octavo.debug(model, changes):
            pass
    with octavo.debug(layer, change), pytest.raises(UnsupportedConfig, match="already"), octavo.debug(layer, change):
        pass
    wide = Call("fprop", tensor="x", function=lambda x, place: x[:1])
    with octavo.debug(layer, wide), pytest.raises(UnsupportedShape, match=r"returns x of fprop as \(32, 64\)"):
        layer(batch()[0])
