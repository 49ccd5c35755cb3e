"""Tensors that are not plain memory, as inputs and as parameters: refused in a sentence. Marks on plain memory work."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map

import octavo
from octavo.errors import Unsupported, UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.ops.inputs import strange
from tests.support.module_kinds import KINDS, RECIPES, ROWS, K, build

pytestmark = pytest.mark.usefixtures("forgetful_compiler")

PARALLEL = (
    r"got a DTensor, which only an octavo.Linear takes that octavo.distributed.ColwiseParallel or RowwiseParallel"
)
FSDP = r"or shard with FSDP2: fully_shard gives whole weights to the forward of the module it was called on"
SUBCLASS = r"a tensor subclass with operators of its own \(torchao's quantized weights are such\), and layers read"


class Quantized(torch.Tensor):
    """A stand-in for a quantized weight: values are twice what is stored."""

    @staticmethod
    def __new__(cls, stored):
        return torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=stored.dtype, device=stored.device)

    def __init__(self, stored):
        self.stored = stored

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Quantized(args[0].stored)
        args, kwargs = tree_map(lambda t: t.stored * 2 if isinstance(t, Quantized) else t, (args, kwargs or {}))
        return func(*args, **kwargs)


class Named(torch.Tensor):
    """Overrides functions, on plain memory."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Mark(torch.Tensor):
    pass


class MarkedParameter(nn.Parameter):
    pass


def with_parameters(module, make, names=("weight", "bias")):
    for part in module.modules():
        for name, p in list(part._parameters.items()):
            if p is not None and name.startswith(names):
                part._parameters[name] = nn.Parameter(make(p.detach()), requires_grad=False)
    return module


# -- the one function ------------------------------------------------------------------------------------------------


def test_strange_tells_what_a_tensor_is_and_the_way_out():
    x = torch.randn(4, 4)
    assert [strange(t) for t in (x, nn.Parameter(x), nn.Buffer(x), x.as_subclass(Mark), x[::2].T, x.to("meta"))] == [
        ""
    ] * 6
    assert strange(Quantized(x)).startswith("a tests.runtime.test_tensors.Quantized, a tensor subclass with operators")
    assert "Use a plain tensor of its values, .dequantize() where it has that" in strange(Quantized(x))
    assert strange(nn.Parameter(Quantized(x), requires_grad=False)) == strange(Quantized(x))
    assert strange(x.to_sparse()) == "one of layout torch.sparse_coo. Make it dense first: .to_dense()"
    assert strange(torch.nested.nested_tensor([x, x[:2]])).startswith("a nested one, whose rows differ in length")
    assert strange(x.as_subclass(Named)) and not strange(x.as_subclass(Named), weight=False)


def test_a_weight_held_as_codes_is_ours():
    layer = octavo.Linear(K, K, recipe="fp8-current")
    octavo.quantize_weights(layer)
    assert strange(layer.weight) == ""


# -- inputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_that_are_no_plain_memory_are_refused(kind, recipe):
    module, extra_inputs = build(kind, recipe)
    x = torch.randn(ROWS, K)
    rows = [torch.randn(ROWS // 2, K), torch.randn(ROWS // 4, K)]
    for layout in (torch.strided, torch.jagged):
        with pytest.raises(UnsupportedShape, match="takes plain tensors, got a nested one, whose rows differ"):
            module(torch.nested.nested_tensor(rows, layout=layout), *extra_inputs)
    for sparse in (x.to_sparse(), x.to_sparse_csr()):
        with pytest.raises(UnsupportedShape, match=rf"dense tensors, got one of layout {sparse.layout}\. Call it on x"):
            module(sparse, *extra_inputs)
    with pytest.raises(UnsupportedDtype, match=rf"got a tests\.runtime\.test_tensors\.Quantized, {SUBCLASS}"):
        module(Quantized(x), *extra_inputs)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_that_are_marked_are_what_they_mark(kind, recipe):
    module, extra_inputs = build(kind, recipe)
    x = torch.randn(ROWS, K)
    want = module(x, *extra_inputs)
    for marked in (nn.Parameter(x), nn.Buffer(x), x.as_subclass(Mark), x.as_subclass(Named)):
        assert torch.equal(module(marked, *extra_inputs).as_subclass(torch.Tensor), want)


def test_a_graph_leaves_a_subclass_to_the_same_error():
    module, x = build("linear", "fp8-block")[0], torch.randn(ROWS, K)
    with pytest.raises(UnsupportedDtype, match=SUBCLASS):
        torch.compile(module, backend="aot_eager")(TwoTensor(x, x))


# -- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Quantized, lambda t: t.as_subclass(Named)], ids=["wrapper", "functions"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_with_operators_of_their_own_are_refused(kind, recipe, make):
    module, extra_inputs = build(kind, recipe)
    with pytest.raises(UnsupportedDtype, match=rf"takes plain tensors as (its weight|a parameter), got .*{SUBCLASS}"):
        with_parameters(module, make)(torch.randn(ROWS, K), *extra_inputs)


@pytest.mark.parametrize("kind", ["linear", "grouped", "sequential"])
def test_so_is_a_bias(kind):
    module, extra_inputs = build(kind, "bf16")
    with pytest.raises(UnsupportedDtype, match=rf"takes plain tensors as its bias, got a .*{SUBCLASS}"):
        with_parameters(module, Quantized, ("bias",))(torch.randn(ROWS, K), *extra_inputs)


@pytest.mark.parametrize("kind", ["linear", "sequential"])
def test_a_bias_of_another_dtype_or_device_is_refused(kind):
    module, extra_inputs = build(kind, "fp8-current")
    with pytest.raises(UnsupportedDtype, match=r"Linear takes its bias in float32, .*, got torch\.float64"):
        with_parameters(module, torch.Tensor.double, ("bias",))(torch.randn(ROWS, K), *extra_inputs)
    with pytest.raises(UnsupportedDevice, match="The bias is on meta and the weight on cpu"):
        with_parameters(module, lambda t: t.float().to("meta"), ("bias",))(torch.randn(ROWS, K), *extra_inputs)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["linear", "groups", "sequential"])
def test_a_sparse_weight_is_refused(kind, recipe):
    module, extra_inputs = build(kind, recipe)
    with pytest.raises(UnsupportedShape, match=r"takes dense tensors as its weight, got one of layout torch\.s"):
        with_parameters(module, torch.Tensor.to_sparse, ("weight",))(torch.randn(ROWS, K), *extra_inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_are_marked_are_what_they_mark(kind):
    module, extra_inputs = build(kind, "fp8-block")
    x = torch.randn(ROWS, K)
    want = module(x, *extra_inputs)
    found = with_parameters(module, lambda t: t.as_subclass(Mark))(x, *extra_inputs)
    assert torch.equal(found.as_subclass(torch.Tensor), want)


# -- DTensors --------------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_dtensors_are_refused_as_input_and_as_parameters(kind, recipe, mesh):
    module, extra_inputs = build(kind, recipe)
    x = torch.randn(ROWS, K)
    sharded = distribute_tensor(torch.randn(2 * ROWS, K), mesh, [Shard(0)])
    with pytest.raises(Unsupported, match="has a plain weight, and x is a DTensor" if kind == "linear" else PARALLEL):
        module(sharded, *extra_inputs)
    with_parameters(module, lambda t: distribute_tensor(t, mesh, [Replicate()]))
    plan = f"{PARALLEL}.*{FSDP}"
    for given, refused in ((x, plan), (sharded, "has a weight of DeviceMesh" if kind == "linear" else plan)):
        with pytest.raises(Unsupported, match=refused):
            module(given, *extra_inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_collectives_result_is_waited_for(kind, mesh):
    """Tensor parallelism of the layers before leaves such behind."""
    module, extra_inputs = build(kind, "fp8-block")
    x = torch.randn(ROWS, K, requires_grad=True)
    sent = all_reduce(x, "sum", mesh)  # of one's own x, where the others are not there
    assert type(sent) is AsyncCollectiveTensor
    found, want = (torch.autograd.grad(module(t, *extra_inputs).sum(), x)[0] for t in (sent, x))
    assert torch.equal(found, want)
    assert torch.equal(octavo.ops.GELU()(all_reduce(x, "sum", mesh)), octavo.ops.GELU()(x))


class Marked(nn.Parameter):
    """A parameter with a name of its own, and nothing else."""


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_marked_parameter_compiles(name):
    layer = octavo.Linear(16, 16, recipe="fp8-current")
    setattr(layer, name, Marked(getattr(layer, name).detach()))
    x = torch.randn(4, 16, requires_grad=True)
    want = layer(x)
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), want)
