"""A weight stored as codes is a tensor: it reads as the values its codes stand for, and a write quantizes anew."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.func import functional_call

import octavo
from octavo.errors import Unsupported, UnsupportedConfig
from tests.support.linear_oracle import assert_same, make, spiky
from tests.support.recipe_traits import QUANTIZED
from tests.support.state_tensors import named_state

K, N, G = 48, 40, 3
quantized = pytest.mark.parametrize("recipe", QUANTIZED)
sample = pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4"])
X = spiky(21, K)
SIZES = torch.tensor([10, 0, 11])


def quantized_linear(recipe="fp8-current", **settings):
    layer = make(recipe, K, N, **settings)
    octavo.quantize_weights(layer)
    return layer


def experts(recipe="fp8-current", each=False, **settings):
    torch.manual_seed(1)
    layer = octavo.GroupedLinear(G, K, N, recipe=recipe, single_grouped_weight=not each, **settings)
    octavo.quantize_weights(layer)
    return layer


def values(layer):
    return layer.state_dict()["weight"]


def quantized_values(weight, recipe="fp8-current"):
    return octavo.recipe(recipe).linear().fprop.right.quantize(weight.detach()).dequantize(weight.dtype)


# -- reads -------------------------------------------------------------------------------------------------------------

READS = {
    "linear": lambda w: F.linear(X.to(w.dtype), w),
    "matmul of T": lambda w: X.to(w.dtype) @ w.T,
    "norm": lambda w: w.norm(),
    "detach": lambda w: w.detach() * 1,
    "data": lambda w: w.data + 0,
    "to": lambda w: w.to(torch.float64),
    "float": lambda w: w.float(),
    "clone": lambda w: w.clone() + 0,
    "row": lambda w: w[3] * 2,
    "slices": lambda w: w[1:9, ::2].reshape(-1),
    "view": lambda w: w.view(-1).sum(),
    "unbind": lambda w: torch.stack(w.unbind()),
    "chunk": lambda w: torch.cat(w.chunk(3, 1), 1),
    "element": lambda w: torch.tensor(w[2, 3].item()),
    "tolist": lambda w: torch.tensor(w.tolist()),
    "where": lambda w: torch.where(w > 0, w, -w),
    "copied from": lambda w: torch.empty(w.shape).copy_(w),
    "added to": lambda w: torch.ones(w.shape).add_(w),
    "foreach": lambda w: torch._foreach_mul([w, w], 2.0)[1],
    "max": lambda w: w.max(1).values,
    "iteration": lambda w: sum(row.sum() for row in w),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_read_sees_what_the_codes_stand_for(read, mode):
    layer = quantized_linear()
    want = values(layer)
    assert want.abs().sum() > 1
    with mode():
        found = read(layer.weight)
    expected = read(want)
    assert_same(found.detach().clone() * 1, expected.detach())


@quantized
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_recipes_values_are_read(recipe, dtype):
    layer = quantized_linear(recipe, dtype=dtype)
    assert_same(layer.weight.detach() * 1, values(layer))
    assert layer.weight.dtype == dtype
    grouped = experts(recipe, dtype=dtype)
    assert_same(grouped.weight.detach() * 1, values(grouped))
    assert_same(grouped.weight[1].detach() * 1, values(grouped)[1])
    each = experts(recipe, each=True, dtype=dtype)
    for i in range(G):
        assert_same(each.get_parameter(f"weight{i}").detach() * 1, values(grouped)[i])


def test_a_penalty_on_the_weight_has_its_gradient():
    layer = quantized_linear()
    layer.weight.pow(2).sum().backward()
    assert_same(layer.weight.grad, 2 * values(layer))
    layer.weight.grad = None
    F.linear(X, layer.weight).sum().backward()
    torch.testing.assert_close(layer.weight.grad, X.sum(0).expand(N, K))
    each = experts(each=True)
    each.weight1.square().sum().backward()
    assert_same(each.weight1.grad, 2 * each.weight1.detach())
    assert each.weight0.grad is None


def test_a_gradient_of_the_layer_and_one_of_a_penalty_add_up():
    layer, plain = quantized_linear(), make("fp8-current", K, N)
    plain.load_state_dict(layer.state_dict())
    for model in (layer, plain):
        (model(X).sum() + model.weight.square().sum()).backward()
    error = (layer.weight.grad - plain.weight.grad).norm() / plain.weight.grad.norm()
    assert error < 1e-6


def test_values_can_be_asked_for():
    layer = quantized_linear()
    dense = layer.weight.dequantize()
    assert type(dense) is torch.Tensor
    assert_same(dense.detach(), values(layer))
    dense.sum().backward()
    assert_same(layer.weight.grad, torch.ones(N, K))


# -- writes ------------------------------------------------------------------------------------------------------------

DELTA = spiky(N, K, seed=77)


def penalised(w):
    w.data += DELTA


def subtracted(w):
    w.data -= DELTA


WRITES = {
    "copy_": lambda w: w.copy_(DELTA),
    "data.copy_": lambda w: w.data.copy_(DELTA),
    "detach().copy_": lambda w: w.detach().copy_(DELTA),
    "data =": lambda w: setattr(w, "data", DELTA.clone()),
    "merge": penalised,
    "unmerge": subtracted,
    "add_": lambda w: w.add_(DELTA, alpha=0.5),
    "mul_": lambda w: w.mul_(3),
    "fill_": lambda w: w.fill_(0.25),
    "zero_": lambda w: w.zero_(),
    "addmm_": lambda w: w.addmm_(DELTA[:, :4], DELTA[:4]),
    "nn.init.ones_": nn.init.ones_,
    "nn.init.uniform_": nn.init.uniform_,
    "nn.init.normal_": nn.init.normal_,
    "nn.init.kaiming_uniform_": nn.init.kaiming_uniform_,
    "nn.init.xavier_normal_": nn.init.xavier_normal_,
    "nn.init.orthogonal_": nn.init.orthogonal_,
    "an element": lambda w: w.__setitem__((3, 5), 7.0),
    "a row": lambda w: w[3].fill_(2.0),
    "rows by mask": lambda w: w.__setitem__(w.abs() > 0.1, 0.0),
    "columns": lambda w: w[:, ::2].mul_(2),
    "through T": lambda w: w.t().copy_(DELTA.t()),
    "through a view": lambda w: w.view(-1)[5:9].zero_(),
    "out=": lambda w: torch.add(DELTA, 1.0, out=w.detach()),
    "foreach": lambda w: torch._foreach_add_([w.detach()], [DELTA]),
    "fused": lambda w: torch._fused_sgd_([w.detach()], [DELTA], [], weight_decay=0.0, momentum=0.0, lr=0.1,
                                         dampening=0.0, nesterov=False, maximize=False, is_first_step=True),
    "parameter by vector": lambda w: nn.utils.vector_to_parameters(DELTA.reshape(-1), [w]),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_quantizes_anew_in_place(write):
    layer, plain = quantized_linear(), make("fp8-current", K, N)
    plain.load_state_dict(layer.state_dict())
    before, parameter = layer(X).detach().clone(), layer.weight
    places = [t.data_ptr() for t in codes(layer)]
    for model in (layer, plain):
        torch.manual_seed(5)
        with torch.no_grad():
            write(model.weight)
    assert_same(values(layer), quantized_values(plain.weight))
    assert layer.weight is parameter and isinstance(parameter, nn.Parameter)
    assert [t.data_ptr() for t in codes(layer)] == places
    x = X.clone().requires_grad_()
    y, want = layer(x), plain(x)
    assert_same(y.detach(), want.detach())
    assert not torch.equal(y.detach(), before)
    dx, wanted = (torch.autograd.grad(out.sum(), x)[0] for out in (y, want))
    assert_same(dx, wanted)  # the codes for dgrad followed


def codes(layer):
    return [getattr(layer.weight, name) for name in layer.weight.__tensor_flatten__()[0]]


@quantized
@pytest.mark.parametrize("each", [False, True], ids=["one", "each"])
def test_a_write_to_groups_is_what_a_fresh_layer_would_hold(recipe, each):
    layer, fresh = experts(recipe, each), octavo.GroupedLinear(G, K, N, recipe=recipe)
    octavo.load_state_dict(layer, octavo.state_dict(fresh))
    fresh.load_state_dict({"weight": spiky(G * N, K, seed=4).view(G, N, K), "bias": layer.bias})
    with torch.no_grad():
        for i in range(G):
            part = layer.get_parameter(f"weight{i}") if each else layer.weight[i]
            part.copy_(fresh.weight[i])
        octavo.quantize_weights(fresh)
        assert_same(layer(X, SIZES), fresh(X, SIZES))


def test_a_write_to_one_group_leaves_the_codes_of_the_others():
    layer = experts("fp8-current", each=True, dtype=torch.bfloat16)
    before = [layer.get_parameter(f"weight{i}").detach() * 1 for i in range(G)]
    with torch.no_grad():
        layer.weight1.zero_()
    assert_same(layer.weight0.detach() * 1, before[0])
    assert_same(layer.weight2.detach() * 1, before[2])
    assert not layer.weight1.any()


def test_values_of_one_held_weight_are_copied_to_another_bit_for_bit():
    a, b = quantized_linear("nvfp4"), make("nvfp4", K, N, seed=9)
    octavo.quantize_weights(b)
    with torch.no_grad():
        b.weight.copy_(a.weight)
    for own, other in zip(codes(a), codes(b), strict=True):
        assert_same(own, other)


def test_data_of_another_view_is_not_taken_for_its_own():
    layer, square = experts(each=True), make("fp8-current", K, K)
    octavo.quantize_weights(square)
    want = layer.weight1.detach() * 1
    layer.weight0.data = layer.weight1.data
    assert_same(layer.weight0.detach() * 1, want)
    turned = square.weight.detach().t() * 1
    square.weight.data = square.weight.data.t()
    torch.testing.assert_close(square.weight.detach() * 1, turned)


def test_a_module_that_is_not_moved_keeps_its_parameter_and_a_cast_keeps_the_gradient():
    layer = quantized_linear()
    layer(X).sum().backward()
    parameter, grad = layer.weight, layer.weight.grad
    assert layer.to(torch.float32).weight is parameter
    assert_same(layer.to(torch.bfloat16).weight.grad, grad.bfloat16())


def test_weights_quantized_in_inference_mode_can_be_trained_through():
    layer, plain = make("fp8-current", K, N), quantized_linear()
    with torch.inference_mode():
        octavo.quantize_weights(layer)
    x, same = X.clone().requires_grad_(), X.clone().requires_grad_()
    for model, leaf in ((layer, x), (plain, same)):
        model(leaf).sum().backward()
        with torch.no_grad():
            model.weight.mul_(2)
    assert_same(x.grad, same.grad)
    assert_same(values(layer), values(plain))


def test_a_leaf_that_requires_a_gradient_is_written_under_no_grad_only():
    layer = quantized_linear()
    with pytest.raises(RuntimeError, match="leaf"):
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="leaf"):
        layer.weight[0].zero_()


def test_a_write_between_forward_and_backward_is_noticed():
    layer = quantized_linear()
    y = layer(X.clone().requires_grad_())
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.detach().resize_(3, 3),
        lambda w: w.detach().t_(),
        lambda w: w.detach().set_(torch.zeros(N, K)),
        lambda w: setattr(w, "data", torch.zeros(3, 3)),
        lambda w: torch.add(torch.zeros(3, 3), 1.0, out=w.detach()),
        lambda w: setattr(w, "data", torch.zeros(N, K, device="meta")),
    ],
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_another_shape_or_memory_is_refused(change):
    layer = quantized_linear()
    before = values(layer).clone()
    with pytest.raises(UnsupportedConfig, match="stored as codes"):
        change(layer.weight)
    assert_same(values(layer), before)


@pytest.mark.parametrize(
    "reach",
    [lambda w: w.data_ptr(), torch.from_dlpack, lambda w: w.numpy(), lambda w: w.view(torch.int32)],
    ids=["data_ptr", "dlpack", "numpy", "bits"],
)
def test_memory_that_a_held_weight_does_not_have_is_not_given_away(reach):
    with pytest.raises((UnsupportedConfig, RuntimeError), match=r"codes|subclass"):
        reach(quantized_linear().weight.detach())


def test_an_operator_that_hides_what_it_writes_is_refused():
    """Collectives do not say that they write: what they wrote would be lost."""
    layer = quantized_linear()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for call in (dist.broadcast, dist.all_reduce):
            with pytest.raises(UnsupportedConfig, match="stored as codes"):
                call(layer.weight.detach(), *([0] if call is dist.broadcast else []))
    finally:
        dist.destroy_process_group()


def test_a_held_weight_is_no_activation():
    layer, other = quantized_linear(), make("fp8-current", K, 8)
    for op in (other, octavo.ops.GELU(), octavo.ops.Sequential(octavo.ops.RMSNorm(K), other)):
        with pytest.raises(Unsupported, match="dequantize"):
            op(layer.weight)


# -- the optimizer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_a_step_of_an_optimizer_is_refused_and_changes_nothing(settings):
    layer = quantized_linear()
    layer(X).sum().backward()
    before, bias = values(layer).clone(), layer.bias.detach().clone()
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        with pytest.raises(UnsupportedConfig, match="frozen as codes"):
            kind(layer.parameters(), lr=0.1, **settings).step()
    assert_same(values(layer), before)
    assert_same(layer.bias.detach(), bias)


def test_a_parameter_that_looks_like_one_element_is_updated_as_any_other():
    quantized_linear()
    for p in (nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.ones(1).expand(1, 1))):
        p.grad = torch.ones(1, 1)
        torch.optim.SGD([p], lr=0.5).step()
        assert p.item() == 0.5


# -- what the layer does with it ---------------------------------------------------------------------------------------


def test_held_codes_do_not_serve_another_recipe():
    layer = quantized_linear()
    layer.recipe = None
    torch.testing.assert_close(layer(X), F.linear(X, values(layer), layer.bias))  # no recipe: the values, not the codes
    with octavo.autocast("mxfp8"), pytest.raises(UnsupportedConfig, match="fp8-current"):
        layer(X)
    with octavo.autocast("fp8-current"):
        assert layer(X).abs().sum() > 0


def test_a_held_weight_serves_whatever_layer_has_it():
    layer, other = quantized_linear(), make("fp8-current", K, N, bias=False, seed=9)
    want = layer(X) - layer.bias
    other.weight = layer.weight
    assert (other(X) - want).abs().max() < 1e-5
    found = functional_call(make("fp8-current", K, N, bias=False, seed=9), {"weight": layer.weight}, (X,))
    assert_same(found, other(X))
    with pytest.raises(UnsupportedConfig, match="fp8-current"):
        functional_call(make("mxfp8", K, N, bias=False), {"weight": layer.weight}, (X,))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_part_of_another_weight_is_not_taken_for_ones_own(compiled):
    layer, other = experts(each=True), experts(each=True)
    square = make("fp8-current", K, K)
    octavo.quantize_weights(square)
    layer.weight1 = other.weight1
    square.weight = nn.Parameter(square.weight.detach().t())
    for model, arguments in ((layer, (X, SIZES)), (square, (X,))):
        call = torch.compile(model, backend="aot_eager") if compiled else model
        with pytest.raises(Exception, match="would not read"):
            call(*arguments)
    layer.weight1, layer.weight2 = layer.weight2, layer.weight1
    with pytest.raises(UnsupportedConfig, match="would not read"):
        layer(X, SIZES)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_values_are_read_in_a_graph(backend):
    layer = quantized_linear()

    def call(x):
        return layer(x).sum() + F.linear(x, layer.weight).square().sum() + layer.weight.norm()

    want = call(X)
    (dw,) = torch.autograd.grad(want, layer.weight)
    found = torch.compile(call, backend=backend, fullgraph=True)(X)
    (grad,) = torch.autograd.grad(found, layer.weight)
    assert (found - want).abs() / want.abs() < 1e-6
    assert (grad - dw).norm() / dw.norm() < 1e-5


@pytest.mark.parametrize("each", [None, False, True], ids=["linear", "one", "each"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_a_layers_node_takes_the_codes_and_reads_no_values(each, frozen):
    layer = (quantized_linear() if each is None else experts(each=each)).requires_grad_(not frozen)
    graphs = []

    def noted(graph, _):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=noted)
    x = X.clone().requires_grad_()
    torch.compile(layer, backend=backend, fullgraph=True)(x, *([] if each is None else [SIZES])).sum().backward()
    assert len(graphs) == 2
    assert not any("weight_values" in name or "dequantize" in name for names in graphs for name in names)
    assert sum("octavo.run" in name for names in graphs for name in names) == 2


@pytest.mark.parametrize("write", [lambda w: w.mul_(2), lambda w: w.data.add_(1), lambda w: w[0].zero_()])
def test_a_write_in_a_graph_is_refused(write):
    layer = quantized_linear()
    before = values(layer).clone()

    @torch.compile(backend="aot_eager")
    def call():
        with torch.no_grad():
            write(layer.weight)

    with pytest.raises(Exception, match="stored as codes"):
        call()
    assert_same(values(layer), before)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("each", [False, True], ids=["one", "each"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_groups_compile(each, frozen):
    layer = experts("fp8-block", each).requires_grad_(not frozen)
    twin = copy.deepcopy(layer)
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    found = torch.compile(layer, backend="aot_eager", fullgraph=True)(x, SIZES)
    want = twin(y, SIZES)
    assert_same(found.detach(), want.detach())
    found.sum().backward()
    want.sum().backward()
    assert_same(x.grad, y.grad)
    for a, b in zip(layer.parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            assert_same(a.grad, b.grad)


# -- modules -----------------------------------------------------------------------------------------------------------


@sample
@pytest.mark.parametrize("each", [None, False, True], ids=["linear", "one", "each"])
def test_copies_and_pickles_are_held_too(recipe, each):
    layer = quantized_linear(recipe) if each is None else experts(recipe, each)
    arguments = (X,) if each is None else (X, SIZES)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    twins = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)]
    want = layer(*arguments).detach()
    own = {t.data_ptr() for p in layer._weight_parts() for t in inner(p)}
    for twin in twins:
        assert_same(twin(*arguments).detach(), want)
        for p in twin._weight_parts():
            assert isinstance(p, nn.Parameter) and p.requires_grad
            assert own.isdisjoint(t.data_ptr() for t in inner(p))
        with torch.no_grad():
            twin._weight_parts()[0].zero_()
            assert not torch.equal(twin(*arguments), want)
        assert_same(layer(*arguments).detach(), want)


def inner(p):
    return [getattr(p, name) for name in p.__tensor_flatten__()[0]]


def test_the_memory_is_the_codes():
    layer = quantized_linear("fp8-block")
    stored = sum(t.nbytes for t in inner(layer.weight))
    assert layer.weight.untyped_storage().nbytes() == stored <= 2 * N * K * 1.1 + 64


@pytest.mark.parametrize("each", [None, False, True], ids=["linear", "one", "each"])
def test_a_module_on_the_meta_device_gets_its_codes_by_loading(each):
    layer = quantized_linear() if each is None else experts(each=each)
    arguments = (X,) if each is None else (X, SIZES)
    state, twin = layer.state_dict(), copy.deepcopy(layer)
    twin.to("meta")
    assert all(p.is_meta and t.is_meta for p in twin._weight_parts() for t in inner(p))
    twin.to_empty(device="cpu").load_state_dict(state)
    assert_same(twin(*arguments), layer(*arguments))


@pytest.mark.parametrize("each", [None, False, True], ids=["linear", "one", "each"])
def test_casts_keep_the_codes_and_requires_grad(each):
    layer = quantized_linear() if each is None else experts(each=each)
    before = [t.clone() for p in layer._weight_parts() for t in inner(p) if t.numel() > 1]
    layer.requires_grad_(False)
    layer.to(torch.bfloat16)
    parts = layer._weight_parts()
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in parts)
    after = [t for p in parts for t in inner(p) if t.numel() > 1]
    for old, new in zip(before, after, strict=True):
        assert_same(new, old)
    assert len({inner(p)[0].data_ptr() for p in parts}) == 1
    layer.share_memory()
    assert all(t.is_shared() for p in layer._weight_parts() for t in inner(p))


@pytest.mark.parametrize("each", [None, False, True], ids=["linear", "one", "each"])
def test_parameters_are_drawn_anew_as_codes(each):
    layer = quantized_linear("mxfp8") if each is None else experts("mxfp8", each)
    kind = {"recipe": "mxfp8"} if each is None else {"recipe": "mxfp8", "single_grouped_weight": not each}
    plain = octavo.Linear(K, N, **kind) if each is None else octavo.GroupedLinear(G, K, N, **kind)
    for model in (layer, plain):
        torch.manual_seed(11)
        model.reset_parameters()
    octavo.quantize_weights(plain)
    arguments = (X,) if each is None else (X, SIZES)
    assert_same(layer(*arguments).detach(), plain(*arguments).detach())


def test_loading_by_assignment_quantizes():
    layer = quantized_linear()
    dense = spiky(N, K, seed=3)
    layer.load_state_dict({"weight": dense, "bias": torch.zeros(N)}, assign=True)
    assert_same(values(layer), quantized_values(dense))
    assert_same(layer.weight.detach() * 1, values(layer))


def test_a_held_weight_tells_what_it_is():
    layer = quantized_linear()
    text = repr(layer.weight)
    assert "fp8-current" in text and "40" in text and "stored as codes" in text
    assert "weight that is codes" in repr(layer)


def test_reverting_brings_the_values():
    layer = quantized_linear()
    want = layer.weight.detach() * 1
    octavo.revert(layer)
    assert type(layer) is nn.Linear and type(layer.weight) is nn.Parameter
    assert_same(layer.weight.detach(), want)
    layer.weight.detach().mul_(2)


@pytest.mark.gpu
@quantized
@pytest.mark.parametrize("each", [None, False, True], ids=["linear", "one", "each"])
def test_a_gpu_reads_and_writes_the_same_codes(recipe, each):
    here = quantized_linear(recipe) if each is None else experts(recipe, each)
    there = copy.deepcopy(here).to("cuda")
    assert all(t.is_cuda for p in there._weight_parts() for t in inner(p))
    for model in (here, there):
        with torch.no_grad():
            for p in model._weight_parts():
                p.add_(DELTA.to(p.device))
                p[0].mul_(0.5)
    for mine, theirs in zip(here._weight_parts(), there._weight_parts(), strict=True):
        assert_same((theirs.detach() * 1).cpu(), mine.detach() * 1)
    arguments = [t.to("cuda") for t in ((X,) if each is None else (X, SIZES))]
    torch.compiler.reset()  # all these recipes together would pass Dynamo's limit of graphs for one function
    compiled = torch.compile(there, fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            assert_same(compiled(*arguments), there(*arguments))
            there._weight_parts()[0].mul_(2)


def test_weights_are_quantized_all_or_none():
    model = nn.Sequential(make("fp8-current"), make("bf16", 40, 40), make("fp8-current", 40, 48))
    model[2].weight = model[0].weight
    with pytest.raises(UnsupportedConfig, match=r"0.weight is also 2.weight"):
        octavo.quantize_weights(model)
    assert not any(name.endswith("codes") for name, _ in named_state(model))


def test_a_layer_without_codes_is_left_as_it_is():
    model = nn.Sequential(make("fp8-current"), make("bf16", 40, 40))
    octavo.quantize_weights(model)
    assert model[0].weight.untyped_storage().nbytes() == sum(t.nbytes for t in inner(model[0].weight)) < 2.1 * 48 * 40
    assert model[1].weight.untyped_storage().nbytes() == 40 * 40 * 4


def test_held_codes_are_scaled_by_the_weight_itself_whatever_was_seen_before():
    layer = make("fp8-delayed")
    weight = layer.weight.detach().clone() * 1e-5
    with torch.no_grad():
        layer.weight.copy_(weight)
    octavo.quantize_weights(layer)
    found = layer.state_dict()["weight"]
    assert (found - weight).norm() / weight.norm() < 0.06


def test_a_copy_of_held_codes_is_held_too():
    layer = make("fp8-current")
    octavo.quantize_weights(layer)
    layer.weight.main_grad = torch.zeros(40, 48)
    twin = copy.deepcopy(layer)
    assert twin.weight.untyped_storage().nbytes() == layer.weight.untyped_storage().nbytes() < 2.1 * 48 * 40
    assert_same(twin(X), layer(X))


def test_another_weight_in_the_place_of_held_codes_is_refused():
    layer = make("fp8-current")
    layer.weight.main_grad = "kept"
    octavo.quantize_weights(layer)
    assert layer.weight.main_grad == "kept"
    with pytest.raises(UnsupportedConfig, match="would not read"):
        functional_call(layer, {"weight": torch.zeros(40, 48)}, (X,))
    layer.weight = nn.Parameter(torch.zeros(40, 48))
    with pytest.raises(UnsupportedConfig, match="would not read"):
        layer(X)


# -- weights that only look like it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "mxfp8"])
@pytest.mark.parametrize("flag", [None, True])
def test_weights_of_one_element_are_multiplied_by(recipe, flag):
    each = octavo.GroupedLinear(2, 1, 1, bias=False, recipe=recipe, single_grouped_weight=False)
    one = octavo.GroupedLinear(2, 1, 1, bias=False, recipe=recipe)
    with torch.no_grad():
        each.weight0.fill_(2.0)
        each.weight1.fill_(-3.0)
        one.weight.copy_(torch.tensor([2.0, -3.0]).view(2, 1, 1))
    x, sizes = torch.ones(4, 1), torch.tensor([2, 2])
    want = torch.tensor([2.0, 2.0, -3.0, -3.0]).view(4, 1)
    for layer in (each, one, octavo.Linear(1, 1, bias=False, recipe=recipe)):
        if isinstance(layer, octavo.Linear):
            nn.init.constant_(layer.weight, 4.0)
            torch.testing.assert_close(layer(x, flag).detach(), torch.full((4, 1), 4.0))
        else:
            torch.testing.assert_close(layer(x, sizes, flag).detach(), want)


@pytest.mark.parametrize("flag", [None, True])
def test_expanded_weights_are_multiplied_by(flag):
    each = octavo.GroupedLinear(2, K, N, bias=False, recipe="fp8-current", single_grouped_weight=False)
    plain = octavo.GroupedLinear(2, K, N, bias=False, recipe="fp8-current")
    for i, value in enumerate((0.5, -2.0)):
        setattr(each, f"weight{i}", nn.Parameter(torch.full((1,), value).expand(N, K)))
        plain.weight.data[i] = value
    sizes = torch.tensor([10, 11])
    y = each(X, sizes, flag)
    assert_same(y.detach(), plain(X, sizes, flag).detach())
    y.sum().backward()
    assert each.weight0.grad.shape == (N, K)


@pytest.mark.parametrize("value", ["expanded", "tiny"])
def test_parameters_that_look_like_one_element_are_held_and_released(value):
    n, k = (N, K) if value == "expanded" else (1, 1)
    layer = octavo.GroupedLinear(2, k, n, bias=False, recipe="fp8-current", single_grouped_weight=False)
    for i in range(2):
        setattr(layer, f"weight{i}", nn.Parameter(torch.full((1,), 2.0 + i).expand(n, k)))
    octavo.quantize_weights(layer)
    x, sizes = torch.ones(4, k), torch.tensor([2, 2])
    torch.testing.assert_close(layer(x, sizes).detach()[:, 0], torch.tensor([2.0, 2.0, 3.0, 3.0]) * k)
    layer.to(torch.float32)
    twin = copy.deepcopy(layer)
    octavo.revert(layer)
    assert_same(layer(x, sizes).detach(), twin(x, sizes).detach())


# -- a write while a backward waits ------------------------------------------------------------------------------------


def negative(weight):
    other = weight.detach().clone()
    other.mul_(-2)
    return other


WRITES = {
    "in place": lambda w: w.mul_(-2),
    "through data": lambda w: w.data.mul_(-2),
    "from quantized codes": lambda w: w.copy_(negative(w)),
    "data of quantized codes": lambda w: setattr(w, "data", negative(w)),
    "one row": lambda w: w[0].mul_(-2),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("kind", ["linear", "one weight", "a weight for each group"])
def test_a_pending_backward_notices_a_write(kind, write):
    layer = make("fp8-current") if kind == "linear" else experts(each=kind != "one weight")
    octavo.quantize_weights(layer)
    x = X.clone().requires_grad_()
    y = layer(x) if kind == "linear" else layer(x, SIZES)
    with torch.no_grad():
        write(layer._weight_parts()[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_revert_keeps_a_dense_weight_that_took_the_place_of_codes():
    layer = make("fp8-current")
    octavo.quantize_weights(layer)
    dense = nn.Parameter(torch.randn_like(layer.weight.dequantize()))
    layer.weight = dense
    model = nn.Sequential(layer)
    octavo.revert(model)
    assert type(model[0]) is nn.Linear and model[0].weight is dense


@pytest.mark.parametrize("kind", ["linear", "one weight", "a weight for each group"])
def test_weights_assigned_to_codes_on_the_meta_device_become_codes(kind):
    def build():
        return make("fp8-current") if kind == "linear" else experts(each=kind != "one weight")

    source, arguments = build(), (X,) if kind == "linear" else (X, SIZES)
    state, target = dict(source.state_dict()), build().to("meta")
    octavo.quantize_weights(target)
    target.load_state_dict(state, assign=True)
    octavo.quantize_weights(source)
    assert torch.equal(target(*arguments), source(*arguments))
