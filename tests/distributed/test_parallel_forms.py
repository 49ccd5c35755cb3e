"""Calls of a split Linear: shapes, codes as x, no gradients, checkpoints, copies, values that are not finite."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.errors import UnsupportedConfig
from tests.support import linear_shards as shards
from tests.support.linear_shards import K, N, cut
from tests.support.steps import relative_error

SUMS = 6e-3


def pair(group, recipe, mode, sequence, bias=True, dtype=torch.bfloat16, **settings):
    """A whole layer and this rank's part of it."""
    _, _, w, b = shards.tensors(dtype)
    whole = octavo.Linear(K, N, bias, dtype=dtype, recipe=recipe)
    part = octavo.Linear(
        K, N, bias, dtype=dtype, recipe=recipe, parallel_mode=mode, sequence_parallel=sequence, tp_group=group,
        **settings,
    )  # fmt: skip
    with torch.no_grad():
        whole.weight.copy_(w)
        part.weight.copy_(cut(w, group, 0 if mode == "column" else 1))
        if bias:
            whole.bias.copy_(b)
            part.bias.copy_(cut(b, group, 0) if mode == "column" else b)
    return whole, part


def x_of(x, group, mode, sequence):
    if mode == "row":
        return cut(x, group, -1).contiguous()
    return (cut(x, group, 0) if sequence else x).contiguous()


def y_of(y, group, mode, sequence):
    if mode == "column":
        return cut(y, group, -1)
    return cut(y, group, 0) if sequence else y


def close(found, right, exact):
    return torch.equal(found, right) if exact else relative_error(found, right) <= SUMS


def _three_dims(group, rank, mode, sequence):
    """x [S, B, K], and one that is not contiguous."""
    whole, part = pair(group, "fp8-block", mode, sequence)
    x = torch.randn(256, 2, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    right, own = whole(x), x_of(x, group, mode, sequence)
    odd = own.transpose(0, 2).contiguous().transpose(0, 2)
    return [close(part(one), y_of(right, group, mode, sequence), mode == "column") for one in (own, odd)]


@pytest.mark.parametrize(("mode", "sequence"), [("column", True), ("row", True), ("row", False)])
def test_any_leading_dims(ranks, mode, sequence):
    assert ranks.run(_three_dims, mode, sequence, size=2) == [[True, True]] * 2


def _without_gradients(group, rank, recipe, mode, sequence):
    """Without grad, in inference mode, with a frozen weight, and with an x that takes none."""
    whole, part = pair(group, recipe, mode, sequence)
    x, dy, *_ = shards.tensors()
    own, own_dy = x_of(x, group, mode, sequence), y_of(dy, group, mode, sequence).contiguous()
    right = y_of(whole(x), group, mode, sequence)
    exact, found = mode == "column", []
    with torch.no_grad():
        found.append(close(part(own), right, exact))
    with torch.inference_mode():
        found.append(close(part(own), right, exact))
    part(own).backward(own_dy)  # dw alone
    found.append(part.weight.grad is not None)
    part.weight.requires_grad_(False)
    leaf = own.clone().requires_grad_()
    y = part(leaf)
    y.backward(own_dy)
    found += [close(y, right, exact), leaf.grad.shape == own.shape]
    part.eval()
    found.append(close(part(own), right, exact))
    return found


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block"])
@pytest.mark.parametrize(("mode", "sequence"), [("column", True), ("row", False)])
def test_calls_that_want_fewer_gradients(ranks, recipe, mode, sequence):
    assert ranks.run(_without_gradients, recipe, mode, sequence, size=2) == [[True] * 6] * 2


def _codes(group, rank, recipe, mode, sequence):
    """x as codes of the layer's recipe, with a gradient."""
    whole, part = pair(group, recipe, mode, sequence)
    x, dy, *_ = shards.tensors()
    quantize = octavo.ops.Quantize(recipe=recipe)
    leaf, own = x.clone().requires_grad_(), x_of(x, group, mode, sequence).requires_grad_()
    y = whole(quantize(leaf))
    y.backward(dy)
    found = part(quantize(own))
    found.backward(y_of(dy, group, mode, sequence).contiguous())
    dx = x_of(leaf.grad, group, mode, sequence)
    return relative_error(found, y_of(y, group, mode, sequence)), relative_error(own.grad, dx)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block"])
@pytest.mark.parametrize(("mode", "sequence"), [("column", False), ("column", True), ("row", True)])
def test_x_as_codes(ranks, recipe, mode, sequence):
    bound = 0.08 if recipe == "fp8-current" else SUMS  # each rank has quantized x by its own amax
    for y, dx in ranks.run(_codes, recipe, mode, sequence, size=2):
        assert y <= bound and dx <= bound


def _returned_bias(group, rank, sequence):
    whole, part = pair(group, "fp8-block", "row", sequence, return_bias=True)
    x, dy, *_ = shards.tensors()
    y, bias = part(x_of(x, group, "row", sequence))
    ((y + bias) * y_of(dy, group, "row", sequence)).sum().backward()
    (whole(x) * dy).sum().backward()
    right = y_of(whole(x), group, "row", sequence)
    return relative_error(y + bias, right), relative_error(part.bias.grad, whole.bias.grad)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_bias_that_is_returned_has_the_whole_gradient(ranks, sequence):
    for y, db in ranks.run(_returned_bias, sequence, size=2):
        assert y <= SUMS and db <= SUMS


def _checkpointed(group, rank, recipe, mode, sequence, compiled):
    whole, part = pair(group, recipe, mode, sequence, bias=False)
    del whole
    x, dy, *_ = shards.tensors()
    own, own_dy = x_of(x, group, mode, sequence), y_of(dy, group, mode, sequence).contiguous()
    made = []
    for again in (False, True):
        twin = copy.deepcopy(part)
        leaf = own.clone().requires_grad_()

        def run(x, twin=twin, again=again):
            return checkpoint(twin, x, use_reentrant=False) if again else twin(x)

        call = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
        y = call(leaf)
        y.backward(own_dy)
        made.append((y.detach(), leaf.grad, twin.weight.grad))
    return [torch.equal(a, b) for a, b in zip(*made, strict=True)]


@pytest.mark.parametrize(
    ("recipe", "mode", "sequence", "compiled"),
    [("fp8-current", "column", True, False), ("fp8-block", "column", True, False), ("fp8-block", "row", True, False),
     pytest.param("fp8-block", "column", True, True, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_checkpoint_gathers_again_and_computes_the_same(ranks, recipe, mode, sequence, compiled):
    assert ranks.run(_checkpointed, recipe, mode, sequence, compiled, size=2) == [[True] * 3] * 2


def _copies(group, rank):
    _, part = pair(group, "fp8-delayed", "column", True)
    x = x_of(shards.tensors()[0], group, "column", True)
    right = part(x)
    others = copy.deepcopy(part), pickle.loads(pickle.dumps(part))
    loads = pair(group, "fp8-delayed", "column", True)[1]
    loads.load_state_dict(part.state_dict())
    found = [torch.equal(other(x), right) for other in (*others, loads)]
    retained = part(x.clone().requires_grad_())
    dy = torch.ones_like(retained)
    retained.backward(dy, retain_graph=True)
    once = part.weight.grad.clone()
    retained.backward(dy)
    return [*found, torch.equal(part.weight.grad, 2 * once)]


def test_copies_pickles_state_dicts_and_a_second_backward(ranks):
    assert ranks.run(_copies, size=2) == [[True] * 4] * 2


def _of_all_ranks(group, rank, mode):
    """A pickled layer of the default group, which has all four ranks."""
    return pickle.dumps(octavo.Linear(K, N, recipe="fp8-block", parallel_mode=mode))


@pytest.mark.parametrize("mode", ["column", "row"])
def test_a_part_of_a_weight_does_not_run_in_a_single_process(ranks, mode):
    part = pickle.loads(ranks.run(_of_all_ranks, mode)[0])
    with pytest.raises(UnsupportedConfig, match="was made for 4 ranks of the default process group, which has 1 now"):
        part(torch.ones(2, part.weight.shape[1]))
    assert part.state_dict()["weight"].shape == ((N // 4, K) if mode == "column" else (N, K // 4))


def _called(group, rank, made):
    layer = pickle.loads(made)
    try:
        layer(torch.ones(2, K), *([torch.tensor([1, 1])] if isinstance(layer, octavo.GroupedLinear) else []))
    except UnsupportedConfig as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("kind", "sizes"), [(octavo.Linear, (K, N)), (octavo.GroupedLinear, (2, K, N))])
def test_a_layer_that_was_made_before_the_group_does_not_run_in_it(ranks, kind, sizes):
    for found in ranks.run(_called, pickle.dumps(kind(*sizes, parallel_mode="row"))):
        assert "was made for 1 rank of the default process group, which has 4 now" in found
        assert "Call torch.distributed.init_process_group before you make the layer" in found


def _left_out(group, rank):
    own = dist.new_group([0, 1])
    try:
        return tuple(octavo.Linear(K, N, parallel_mode="column", tp_group=own).weight.shape)
    except UnsupportedConfig as error:
        return str(error)
    finally:
        dist.barrier(group)  # gloo may still connect the other rank
        if rank < 2:
            dist.destroy_process_group(own)


def test_a_rank_that_a_group_leaves_out_is_told_so(ranks):
    inside, _, outside, _ = ranks.run(_left_out)
    assert inside == (N // 2, K)
    assert outside.startswith("This process is not in the group")


def _not_finite(group, rank, recipe, value):
    """A value that is not finite, in a row of the last rank alone."""
    whole, part = pair(group, recipe, "column", True)
    x, *_ = shards.tensors()
    x[-1, 3] = value
    found, right = part(x_of(x, group, "column", True)), cut(whole(x), group, 1)
    return torch.equal(found.isfinite(), right.isfinite()), bool(right.isfinite().all())


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-rowwise", "fp8-block", "nvfp4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_on_one_rank_counts_on_all(ranks, recipe, value):
    for same, finite in ranks.run(_not_finite, recipe, value, size=2):
        assert same and not finite


def _ambient(group, rank):
    whole, part = pair(group, None, "column", True, dtype=torch.float32)
    x, *_ = shards.tensors(torch.float32)
    with octavo.autocast("fp8-current"), torch.autocast("cpu", torch.bfloat16):
        found, right = part(x_of(x, group, "column", True)), cut(whole(x), group, 1)
    return torch.equal(found, right), found.dtype


def test_recipes_and_dtypes_from_around(ranks):
    assert ranks.run(_ambient, size=2) == [(True, torch.bfloat16)] * 2


def _quantized_weight(group, rank, recipe, mode):
    whole, part = pair(group, recipe, mode, True)
    models = [torch.nn.Sequential(layer) for layer in (whole, part)]
    for model in models:
        octavo.quantize_weights(model)
    x, dy, *_ = shards.tensors()
    y = models[0](x)
    own = x_of(x, group, mode, True).requires_grad_()
    found = models[1](own)
    found.backward(y_of(dy, group, mode, True).contiguous())
    return relative_error(found, y_of(y, group, mode, True)), own.grad is not None


@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize(("recipe", "bound"), [("fp8-block", SUMS), ("fp8-current", 0.06)])
def test_a_weight_held_as_codes(ranks, recipe, bound, mode):
    """One scale for a weight is that of a rank's own part: other codes than those of the whole weight."""
    for distance, has_gradient in ranks.run(_quantized_weight, recipe, mode, size=2):
        assert distance <= bound and has_gradient


def _parts_are_kept(group, rank, folder):
    _, part = pair(group, "fp8-block", "column", True)
    model, said = torch.nn.Sequential(part), []
    for call in (octavo.revert, lambda model: octavo.save_checkpoint(folder, model)):
        try:
            call(model)
        except octavo.errors.UnsupportedConfig as problem:
            said.append(str(problem))
    return said, type(model[0]).__name__, part.parallel is not None


def test_functions_that_need_whole_weights_refuse_parts(ranks, tmp_path):
    for said, name, is_split in ranks.run(_parts_are_kept, str(tmp_path / "run"), size=2):
        assert [text.split(" needs")[0] for text in said] == ["octavo.revert", "octavo.save_checkpoint"]
        assert all("0 is split over 2 ranks (parallel_mode='column')" in text for text in said)
        assert name == "Linear" and is_split
    assert not (tmp_path / "run").exists()


def _cached_on_disk(group, rank):
    """Hits of the compiler's cache when a layer of the same settings is compiled again, by all ranks."""
    from torch._dynamo.utils import counters

    found = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        _, part = pair(group, "fp8-block", "column", True)
        x, dy, *_ = shards.tensors()
        call = torch.compile(part, fullgraph=True)
        call(x_of(x, group, "column", True).requires_grad_()).backward(cut(dy, group, 1).contiguous())
        torch.distributed.barrier(group)
        graphs = counters["inductor"]
        hits = graphs["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        found.append((hits, graphs["fxgraph_cache_miss"] + graphs["fxgraph_cache_bypass"]))
    return found


@pytest.mark.slow
def test_the_disk_cache_serves_all_ranks(ranks):
    for _, again in ranks.run(_cached_on_disk, size=2):
        assert again[0] > 0 and again[1] == 0


def _deferred_in_a_graph(group, rank, recipe):
    _, part = pair(group, recipe, "column", True, delay_wgrad_compute=True)
    twin = pair(group, recipe, "column", True)[1]
    x, dy, *_ = shards.tensors()
    own, own_dy = x_of(x, group, "column", True), cut(dy, group, 1).contiguous()
    twin(own).backward(own_dy)
    call = torch.compile(part, backend="aot_eager", fullgraph=True)
    call(own).backward(own_dy)
    early = part.weight.grad is None
    part.backward_dw()
    return early, torch.equal(part.weight.grad, twin.weight.grad)


@pytest.mark.parametrize("recipe", ["fp8-current", pytest.param("fp8-block", marks=pytest.mark.slow)])
def test_a_deferred_gradient_in_a_graph(ranks, recipe):
    assert ranks.run(_deferred_in_a_graph, recipe, size=2) == [(True, True)] * 2


def _inductor(group, rank, recipe, mode, sequence):
    _, part = pair(group, recipe, mode, sequence)
    twin = copy.deepcopy(part)
    x, dy, *_ = shards.tensors()
    own, own_dy = x_of(x, group, mode, sequence), y_of(dy, group, mode, sequence).contiguous()
    call = torch.compile(part, fullgraph=True)
    made = []
    for layer, run in ((twin, twin), (part, call)):
        leaf = own.clone().requires_grad_()
        y = run(leaf)
        y.backward(own_dy)
        made.append((y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad))
    return [torch.equal(a, b) for a, b in zip(*made, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "fp8-delayed", "bf16"])
@pytest.mark.parametrize(("mode", "sequence"), [("column", True), ("column", False), ("row", True), ("row", False)])
def test_inductor_has_the_bits_of_eager(ranks, recipe, mode, sequence):
    assert ranks.run(_inductor, recipe, mode, sequence, size=2) == [[True] * 4] * 2
