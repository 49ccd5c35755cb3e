"""Gated blocks over ranks: each half split by itself is right, and halves on different ranks are refused."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

import octavo
from octavo.distributed import ColwiseParallel, RowwiseParallel
from tests.support.linear_shards import mesh_of, message
from tests.support.steps import relative_error

HIDDEN, FFN, TOKENS, GROUPS = 32, 64, 24, 2
SUMS = 1e-5
SIZES = torch.tensor([10, 14])
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}
GATED = ["GLU", "GEGLU", "QGEGLU", "ReGLU", "SReGLU", "SwiGLU", "ClampedSwiGLU", "SiTUGLU"]


def data():
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5))


def gated(between=(), activation=None, kind=octavo.Sequential, group=None, wide=2 * FFN, **settings):
    """A Linear, a gated activation and a Linear; split if a group is given."""
    torch.manual_seed(3)
    modes = ("column", "row") if group is not None else (None, None)
    return kind(
        octavo.Linear(HIDDEN, wide, recipe="bf16", parallel_mode=modes[0], tp_group=group, **settings), *between,
        octavo.ops.SwiGLU() if activation is None else activation,
        octavo.Linear(FFN, HIDDEN, recipe="bf16", parallel_mode=modes[1], tp_group=group),
    )  # fmt: skip


# -- what is wrong -----------------------------------------------------------------------------------------------------


def _by_a_plan(group, rank):
    """What each way to split a gated block by `parallelize_module` says."""
    mesh, x, found = mesh_of(group), data(), {}
    block = octavo.LayerNormMLP(HIDDEN, FFN, activation="swiglu", recipe="fp8-block")
    plan = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
    found["block"] = message(parallelize_module, block, mesh, plan)
    found["sequential"] = message(parallelize_module(gated(), mesh, PLAN), x)
    found["graph"] = message(torch.compile(parallelize_module(gated(), mesh, PLAN), backend="aot_eager"), x)
    found["torch's sequential"] = message(parallelize_module(gated(kind=nn.Sequential), mesh, PLAN), x)
    inside = octavo.Sequential(octavo.Sequential(gated()[0], rules=None), *gated()[1:])
    plan = {"0.0": ColwiseParallel(), "2": RowwiseParallel()}
    found["inner"] = message(parallelize_module(inside, mesh, plan), x)
    return found


def test_halves_on_different_ranks_are_refused(ranks):
    for found in ranks.run(_by_a_plan, size=2):
        assert "has 2 blocks of output features, each of which is split" in found.pop("block")
        for name, text in found.items():
            assert "SwiGLU pairs the two halves of x's last dim" in text, (name, text)
            assert "column_blocks=2" in text


def _by_a_constructor(group, rank):
    x, found = data(), {}
    for name in GATED:
        found[name] = message(gated(activation=getattr(octavo.ops, name)(), group=group), x)
    passing = {
        "dropout": octavo.ops.Dropout(0.1), "bias": octavo.ops.Bias(FFN), "scale": octavo.ops.ConstantScale(2.0),
        "identity": octavo.ops.Identity(), "gelu": octavo.ops.GELU(),
    }  # fmt: skip
    for name, op in passing.items():
        found[name] = message(gated([op], group=group), x)
    found["sequence"] = message(gated(group=group, sequence_parallel=True), x[: TOKENS // 2])
    found["by hand"] = message(lambda: octavo.ops.SwiGLU()(gated(group=group)[0](x)))
    found["in two"] = message(lambda: gated(group=group)[1:](gated(group=group)[0](x)))
    later = gated()[:2]
    later[0].set_tensor_parallel_group(group, "column")
    found["later"] = message(later, x)
    norm = octavo.LayerNormLinear(HIDDEN, 2 * FFN, recipe="fp8-block", parallel_mode="column", tp_group=group)
    found["norm"] = message(octavo.Sequential(norm, octavo.ops.GEGLU()), x)
    return found


def test_every_way_to_a_gated_activation_is_refused(ranks):
    for found in ranks.run(_by_a_constructor, size=2):
        for name, text in found.items():
            assert "pairs the two halves of x's last dim" in text, (name, text)


def experts(group, blocks, activation=None, bias=False):
    torch.manual_seed(4)
    settings = {"recipe": "bf16", "bias": bias, "tp_group": group}
    modes = ("column", "row") if group is not None else (None, None)
    return [
        octavo.GroupedLinear(GROUPS, HIDDEN, 2 * FFN, parallel_mode=modes[0], column_blocks=blocks, **settings),
        octavo.ops.ScaledSwiGLU() if activation is None else activation,
        octavo.GroupedLinear(GROUPS, FFN, HIDDEN, parallel_mode=modes[1], **settings),
    ]


def _experts(group, rank):
    x, scales, found = data(), torch.rand(TOKENS), {}
    for bias in (False, True):
        run = octavo.Sequential(*experts(group, 1, bias=bias))
        found[f"run, bias={bias}"] = message(run, x, SIZES, scales, SIZES)
    first, activation, _ = experts(group, 1)
    found["by hand"] = message(lambda: activation(first(x, SIZES), scales))
    return found


def test_experts_whose_halves_are_on_different_ranks_are_refused(ranks):
    for found in ranks.run(_experts, size=2):
        for name, text in found.items():
            assert "ScaledSwiGLU pairs the two halves of x's last dim" in text, (name, text)


def _blocks_that_stay(group, rank):
    """Blocks of output features that no gated activation joins, before a row layer and before attention."""
    x = data()
    model = gated(activation=octavo.ops.GELU(), group=group, wide=FFN, column_blocks=2)
    heads = octavo.Sequential(
        octavo.Linear(HIDDEN, 3 * FFN, recipe="bf16", parallel_mode="column", tp_group=group),
        octavo.ops.RotaryAttention(2, FFN // 4, positions=TOKENS),
    )
    return message(model, x), message(lambda: model[2](model[0](x))), message(heads, x[None])


def test_blocks_that_a_row_layer_or_attention_takes_for_others_are_refused(ranks):
    for row, by_hand, heads in ranks.run(_blocks_that_stay, size=2):
        for text in (row, by_hand):
            assert "takes adjacent features of one block, and each rank has a part of 2 blocks" in text
        assert "RotaryAttention takes q, k and v side by side" in heads and "column_blocks=3" in heads


class Packed(nn.Module):
    """A gated MLP in plain torch, as models of transformers have it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.gate_up_proj, self.down_proj = nn.Linear(HIDDEN, 2 * FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(nn.functional.silu(gate) * up)


def _packed(group, rank):
    model = Packed()
    octavo.convert(model, "bf16")
    refused = message(parallelize_module, model, mesh_of(group), {"gate_up_proj": ColwiseParallel()})
    plan = {"gate_up_proj": ColwiseParallel(use_local_output=False), "down_proj": RowwiseParallel()}
    return refused, parallelize_module(model, mesh_of(group), plan)(data()).detach()


def test_a_gate_and_an_up_projection_in_one_weight_need_dtensors(ranks):
    model = Packed()
    octavo.convert(model, "bf16")
    right = model(data())
    for refused, y in ranks.run(_packed, size=2):
        assert "has gate and up in one weight by its name" in refused and "use_local_output=False" in refused
        assert relative_error(y, right) <= SUMS


# -- what is right -----------------------------------------------------------------------------------------------------


def trained(model, x, *extra_inputs):
    leaf = x.clone().requires_grad_()
    y = model(leaf, *extra_inputs)
    y.sum().backward()
    return y.detach(), leaf.grad


def _right(group, rank):
    """y and dx of what each rank splits as one process has it."""
    x, scales, one = data(), torch.linspace(0.5, 1, TOKENS), group is None
    found = {"blocks": trained(gated(group=group, column_blocks=2), x)}
    found["passing"] = trained(gated([octavo.ops.ConstantScale(2.0)], group=group, column_blocks=2), x)
    woven = octavo.ops.SwiGLU(glu_interleave_size=8)
    found["interleaved"] = trained(gated(activation=woven, group=group), x)
    found["experts"] = trained(octavo.Sequential(*experts(group, 2)), x, SIZES, scales, SIZES)
    woven = octavo.ops.ScaledSwiGLU(glu_interleave_size=16)
    found["interleaved experts"] = trained(octavo.Sequential(*experts(group, 1, woven)), x, SIZES, scales, SIZES)
    first, activation, second = experts(group, 2)
    found["by hand"] = trained(lambda x: second(activation(first(x, SIZES), scales), SIZES), x)
    torch.manual_seed(6)
    block = octavo.LayerNormMLP(HIDDEN, FFN, activation="geglu", recipe="bf16", set_parallel_mode=True, tp_group=group)
    found["block"] = trained(block, x)
    torch.manual_seed(7)
    heads = [octavo.Linear(HIDDEN, 3 * FFN, recipe="bf16", parallel_mode="column", tp_group=group, column_blocks=3),
             octavo.ops.RotaryAttention(4 if one else 2, FFN // 4, positions=TOKENS),
             octavo.Linear(FFN, HIDDEN, recipe="bf16", parallel_mode="row", tp_group=group)]  # fmt: skip
    found["attention"] = trained(octavo.Sequential(*heads), x[None])
    return found


def test_halves_that_are_split_each_by_itself_compute_what_one_process_does(ranks):
    right = _right(None, 0)
    for found in ranks.run(_right, size=2):
        for name, (y, dx) in found.items():
            assert relative_error(y, right[name][0]) <= SUMS, name
            assert relative_error(dx, right[name][1]) <= SUMS, name


def _set_later(group, rank):
    """A layer that was built whole with its blocks, and one that gets them later."""
    found = []
    for later in (False, True):
        whole, part = (gated(column_blocks=1 if later else 2) for _ in range(2))
        size = group.size()
        with torch.no_grad():
            halves = whole[0].weight.chunk(2), whole[0].bias.chunk(2)
            w, b = (torch.cat([half.chunk(size)[rank] for half in pair]) for pair in halves)
            part[0].weight, part[0].bias = nn.Parameter(w.clone()), nn.Parameter(b.clone())
            part[2].weight = nn.Parameter(whole[2].weight.chunk(size, 1)[rank].clone())
        part[0].set_tensor_parallel_group(group, "column", **({"column_blocks": 2} if later else {}))
        part[2].set_tensor_parallel_group(group, "row")
        found.append(relative_error(part(data()).detach(), whole(data()).detach()))
    return found


def test_a_layer_keeps_its_blocks_until_it_is_split(ranks):
    for found in ranks.run(_set_later, size=2):
        assert max(found) <= SUMS


@pytest.mark.parametrize("blocks", [0, -1, 1.5, True])
def test_column_blocks_are_counted_from_one(blocks):
    with pytest.raises(octavo.errors.UnsupportedConfig, match=r"column_blocks=.* is an int from 1 up"):
        octavo.Linear(8, 8, column_blocks=blocks)


def test_one_process_is_left_alone():
    assert gated(group="")(data()).shape == (TOKENS, HIDDEN)
