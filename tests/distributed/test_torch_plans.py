"""Plans of torch itself on a converted model, and models that another library has split before."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.distributed.tensor.parallel import parallelize_module

import octavo
from tests.support.linear_shards import mesh_of, message
from tests.support.steps import relative_error

HIDDEN, FFN, BATCH, SEQUENCE = 128, 256, 2, 64
SUMS = 6e-3
OWN_SCALES = 0.07  # dy of a column layer has a rank's own amax


class Block(nn.Module):
    """A norm and the MLP of Llama, with biases; x [batch, sequence, features]."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.gate, self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def made(recipe):
    torch.manual_seed(5)
    model = Block()
    octavo.convert(model, recipe)
    return model


def data():
    g = torch.Generator().manual_seed(6)
    return [torch.randn(BATCH, SEQUENCE, HIDDEN, generator=g) for _ in range(2)]


# x is the same on all ranks; x is split along the sequence, which torch gathers before the block's MLP
PLANS = {
    "replicated": {"gate": tp.ColwiseParallel(), "up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()},
    "sequence": {
        "norm": tp.SequenceParallel(use_local_output=True),
        "gate": tp.ColwiseParallel(input_layouts=Shard(1)), "up": tp.ColwiseParallel(input_layouts=Shard(1)),
        "down": tp.RowwiseParallel(output_layouts=Shard(1)),
    },
    "dtensors": {
        "norm": tp.SequenceParallel(), "gate": tp.ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "up": tp.ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": tp.RowwiseParallel(output_layouts=Shard(1)),
    },
}  # fmt: skip


def trained(model, call, x, dy, recipe):
    for _ in range(2 if recipe == "fp8-delayed" else 1):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.backward(dy)
        octavo.step(model)
    grads = {name: p.grad for name, p in model.named_parameters()}
    return y.detach(), leaf.grad, {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def _planned(group, rank, recipe, plan, compiled):
    model = parallelize_module(made(recipe), mesh_of(group), PLANS[plan])
    x, dy = data() if plan == "replicated" else (t.chunk(group.size(), 1)[rank].contiguous() for t in data())
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    found = trained(model, call, x, dy, recipe)
    return *found, {type(p).__name__ for name, p in model.named_parameters() if "norm" not in name}


@pytest.mark.parametrize(
    ("recipe", "plan", "compiled"),
    [("fp8-delayed", "replicated", False), ("fp8-block", "sequence", False), ("fp8-current", "dtensors", False),
     ("fp8-block", "sequence", True)]
    + [pytest.param(recipe, plan, compiled, marks=pytest.mark.slow)
       for recipe in ("bf16", "fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8")
       for plan in PLANS for compiled in (False, True)],
)  # fmt: skip
def test_torchs_own_plan_computes_what_one_process_does(ranks, recipe, plan, compiled):
    model, (x, dy) = made(recipe), data()
    y, dx, grads = trained(model, model, x, dy, recipe)
    found = ranks.run(_planned, recipe, plan, compiled, size=2)
    ys, dxs = ([own[i] for own in found] for i in (0, 1))
    bound = OWN_SCALES if recipe == "fp8-current" else SUMS
    assert relative_error(torch.cat(ys, 1) if plan != "replicated" else ys[0], y) <= SUMS
    assert relative_error(torch.cat(dxs, 1) if plan != "replicated" else dxs[0], dx) <= bound
    for own in found:
        assert own[3] == {"DTensor"}
        for name, right in grads.items():
            assert relative_error(own[2][name], right) <= bound, name


def _prepared(group, rank, sharded):
    """One gather of x for gate and up, by PrepareModuleInput; and FSDP2 around it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if sharded else {"tp": mesh_of(group)}
    model = nn.Sequential(made("fp8-block"))
    outside = {"input_layouts": Shard(1), "desired_input_layouts": Replicate(), "use_local_output": True}
    plan = {
        "0": tp.PrepareModuleInput(**outside), "0.gate": tp.ColwiseParallel(), "0.up": tp.ColwiseParallel(),
        "0.down": tp.RowwiseParallel(),
    }  # fmt: skip
    parallelize_module(model, mesh["tp"], plan)
    if sharded:
        fully_shard(model, mesh=mesh["dp"])
    x = data()[0].chunk(2, 1)[mesh["tp"].get_local_rank()].contiguous()
    y = model(x)
    y.sum().backward()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters() if "norm" not in name}
    return y.detach(), grads


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["tp", "dp-tp"])
def test_prepare_module_input_gathers_for_all_layers(ranks, sharded):
    model = nn.Sequential(made("fp8-block"))
    right = model(data()[0])
    right.sum().backward()
    for y, grads in ranks.run(_prepared, sharded, size=4 if sharded else 2):
        assert relative_error(y, right.detach()) <= SUMS
        for name, grad in grads.items():
            assert relative_error(grad, model.get_parameter(name).grad) <= SUMS, name


# -- models that another library has split -----------------------------------------------------------------------------


def _own_hooks(group, rank, dtensors, recipe):
    """A model as transformers splits it by a tp_plan, with DTensors or with parts, and converts later."""
    torch.manual_seed(5)
    model, mesh, size = Block(), mesh_of(group), group.size()

    def column_in(module, arguments):
        x = arguments[0]
        return (DTensor.from_local(x, mesh, [Replicate()], run_check=False) if dtensors else summed.apply(x, group),)

    def row_in(module, arguments):
        if not dtensors:
            return arguments
        module._bias, module.bias = module.bias, None
        return (DTensor.from_local(arguments[0], mesh, [Shard(-1)], run_check=False),)

    def row_out(module, arguments, y):
        if not dtensors:
            dist.all_reduce(y.data, group=group)
            return y
        y = y.redistribute(placements=[Replicate()])
        y = y + module._bias
        return y.to_local()

    for name, dim in (("gate", 0), ("up", 0), ("down", 1)):
        layer = getattr(model, name)
        for key, parameter in list(layer.named_parameters()):
            whole = parameter.detach()
            if key == "bias" and dim:
                part, place = whole / (1 if dtensors else size), Replicate()
            else:
                part, place = whole.chunk(size, dim)[rank].contiguous(), Shard(dim - whole.dim())
            if dtensors:
                part = DTensor.from_local(part, mesh, [place], run_check=False)
            setattr(layer, key, nn.Parameter(part))
        layer.register_forward_pre_hook(row_in if dim else column_in)
        layer.register_forward_hook(row_out if dim else (lambda m, a, y: y.to_local() if dtensors else y))
    octavo.convert(model, recipe)
    x, dy = data()
    y, dx, _ = trained(model, model, x, dy, recipe)
    return y, dx, type(model.gate).__name__, model.gate.parallel is not None


class TensorParallelLayer:
    """The wrapper that transformers 5 puts in the place of a layer's forward, as far as it decides: with gradients the
    layer gets DTensors, and without them local parameters and x."""

    def __init__(self, dim):
        self.dim = dim

    def install_forward(self, module, mesh):
        original_forward, inside = module.forward, Replicate() if self.dim == 0 else Shard(-1)

        def tp_forward(x):
            if torch.is_grad_enabled():
                y = original_forward(DTensor.from_local(x, mesh, [inside], run_check=False))
            else:
                own = dict(module._parameters)
                module._parameters.update({name: p.to_local() for name, p in own.items() if p is not None})
                y = DTensor.from_local(original_forward(x), mesh, [(Shard(-1), Partial())[self.dim]], run_check=False)
                module._parameters.update(own)
            return (y if self.dim == 0 else y.redistribute(placements=[Replicate()])).to_local()

        module.forward = tp_forward


def _wrapped(group, rank, recipe):
    """y and the gradient of x, y without gradients, and whether layers were converted, of a model that is wrapped."""
    torch.manual_seed(5)
    model, mesh = Block(), mesh_of(group)
    for name, dim in (("gate", 0), ("up", 0), ("down", 1)):
        layer = getattr(model, name)
        layer.bias = None
        layer.weight = nn.Parameter(tp_part(layer.weight, mesh, dim))
        TensorParallelLayer(dim).install_forward(layer, mesh)
    octavo.convert(model, recipe)
    x, dy = data()
    kinds = {type(layer) for layer in (model.gate, model.up, model.down)}
    y, dx, _ = trained(model, model, x, dy, recipe)
    with torch.no_grad():
        quiet = model(x)
    return y, dx, quiet, kinds == {octavo.Linear}


def tp_part(weight, mesh, dim):
    return DTensor.from_local(
        weight.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous(), mesh, [Shard(dim)], run_check=False
    )


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block"])
def test_a_model_whose_forwards_were_wrapped_by_a_plan(ranks, recipe):
    torch.manual_seed(5)
    model, (x, dy) = Block(), data()
    for layer in (model.gate, model.up, model.down):
        layer.bias = None
    plain = model(x).detach()
    octavo.convert(model, recipe)
    y, dx, _ = trained(model, model, x, dy, recipe)
    for found, own_dx, quiet, converted in ranks.run(_wrapped, recipe, size=2):
        assert converted
        assert relative_error(found, y) <= SUMS and relative_error(quiet, y) <= SUMS
        assert relative_error(own_dx, dx) <= (OWN_SCALES if recipe == "fp8-current" else SUMS)
        assert relative_error(found, plain) > SUMS  # it did run in low precision


class summed(torch.autograd.Function):
    """x, whose gradient is summed over ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        dy = dy.clone()
        dist.all_reduce(dy, group=ctx.group)
        return dy, None


@pytest.mark.parametrize(("dtensors", "recipe"), [(True, "fp8-current"), (False, "fp8-block")])
def test_a_model_that_was_split_before_it_is_converted(ranks, dtensors, recipe):
    model, (x, dy) = made(recipe), data()
    y, dx, _ = trained(model, model, x, dy, recipe)
    for found, own_dx, kind, split in ranks.run(_own_hooks, dtensors, recipe, size=2):
        assert kind == "Linear" and split == dtensors
        assert relative_error(found, y) <= SUMS
        assert relative_error(own_dx, dx) <= (OWN_SCALES if recipe == "fp8-current" else SUMS)


# -- what is refused ---------------------------------------------------------------------------------------------------


def _refused(group, rank):
    mesh, found = mesh_of(group), {}
    pair = {"fc1": tp.ColwiseParallel(), "fc2": tp.RowwiseParallel()}
    block = octavo.LayerNormMLP(HIDDEN, FFN, activation="swiglu", recipe="fp8-block")
    found["block"] = message(parallelize_module, block, mesh, pair)
    packed = nn.ModuleDict({"gate_up_proj": nn.Linear(HIDDEN, 2 * FFN)})
    octavo.convert(packed, "fp8-block")
    found["packed"] = message(parallelize_module, packed, mesh, {"gate_up_proj": tp.ColwiseParallel()})
    gated = octavo.Sequential(octavo.Linear(HIDDEN, 2 * FFN), octavo.ops.SwiGLU(), octavo.Linear(FFN, HIDDEN))
    parallelize_module(gated, mesh, {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()})
    found["sequential"] = message(gated, data()[0])
    layer, x = octavo.Linear(HIDDEN, FFN, recipe="fp8-block"), data()[0]
    found["uneven"] = message(
        parallelize_module, nn.ModuleDict({"0": octavo.Linear(8, 9)}), mesh, {"0": tp.ColwiseParallel()}
    )
    found["plain"] = message(layer, DTensor.from_local(x, mesh, [Replicate()]))
    layer.weight = nn.Parameter(DTensor.from_local(layer.weight.detach(), mesh, [Replicate()]))
    found["replicated"] = message(layer, DTensor.from_local(x, mesh, [Replicate()]))
    split = parallelize_module(octavo.Linear(HIDDEN, FFN, recipe="fp8-block"), mesh, tp.ColwiseParallel())
    found["codes"] = message(partial(split, fp8_output=True), x)
    return found


REASONS = {
    "packed": "gate and up in one weight by its name",
    "block": "has 2 blocks of output features", "sequential": "SwiGLU pairs the two halves",
    "uneven": "9 out_features do not divide by the 2 ranks", "plain": "has a plain weight, and x is a DTensor",
    "replicated": "Layers take weights that one dim of a mesh splits", "codes": "takes no DTensor, whose y torch sends",
}  # fmt: skip


def test_what_a_plan_of_torch_cannot_do_is_refused(ranks):
    for found in ranks.run(_refused, size=2):
        assert found.keys() == REASONS.keys()
        for name, reason in REASONS.items():
            assert reason in found[name], (name, found[name])


# -- another group -----------------------------------------------------------------------------------------------------


def _another_group(group, rank):
    """Layers whose group was destroyed and made again, and blocks that are split later."""
    x, found = torch.randn(32, HIDDEN, generator=torch.Generator().manual_seed(1)), []
    first = dist.new_group([0, 1])
    torch.manual_seed(5)
    block = octavo.LayerNormMLP(
        HIDDEN, FFN, activation="swiglu", recipe="fp8-current", set_parallel_mode=True, tp_group=first
    )
    experts = octavo.GroupedLinear(2, HIDDEN, FFN, recipe="fp8-current", parallel_mode="column", tp_group=first)
    sizes = torch.tensor([12, 20])
    right = block(x).detach(), experts(x, sizes).detach()
    dist.destroy_process_group(first)
    found.append(message(block, x))
    again = dist.new_group([0, 1])
    block.set_tensor_parallel_group(again)
    experts.set_tensor_parallel_group(again)
    found += [torch.equal(block(x), right[0]), torch.equal(experts(x, sizes), right[1])]
    later = octavo.LayerNormMLP(HIDDEN, FFN // 2, activation="swiglu", recipe="fp8-current")
    later.load_state_dict(block.state_dict())
    later.set_tensor_parallel_group(mesh_of(again))
    found.append(torch.equal(later(x), right[0]))
    head = octavo.LayerNormLinear(HIDDEN, FFN, recipe="fp8-current")
    head.set_tensor_parallel_group(again, sequence_parallel=True)
    found.append(tuple(head(x).shape) == (64, FFN) and head.norm.sums_gradients)
    found.append(message(experts.set_tensor_parallel_group, again, None, True))
    return found


def test_a_group_that_was_made_again_can_be_set(ranks):
    for gone, *same, grouped in ranks.run(_another_group, size=2):
        assert "torch.distributed has no process group named" in gone
        assert same == [True] * 4
        assert "takes the rows of all ranks on each of them" in grouped


PAIRS = {
    "block": (
        lambda recipe: octavo.LayerNormMLP(HIDDEN, FFN, activation="gelu", recipe=recipe),
        {"fc1": tp.ColwiseParallel(), "fc2": tp.RowwiseParallel()},
    ),
    "run": (
        lambda recipe: octavo.Sequential(
            octavo.Linear(HIDDEN, FFN, recipe=recipe), octavo.ops.GELU(), octavo.Linear(FFN, HIDDEN, recipe=recipe)
        ),
        {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()},
    ),
}


def _pair(group, rank, kind, recipe):
    build, plan = PAIRS[kind]
    torch.manual_seed(3)
    one, (x, dy) = build(recipe), data()
    split = parallelize_module(copy.deepcopy(one), mesh_of(group), plan)
    y, right = split(x), one(x)
    y.backward(dy), right.backward(dy)
    grads = [(p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad, q.grad)
             for p, q in zip(split.parameters(), one.parameters(), strict=True)]  # fmt: skip
    return relative_error(y.detach(), right.detach()), max(relative_error(a, b) for a, b in grads)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-block"])
@pytest.mark.parametrize("kind", PAIRS)
def test_blocks_and_runs_follow_torchs_own_plan(ranks, kind, recipe):
    for y, grads in ranks.run(_pair, kind, recipe, size=2):
        assert y < SUMS and grads < SUMS
