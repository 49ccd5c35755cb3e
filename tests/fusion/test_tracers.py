"""torch.fx, TorchScript and ONNX: refused in a sentence, with the way out, which works."""

import io

import pytest
import torch
from torch import fx, nn

import octavo
from octavo.errors import UnsupportedConfig, UnsupportedDtype
from tests.support.exports import kept_hooks
from tests.support.module_kinds import KINDS, ROWS, Holder, K, build

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SYMBOL = r"takes a tensor, got a Proxy of torch\.fx: symbolic_trace calls layers with symbols, and this one needs"
WAY_OUT = r"Use torch\.export\.export\(model, args\) or torch\.compile"
REVERT = r"for TorchScript and ONNX call octavo\.revert\(model\) first"
NAMES = {"grouped": "GroupedLinear", "groups": "GroupedLinear", "mlp": "LayerNormMLP"}


def name_of(kind):
    return NAMES.get(kind, kind.title())


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed"])
@pytest.mark.parametrize("kind", KINDS)
def test_symbolic_trace_is_refused(kind, recipe):
    module, extra_inputs = build(kind, recipe)
    for root in (module, Holder(module, extra_inputs)):
        with pytest.raises(UnsupportedDtype, match=f"{name_of(kind)} {SYMBOL}.*{WAY_OUT}.*is_leaf_module is True"):
            fx.symbolic_trace(root)


class Sized(fx.Proxy):
    """As tracers have it that know what values are like."""

    @property
    def dtype(self):
        return torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_symbols_that_have_a_dtype_are_symbols(kind):
    module, extra_inputs = build(kind, "bf16")
    x = Sized(fx.Graph().placeholder("x"))
    with pytest.raises(UnsupportedDtype, match=f"{name_of(kind)} {SYMBOL}"):
        module(x, *extra_inputs)


class Tracer(fx.Tracer):
    def is_leaf_module(self, m, name):
        return type(m).__module__.startswith("octavo.") or super().is_leaf_module(m, name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tracer_that_takes_layers_as_leaves_has_a_node_for_each(kind):
    holder, x = Holder(*build(kind, "fp8-block")), torch.randn(ROWS, K)
    traced = fx.GraphModule(holder, Tracer().trace(holder))
    assert [node.op for node in traced.graph.nodes].count("call_module") == 1
    assert torch.equal(traced(x), holder(x))


@pytest.mark.parametrize("kind", KINDS)
def test_what_export_has_is_the_layer(kind):
    """The way out of symbolic_trace and of torch.jit.trace."""
    holder, x = Holder(*build(kind, "fp8-block")), torch.randn(ROWS, K)
    assert torch.equal(torch.export.export(holder, (torch.randn(ROWS, K),)).module()(x), holder(x))


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed"])
@pytest.mark.parametrize("kind", KINDS)
def test_torchscript_is_refused(kind, recipe):
    holder, x = Holder(*build(kind, recipe)), torch.randn(ROWS, K)
    message = rf"torch\.jit\.trace, .* would keep as constants what {name_of(kind)} decides at each call: recipe"
    with pytest.raises(UnsupportedConfig, match=f"{message}.*{WAY_OUT}; {REVERT}"):
        torch.jit.trace(holder, (x,))
    for module in (holder, holder.module):
        message = rf"torch\.jit\.script cannot compile what {name_of(kind)} decides at each call"
        with pytest.raises(UnsupportedConfig, match=f"{message}.*{REVERT}"):
            torch.jit.script(module)
    assert holder(x).shape == (ROWS, K)  # nothing is left behind


@pytest.mark.parametrize("operation", [octavo.ops.LayerNorm(K), octavo.ops.GELU(), octavo.ops.Quantize()])
def test_other_operations_are_refused_too(operation):
    with pytest.raises(UnsupportedConfig, match=f"what {type(operation).__name__} decides at each call"):
        torch.jit.trace(operation, (torch.randn(ROWS, K),))


def test_onnx_by_torchscript_is_refused():
    model = nn.Sequential(octavo.Linear(K, K, recipe="fp8-block"))
    with pytest.raises(UnsupportedConfig, match=rf"which torch\.onnx\.export\(dynamo=False\) is too.*{REVERT}"):
        torch.onnx.export(model, (torch.randn(ROWS, K),), io.BytesIO(), dynamo=False)


@pytest.mark.parametrize("kind", KINDS)
def test_onnx_is_refused(kind, monkeypatch):
    """As the exporter asks for it: what it converts was exported first. The exporter itself is no dependency here."""
    holder = Holder(*build(kind, "fp8-block"))
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    message = r"torch\.onnx\.export has no operators for Octavo's layers.*Call octavo\.revert\(model\) first"
    with kept_hooks(), pytest.raises(UnsupportedConfig, match=message):
        torch.export.export(holder, (torch.randn(ROWS, K),), strict=False)


def test_a_model_that_was_reverted_is_traced_and_scripted():
    model, x = nn.Sequential(nn.Linear(K, K), nn.ReLU()), torch.randn(ROWS, K)
    octavo.convert(model, "fp8-block")
    with pytest.raises(UnsupportedConfig):
        torch.jit.trace(model, (x,))
    octavo.revert(model)
    want = model(x)
    for made in (torch.jit.trace(model, (x,)), torch.jit.script(model), fx.symbolic_trace(model)):
        assert torch.equal(made(x), want)
