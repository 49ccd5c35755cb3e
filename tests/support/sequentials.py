"""Sequentials to try, one step of them, what their graphs hold, and the same models a second time in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import octavo
from octavo import ops
from octavo.kernels.activation import ACTIVATIONS
from octavo.recipes import SHIPPED
from tests.support.activation_formulas import FORMULAS, applied
from tests.support.linear_oracle import randn, spiky
from tests.support.recipe_traits import QUANTIZED, by_bits
from tests.support.state_tensors import named_state
from tests.support.steps import assert_equal, relative_error, step

H, FFN, M = 32, 48, 24  # hidden, feed-forward, tokens

# relative error, root of the mean square, that y and gradients of a chain of two layers may have against float64
Y_ERROR = by_bits(unquantized=1e-5, eight=0.1, four=0.5, gemms=("fprop",))
GRAD_ERROR = by_bits(unquantized=1e-5, eight=0.16, four=0.7)
FUSED_AT_ONCE = {
    "fp8-delayed": "fp8-delayed(cold_start='one')"
}  # for tests of one step: the first is as later ones are
SAMPLE = ("bf16", "fp8-delayed", "fp8-current", "nvfp4")  # one recipe of each kind


def recipes(names):
    """A test for each of these recipes, all of which fuse in a first step."""
    return pytest.mark.parametrize("recipe", [pytest.param(FUSED_AT_ONCE.get(name, name), id=name) for name in names])


every, quantized, sample = recipes(SHIPPED), recipes(QUANTIZED), recipes(SAMPLE)


# -- models ------------------------------------------------------------------------------------------------------------


def fill(model, seed=1):
    """Parameters, and counters of rounding, that do not depend on torch's generator."""
    with torch.no_grad():
        for i, (name, p) in enumerate(model.named_parameters()):
            if p.dim() > 1:
                p.copy_(spiky(*p.shape, seed=seed + i, size=6.0) / p.shape[-1] ** 0.5)
            else:
                p.copy_(0.3 * randn(*p.shape, seed=seed + i) + float("bias" not in name))
        for name, buffer in named_state(model):
            if name.endswith("rounding_seed"):
                buffer.copy_(torch.tensor([7, 0]))
    return model


def linear(**settings):
    """A layer that keeps the width."""
    return octavo.Linear(H, H, **settings)


def unbiased(recipe, n=H, k=H, **settings):
    """A layer from k to n features, without a bias unless the settings say so."""
    return octavo.Linear(k, n, recipe=recipe, **{"bias": False, **settings})


def mlp(recipe=None, *, norm=ops.RMSNorm, act=ops.SwiGLU, bias=False, dtype=torch.float32, linear=None, **settings):
    """Norm, Linear, activation, Linear; `linear`: settings of both layers."""
    width = 2 * FFN if ACTIVATIONS[act.NAME].gated else FFN
    linear = {"bias": bias, "recipe": recipe, "dtype": dtype, **(linear or {})}
    layers = (norm(H, dtype=dtype), octavo.Linear(H, width, **linear), act(), octavo.Linear(FFN, H, **linear))
    return fill(octavo.Sequential(*layers, **settings))


def residual(recipe=None, *, dtype=torch.float32, output_to_caller=False, **settings):
    """x + mlp(x) in one Sequential."""
    return octavo.Sequential(
        ops.MakeExtraOutput(channel="residual", output_to_caller=output_to_caller),
        *mlp(recipe, dtype=dtype),
        ops.AddExtraInput(source="residual"),
        **settings,
    )


def unfused(model):
    """A copy of it that runs by no rule at all."""
    return octavo.Sequential(*copy.deepcopy(list(model)), rules=None)


def batch(*lead, seed=0, dtype=torch.float32, width=H, out=H):
    """x and dy, signed, with outliers."""
    lead = lead or (M,)
    return spiky(*lead, width, seed=seed, dtype=dtype, size=8.0), spiky(*lead, out, seed=90 + seed, dtype=dtype)


def rows(n=8):
    """Rows that no earlier call gave."""
    return torch.randn(n, H)


def whole(*shape, seed=0, dtype=torch.float32):
    """Small integers: sums of them are exact in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- steps -------------------------------------------------------------------------------------------------------------


def assert_unfused(model, inputs, dys, **given):
    """A step equals that of a copy, made before it, that runs by no rule; returns it."""
    twin = unfused(model)
    found = step(model, inputs, dys, **given)
    assert_equal(found, step(twin, inputs, dys, **given))
    return found


def assert_near(found, want, recipe, outputs=1):
    """Against float64, within what the recipe may lose."""
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        assert (a is None) == (b is None), i
        if a is not None:
            bound = (Y_ERROR if i < outputs else GRAD_ERROR)[recipe.split("(")[0]]
            bound = max(bound, 4 * torch.finfo(a.dtype).eps)
            assert a.shape == b.shape
            assert relative_error(a, b) < bound, f"{i}: {relative_error(a, b):.3g} of {bound:.3g}"


def fired(model, inputs):
    """The rules by which a call of a model that trains runs."""
    return model.explain(*[t.detach().clone().requires_grad_() for t in inputs]).fired


# -- graphs ------------------------------------------------------------------------------------------------------------


class Graphs:
    """A backend that runs what it is given as it is, and keeps it."""

    def __init__(self):
        self.forward, self.backward = [], []

    def __call__(self, gm, example_inputs):
        def keep(graphs):
            def compiler(inner, _):
                graphs.append(inner)
                return make_boxed_func(inner.forward)

            return compiler

        made = aot_autograd(fw_compiler=keep(self.forward), bw_compiler=keep(self.backward))
        return made(gm, example_inputs)

    def runs(self):
        """Differentiable nodes of ours: forward, backward."""
        return (
            sum(count(g, "octavo.run.default", "octavo.attach.default") for g in self.forward),
            sum(count(g, "octavo.run_bwd.default") for g in self.backward),
        )


def count(graph, *targets):
    return sum(n.op == "call_function" and str(n.target) in targets for n in graph.graph.nodes)


# -- a second time, in float64 -----------------------------------------------------------------------------------------


class Reference(nn.Module):
    """The operations of a Sequential as formulas of float64, quantized by nothing. `public`: extra outputs are too."""

    def __init__(self, model, public=False):
        super().__init__()
        self.public = public
        self.ops = [op for op in model.modules() if not list(op.children())]
        self.values = nn.ParameterList(
            nn.Parameter(p.detach().double(), p.requires_grad) for op in self.ops for p in op.parameters()
        )

    def forward(self, x, *extra):
        params, extra, made = iter(self.values), list(extra), []
        for op in self.ops:
            own = [next(params) for _ in op.parameters()]
            match op:
                case ops.MakeExtraOutput():
                    made.append(x)
                case ops.AddExtraInput():
                    x = x + (extra.pop(0) if extra else made[0])
                case octavo.Linear():
                    x = F.linear(x, *own)
                case ops.LayerNorm():
                    x = F.layer_norm(x, own[0].shape, own[0] + float(op.zero_centered_gamma), *own[1:], op.eps)
                case ops.RMSNorm():
                    x = F.rms_norm(x, own[0].shape, own[0] + float(op.zero_centered_gamma), op.eps)
                case ops.ConstantScale():
                    x = op.scale * x
                case ops.Bias():
                    x = x + own[0]
                case ops.Identity() | ops.Dropout() | ops.Quantize():
                    pass
                case _:
                    x = applied(FORMULAS[op.NAME], ACTIVATIONS[op.NAME].gated, x)
        return (x, *made) if self.public else x


def reference_step(model, inputs, dys, *, public=False, **given):
    inputs, dys = ([t] if isinstance(t, torch.Tensor) else list(t) for t in (inputs, dys))
    inputs = [t.double() if t.is_floating_point() else t for t in inputs]
    return step(Reference(model, public), inputs, [None if dy is None else dy.double() for dy in dys], **given)
