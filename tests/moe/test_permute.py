"""octavo.moe's permutation: forward and backward against plain torch, eager and compiled, with nothing read back."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

import octavo
from octavo import moe
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.quant import MX, NVFP4, Block1D, Rowwise, Tensorwise
from tests.support.linear_oracle import assert_same
from tests.support.pairs import pairs, turns
from tests.support.recorded_operators import Recorder
from tests.support.waiting import no_waiting

TOKENS, WIDTH = 97, 24
device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
masked = pytest.mark.parametrize("is_mask", [False, True], ids=["index", "mask"])
WAYS = {
    "whole": {},
    "aligned": {"align": 8},
    "cut": {"capacity": 70},
    "aligned, cut": {"align": 16, "capacity": 64},
    "spare": {"capacity": 1024},
}


def routed(is_mask, top_k, experts, device="cpu", tokens=TOKENS):
    """(map, probabilities, options of sort); a fifth of the assignments is dropped."""
    chosen = torch.rand(tokens, experts).topk(top_k).indices
    dropped = torch.rand(tokens, top_k) < 0.2
    if not is_mask:
        return chosen.where(~dropped, -1).to(device), torch.rand(tokens, top_k, device=device), {"num_experts": experts}
    mask = torch.zeros(tokens, experts, dtype=torch.bool)
    mask.scatter_(1, chosen, ~dropped)
    return mask.to(device), torch.rand(tokens, experts, device=device), {"top_k": top_k}


def by_torch(x, permutation, probs, factor):
    """The results of `by_octavo`, computed on values in float64: rows by gather, the sum by index_add."""
    kept = (permutation.assignments >= 0).nonzero().flatten()
    assignment = permutation.assignments[kept].long()
    token = assignment // permutation.positions.shape[-1]
    column = assignment % permutation.positions.shape[-1]
    if permutation.experts is not None:
        column = permutation.experts.flatten()[assignment].long()
    prob = probs[token, column]
    rows = x[token] * factor[kept] * prob[:, None]
    y = torch.zeros_like(x).index_add(0, token, rows * prob[:, None])
    return y, rows


def by_octavo(x, routing, probs, factor, options):
    rows, permutation = moe.permute(x, routing, **options)
    rows = rows * factor.to(rows.dtype) * moe.permute_probs(probs, permutation)[:, None].to(rows.dtype)
    return moe.unpermute(rows, permutation, probs), permutation


@pairs(devices=True, way=WAYS, dtype=DTYPES, top_k=[1, 2, 5], experts=[7, 16], is_mask={"index": False, "mask": True})
def test_there_and_back_with_gradients(is_mask, top_k, experts, dtype, way, device):
    routing, probs, options = routed(is_mask, top_k, experts, device)
    x = torch.randn(TOKENS, WIDTH, device=device).to(dtype).requires_grad_()
    probs.requires_grad_()
    permutation = moe.sort(routing, **options, **way)
    factor = torch.randn(permutation.assignments.shape[0], 1, device=device)
    y, _ = by_octavo(x, routing, probs, factor, options | way)
    dy = torch.randn_like(y)
    found = [y, *torch.autograd.grad(y, (x, probs), dy)]
    exact_x, exact_probs = (t.detach().double().requires_grad_() for t in (x, probs))
    exact, _ = by_torch(exact_x, permutation, exact_probs, factor.double())
    want = [exact, *torch.autograd.grad(exact, (exact_x, exact_probs), dy.double())]
    for a, b in zip(found, want, strict=True):
        bound = torch.finfo(dtype).eps * 8
        torch.testing.assert_close(a.double(), b, rtol=bound, atol=bound * (1 + b.abs().max().item()))


@masked
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_sizes_positions_and_pads(is_mask, way):
    routing, _, options = routed(is_mask, 2, 7)
    x = torch.randn(TOKENS, WIDTH)
    rows, permutation = moe.permute(x, routing, **options, **way)
    sizes, align = permutation.sizes.tolist(), way.get("align", 1)
    assert all(size % align == 0 for size in sizes)
    assert sum(sizes) <= rows.shape[0] == way.get("capacity", rows.shape[0])
    begin = 0
    for expert, size in enumerate(sizes):
        sources = permutation.sources[begin : begin + size]
        tokens = [t for t in sources.tolist() if t >= 0]
        goes = routing[:, expert] if is_mask else (routing == expert).any(1)
        wanted = goes.nonzero().flatten().tolist()
        assert tokens == wanted[: len(tokens)]
        assert len(tokens) == min(len(wanted), size) and (tokens == wanted or sum(sizes) == rows.shape[0])
        assert torch.equal(rows[begin : begin + len(tokens)], x[tokens])
        assert not rows[begin + len(tokens) : begin + size].any()
        begin += size
    assert not rows[begin:].any() and (permutation.sources[begin:] == -1).all()
    kept = permutation.positions[permutation.positions >= 0].long()
    assert torch.equal(permutation.assignments[kept], (permutation.positions.flatten() >= 0).nonzero().flatten().int())


@device
@masked
def test_nothing_reads_rows_without_a_slot(is_mask, device):
    """NaN in pads and tail of the rows, and of the gradient that comes back, reaches neither y nor any gradient."""
    routing, probs, options = routed(is_mask, 2, 7, device)
    x = torch.randn(TOKENS, WIDTH, device=device, requires_grad=True)
    probs.requires_grad_()
    rows, permutation = moe.permute(x, routing, **options, align=16, capacity=512)
    bad = permutation.assignments < 0
    assert bad.sum() > 100
    (dx,) = torch.autograd.grad(rows, x, torch.ones_like(rows).masked_fill(bad[:, None], torch.nan))
    counts = (permutation.positions >= 0).sum(1)
    assert torch.equal(dx, counts[:, None].expand(TOKENS, WIDTH).float())
    results = rows.detach().masked_fill(bad[:, None], torch.nan).requires_grad_()
    y = moe.unpermute(results, permutation, probs)
    drows, dprobs = torch.autograd.grad(y, (results, probs), torch.ones_like(y))
    assert y.isfinite().all() and dprobs.isfinite().all() and not drows[bad].any()
    taken = moe.permute_probs(probs, permutation)
    assert not taken[bad].any()
    (dprobs,) = torch.autograd.grad(taken, probs, torch.ones_like(taken).masked_fill(bad, torch.nan))
    assert dprobs.sum() == counts.sum() and dprobs.isfinite().all()


@device
def test_an_expert_layer_with_a_dirty_gradient_buffer(device):
    """dgrad_out's tail is NaN, and the layer leaves it alone: the gradient of the tokens is clean."""
    torch.manual_seed(1)
    layer = octavo.GroupedLinear(7, WIDTH, 16, recipe="fp8-block", device=device)
    routing, probs, options = routed(False, 2, 7, device)
    x = torch.randn(TOKENS, WIDTH, device=device, requires_grad=True)
    rows, permutation = moe.permute(x, routing, **options, capacity=256)
    dirty = torch.full((256, WIDTH), torch.nan, device=device)
    out = layer(rows, permutation.sizes, out=torch.full((256, 16), torch.nan, device=device), dgrad_out=dirty)
    y = moe.unpermute(out, permutation, probs)
    y.square().sum().backward()
    assert dirty[-1].isnan().all() and out[-1].isnan().all()
    assert y.isfinite().all() and x.grad.isfinite().all() and x.grad.any()


@device
@masked
def test_no_tokens(is_mask, device):
    routing, probs, options = routed(is_mask, 2, 7, device, tokens=0)
    for way in WAYS.values():
        x = torch.randn(0, WIDTH, device=device, requires_grad=True)
        given = probs.clone().requires_grad_()
        rows, permutation = moe.permute(x, routing, **options, **way)
        y = moe.unpermute(rows * moe.permute_probs(given, permutation)[:, None], permutation, given)
        y.sum().backward()
        assert y.shape == x.grad.shape == (0, WIDTH) and given.grad.shape == given.shape
        assert not rows.any() and not permutation.sizes.any()


@device
def test_leading_dims(device):
    x, index = torch.randn(3, 5, 8, device=device), torch.randint(0, 4, (3, 5, 2), device=device)
    probs = torch.rand(3, 5, 2, device=device)
    rows, permutation = moe.permute(x, index, 4)
    flat, other = moe.permute(x.flatten(0, 1), index.flatten(0, 1), 4)
    assert torch.equal(rows, flat) and torch.equal(permutation.sources, other.sources)
    assert torch.equal(permutation.positions.flatten(0, 1), other.positions)
    y = moe.unpermute(rows, permutation, probs)
    assert y.shape == x.shape
    assert torch.equal(y.flatten(0, 1), moe.unpermute(flat, other, probs.flatten(0, 1)))


@device
def test_an_expert_named_twice_counts_twice(device):
    x = torch.randn(4, 8, device=device)
    rows, permutation = moe.permute(x, torch.full((4, 2), 1, device=device), 3)
    assert permutation.sizes.tolist() == [0, 8, 0]
    assert torch.equal(rows, x.repeat_interleave(2, 0)) and torch.equal(moe.unpermute(rows, permutation), 2 * x)


@masked
def test_a_permutation_is_used_again(is_mask):
    routing, _, options = routed(is_mask, 2, 7)
    permutation = moe.sort(routing, **options)
    x = torch.randn(TOKENS, WIDTH)
    rows, same = moe.permute(x, permutation)
    assert same is permutation and torch.equal(rows, moe.permute(x, routing, **options)[0])


@device
@pytest.mark.parametrize("quantizer", [Rowwise(), Block1D()], ids=str)
def test_codes_of_permuted_rows_are_permuted_codes(quantizer, device):
    routing, _, options = routed(False, 2, 7, device)
    x = torch.randn(TOKENS, 256, device=device)
    rows, permutation = moe.permute(x, routing, **options)
    after, before = quantizer.quantize(rows), quantizer.quantize(x)
    used = int(permutation.sizes.sum())
    codes, _ = moe.permute(before.codes, permutation)
    scale, _ = moe.permute(before.scale, permutation)
    assert torch.equal(codes.view(torch.uint8)[:used], after.codes.view(torch.uint8)[:used])
    assert torch.equal(scale[:used], after.scale.contiguous()[:used])


@turns(devices=True, quantizer=[Tensorwise(), Block1D(), Rowwise(), MX(), NVFP4()], way=WAYS)
def test_quantizing_permuted_rows_is_permuting_and_quantizing(quantizer, way, device):
    """Rows that a cast takes from the tokens, pads and a tail included, have the codes and scales of copied rows."""
    routing, _, options = routed(False, 2, 7, device)
    x = torch.randn(TOKENS, 64, device=device)
    rows, permutation = moe.permute(x, routing, **options, **way)
    found = quantizer.quantize_groups(x, permutation.sizes, source=permutation.sources)
    want = quantizer.quantize_groups(rows, permutation.sizes)
    for mine, theirs in zip(found.members(), want.members(), strict=True):
        for a, b in zip(mine.tensors(), theirs.tensors(), strict=True):
            assert torch.equal(*(t if t.dtype == torch.float32 else t.view(torch.uint8) for t in (a, b)))


@device
def test_an_index_of_either_integer(device):
    routing, _, options = routed(False, 2, 7, device)
    x = torch.randn(TOKENS, WIDTH, device=device)
    for a, b in zip(moe.permute(x, routing.int(), **options)[1][:3], moe.sort(routing, **options)[:3], strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


# -- graphs ------------------------------------------------------------------------------------------------------------


def step(call, x, routing, probs, dy):
    y, permutation = call(x, routing, probs)
    return [y, *permutation[:3], *torch.autograd.grad(y, (x, probs), dy)]


@pytest.mark.usefixtures("fresh_compiler")
@masked
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("way", [{}, {"align": 16, "capacity": 64}], ids=["whole", "aligned, cut"])
def test_compiled_gives_the_bits_of_eager(is_mask, dynamic, way):
    def call(x, routing, probs):
        rows, permutation = moe.permute(x, routing, **options, **way)
        rows = rows * moe.permute_probs(probs, permutation)[:, None]
        return moe.unpermute(rows, permutation, probs), permutation

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (TOKENS, 40, 64):
        routing, probs, options = routed(is_mask, 2, 7, tokens=tokens)
        x, dy = torch.randn(tokens, WIDTH, requires_grad=True), torch.randn(tokens, WIDTH)
        probs.requires_grad_()
        for found, want in zip(step(compiled, x, routing, probs, dy), step(call, x, routing, probs, dy), strict=True):
            assert_same(found, want)
    assert counters["stats"]["unique_graphs"] == (1 if dynamic else 2)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_capacity_that_follows_the_tokens_does_not_recompile():
    def call(x, index):
        rows, permutation = moe.permute(x, index, 7, capacity=x.shape[0] * 3)
        return moe.unpermute(rows, permutation), permutation

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (20, 50, 64):
        x, index = torch.randn(tokens, WIDTH), torch.randint(-1, 7, (tokens, 2))
        found, permutation = compiled(x, index)
        assert_same(found, call(x, index)[0])
        assert permutation.assignments.shape == (3 * tokens,)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_each_function_is_one_node_each_way():
    calls = []
    routing, probs, options = routed(True, 2, 7)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    probs.requires_grad_()
    with Recorder(calls):
        y, _ = by_octavo(x, routing, probs, torch.ones(TOKENS * 2, 1), options)
        y.backward(torch.ones(TOKENS, WIDTH))
    names = [str(func) + " " + args[1].split("|")[1] for func, args in calls]
    run, back = "octavo.run.default", "octavo.run_bwd.default"
    forward = [f"{run} {name}" for name in ("token-sort", "permute", "permute-probs", "unpermute")]
    assert names == [*forward, *[f"{back} {name}" for name in ("unpermute", "permute-probs", "permute")]]
    for func, args in calls[:4]:
        torch.library.opcheck(func, args, test_utils=("test_schema", "test_faketensor"))


READERS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")


@masked
def test_nothing_is_read_on_the_host(is_mask, monkeypatch):
    routing, probs, options = routed(is_mask, 2, 7)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    probs.requires_grad_()
    factor, dy = torch.ones(320, 1), torch.ones(TOKENS, WIDTH)

    def refuse(*_):
        raise AssertionError("a value was read")

    monkeypatch.setattr("octavo.moe.permutation._is_sorted", lambda *_: True)  # a check of values on a CPU alone
    for name in READERS:
        monkeypatch.setattr(torch.Tensor, name, refuse)
    y, _ = by_octavo(x, routing, probs, factor, options | {"align": 8, "capacity": 320})
    dx, dprobs = torch.autograd.grad(y, (x, probs), dy)
    monkeypatch.undo()
    assert dx.any() and dprobs.any()


@pytest.mark.gpu
@pytest.mark.gpu_smoke
@masked
@pytest.mark.parametrize("way", [{}, {"align": 128, "capacity": 2048}], ids=["whole", "aligned"])
def test_a_captured_step_follows_the_map(is_mask, way):
    layer = octavo.GroupedLinear(7, 256, 256, recipe="fp8-block", device="cuda", dtype=torch.bfloat16)
    x = torch.randn(TOKENS, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    routing, probs, options = routed(is_mask, 2, 7, "cuda")
    probs.requires_grad_()

    def whole():
        rows, permutation = moe.permute(x, routing, **options, **way)
        y = moe.unpermute(layer(rows, permutation.sizes), permutation, probs)
        return [y, permutation.sizes, *torch.autograd.grad(y, (x, probs, layer.weight), dy)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            whole()
    torch.cuda.synchronize()
    with no_waiting():
        whole()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = whole()
    for _ in range(4):
        other, other_probs, _ = routed(is_mask, 2, 7, "cuda")
        routing.copy_(other)
        with torch.no_grad():
            probs.copy_(other_probs)
        graph.replay()
        for found, want in zip(captured, whole(), strict=True):
            assert_same(found, want)


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_on_a_gpu(mode):
    def call(x, routing, probs):
        rows, permutation = moe.permute(x, routing, 16, align=16)
        return moe.unpermute(rows * 2, permutation, probs)

    compiled = torch.compile(call, fullgraph=True, mode=mode)
    for _ in range(4):
        routing, probs, _ = routed(False, 2, 16, "cuda")
        x = torch.randn(TOKENS, WIDTH, device="cuda", requires_grad=True)
        probs.requires_grad_()
        dy = torch.randn_like(x)
        torch.compiler.cudagraph_mark_step_begin()
        y = compiled(x, routing, probs)
        found = [t.clone() for t in (y, *torch.autograd.grad(y, (x, probs), dy))]
        y = call(x, routing, probs)
        for a, b in zip(found, (y, *torch.autograd.grad(y, (x, probs), dy)), strict=True):
            assert_same(a, b)


# -- errors ------------------------------------------------------------------------------------------------------------

INDEX, MASK, X = torch.zeros(4, 2, dtype=torch.long), torch.ones(4, 3, dtype=torch.bool), torch.ones(4, 8)
SORTED = moe.sort(INDEX, 3)
REFUSED = {
    "a map of floats": (UnsupportedDtype, "int32 or int64", lambda: moe.sort(X, 3)),
    "a list": (UnsupportedDtype, "got list", lambda: moe.sort([0, 1], 3)),
    "no number of experts": (UnsupportedConfig, "Pass num_experts", lambda: moe.sort(INDEX)),
    "no experts": (UnsupportedShape, "1 to 4096 experts, got 0", lambda: moe.sort(INDEX, 0)),
    "no assignments": (UnsupportedShape, "at least one assignment", lambda: moe.sort(INDEX[:, :0], 3)),
    "another number of experts": (UnsupportedConfig, "has 3 experts", lambda: moe.sort(MASK, 4)),
    "top_k of an index": (UnsupportedConfig, "Leave top_k out", lambda: moe.sort(INDEX, 3, top_k=2)),
    "top_k beyond the experts": (UnsupportedConfig, "1 to 3 here, got 4", lambda: moe.sort(MASK, top_k=4)),
    "align of none": (
        UnsupportedConfig,
        "align must be a whole number from 1 up, got 0",
        lambda: moe.sort(INDEX, 3, align=0),
    ),
    "capacity between": (UnsupportedConfig, "multiple of align=4", lambda: moe.sort(INDEX, 3, align=4, capacity=10)),
    "capacity below zero": (UnsupportedConfig, "got -1", lambda: moe.sort(INDEX, 3, capacity=-1)),
    "too many rows": (UnsupportedShape, "32 bits", lambda: moe.sort(INDEX, 3, capacity=2**31)),
    "options of a Permutation": (UnsupportedConfig, "sorted already", lambda: moe.permute(X, SORTED, 3)),
    "other tokens": (UnsupportedShape, r"\[4, 8\]", lambda: moe.permute(X[:3], SORTED)),
    "a number": (UnsupportedShape, r"\[4, D\]", lambda: moe.permute(X[0, 0], SORTED)),
    "float64": (UnsupportedDtype, "float64", lambda: moe.permute(X.double(), SORTED)),
    "another tail": (UnsupportedConfig, "tail", lambda: moe.permute(X, SORTED, tail="nan")),
    "other rows": (UnsupportedShape, "the 8 rows", lambda: moe.unpermute(X, SORTED)),
    "other probabilities": (UnsupportedShape, r"\[4, 2\]", lambda: moe.unpermute(X.repeat(2, 1), SORTED, X)),
    "integers as probabilities": (UnsupportedDtype, "takes probs", lambda: moe.permute_probs(INDEX, SORTED)),
    "two devices": (UnsupportedDevice, "meta", lambda: moe.permute(X.to("meta"), SORTED)),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case):
    error, words, call = case
    with pytest.raises(error, match=words):
        call()


def test_a_permutation_can_be_copied_and_moved():
    permutation = copy.deepcopy(moe.sort(MASK))
    moved = moe.Permutation(*[t.to("meta") for t in permutation])
    rows, same = moe.permute(torch.ones(4, 8, device="meta"), moved)
    assert rows.shape == (12, 8) and same.sources.is_meta


def test_a_map_without_a_dim_for_the_slots_is_named():
    with pytest.raises(UnsupportedShape, match=r"For one expert each pass index\[:, None\]"):
        moe.permute(torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64), 3)


def test_an_error_of_probs_names_them():
    rows, permutation = moe.permute(torch.zeros(5, 4), torch.zeros(5, 1, dtype=torch.int64), 3)
    with pytest.raises(UnsupportedDtype, match=r"unpermute takes probs in .* Cast probs first"):
        moe.unpermute(rows, permutation, torch.zeros(5, 1, dtype=torch.float64))


def test_the_gradient_of_an_unpermuted_row_is_multiplied_by_its_probability():
    rows, permutation = moe.permute(torch.randn(3, WIDTH), torch.tensor([[0], [1], [0]]), num_experts=2)
    rows, probs = rows.detach().requires_grad_(), torch.tensor([[0.5], [2.0], [4.0]], requires_grad=True)
    moe.unpermute(rows, permutation, probs).sum().backward()
    assert rows.grad[permutation.positions.flatten(), 0].tolist() == [0.5, 2.0, 4.0]
