"""Linear under torch.compile(fullgraph=True): one forward and one backward node, and eager's bits."""

import copy
import functools
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import octavo
from octavo.ops import linear_layer
from octavo.recipes import SHIPPED
from octavo.runtime import digest as sources_digest
from tests.support import steps
from tests.support.compiled_twins import quantizing
from tests.support.linear_oracle import assert_same, graphs_of, make, spiky
from tests.support.recipe_traits import QUANTIZED, is_stateful
from tests.support.recorded_operators import recorded
from tests.support.steps import assert_state, compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")

batch = functools.partial(steps.batch, m=24, seeds=(0, 50))
every = pytest.mark.parametrize("recipe", SHIPPED)
quantized = pytest.mark.parametrize("recipe", QUANTIZED)


def same_step(twins, calls, x, dy):
    """One forward and backward of both, with outputs and every gradient compared bit by bit."""
    leaves = [x.clone().requires_grad_() for _ in twins]
    outputs = []
    for twin, call, leaf in zip(twins, calls, leaves, strict=True):
        twin.zero_grad()
        y = call(leaf)
        y.backward(dy)
        outputs.append(y.detach())
    assert_same(*outputs, "y")
    assert_same(leaves[0].grad, leaves[1].grad, "dx")
    for (name, a), b in zip(twins[0].named_parameters(), twins[1].parameters(), strict=True):
        assert_same(a.grad, b.grad, name)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_compiled_is_eager_bit_for_bit_in_one_graph(recipe, dtype):
    layer = make(recipe, dtype=dtype)
    twin = copy.deepcopy(layer)
    call = compiled(layer)
    for i in range(3):
        same_step((layer, twin), (call, twin), *batch(i, dtype=dtype))
        octavo.step(layer)
        octavo.step(twin)
    assert_state(layer, twin)
    assert counters["stats"]["unique_graphs"] == graphs_of(recipe)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "nvfp4"])
def test_inductor_gives_the_bits_of_eager(recipe):
    layer = make(recipe)
    twin = copy.deepcopy(layer)
    call = compiled(layer, backend="inductor")
    for i in range(2):
        same_step((layer, twin), (call, twin), *batch(i))
        octavo.step(layer)
        octavo.step(twin)
    assert_state(layer, twin)


@every
def test_one_graph_serves_many_batch_sizes(recipe):
    layer = make(recipe)
    twin = copy.deepcopy(layer)
    call = compiled(layer, dynamic=True)
    for i, m in enumerate((24, 7, 33, 130, 64)):
        same_step((layer, twin), (call, twin), *batch(i, m=m))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("frozen", ["weight", "input", "weight and bias"])
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "nvfp4"])
def test_a_graph_gives_no_gradient_to_frozen_parts(recipe, frozen):
    layer = make(recipe)
    layer.weight.requires_grad_("weight" not in frozen)
    layer.bias.requires_grad_("bias" not in frozen)
    twin = copy.deepcopy(layer)
    x, dy = batch(0)
    a, b = (x.clone().requires_grad_(frozen != "input") for _ in range(2))
    compiled(layer)(a).backward(dy)
    twin(b).backward(dy)
    assert_same(a.grad, b.grad)
    for p, q in zip(layer.parameters(), twin.parameters(), strict=True):
        assert_same(p.grad, q.grad)


@every
def test_one_node_forward_and_one_backward(recipe):
    layer = make(recipe)
    seen = []

    def backend(gm, example_inputs):

        def capture(inner, _):
            seen.append([str(n.target) for n in inner.graph.nodes if n.op == "call_function"])
            return inner.forward

        return aot_autograd(fw_compiler=capture, bw_compiler=capture)(gm, example_inputs)

    x, dy = batch(0)
    compiled(layer, backend=backend)(x.requires_grad_()).backward(dy)
    forward, backward = seen
    assert [n for n in forward if "octavo" in n] == ["octavo.run.default"]
    assert [n for n in backward if "octavo" in n] == ["octavo.run_bwd.default"]
    views = {"aten.view.default", "aten.unbind.int"}  # of buffers: no kernels
    rest = {n for n in forward + backward if "octavo" not in n and "getitem" not in n}
    assert rest == (views if is_stateful(recipe) else set())


@quantized
@pytest.mark.parametrize("flight", [1, 3])
def test_main_grad_with_several_microbatches_in_flight(recipe, flight):
    layer = make(recipe, fuse_wgrad_accumulation=True)
    twin = copy.deepcopy(layer)
    call = compiled(layer)
    for m in (layer, twin):
        m.weight.main_grad = torch.zeros(40, 48)
    for step in range(2):
        data = [batch(flight * step + i) for i in range(flight)]
        for run in (call, twin):
            for y, (_, dy) in zip([run(x) for x, _ in data], data, strict=True):
                y.backward(dy)
    assert layer.weight.grad is None
    assert_same(layer.weight.main_grad, twin.weight.main_grad)
    assert_state(layer, twin)


@quantized
def test_codes_pass_from_layer_to_layer_inside_a_graph(recipe):
    model = nn.ModuleList([make(recipe), make(recipe, 40, 24)])
    twin = copy.deepcopy(model)
    x, dy = batch(0, n=24)
    same_step((model, twin), (compiled(chain(model)), chain(twin)), x, dy)


def chain(model):
    return lambda x: model[1](model[0](x, fp8_output=True))


@quantized
def test_codes_leave_a_graph_with_their_gradient(recipe):
    layer = make(recipe)
    twin = copy.deepcopy(layer)
    same_step((layer, twin), (opened(compiled(quantizing(layer))), opened(quantizing(twin))), *batch(0))
    assert_state(layer, twin)


def opened(call):
    """The values of what a call returns, read outside its graph."""
    return lambda x: call(x).dequantize()


@quantized
def test_weights_held_as_codes(recipe):
    layer = make(recipe)
    octavo.quantize_weights(layer)
    twin = copy.deepcopy(layer)
    same_step((layer, twin), (compiled(layer), twin), *batch(0))


def test_recipes_nested_in_the_graph():
    model = nn.ModuleList([make(None, 48, 48) for _ in range(3)])
    twin = copy.deepcopy(model)

    def nested(m):
        def call(x):
            with octavo.autocast("fp8-current"):
                x = m[0](x)
                with octavo.autocast("mxfp8"):
                    x = m[1](x)
                return m[2](x)

        return call

    same_step((model, twin), (compiled(nested(model)), nested(twin)), *batch(0, n=48))


def test_an_ambient_recipe_around_the_call_is_a_guard():
    layer = make(None)
    call, x = compiled(layer), batch(0)[0]
    for recipe in ("fp8-current", "mxfp8", "fp8-current"):
        with octavo.autocast(recipe):
            assert_same(call(x), layer(x))
    assert counters["stats"]["unique_graphs"] == 2


def test_torch_autocast_inside_a_graph():
    layer = make("fp8-current")
    twin = copy.deepcopy(layer)

    def mixed(m):
        def call(x):
            with torch.autocast("cpu", torch.bfloat16):
                return m(x)

        return call

    x, dy = batch(0)
    same_step((layer, twin), (compiled(mixed(layer)), mixed(twin)), x, dy.bfloat16())


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-block", "nvfp4"])
def test_checkpoints_recompute_the_same(recipe):
    layer = make(recipe)
    twin = copy.deepcopy(layer)
    call = compiled(lambda x: checkpoint(layer, x, use_reentrant=False))
    same_step((layer, twin), (call, twin), *batch(0))
    assert_state(layer, twin)


def test_training_evaluating_and_training_again():
    layer = make("fp8-delayed")
    twin = copy.deepcopy(layer)
    call = compiled(layer)
    for i, training in enumerate((True, False, True, False, True)):
        layer.train(training)
        twin.train(training)
        same_step((layer, twin), (call, twin), *batch(i))
        octavo.step(layer)
        octavo.step(twin)
    assert_state(layer, twin)
    assert counters["stats"]["unique_graphs"] == 3  # the first step, evaluation, and training


@every
def test_no_tokens_one_token_and_leading_dims(recipe):
    layer = make(recipe)
    twin = copy.deepcopy(layer)
    for shape in ((0, 48), (1, 48), (2, 3, 48)):
        torch._dynamo.reset()
        same_step((layer, twin), (compiled(layer), twin), spiky(*shape), spiky(*shape[:-1], 40))


def test_a_graph_returns_the_layers_own_bias():
    layer = make("fp8-current", return_bias=True)
    y, bias = compiled(layer)(batch(0)[0])
    assert_same(y, layer(batch(0)[0])[0])
    assert bias is layer.bias


def test_equal_layers_share_and_a_changed_recipe_recompiles_once():
    model = nn.Sequential(*[make("fp8-current", 48, 48) for _ in range(32)])
    x = batch(0)[0]
    call = compiled(model)
    assert_same(call(x), model(x))
    for layer in model:
        layer.recipe = octavo.recipe("fp8-current")
    call(x)
    assert counters["stats"]["unique_graphs"] == 1
    for layer in model:
        layer.recipe = "mxfp8"
    assert_same(call(x), model(x))
    assert counters["stats"]["unique_graphs"] == 2


def minibatch(model, call, data, deferred):
    """Microbatches that share one quantization of the weight; outputs, input gradients and the weight's."""
    model.zero_grad()
    leaves, outputs = [x.clone().requires_grad_() for x, _ in data], []
    for i, leaf in enumerate(leaves):
        outputs.append(call(leaf, is_first_microbatch=i == 0))
        if not deferred:
            outputs[i].backward(data[i][1])
    if deferred:
        for y, (_, dy) in zip(outputs, data, strict=True):
            y.backward(dy)
    return [*[y.detach() for y in outputs], *[leaf.grad for leaf in leaves], model.weight.grad.clone()]


@pytest.mark.parametrize("deferred", [False, True], ids=["interleaved", "deferred"])
@pytest.mark.parametrize("recipe", [*QUANTIZED, "fp8-delayed(margin=1)"])
def test_the_weight_cache_from_a_cold_start(recipe, deferred):
    """No eager forward comes first; weights change between minibatches; a graph for each value of the flag."""
    layer = make(recipe)
    twin = copy.deepcopy(layer)
    call, addresses = compiled(layer), set()
    for step in range(3):
        data = [batch(3 * step + i) for i in range(3)]
        for a, b in zip(minibatch(layer, call, data, deferred), minibatch(twin, twin, data, deferred), strict=True):
            assert_same(a, b)
        for m in (layer, twin):
            with torch.no_grad():
                m.weight.sub_(m.weight.grad * 0.01)
            octavo.step(m)
        addresses.add(layer._hidden.weight_row_codes.data_ptr())
    assert_state(layer, twin)
    assert counters["stats"]["unique_graphs"] == graphs_of(recipe, 2)
    assert len(addresses) == 1


def test_a_cold_cache_is_filled_for_a_later_microbatch():
    layer = make("fp8-current")
    x = batch(0)[0]
    assert_same(compiled(layer)(x, is_first_microbatch=False), make("fp8-current")(x))


def test_refreshed_weights_serve_a_graph():
    layer = make("mxfp8")
    call, x = compiled(layer), batch(0)[0]
    call(x, is_first_microbatch=True)
    with torch.no_grad():
        layer.weight.mul_(2)
    octavo.refresh_weights(layer)
    assert_same(call(x, is_first_microbatch=False), layer(x))


def test_a_copied_and_a_pickled_layer_compile_with_a_cache_of_their_own():
    layer, x = make("fp8-current"), batch(0)[0]
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same(compiled(other)(x, is_first_microbatch=True), layer(x))


@every
@pytest.mark.parametrize("flight", [1, 3])
def test_deferred_weight_gradients_with_several_microbatches_in_flight(recipe, flight):
    layer = make(recipe, delay_wgrad_compute=True)
    twin = copy.deepcopy(layer)
    call = compiled(layer, dynamic=True)
    for step in range(2):
        data = [batch(flight * step + i, m=(24, 13, 40)[i]) for i in range(flight)]
        for m, run in ((layer, call), (twin, twin)):
            for y, (_, dy) in zip([run(x) for x, _ in data], data, strict=True):
                y.backward(dy)
            for _ in data:
                m.backward_dw()
    assert_same(layer.weight.grad, twin.weight.grad)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_weight_gradient_without_its_backward_is_not_delivered():
    """A graph leaves room for it at forward, when nothing tells whether a backward will come."""
    layer = make("fp8-block", delay_wgrad_compute=True)
    compiled(layer)(batch(0)[0])
    with pytest.warns(UserWarning, match="no backward to finish"):
        layer.backward_dw()
    assert layer.weight.grad is None


def test_flop_counters_see_the_nodes():
    layer = make("fp8-current")
    x, dy = batch(0)
    with FlopCounterMode(display=False) as counter:
        layer(x.requires_grad_()).backward(dy)
    assert counter.get_total_flops() == 3 * 2 * 24 * 48 * 40


@every
def test_the_ops_pass_opcheck(recipe):
    layer = make(recipe)
    x = batch(0)[0].requires_grad_()
    inputs = linear_layer.Inputs(x, layer.weight, layer.bias,
        scaling=layer._scaling.of_call(layer)[0] if is_stateful(recipe) else ())  # fmt: skip
    key = f"linear(recipe={recipe},dtype='float32',weight_dtype='float32',bias_dtype='float32',"
    key += "wants_dx=True,wants_dw=True,wants_db=True)"
    seed = layer._hidden._buffers.get("rounding_seed")
    tensors = [t for t in (*inputs[:3], *inputs.scaling, seed) if t is not None]
    presence = f"1,1,1,t0,t0,t0,t{len(inputs.scaling)},t0,t0,t0|t0,0,{int(seed is not None)},0"
    plan = f"{sources_digest.DIGEST}|linear|{presence}|{key}"
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    found = torch.library.opcheck(torch.ops.octavo.run.default, (tensors[::-1], plan), test_utils=tests)
    assert found == dict.fromkeys(tests, "SUCCESS")


def on_a_gpu(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)], ids=str)
@every
def test_fakes_are_the_same_on_every_chip(recipe, capability, monkeypatch):
    """Which route a chip takes is decided when an operator runs, and never shows in what it makes."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    layer = make(recipe)
    x, dy = batch(0)
    for op, args in recorded(layer, x.requires_grad_(), dy):
        with FakeTensorMode(), torch.no_grad():
            fakes = op(*pytree.tree_map_only(torch.Tensor, on_a_gpu, args))
        for fake, real in zip(fakes, op(*args), strict=True):
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
            assert fake.device.type == "cuda"


PACKAGE = Path(octavo.__file__).parent
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py")))


@pytest.fixture
def sources(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "octavo", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "octavo"


def test_another_process_with_other_sources_has_another_digest(sources):
    """The digest is of the sources: another process with another backward never reads this one's cached graphs."""
    script = "from octavo.runtime.digest import DIGEST; print(DIGEST)"
    path = sources / "ops" / "linear_layer.py"

    def read():
        environment = {**os.environ, "PYTHONPATH": str(sources.parent)}
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                             env=environment, cwd=sources.parent)  # fmt: skip
        return run.stdout.strip()

    assert read() == sources_digest.DIGEST
    path.write_text(path.read_text() + "\n# edited\n")
    assert read() != sources_digest.DIGEST


def test_a_file_of_each_room_that_graphs_depend_on_is_in_the_digest(sources):
    for room in ROOMS:
        before = sources_digest.digest(sources)
        path = max((sources / room).rglob("*.py"))
        path.write_text(path.read_text() + "\n# edited\n")
        assert (sources_digest.digest(sources) == before) == (room in sources_digest.NOT_IN_GRAPHS), room
    assert {"ops", "runtime", "kernels", "quant", "scaling", "fusion"} <= set(ROOMS) - set(sources_digest.NOT_IN_GRAPHS)


def test_a_new_room_is_in_the_digest_and_a_missing_one_is_an_error(sources):
    before = sources_digest.digest(sources)
    (sources / "attention").mkdir()
    (sources / "attention" / "scores.py").write_text("")
    (sources / "attention" / "scores.py").write_text("SCALE = 2\n")
    assert sources_digest.digest(sources) != before
    shutil.rmtree(sources / sources_digest.NOT_IN_GRAPHS[0])
    with pytest.raises(FileNotFoundError, match="Rename it in NOT_IN_GRAPHS too"):
        sources_digest.digest(sources)
