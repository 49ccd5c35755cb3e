"""Linear compiled by Inductor on a GPU: checkpoints, saved tensors moved away, the operators' own tests, memory."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.cli.bench.training_steps import peak_mib, training_step
from octavo.recipes import SHIPPED
from tests.support.captured_twins import DEVICE, K, N, batch, compiled, same_microbatches, twins
from tests.support.checkpointed import saving
from tests.support.recipe_traits import WITHOUT_BUFFERS
from tests.support.recorded_operators import hides_writes, recorded, without_gradients
from tests.support.steps import assert_state, update

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("forgetful_compiler")]

every = pytest.mark.parametrize("recipe", SHIPPED)


def run_steps(pair, call, steps=2):
    for i in range(steps):
        same_microbatches(pair, (call, pair[1]), [batch(i)], f"step {i}")
        for model in pair:
            update(model)
    assert_state(*pair)


@pytest.mark.parametrize("selective", [False, True], ids=["whole", "selective"])
@every
def test_a_checkpoint_changes_no_bits(recipe, selective):
    pair = twins(recipe)
    settings = {"context_fn": saving(octavo.sac_save_ops())} if selective else {}

    def call(x):
        return checkpoint(pair[0], x, use_reentrant=False, **settings)

    run_steps(pair, compiled(call, "default"))


def offloaded(call):
    def run(x):
        with torch.autograd.graph.save_on_cpu():
            return call(x)

    return run


@every
def test_saved_tensors_may_wait_on_the_host(recipe):
    """What backward writes to is not among them, or would be a copy."""
    pair = twins(recipe)
    run_steps(pair, offloaded(pair[0]))


@every
def test_saved_tensors_of_a_graph_may_wait_on_the_host_or_a_reason_is_given(recipe):
    """In a graph all that backward reads or writes is saved alike: with state to write, that is refused."""
    pair = twins(recipe)
    call = offloaded(compiled(pair[0], "default"))
    if recipe not in WITHOUT_BUFFERS:
        with pytest.raises(octavo.errors.UnsupportedConfig, match="In a graph, saved_tensors_hooks"):
            call(batch(0)[0].requires_grad_())
    else:
        run_steps(pair, call)


ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
WAYS = {
    "plain": ({}, {}),
    "cached": ({}, {"is_first_microbatch": True}),
    "main_grad": ({"fuse_wgrad_accumulation": True}, {}),
    "deferred": ({"delay_wgrad_compute": True}, {}),
}


@pytest.mark.parametrize("way", WAYS)
@every
def test_the_operators_pass_opcheck(recipe, way):
    """Operators that write to buffers outside of their schema (octavo/runtime/graph_nodes.py says why) skip the schema
    test and no other."""
    settings, flags = WAYS[way]
    layer, _ = twins(recipe, **settings)
    layer.weight.main_grad = torch.zeros(N, K, device=DEVICE)
    x, dy = batch(0)
    calls = recorded(layer, x.requires_grad_(), dy, **flags)
    refreshed = way == "cached" and recipe != "bf16"
    assert {op.name() for op, _ in calls} == {"octavo::run", "octavo::run_bwd", *["octavo::refresh"] * refreshed}
    for op, args in calls:
        tests = tuple(test for test in ALL if test != "test_schema" or not hides_writes(op, args))
        torch.library.opcheck(op, args if op.name() == "octavo::run" else without_gradients(args), test_utils=tests)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block"])
def test_compiled_takes_no_more_memory_than_eager(recipe):
    layer = octavo.Linear(4096, 4096, bias=False, device=DEVICE, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x).detach()
    peaks = []
    for call in (layer, compiled(layer, "default")):
        step = training_step(layer, x, dy, call)
        for _ in range(2):
            step()
        peaks.append(peak_mib(step))
    assert peaks[1] <= peaks[0], f"compiled {peaks[1]:.1f} MiB, eager {peaks[0]:.1f}"
