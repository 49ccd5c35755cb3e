"""What a step of octavo.optim.AdamW gives the device to do: an update and a cast for each weight, and no pass between
them that measures."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

import octavo
from octavo import launch
from octavo.errors import UnsupportedConfig
from octavo.kernels.adamw import Moments, adamw
from tests.support import hopper_memory
from tests.support.training import layer_of_codes

EXPERTS = 3
UPDATE, SPLIT = "_adamw_kernel", "_split_kernel"
BY_AMAX = ("fp8-current", "fp8-delayed")


experts = partial(layer_of_codes, octavo.GroupedLinear, EXPERTS, 48, 160, dtype=torch.bfloat16)


def updated(layer, **settings):
    optimizer = octavo.optim.AdamW(layer.parameters(), lr=1e-2, **settings)
    for i in range(3):
        for p in layer.parameters():
            p.grad = torch.randn(p.shape, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(i))
            p.grad[-1] *= 7 + i  # by expert
        optimizer.step()
    return optimizer


def same_codes(layer, master):
    twin = octavo.GroupedLinear(EXPERTS, 48, 160, bias=False, recipe=layer.recipe, dtype=torch.bfloat16)
    twin.weight = nn.Parameter(master.clone())
    octavo.quantize_weights(twin, trainable=True, keep_columns=layer.weight.kind.columns)
    wanted = twin.weight.tensors()
    return [
        name for name, t in layer.weight.tensors().items() if name != "element" and not torch.equal(t, wanted[name])
    ]


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
@pytest.mark.parametrize("keep_columns", [False, True])
@pytest.mark.parametrize("recipe", [*BY_AMAX, "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"])
def test_codes_of_experts_are_those_of_the_master_copy(recipe, keep_columns, master):
    layer = experts(recipe=recipe, keep_columns=keep_columns)
    optimizer = updated(layer, master=master)
    assert same_codes(layer, optimizer.state[layer.weight]["master"]) == []


@pytest.mark.parametrize("recipe", BY_AMAX)
def test_parameters_of_single_experts_are_scaled_by_their_own_amax(recipe):
    where = {"bias": False, "recipe": recipe, "dtype": torch.bfloat16}
    layer = octavo.GroupedLinear(EXPERTS, 48, 160, single_grouped_weight=False, **where)
    octavo.quantize_weights(layer, trainable=True)
    optimizer = updated(layer)
    for p in layer.parameters():
        master = optimizer.state[p]["master"]
        alone = octavo.Linear(48, 160, **where)
        alone.weight = nn.Parameter(master.clone())
        octavo.quantize_weights(alone)
        assert torch.equal(p.base_values(torch.float32), alone.weight.base_values(torch.float32))


@pytest.mark.parametrize("recipe", BY_AMAX)
def test_an_expert_that_is_not_finite_leaves_the_others_alone(recipe):
    layer = experts(recipe=recipe)
    optimizer = octavo.optim.AdamW(layer.parameters(), lr=1e-2)
    layer.weight.grad = torch.ones(layer.weight.shape, dtype=torch.bfloat16)
    layer.weight.grad[1, 0, 0] = float("nan")
    optimizer.step()
    values = layer.weight.base_values(torch.float32)
    assert values[[0, 2]].isfinite().all()
    assert values[1].isnan().any()
    assert optimizer.state[layer.weight]["master"][1].isnan().sum() == 1


@pytest.mark.parametrize("number", [0, 1, 3, 60])
def test_an_update_measures_as_many_parts_as_are_asked_for(number):
    values, grad = torch.randn(60, 7), torch.randn(60, 7)
    settings = torch.tensor([1 - 1e-4, 1e-2, 0.3, 0.1, 0.999, 0.001, 1e-8, 1.0, 0.0])
    found = adamw(values, grad, Moments.zeros(values, "float32"), settings, amaxes=number)
    assert (found is None) == (number == 0)
    assert found is None or torch.equal(found, values.view(number, -1).abs().amax(1))


@pytest.fixture
def launches(monkeypatch):
    """The kernels that a call launches, by name and number. None runs, from the first such call on."""

    def of(call):
        hopper_memory.imitate(monkeypatch)
        names = []
        with launch.listening(lambda one, _: names.append(one.kernel.fn.__name__)):
            call()
        return Counter(names)

    return of


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", [*BY_AMAX, "fp8-block"])
def test_a_step_is_an_update_and_a_cast_of_each_weight(recipe, master, launches):
    layer = experts(recipe=recipe, keep_columns=True)
    plain = nn.Parameter(torch.ones(8, 48, dtype=torch.bfloat16))
    optimizer = octavo.optim.AdamW([plain, *layer.parameters()], master=master, states="bfloat16")
    for p in (plain, *layer.parameters()):
        p.grad = torch.ones(p.shape, dtype=torch.bfloat16)
    optimizer.step()
    found = launches(optimizer.step)
    assert found.pop(UPDATE) == 2
    assert found.pop(SPLIT) == 1  # where each expert's rows are
    assert list(found.values()) == [1], found  # the cast, of both orientations


@pytest.mark.gpu
@pytest.mark.parametrize("master", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-block"])
def test_a_step_does_not_wait_for_the_device(recipe, master):
    layer = experts(recipe=recipe).to("cuda")
    plain = nn.Parameter(torch.ones(8, 48, dtype=torch.bfloat16, device="cuda"))
    optimizer = octavo.optim.AdamW([plain, *layer.parameters()], master=master)
    for p in (plain, *layer.parameters()):
        p.grad = torch.ones(p.shape, dtype=torch.bfloat16, device="cuda")
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # a bfloat16 master is rounded stochastically, and the steps are smaller than the distance of its values
    assert (plain <= 1).all() and (plain < 1).any(), "two steps were taken"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("number", "size"), [(3, 1024), (5, 1000), (700, 3), (2, 128 * 1024 + 8), (1, 77)])
def test_triton_measures_each_part(number, size, dtype):
    values = (torch.randn(number, size, device="cuda") * torch.rand(number, 1, device="cuda")).to(dtype)
    settings = torch.tensor([1 - 1e-4, 1e-2, 0.3, 0.1, 0.999, 0.001, 1e-8, 1.0, 0.0], device="cuda")
    seed = None if dtype == torch.float32 else torch.tensor([7, 1], device="cuda")
    for skip in (0.0, 1.0):
        settings[8] = skip
        moments = Moments.zeros(values, "8bit")
        found = adamw(values, torch.randn_like(values), moments, settings, seed=seed, amaxes=number)
        assert torch.equal(found, values.abs().amax(1).float())


@pytest.mark.gpu
def test_a_capture_of_steps_that_the_host_counts_is_refused():
    p = nn.Parameter(torch.ones(8, device="cuda"))
    optimizer = octavo.optim.AdamW([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(UnsupportedConfig, match="capturable=True"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
