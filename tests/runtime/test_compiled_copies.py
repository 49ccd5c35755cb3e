"""Copies and files of compiled modules: they stay compiled, as those of torch's own layers do."""

import copy
import io

import pytest
import torch
from torch import nn

import octavo

pytestmark = pytest.mark.usefixtures("fresh_compiler")

KINDS = {
    "nn.Linear": lambda: nn.Linear(64, 64),
    "Linear": lambda: octavo.Linear(64, 64, recipe="fp8-block"),
    "GroupedLinear": lambda: octavo.GroupedLinear(2, 64, 64, recipe="fp8-block", single_grouped_weight=False),
    "Sequential": lambda: octavo.Sequential(octavo.Linear(64, 64, recipe="fp8-block"), octavo.ops.GELU()),
    "LayerNormMLP": lambda: octavo.LayerNormMLP(64, 64, recipe="fp8-block"),
    "MoE": lambda: octavo.MoE(64, 32, num_experts=4, top_k=2, recipe="fp8-block"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_a_compiled_module_is_compiled(kind):
    module, x = KINDS[kind](), torch.randn(8, 64)
    sizes = (torch.tensor([3, 5]),) if kind == "GroupedLinear" else ()
    compiled = torch.compile(module, backend="aot_eager")
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    want = compiled(x, *sizes)
    for other in (copy.deepcopy(compiled), torch.load(file, weights_only=False)):
        assert type(other) is type(compiled) and type(other._orig_mod) is type(module)
        assert list(other.state_dict()) == list(compiled.state_dict())
        own = {p.data_ptr() for p in module.parameters()}
        assert own.isdisjoint([p.data_ptr() for p in other.parameters()])
        assert torch.equal(other(x, *sizes), want)


def test_a_copy_has_its_groups_in_one_piece():
    layer = copy.deepcopy(KINDS["GroupedLinear"]())
    first, second = layer.weight0, layer.weight1
    assert second.data_ptr() - first.data_ptr() == first.numel() * first.element_size()
