"""Every layer with weights that are codes, against the same layer whose bf16 weights are cast in every call.

With columns kept nothing differs, and where columns are the transposed rows nothing differs without them. Elsewhere
(fp8-rowwise, mxfp8) dx alone is another: it is made of the values of row codes, and what follows from it.
"""

import copy
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.weights.quantized_weight import QuantizedWeight
from tests.support.linear_oracle import assert_same
from tests.support.recipe_traits import QUANTIZED

K, N = 64, 96
SIZES = torch.tensor([10, 0, 14])
BF16 = torch.bfloat16
LAYERS = {
    "linear": (lambda r: octavo.Linear(K, N, recipe=r, dtype=BF16), 0),
    "experts": (lambda r: octavo.GroupedLinear(3, K, N, recipe=r, dtype=BF16), 1),
    "experts, one parameter": (
        lambda r: octavo.GroupedLinear(3, K, N, recipe=r, dtype=BF16, single_grouped_weight=True), 1,
    ),
    "norm and linear": (lambda r: octavo.LayerNormLinear(K, N, recipe=r, dtype=BF16), 0),
    "mlp": (lambda r: octavo.LayerNormMLP(K, N, recipe=r, dtype=BF16), 0),
    "mixture": (lambda r: octavo.MoE(K, N, 4, 2, recipe=r, dtype=BF16), 0),
}  # fmt: skip
WAYS = ("eager", "compiled", "checkpointed", "microbatches")
SAMPLE = {
    ("linear", "fp8-delayed", "microbatches"), ("experts", "fp8-current", "checkpointed"),
    ("experts, one parameter", "nvfp4", "compiled"), ("norm and linear", "fp8-rowwise", "compiled"),
    ("mlp", "fp8-block", "checkpointed"), ("mlp", "mxfp8", "microbatches"), ("mixture", "fp8-block", "microbatches"),
    ("mixture", "fp8-rowwise", "eager"), ("experts", "mxfp8", "eager"), ("norm and linear", "fp8-delayed", "eager"),
}  # fmt: skip
GRID = [
    pytest.param(*case, id="-".join(case), marks=() if case in SAMPLE else pytest.mark.slow)
    for case in itertools.product(LAYERS, QUANTIZED, WAYS)
]


def ran(model, args, way, device="cpu"):
    """Outputs, gradients of x and of parameters, of two calls."""
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if way == "compiled" else model
    found = []
    for i in range(2):
        x = torch.randn(24, K, generator=torch.Generator().manual_seed(i)).to(device, BF16).requires_grad_()
        if way == "checkpointed":
            y = checkpoint(call, x, *args, use_reentrant=False)
        elif way == "microbatches":
            with octavo.microbatch(first=i == 0):
                y = call(x, *args)
        else:
            y = call(x, *args)
        y.float().square().sum().backward()
        found += [("y", y.detach()), ("dx", x.grad)]
    return found + [(name, p.grad) for name, p in model.named_parameters()]


def pair(layer, recipe, keep_columns, device="cpu"):
    build, with_sizes = LAYERS[layer]
    torch.manual_seed(0)
    cast = build(recipe).to(device)
    codes = copy.deepcopy(cast)
    octavo.quantize_weights(codes, trainable=True, keep_columns=keep_columns)
    return codes, cast, (SIZES.to(device),) if with_sizes else ()


def assert_alike(layer, recipe, way, keep_columns, device="cpu"):
    torch._dynamo.reset()
    codes, cast, args = pair(layer, recipe, keep_columns, device)
    weights = [p for p in codes.parameters() if isinstance(p, QuantizedWeight)]
    same = all(w.kind.turns or w.kind.columns for w in weights)
    for (name, a), (_, b) in zip(ran(codes, args, way, device), ran(cast, args, way, device), strict=True):
        if same:
            assert_same(a, b, name)
        elif b is not None:
            assert (a.float() - b.float()).norm() <= 0.06 * b.float().norm(), name


@pytest.mark.parametrize(("layer", "recipe", "way"), GRID)
def test_a_layer_computes_what_it_computes_with_a_weight_that_is_cast(layer, recipe, way):
    for keep_columns in (False, True):
        assert_alike(layer, recipe, way, keep_columns)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("layer", ["linear", "experts", "mlp", "mixture"])
def test_a_gpu_computes_the_same_too(layer, recipe):
    for keep_columns in (False, True):
        for way in ("eager", "microbatches", "compiled"):
            assert_alike(layer, recipe, way, keep_columns, "cuda")
