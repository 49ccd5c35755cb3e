"""Every operation on no tokens: empty results of the right shape, and gradients of zero."""

import pytest
import torch

import octavo
from octavo import ops
from tests.support.steps import step

M, K, N = 32, 48, 40
OPS = {
    **{
        name: getattr(ops, name)
        for name in (
            "GELU", "QGELU", "ReLU", "SReLU", "SiLU", "GLU", "GEGLU", "QGEGLU", "ReGLU", "SReGLU", "SwiGLU",
            "ClampedSwiGLU", "L2Normalization", "Identity", "MakeExtraOutput", "AddExtraInput", "ScaledSwiGLU",
            "ScaledSReLU", "ScaledClampedSwiGLU", "SiTUGLU", "ScaledSiTUGLU", "AllReduce", "AllGather", "ReduceScatter",
        )
    },
    "LayerNorm": lambda: ops.LayerNorm(K),
    "RMSNorm": lambda: ops.RMSNorm(K),
    "Bias": lambda: ops.Bias(K),
    "ConstantScale": lambda: ops.ConstantScale(3.0),
    "Dropout": lambda: ops.Dropout(0.5),
    "Reshape": lambda: ops.Reshape((-1, 2 * K)),
    "Linear": lambda: octavo.Linear(K, N, recipe="fp8-current"),
    "GroupedLinear": lambda: octavo.GroupedLinear(3, K, N, recipe="fp8-current"),
}  # fmt: skip


def extra_inputs(name, rows):
    match name:
        case "AddExtraInput":
            return [torch.zeros(rows, K)]
        case "GroupedLinear":
            return [torch.tensor([0, rows, 0])]
    return [torch.zeros(rows)] if name.startswith("Scaled") else []


@pytest.mark.parametrize("name", OPS)
def test_no_tokens_give_outputs_and_gradients_of_no_rows(name):
    model = octavo.Sequential(OPS[name]())
    with torch.no_grad():
        outputs = model(torch.zeros(0, K), *extra_inputs(name, 0))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    found = step(model, (torch.zeros(0, K), *extra_inputs(name, 0)), [torch.zeros_like(y) for y in outputs])
    some = model(torch.zeros(2, K), *extra_inputs(name, 2))
    some = some if isinstance(some, tuple) else (some,)
    assert [y.shape[1:] for y in outputs] == [y.shape[1:] for y in some]
    assert all(y.shape[0] == 0 for y in outputs)
    assert found[len(outputs)].shape == (0, K)
    for p in model.parameters():
        assert p.grad is not None and not p.grad.any()
