"""`parallelize_module` with Octavo's styles: DTensor parameters, results of one process, and checkpoints."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import octavo
from octavo.distributed import ColwiseParallel, RowwiseParallel, distribute_parameters
from octavo.errors import Unsupported, UnsupportedConfig
from tests.support.linear_shards import cut, mesh_of
from tests.support.steps import relative_error

HIDDEN, FFN, TOKENS = 128, 512, 64
SUMS = 6e-3


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


def stock(seed=11):
    torch.manual_seed(seed)
    return MLP()


def converted(recipe, seed=11):
    model = stock(seed)
    octavo.convert(model, recipe)
    return model


def data():
    g = torch.Generator().manual_seed(5)
    return [torch.randn(TOKENS, HIDDEN, generator=g) for _ in range(2)]


def split(group, recipe, sequence=False, seed=11, **settings):
    """The stock model, converted, and split as a plan says."""
    model = converted(recipe, seed)
    outside = Shard(0) if sequence else Replicate()
    plan = {"up": ColwiseParallel(input_layouts=outside), "down": RowwiseParallel(output_layouts=outside, **settings)}
    return parallelize_module(model, mesh_of(group), plan)


def _step(group, rank, recipe, sequence, compiled):
    model = split(group, recipe, sequence)
    x, dy = (cut(t, group, 0).contiguous() if sequence else t for t in data())
    x.requires_grad_()
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for _ in range(2 if recipe == "fp8-delayed" else 1):
        model.zero_grad()
        x.grad = None
        y = call(x)
        y.backward(dy)
        octavo.step(model)
    kinds = {type(p).__name__ for p in model.parameters()} | {type(p.grad).__name__ for p in model.parameters()}
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()
    after = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    return y.detach(), x.grad, grads, after, kinds


@pytest.mark.parametrize(
    ("recipe", "sequence", "compiled", "size"),
    [("fp8-block", True, False, 2), ("fp8-delayed", True, False, 2), ("bf16", False, False, 4),
     ("fp8-block", False, True, 2)],
)  # fmt: skip
def test_a_plan_of_parallelize_module_computes_what_one_process_does(ranks, recipe, sequence, compiled, size):
    model, (x, dy) = converted(recipe), data()
    x.requires_grad_()
    for _ in range(2 if recipe == "fp8-delayed" else 1):
        model.zero_grad()
        x.grad = None
        y = model(x)
        y.backward(dy)
        octavo.step(model)
    found = ranks.run(_step, recipe, sequence, compiled, size=size)
    ys, dxs = ([own[i] for own in found] for i in (0, 1))
    assert relative_error(torch.cat(ys) if sequence else ys[0], y.detach()) <= SUMS
    assert relative_error(torch.cat(dxs) if sequence else dxs[0], x.grad) <= SUMS
    grads = {name: p.grad for name, p in model.named_parameters()}
    torch.optim.SGD(model.parameters(), 0.1).step()
    for own in found:
        assert own[4] == {"DTensor"}
        for name, right in model.named_parameters():
            assert relative_error(own[2][name], grads[name]) <= SUMS, name
            assert own[3][name].shape == right.shape


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(11)
        self.norm, self.mlp = nn.RMSNorm(HIDDEN), MLP()
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def _normed(group, rank):
    model = Normed()
    octavo.convert(model, "fp8-block")
    plan = {
        "norm": SequenceParallel(sequence_dim=0), "mlp.up": ColwiseParallel(input_layouts=Shard(0)),
        "mlp.down": RowwiseParallel(output_layouts=Shard(0)),
    }  # fmt: skip
    parallelize_module(model, mesh_of(group), plan)
    x, dy = (cut(t, group, 0).contiguous() for t in data())
    y = model(x)
    y.backward(dy)
    return y.detach(), model.norm.weight.grad.full_tensor()


def test_norms_of_torch_take_torchs_style(ranks):
    model, (x, dy) = Normed(), data()
    octavo.convert(model, "fp8-block")
    y = model(x)
    y.backward(dy)
    found = ranks.run(_normed, size=2)
    assert relative_error(torch.cat([own[0] for own in found]), y.detach()) <= SUMS
    for own in found:
        assert relative_error(own[1], model.norm.weight.grad) <= SUMS


def _save(group, rank, folder):
    model = split(group, "fp8-block")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, process_group=group)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: (type(t).__name__, t) for name, t in full.items()}


def _load(group, rank, folder):
    model = split(group, "fp8-current", seed=12)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    model.load_state_dict(state["model"])
    whole = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    other = split(group, "fp8-current", seed=13)
    set_model_state_dict(other, stock().state_dict(), options=StateDictOptions(full_state_dict=True))
    return whole, {name: p.full_tensor().detach() for name, p in other.named_parameters()}


def same(found, right):
    return set(found) == set(right) and all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (2, 4), (4, 2), (2, 1), (4, 1), (1, 4)])
def test_checkpoints_load_over_other_numbers_of_ranks(ranks, tmp_path, saved, loaded):
    folder, right = str(tmp_path / "checkpoint"), stock().state_dict()
    if saved == 1:
        dcp.save({"model": converted("fp8-block").state_dict()}, checkpoint_id=folder, no_dist=True)
    else:
        for full in ranks.run(_save, folder, size=saved)[:1]:
            assert {kind for kind, _ in full.values()} == {"Tensor"}
            assert same({name: t for name, (_, t) in full.items()}, right)
    if loaded == 1:  # a model without Octavo
        model = stock(12)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        assert same(state["model"], right)
    else:
        for whole, from_stock in ranks.run(_load, folder, size=loaded):
            assert same(whole, right)
            assert same(from_stock, right)


def _built(group, rank, folder):
    """Layers of a constructor, whose parts become DTensors."""
    mesh = mesh_of(group)
    torch.manual_seed(11)
    model = nn.ModuleDict(
        {"up": octavo.Linear(HIDDEN, FFN, recipe="fp8-block", parallel_mode="column", tp_group=mesh),
         "down": octavo.Linear(FFN, HIDDEN, recipe="fp8-block", parallel_mode="row", tp_group=mesh)}
    )  # fmt: skip
    x, _ = data()
    before = model["down"](model["up"](x))
    distribute_parameters(model, mesh)
    after = model["down"](model["up"](x))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, process_group=group)
    return torch.equal(before, after)


def test_parts_of_a_constructor_are_saved_as_the_whole(ranks, tmp_path):
    folder = str(tmp_path / "checkpoint")
    assert ranks.run(_built, folder) == [True] * 4
    model = stock(12)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert same(state["model"], stock().state_dict())


def _default_group(group, rank):
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Sequential(octavo.Linear(HIDDEN, FFN, recipe="fp8-block", parallel_mode="column"))
    weight = distribute_parameters(model, mesh)[0].weight
    half = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))["tp"]
    other = nn.Sequential(octavo.Linear(HIDDEN, FFN, recipe="fp8-block", parallel_mode="column"))
    try:
        distribute_parameters(other, half)
    except UnsupportedConfig as error:
        return tuple(weight.shape), str(error)
    return tuple(weight.shape), "no error"


def test_parts_over_the_default_group_take_a_mesh_of_all_ranks(ranks):
    for rank, (shape, refused) in enumerate(ranks.run(_default_group)):
        assert shape == (FFN, HIDDEN)
        assert f"split over the ranks [0, 1, 2, 3], and the mesh has {[0, 1] if rank < 2 else [2, 3]}" in refused


def _edges(group, rank):
    found = {}
    model, x = split(group, "fp8-block", use_local_output=False), data()[0]
    y = model(DTensor.from_local(x, mesh_of(group), [Replicate()]))
    found["kind"] = type(y).__name__, tuple(map(str, y.placements)), y.full_tensor().shape
    found["dtensor in"] = torch.equal(y.to_local(), split(group, "fp8-block")(x))
    quantized = nn.Sequential(octavo.Linear(8, 8, recipe="fp8-current"))
    octavo.quantize_weights(quantized)
    for name, call in {
        "torch's": lambda: parallelize_module(nn.Linear(8, 8), mesh_of(group), ColwiseParallel()),
        "uneven": lambda: parallelize_module(octavo.Linear(8, 9), mesh_of(group), ColwiseParallel()),
        "quantized": lambda: parallelize_module(quantized[0], mesh_of(group), ColwiseParallel()),
        "cached": lambda: model.up(x, is_first_microbatch=True),
    }.items():  # fmt: skip
        try:
            call()
        except Unsupported as error:
            found[name] = str(error)
    return found


def test_what_a_style_takes_and_refuses(ranks):
    for found in ranks.run(_edges, size=2):
        assert found["kind"] == ("DTensor", ("R",), (TOKENS, HIDDEN))
        assert found["dtensor in"]
        assert "splits an octavo.Linear, got Linear. Convert the model first" in found["torch's"]
        assert "9 out_features do not divide by the 2 ranks of the mesh" in found["uneven"]
        assert "has a weight that is codes" in found["quantized"]
        assert "needs the whole weight, and this process holds a shard of it" in found["cached"]


@pytest.mark.parametrize(
    "make",
    [lambda: ColwiseParallel(input_layouts=Shard(1)), lambda: ColwiseParallel(output_layouts=Replicate()),
     lambda: RowwiseParallel(input_layouts=Replicate()), lambda: RowwiseParallel(output_layouts=Shard(1))],
)  # fmt: skip
def test_other_layouts_are_refused(make):
    with pytest.raises(UnsupportedConfig, match=r"(Replicate|Shard)\("):
        make()


def _sharded_twice(group, rank, recipe):
    """FSDP2 over two data-parallel ranks, of layers that are split over two others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = converted(recipe)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    x, dy = (t.chunk(2)[mesh.get_local_rank("dp")].contiguous() for t in data())
    model(x).backward(dy)
    kinds = {type(p).__name__ for p in model.parameters()}
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}, kinds


def test_fsdp_shards_what_is_split(ranks):
    model, (x, dy) = converted("fp8-block"), data()
    for rows, gradient in zip(x.chunk(2), dy.chunk(2), strict=True):
        (model(rows) / 2).backward(gradient)  # FSDP averages
    for found, kinds in ranks.run(_sharded_twice, "fp8-block"):
        assert kinds == {"DTensor"}
        for name, p in model.named_parameters():
            assert relative_error(found[name], p.grad) <= SUMS, name
