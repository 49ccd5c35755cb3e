"""What a compiler, a mode or a second caller may do behind a layer's back."""

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import octavo
from octavo.errors import UnsupportedConfig
from tests.modules.oracle import assert_same, make, spiky


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()


def compiled(call, **settings):
    return torch.compile(call, fullgraph=True, backend="aot_eager", **settings)


@pytest.mark.parametrize("recipe", ["fp8-current", "bf16", "fp8-block"])
def test_equal_calls_in_one_graph_keep_their_own_weight_gradients(recipe):
    layer = make(recipe, delay_wgrad_compute=True)
    twin, x = copy.deepcopy(layer), spiky(24, 48)
    for model, run in ((layer, compiled(lambda x: (layer(x), layer(x)))), (twin, lambda x: (twin(x), twin(x)))):
        torch.autograd.backward(run(x), (spiky(24, 40, seed=1), spiky(24, 40, seed=2)))
        model.backward_dw()
        model.backward_dw()
    assert_same(layer.weight.grad, twin.weight.grad)


@pytest.mark.parametrize("pair", [("fp8-block", "fp8-block(scale='fp32')"), ("mxfp8", "fp8-current")], ids=str)
def test_a_graph_does_not_use_codes_that_another_recipe_left(pair):
    layer, x = make(None), spiky(24, 48)
    call, twin = compiled(layer), copy.deepcopy(layer)
    for recipe, first in ((pair[0], True), (pair[0], False), (pair[1], True), (pair[1], False), (pair[0], False)):
        with octavo.autocast(recipe):
            assert_same(call(x, is_first_microbatch=first), twin(x), recipe)


def test_an_input_that_is_written_to_does_not_change_a_weight_gradient_put_off():
    layer = make("bf16", delay_wgrad_compute=True)
    twin = make("bf16")
    x, dy = spiky(24, 48), spiky(24, 40)

    def call(x):
        h = x * 2
        y = layer(h)
        h.zero_()
        return y

    compiled(call)(x).backward(dy)
    layer.backward_dw()
    twin(x * 2).backward(dy)
    assert_same(layer.weight.grad, twin.weight.grad)


def test_a_checkpoint_around_a_graph_with_weight_gradients_put_off_is_refused():
    layer = make("fp8-current", delay_wgrad_compute=True)
    call = compiled(layer)
    with pytest.raises(UnsupportedConfig, match=r"delay_wgrad_compute.*checkpoint"):
        checkpoint(call, spiky(24, 48), use_reentrant=False)


def test_a_memory_budget_and_weight_gradients_put_off_are_refused():
    layer = make("fp8-current", delay_wgrad_compute=True)
    with (
        torch._functorch.config.patch(activation_memory_budget=0.0),
        pytest.raises(Exception, match="memory budget below 1"),
    ):
        compiled(layer)(spiky(24, 48))


def recompute_all(*_, **__):
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("mode", ["selective checkpoint", "flops"])
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "bf16"])
def test_weight_gradients_put_off_in_eager_mode_while_a_mode_watches(recipe, mode):
    layer = make(recipe, delay_wgrad_compute=True)
    twin = copy.deepcopy(layer)
    x, dy = spiky(24, 48), spiky(24, 40)
    if mode == "flops":
        with FlopCounterMode(display=False):
            checkpoint(layer, x, use_reentrant=False).backward(dy)
    else:
        contexts = functools.partial(create_selective_checkpoint_contexts, recompute_all)
        checkpoint(layer, x, use_reentrant=False, context_fn=contexts).backward(dy)
    twin(x).backward(dy)
    for model in (layer, twin):
        model.backward_dw()
    assert_same(layer.weight.grad, twin.weight.grad)


def test_a_mode_changes_no_check_and_no_buffer_of_eager_mode():
    layer = make("fp8-current", fuse_wgrad_accumulation=True)
    x, dy = spiky(24, 48), spiky(24, 40)
    with FlopCounterMode(display=False):
        y = layer(x, is_first_microbatch=True)
        layer.weight.main_grad = torch.zeros(40, 48)  # only now
        y.backward(dy)
        with torch.no_grad():
            layer.weight.mul_(2)
        with pytest.raises(UnsupportedConfig, match="has changed since"):
            layer(x, is_first_microbatch=False)
    assert layer.weight.main_grad.any()


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "nvfp4"])
def test_fakes_stay_out_of_a_real_layer(recipe):
    layer = make(None)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, octavo.autocast(recipe):
        layer(mode.from_tensor(spiky(24, 48)), is_first_microbatch=True)
    assert not [name for name, buffer in layer.named_buffers() if isinstance(buffer, FakeTensor)]
    with octavo.autocast(recipe):
        assert type(layer(spiky(24, 48), is_first_microbatch=True)) is torch.Tensor


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({"delay_wgrad_compute": True}, {}),
        ({"fuse_wgrad_accumulation": True}, {}),
        ({}, {"is_first_microbatch": True}),
    ],
    ids=["delay", "main_grad", "cache"],
)
def test_equal_layers_compiled_one_by_one_share_a_graph(settings, arguments):
    for i in range(12):
        layer = make("fp8-current", seed=i, **settings)
        layer.weight.main_grad = torch.zeros(40, 48)
        layer(spiky(24, 48), **arguments)  # a cache that is there already
        compiled(layer)(spiky(24, 48), **arguments)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "nvfp4"])
def test_compiled_and_eager_microbatches_share_a_gradient_buffer(recipe):
    layer = make(recipe, fuse_wgrad_accumulation=True)
    twin = copy.deepcopy(layer)
    call = compiled(layer)
    for model, runs in ((layer, (call, layer, call)), (twin, (twin, twin, twin))):
        model.weight.main_grad = torch.zeros(40, 48)
        outputs = [run(spiky(24, 48, seed=i)) for i, run in enumerate(runs)]
        for i, y in enumerate(outputs):
            y.backward(spiky(24, 40, seed=9 + i))
    assert_same(layer.weight.main_grad, twin.weight.main_grad)


def test_data_parallel_training_and_weight_gradients_put_off_are_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        layer = make("fp8-current", delay_wgrad_compute=True)
        with pytest.raises(Exception, match="DistributedDataParallel"):
            DistributedDataParallel(compiled(layer))(spiky(24, 48))
    finally:
        dist.destroy_process_group()


def test_scales_that_nobody_steps_are_said_for_compiled_layers_too():
    layer = make("fp8-delayed")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
    call = compiled(layer)

    def train(steps):
        for i in range(steps):
            call(spiky(24, 48, seed=i)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match=r"octavo\.step"):
        train(3)


def test_scales_that_are_stepped_are_not():
    for attached in (False, True):
        layer = make("fp8-delayed")
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
        if attached:
            octavo.attach(layer, optimizer)
        call = compiled(layer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for i in range(4):
                call(spiky(24, 48, seed=i)).square().sum().backward()
                optimizer.step()
                if not attached:
                    octavo.step(layer)
