"""`strict`: what a graph cannot serve is refused with the reason and the way out, or runs eagerly with one warning."""

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.errors import UnsupportedConfig
from tests.support.compiled_twins import K, N, assert_logs, assert_step, batch, graphs, refused
from tests.support.linear_oracle import assert_same, make, spiky
from tests.support.steps import compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")


# -- strict ------------------------------------------------------------------------------------------------------------


def recomputed(layer):
    """The recomputed forward would leave a second dw pending."""
    return functools.partial(checkpoint, layer, use_reentrant=False)


def hooked_weight(layer):
    """A graph would call these with None in every backward."""
    layer.fired = []
    layer.weight.main_grad = torch.zeros(N, K)
    layer.weight.register_hook(lambda g: layer.fired.append(g.clone()))
    layer.weight.register_post_accumulate_grad_hook(lambda p: layer.fired.append(p.grad.clone()))
    return layer


CANNOT = {
    "checkpoint": (recomputed, {"delay_wgrad_compute": True}, ("delay_wgrad_compute", "checkpoint")),
    "hooks of a delayed dw": (hooked_weight, {"delay_wgrad_compute": True}, ("delay_wgrad_compute", "hooks")),
    "hooks of main_grad": (hooked_weight, {"fuse_wgrad_accumulation": True}, ("fuse_wgrad_accumulation", "hooks")),
    "no main_grad": (lambda layer: layer, {"fuse_wgrad_accumulation": True}, ("fuse_wgrad_accumulation", "main_grad")),
}


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("what", CANNOT)
def test_strict_is_the_default_and_raises_with_a_reason(what, fullgraph):
    prepare, options, words = CANNOT[what]
    block = prepare(make("fp8-current", **options))
    call = torch.compile(lambda x: block(x), fullgraph=fullgraph, backend="aot_eager")
    sentence = refused(call, batch(0)[0], words=(*words, "Linear(48, 40)"))
    assert "strict=False" in sentence, "the way out"


def converted(options):
    model = nn.Sequential(nn.Linear(K, N))
    octavo.convert(model, "fp8-current", strict=False)
    for name in options:
        setattr(model[0], name, True)
    return model[0]


RELAXED = {"Linear": lambda options: make("fp8-current", strict=False, **options), "convert": converted}


@pytest.mark.parametrize(("what", "form"), [
    ("checkpoint", "Linear"), ("checkpoint", "convert"), ("hooks of a delayed dw", "Linear"),
    ("hooks of main_grad", "convert")])  # fmt: skip
def test_strict_false_runs_eagerly_with_one_warning_that_has_the_reason(what, form):
    prepare, options, words = CANNOT[what]
    layer = RELAXED[form](options)
    twin = copy.deepcopy(layer)
    block, eager = prepare(layer), prepare(twin)
    call = torch.compile(lambda x: block(x), backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(3):
            assert_step((layer, twin), (call, eager), batch(i))
            for m in (layer, twin):
                m.backward_dw()
            assert_same(layer.weight.grad, twin.weight.grad)
    if prepare is hooked_weight:
        assert_same(layer.weight.main_grad, twin.weight.main_grad)
        assert len(layer.fired) == (6 if "delay_wgrad_compute" in options else 0)
        assert_logs(layer.fired, twin.fired)
    relevant = [
        w for w in caught if str(w.message).startswith("Running outside the graph") and words[0] in str(w.message)
    ]
    assert len(relevant) == 1, [str(w.message) for w in caught]
    torch._dynamo.reset()
    reason = refused(compiled(lambda x: block(x)), batch(0)[0], words=words)
    assert str(relevant[0].message).partition("Linear(")[2] == reason.partition("Linear(")[2] != ""


@pytest.mark.parametrize("form", RELAXED)
def test_strict_false_changes_nothing_where_a_graph_serves(form):
    layer = RELAXED[form]({"delay_wgrad_compute": True})
    twin = copy.deepcopy(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_step((layer, twin), (compiled(layer), twin), batch(0))
    assert graphs() == 1


# -- weight gradients deferred where backward may run twice, or elsewhere ----------------------------------------------


def test_a_checkpoint_around_a_graph_with_deferred_weight_gradients_is_refused():
    layer = make("fp8-current", delay_wgrad_compute=True)
    call = compiled(layer)
    with pytest.raises(UnsupportedConfig, match=r"delay_wgrad_compute.*checkpoint"):
        checkpoint(call, spiky(24, 48), use_reentrant=False)


def test_a_memory_budget_and_deferred_weight_gradients_are_refused():
    layer = make("fp8-current", delay_wgrad_compute=True)
    with (
        torch._functorch.config.patch(activation_memory_budget=0.0),
        pytest.raises(Exception, match="memory budget below 1"),
    ):
        compiled(layer)(spiky(24, 48))


def test_data_parallel_training_and_deferred_weight_gradients_are_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        layer = make("fp8-current", delay_wgrad_compute=True)
        with pytest.raises(Exception, match="DistributedDataParallel"):
            DistributedDataParallel(compiled(layer))(spiky(24, 48))
    finally:
        dist.destroy_process_group()
