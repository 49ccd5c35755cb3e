"""GroupedLinear as nodes of a compiled graph: which there are, what they say of themselves, what others make of them.

That they give eager mode's bits is in tests/ops/test_grouped_compiled.py."""

import shutil

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import octavo
from octavo.errors import UnsupportedConfig
from octavo.kernels.grouped_gemm import reference as grouped_reference
from octavo.recipes import SHIPPED
from octavo.runtime import graph_nodes as graph
from tests.support.checkpointed import saving
from tests.support.experts import (
    LAYOUTS,
    ROWS,
    USED,
    G,
    K,
    N,
    assert_steps,
    batch,
    delayed,
    experts,
    fused,
    give,
    sizes,
    step,
)
from tests.support.linear_oracle import OTHERS, assert_same
from tests.support.recipe_traits import is_stateful
from tests.support.recorded_operators import hides_writes, recorded, without_gradients
from tests.support.same_tensors import facts
from tests.support.state_tensors import named_state
from tests.support.steps import assert_state, compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")

SAMPLE = ("bf16", "fp8-current", "fp8-delayed", "fp8-block", "nvfp4")
every = pytest.mark.parametrize("recipe", SHIPPED)
sample = pytest.mark.parametrize("recipe", SAMPLE)
compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++ on a CPU")


# -- nodes -------------------------------------------------------------------------------------------------------------


def operator(node):
    """Its name; of one that writes to its inputs, what the compiler has wrapped."""
    wrapped = str(node.target).startswith("auto_functionalized")
    return str(node.args[0] if wrapped else node.target)


def ours(part):
    names = [operator(node) for node in part.graph.nodes if node.op == "call_function"]
    return [name.split(".")[1] for name in names if name.startswith("octavo.")]


class Nodes:
    """A backend that notes the operators of a graph: ours as it was traced, ours in the forward and the backward that
    are made of it, and what others there are."""

    def __init__(self):
        self.traced, self.ours, self.others = [], {}, {}

    def keep(self, direction):
        def compile_(part, _):
            names = {operator(node) for node in part.graph.nodes if node.op == "call_function"}
            self.ours[direction] = ours(part)
            self.others[direction] = {n for n in names if not n.startswith(("octavo.", "<built-in function getitem>"))}
            return make_boxed_func(part.forward)

        return compile_

    def __call__(self, gm, inputs):
        assert not self.traced, "one graph"
        self.traced = ours(gm)
        return aot_autograd(fw_compiler=self.keep("forward"), bw_compiler=self.keep("backward"))(gm, inputs)


def nodes(call, layer, **given):
    found = Nodes()
    step(layer, *batch(), call=torch.compile(call, fullgraph=True, backend=found), **given)
    return found


class Pair(nn.Module):
    def __init__(self, recipe, **settings):
        super().__init__()
        self.first, self.second = experts(recipe, **settings), experts(recipe, G, N, K, **settings)

    def forward(self, x, splits):
        return self.second(self.first(x, splits), splits)


VIEWS = {"aten.view.default"}
FOLDS = {"aten.maximum.default", "aten.copy.default", "aten.copy_.default", "aten.unbind.int"}  # fp8-delayed's amaxes
STACKS = {"aten.stack.default", "aten.cat.default", "aten.view.default", "aten.unbind.int", "aten.select.int",
          "aten.slice.Tensor", "aten.squeeze.dim", "aten.unsqueeze.default"}  # fmt: skip


IN_LAYOUTS = [*[(recipe, "single") for recipe in SHIPPED], ("bf16", "per group"), ("fp8-delayed", "per group")]


@pytest.mark.parametrize(("recipe", "layout"), IN_LAYOUTS)
def test_one_node_forward_and_one_backward_for_each_layer(recipe, layout):
    layer = Pair(recipe, **LAYOUTS[layout])
    x, _ = batch()
    found = Nodes()
    leaf = x.clone().requires_grad_()
    torch.compile(layer, fullgraph=True, backend=found)(leaf, sizes()).sum().backward()
    assert found.ours == {"forward": ["run", "run"], "backward": ["run_bwd", "run_bwd"]}
    allowed = VIEWS | (FOLDS if is_stateful(recipe) else set()) | (STACKS if layout == "per group" else set())
    assert found.others["forward"] <= allowed
    assert found.others["backward"] <= allowed | {"aten.expand.default"}  # the sum's


WAYS = {
    "frozen experts": (lambda r: frozen(r, "weight1"), {}),
    "one bias frozen": (lambda r: frozen(r, "bias0"), {}),
    "scaled": (lambda r: experts(r, scale_bias=True), {"scales": torch.ones(ROWS)}),
    "main_grad": (lambda r: with_buffers(fused(r)), {}),
    "main_grad in parts": (lambda r: with_buffers(fused(r, LAYOUTS["per group"])), {}),
    "deferred": (delayed, {}),
    "dgrad_out": (experts, {"dgrad_out": torch.zeros(ROWS, K)}),
}


def frozen(recipe, name):
    layer = experts(recipe, **LAYOUTS["per group"])
    getattr(layer, name).requires_grad_(False)
    return layer


def with_buffers(layer):
    give(layer, torch.zeros(G, N, K))
    return layer


IN_WAYS = [*[("fp8-delayed", way) for way in WAYS], ("bf16", "main_grad in parts"), ("nvfp4", "deferred")]


@pytest.mark.parametrize(("recipe", "way"), IN_WAYS)
def test_the_same_nodes_whatever_is_asked_of_the_layer(recipe, way):
    make, given = WAYS[way]
    layer = make(recipe)
    assert nodes(layer, layer, **given).ours == {"forward": ["run"], "backward": ["run_bwd"]}


@sample
def test_into_a_buffer_two_nodes_are_traced_and_the_one_without_values_is_not_run(recipe):
    """`attach` is there for its gradient: nothing reads the token that it gives."""
    layer = experts(recipe)
    found = nodes(layer, layer, out=torch.zeros(ROWS, N))
    assert found.traced == ["run_into", "attach"]
    assert found.ours == {"forward": ["run_into"], "backward": ["run_bwd"]}
    # a mutated input is brought home by a copy_, which Inductor leaves out; a slice of nothing says where it is
    rest = found.others["forward"] - VIEWS - {"aten.detach.default"} - (FOLDS if is_stateful(recipe) else set())
    assert rest <= {"aten.copy_.default", "aten.as_strided.default", "aten.slice.Tensor"}, rest
    assert found.others["backward"] <= VIEWS


@compiler
def test_inductor_writes_to_the_buffer_and_copies_nothing():
    from torch._inductor.utils import run_and_get_code

    layer, out, dx = experts("fp8-current"), torch.full((ROWS, N), 7.0), torch.full((ROWS, K), 7.0)
    x, dy = batch()
    leaf = x.clone().requires_grad_()
    call = compiled(layer, backend="inductor")
    y, (forward, *_) = run_and_get_code(lambda: call(leaf, sizes(), out=out, dgrad_out=dx))
    assert y.data_ptr() == out.data_ptr()
    assert forward.count("torch.ops.octavo.run_into.default(") == 1
    assert "torch.ops.octavo.attach" not in forward
    assert "copy_" not in forward.split("def call")[1] and "cpp_fused" not in forward
    y.backward(dy)
    assert (out[USED:] == 7).all() and (dx[USED:] == 7).all()
    assert_same(leaf.grad[:USED], dx[:USED])
    assert_same(dx[:USED], step(experts("fp8-current"), x, dy)["dx"][:USED])


FLAGS = {
    "None": (None, 0),
    "False": (False, 0),
    "True": (True, 1),
    "on the device, 1": (torch.ones(1, dtype=torch.int32), 1),
    "on the device, 0": (torch.zeros((), dtype=torch.bool), 1),
}


FLAGGED = [*[(recipe, "True") for recipe in SAMPLE], *[("fp8-delayed", flag) for flag in FLAGS if flag != "True"],
           ("bf16", "on the device, 1")]  # fmt: skip


@pytest.mark.parametrize(("recipe", "flag"), FLAGGED)
def test_a_graph_refreshes_the_cache_where_it_is_told_to(recipe, flag):
    layer, (first, refreshes) = experts(recipe), FLAGS[flag]
    found = nodes(layer, layer, is_first_microbatch=first)
    expected = ["refresh"] * (refreshes if recipe != "bf16" else 0) + ["run"]
    assert found.ours == {"forward": expected, "backward": ["run_bwd"]}
    assert ("weight_row_codes" in dict(named_state(layer))) == (first is not None and recipe != "bf16")


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-delayed"])
def test_a_cache_refreshed_by_a_graph_and_a_buffer_together(recipe):
    layer, twin, out = experts(recipe), experts(recipe), torch.zeros(ROWS, N)
    found = nodes(layer, layer, is_first_microbatch=True, out=out)
    assert found.ours["forward"] == ["refresh", "run_into"]
    assert_same(out[:USED], step(twin, *batch())["y"][:USED])


@pytest.mark.parametrize(("recipe", "layout"), [*[(recipe, "single") for recipe in SAMPLE], ("nvfp4", "per group")])
def test_two_layers_compiled_one_by_one_share_a_graph(recipe, layout):
    layout = LAYOUTS[layout]
    pair = [experts(recipe, seed=seed, **layout) for seed in (1, 9)]
    for layer, seed in zip(pair, (1, 9), strict=True):
        found = step(layer, *batch(), call=compiled(layer))
        assert_steps(found, step(experts(recipe, seed=seed, **layout), *batch()))
    assert counters["stats"]["unique_graphs"] == 1


def test_a_layer_of_other_sizes_does_not():
    for n in (N, N + 8):
        layer = experts("fp8-current", n=n)
        step(layer, *batch(n=n), call=compiled(layer))
    assert counters["stats"]["unique_graphs"] == 2


# -- what the operators say of themselves ------------------------------------------------------------------------------

ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
SMALL = {"groups": 2, "k": 17, "n": 12}
CALLS = {
    "plain": (experts, {}, ["run", "run_bwd"]),
    "cached": (experts, {"is_first_microbatch": True}, ["refresh", "run", "run_bwd"]),
    "a flag on the device": (experts, {"is_first_microbatch": torch.zeros(1)}, ["refresh", "run", "run_bwd"]),
    "main_grad": (lambda r, **s: with_small_buffers(fused(r, **s)), {}, ["run", "run_bwd"]),
    "deferred": (delayed, {}, ["run", "run_bwd"]),
    "scaled": (lambda r, **s: experts(r, scale_bias=True, **s), {"scales": torch.ones(9)}, ["run", "run_bwd"]),
    "out": (experts, {"out": torch.zeros(9, 12)}, ["run_into", "attach", "run_bwd"]),
    "both": (experts, {"out": torch.zeros(9, 12), "dgrad_out": torch.zeros(9, 17)}, ["run_into", "attach", "run_bwd"]),
    "both, deferred": (delayed, {"out": torch.zeros(9, 12), "dgrad_out": torch.zeros(9, 17)},
                      ["run_into", "attach", "run_bwd"]),
}  # fmt: skip
CHECKED = [("bf16", "plain"), ("fp8-current", "scaled"), ("fp8-block", "main_grad"),
           ("fp8-delayed", "a flag on the device"), ("nvfp4", "deferred"), ("mxfp8", "cached"),
           ("bf16", "both"), ("nvfp4", "both"), ("fp8-rowwise", "out"), ("fp8-delayed", "both, deferred")]  # fmt: skip


def with_small_buffers(layer):
    layer.weight.main_grad = torch.zeros(2, 12, 17)
    return layer


@pytest.mark.parametrize(("recipe", "way"), CHECKED)
def test_opcheck_of_every_operator_of_a_step(recipe, way):
    make, flags, names = CALLS[way]
    layer = make(recipe, **SMALL)
    x, dy = batch((5, 2), 2, k=17, n=12)
    calls = recorded(layer, x.requires_grad_(), dy, m_splits=sizes((5, 2)), **flags)
    assert [str(op).split(".")[1] for op, _ in calls] == names
    for op, args in calls:
        tests = [test for test in ALL if test != "test_schema" or not hides_writes(op, args)]
        if op in (torch.ops.octavo.run.default, torch.ops.octavo.attach.default):
            wanting = [t.requires_grad for t in args[0]]
            wanting = wanting[::-1] if op is torch.ops.octavo.run.default else wanting
            assert wanting[0] and (way in ("main_grad", "deferred", "both, deferred") or wanting[1]), "x and the weight"
        else:
            args = without_gradients(args)
        if "deferred" in way and op in (torch.ops.octavo.run.default, torch.ops.octavo.run_into.default):
            tests.remove("test_aot_dispatch_dynamic")  # room for dy holds NaN, and to this test NaN is not NaN
        assert set(torch.library.opcheck(op, args, test_utils=tests).values()) == {"SUCCESS"}, op


def listed(made):
    return [] if made is None else [made] if isinstance(made, torch.Tensor) else list(made)


def assert_fakes_agree(op, args):
    args = without_gradients(args)
    with FakeTensorMode() as mode:
        fakes = listed(op(*pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)))
    assert all(isinstance(t, FakeTensor) for t in fakes)
    assert [facts(t) for t in fakes] == [facts(t) for t in listed(op(*args))], f"{op} {args[-1]}"


SPLITS = [(0, 0, 0), (5, 0, 3), (0, 128, 1), (129, 0, 0), (1,), (0,), (33, 31)]


def assert_fakes_of_a_step_agree(recipe, splits, spare, k, n, *, dtype=torch.float32, option="", **form):
    rows = sum(splits) + spare
    chosen = {} if option in ("", "frozen") else {option: True}
    layer = experts(recipe, len(splits), k, n, dtype=dtype, bias=form["bias"], **LAYOUTS[form["layout"]], **chosen)
    for i, p in enumerate(layer._weight_parts()):
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        p.requires_grad_(option != "frozen" or i > 0)
    x, dy = batch(splits, spare, k=k, n=n, dtype=dtype)
    given = {"m_splits": sizes(splits), "is_first_microbatch": form["first"]}
    if option == "scale_bias" and form["bias"]:
        given["scales"] = torch.ones(rows, dtype=form["scales"]).requires_grad_()
    for name, width, wanted in (("out", n, form["out"]), ("dgrad_out", k, form["dgrad_out"])):
        if wanted:
            given[name] = torch.zeros(rows, width, dtype=dtype)
    if form["turned"]:
        x = x.T.contiguous().T
    calls = recorded(layer, x.requires_grad_(form["wants_dx"] or form["dgrad_out"]), dy, **given)
    assert calls
    for op, args in calls:
        assert_fakes_agree(op, args)


PLAIN = {"bias": True, "layout": "single", "first": None, "scales": torch.float32, "out": False, "dgrad_out": False,
         "wants_dx": True, "turned": False}  # fmt: skip


@every
@pytest.mark.parametrize("into", [False, True], ids=["fresh", "buffers"])
def test_fakes_agree_with_what_the_operators_give(recipe, into):
    for splits, spare in (((0, 0, 0), 0), ((5, 0, 129), 3))[into:]:
        assert_fakes_of_a_step_agree(recipe, splits, spare, 33, 17, **{**PLAIN, "out": into, "dgrad_out": into})


@settings(max_examples=10)
@given(
    recipe=st.sampled_from([*SHIPPED, *OTHERS]),
    splits=st.sampled_from(SPLITS),
    spare=st.sampled_from([0, 1, 130]),
    k=st.integers(1, 70),
    n=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    option=st.sampled_from(["", "frozen", "fuse_wgrad_accumulation", "delay_wgrad_compute", "scale_bias"]),
    bias=st.booleans(),
    layout=st.sampled_from(list(LAYOUTS)),
    first=st.sampled_from([None, None, True]),
    scales=st.sampled_from([torch.float32, torch.bfloat16]),
    out=st.booleans(),
    dgrad_out=st.booleans(),
    wants_dx=st.booleans(),
    turned=st.booleans(),
)
def test_fakes_agree_for_any_settings(recipe, splits, spare, k, n, **form):
    assume(form["wants_dx"] or form["bias"] or form["option"] != "frozen")
    assert_fakes_of_a_step_agree(recipe, splits, spare, k, n, **form)


def test_no_other_operator_writes_what_its_schema_does_not_say():
    writing = {"run", "run_bwd", "run_into", "run_into_chain", "run_into_long_chain"}
    assert {op.name() for op in graph.UNDECLARED_WRITES} == {f"octavo::{name}" for name in writing}
    assert [a.name for a in torch.ops.octavo.run_into.default._schema.arguments if a.alias_info] == ["out"]
    assert not any(a.alias_info for a in torch.ops.octavo.attach.default._schema.arguments)


# -- what others make of them ------------------------------------------------------------------------------------------


@pytest.fixture
def products(monkeypatch):
    """How many groups have been multiplied."""
    ran, gemm = [], grouped_reference.gemm

    def counting(*args, **options):
        ran.append(1)
        return gemm(*args, **options)

    monkeypatch.setattr(grouped_reference, "gemm", counting)
    return ran


SELECTED = [*[(recipe, "eager") for recipe in SAMPLE], ("fp8-delayed", "compiled"), ("nvfp4", "compiled")]


@pytest.mark.parametrize(("recipe", "mode"), SELECTED)
@pytest.mark.parametrize("saved", [True, False], ids=["saved", "recomputed"])
def test_a_selective_checkpoint_saves_a_layers_forward_or_runs_it_again(recipe, mode, saved, products):
    layer, twin, splits = experts(recipe), experts(recipe), (20, 9, 18)
    options = {"context_fn": saving(octavo.sac_save_ops() if saved else ())}

    def block(x, m_splits):
        return checkpoint(layer, x, m_splits, use_reentrant=False, **options)

    call = compiled(block) if mode == "compiled" else block
    want = step(twin, *batch(splits), splits)
    products.clear()
    found = step(layer, *batch(splits), splits, call=call)
    counted = len(products)
    assert_steps(found, want)
    assert_state(layer, twin)
    if saved:
        assert counted == 3 * G, "fprop, dgrad and wgrad of every group, none of them twice"
    elif mode == "eager":
        assert counted == 4 * G, "fprop once more"


def test_a_selective_checkpoint_saves_what_goes_into_a_buffer(products):
    layer, splits = experts("fp8-current"), (20, 9, 18)

    def block(x, m_splits, out):
        context = saving(octavo.sac_save_ops())
        return checkpoint(layer, x, m_splits, None, out, use_reentrant=False, context_fn=context)

    want = step(experts("fp8-current"), *batch(splits), splits)
    products.clear()
    found = step(layer, *batch(splits), splits, call=compiled(block), out=torch.zeros(ROWS, N))
    counted = len(products)
    assert_same(found["dw"], want["dw"])
    assert counted == 3 * G


@pytest.mark.parametrize("given", [("dgrad_out",), ("out", "dgrad_out")], ids=str)
@pytest.mark.parametrize("recipe", ["fp8-current"])
def test_hooks_on_saved_tensors_leave_the_callers_memory_alone(recipe, given):
    layer, plain = experts(recipe), experts(recipe)
    buffers = {name: torch.zeros(ROWS, N if name == "out" else K) for name in given}

    def hooked(x, m_splits, **given):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            return compiled(layer)(x, m_splits, **given)

    found = step(layer, *batch(), sizes(), call=hooked, **buffers)
    want = step(plain, *batch(), sizes(), **{name: torch.zeros_like(t) for name, t in buffers.items()})
    assert found.keys() == want.keys()
    for name in want:
        assert_same(found[name], want[name], name)
    assert_same(buffers["dgrad_out"], want["dx"])


FLOPS = 2 * ROWS * K * N  # of one GEMM, the tail counted: nobody knows here how long it is


def counted(layer, mode, *, x_grad=True, **given):
    """GEMMs of a step, as counters see them. A graph is not traced under one, but may run under it."""
    (x, dy), seen = batch(), [FlopCounterMode(display=False) for _ in range(2)]

    def backend(gm, _):
        def run(*args):
            with seen[0]:
                return gm(*args)

        return run

    if mode == "eager":
        with seen[0]:
            y = layer(x.requires_grad_(x_grad), sizes(), **given)
    else:
        torch._dynamo.reset()
        y = torch.compile(layer, fullgraph=True, backend=backend)(x.requires_grad_(x_grad), sizes(), **given)
    with seen[1]:
        y.backward(dy)
    return sum(counter.get_total_flops() for counter in seen) / FLOPS


@sample
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_flop_counters_see_the_nodes(recipe, mode):
    assert counted(experts(recipe), mode) == 3


def test_flop_counters_see_what_is_left_out_and_what_goes_into_a_buffer():
    weightless = experts("fp8-block")
    weightless.weight.requires_grad_(False)
    for mode in ("eager", "compiled"):
        assert counted(weightless, mode) == 2
        assert counted(experts("fp8-block"), mode, x_grad=False) == 2
    assert counted(delayed("fp8-block"), "compiled") == 2
    buffers = {"out": torch.zeros(ROWS, N), "dgrad_out": torch.zeros(ROWS, K)}
    assert counted(experts("fp8-block"), "compiled", **buffers) == 3


class Blocks(nn.Module):
    """Experts with parameters of both kinds, and a plain layer before them."""

    def __init__(self):
        super().__init__()
        self.up = octavo.Linear(K, K, recipe="fp8-current")
        self.moe = nn.ModuleList([experts("nvfp4", n=K), experts("fp8-block", n=K, **LAYOUTS["per group"])])
        self.last = experts(None)

    def forward(self, x, splits, room=None):
        x = self.up(x)
        for layer in self.moe:
            x = layer(x, splits)
        return self.last(x, splits, out=room)


@pytest.mark.parametrize("into", [False, True], ids=["fresh", "out="])
def test_explain_names_every_layer_and_its_routes(into):
    room = [torch.zeros(ROWS, N)] if into else []
    report = octavo.explain(Blocks(), batch(poison=0.0)[0], sizes(), *room)
    assert (report.graphs, report.breaks, report.recompiles) == (1, (), ())
    found = {layer.path: layer for layer in report.layers}
    keys = {name: octavo.recipe(name).key for name in ("fp8-current", "nvfp4", "fp8-block", "bf16")}
    assert {path: layer.recipe for path, layer in found.items()} == {
        "up": keys["fp8-current"], "moe.0": keys["nvfp4"], "moe.1": keys["fp8-block"],
        "last": f"from octavo.autocast: {keys['bf16']}",
    }  # fmt: skip
    for layer in report.layers:
        assert dict(layer.routes) == {"fprop": "reference", "dgrad": "reference", "wgrad": "reference"}
        assert layer.uncompiled == "", layer.path
    counts = {name: report.count(f"octavo::{name}") for name in ("run", "run_into", "attach", "run_bwd")}
    assert counts == {"run": 4 - into, "run_into": into, "attach": 0, "run_bwd": 4}
    assert all(path in str(report) for path in ("up", "moe.0", "moe.1", "last"))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.taken, self.refused = experts("fp8-current", n=K), delayed("fp8-current")

    def forward(self, x, splits):
        return checkpoint(self.refused, self.taken(x, splits), splits, use_reentrant=False)


def test_explain_says_why_a_layer_is_in_no_graph():
    report = octavo.explain(Checkpointed(), batch(poison=0.0)[0], sizes())
    taken, refused = report.layers
    assert taken.uncompiled == ""
    assert refused.uncompiled.startswith(f"GroupedLinear({G}, {K}, {N}) at 'refused' does not compile: ")
    assert "delay_wgrad_compute" in refused.uncompiled


# -- CUDA graphs: what is refused is refused while tracing, on any device ----------------------------------------------

CAPTURING = [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}]


@pytest.mark.parametrize("capturing", CAPTURING, ids=["mode", "option"])
@pytest.mark.parametrize("name", ["out", "dgrad_out"])
def test_a_buffer_that_may_move_is_refused_where_cuda_graphs_are_asked_for(capturing, name):
    layer, x = experts("fp8-current"), batch()[0].requires_grad_()
    buffer = torch.full((ROWS, N if name == "out" else K), 7.0)
    sentence = (
        rf"(?s)GroupedLinear\({G}, {K}, {N}\) does not compile: a CUDA graph writes to the memory it was captured "
        rf"with, and {name} may be another each time\. Make it[^.]* octavo\.buffer\(\.\.\.\)"
    )
    with pytest.raises(UnsupportedConfig, match=sentence):
        torch.compile(layer, **capturing)(x, sizes(), **{name: buffer})
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=sentence):
        torch.compile(layer, fullgraph=True, **capturing)(x, sizes(), **{name: buffer})
    assert (buffer == 7).all()


@compiler
@pytest.mark.parametrize("capturing", CAPTURING[:1], ids=["mode"])
def test_a_static_buffer_compiles(capturing):
    layer, twin, (x, dy) = experts("fp8-current"), experts("fp8-current"), batch()
    out, dx = octavo.buffer(ROWS, N), octavo.buffer(ROWS, K, dtype=torch.float32, device="cpu")
    found = step(layer, x, dy, call=torch.compile(layer, fullgraph=True, **capturing), out=out, dgrad_out=dx)
    want = step(twin, x, dy)
    for name, value in (("y", out), ("dx", dx), ("y", found["y"]), ("dx", found["dx"])):
        assert_same(value[:USED], want[name][:USED], name)
    assert_same(found["dw"], want["dw"])


class Room(nn.Module):
    """A module with buffers of its own for what comes out."""

    def __init__(self):
        super().__init__()
        self.moe = experts("fp8-current")
        self.register_buffer("room", torch.full((ROWS, N), 7.0), persistent=False)

    def forward(self, x, splits):
        return self.moe(x, splits, out=self.room)


def test_a_modules_own_buffer_is_static():
    model, (x, dy) = Room(), batch()
    call = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    y = call(x.clone().requires_grad_(), sizes())
    y.backward(dy)
    want = step(experts("fp8-current"), x, dy)
    assert_same(model.room[:USED], want["y"][:USED])
    assert_same(model.moe.weight.grad, want["dw"])
    assert (model.room[USED:] == 7).all()


def test_a_layer_that_is_not_strict_runs_outside_with_a_word_about_it():
    layer, twin, (x, dy) = experts("fp8-current", strict=False), experts("fp8-current"), batch()
    out, call = torch.zeros(ROWS, N), torch.compile(layer, mode="reduce-overhead")
    with pytest.warns(UserWarning, match=r"(?s)Running outside the graph\..*octavo\.buffer"):
        found = step(layer, x, dy, call=call, out=out)
    want = step(twin, x, dy)
    assert_same(out[:USED], want["y"][:USED])
    assert_same(found["dw"], want["dw"])


def test_without_cuda_graphs_any_buffer_will_do():
    layer, (x, dy) = experts("fp8-current"), batch()
    want = step(layer, x, dy)
    for backend in ("aot_eager", "eager"):
        torch._dynamo.reset()
        out = torch.full((ROWS, N), 7.0)
        found = step(layer, x, dy, call=torch.compile(layer, fullgraph=True, backend=backend), out=out)
        assert_same(out[:USED], want["y"][:USED], backend)
        assert (out[USED:] == 7).all()
        assert_steps({name: found[name] for name in ("dx", "dw", "db")}, {n: want[n] for n in ("dx", "dw", "db")})
