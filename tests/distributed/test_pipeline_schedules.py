"""Schedules of torch.distributed.pipelining over two ranks and four, those that split backward too: gradients and
states are those of one process that runs the same microbatches, and both passes together run the GEMMs of one
backward."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import octavo
from octavo.distributed import dw_builder
from octavo.kernels import grouped_gemm
from octavo.ops import operands
from octavo.recipes import SHIPPED
from tests.support.linear_oracle import assert_same
from tests.support.replicas import draw_as_rank
from tests.support.split_backward import needs_split_backward

WIDTH, ROWS, STEPS, MICROBATCHES = 32, 32, 4, 4
# of n ranks, the stages of rank r
ONE, LOOP, V = (lambda r, n: [r]), (lambda r, n: [r, r + n]), (lambda r, n: [r, 2 * n - 1 - r])
SCHEDULES = {
    "gpipe": (ScheduleGPipe, ONE),
    "1f1b": (Schedule1F1B, ONE),
    "interleaved": (ScheduleInterleaved1F1B, LOOP),
    "zero-bubble": (ScheduleInterleavedZeroBubble, LOOP),
    "zbv": (ScheduleZBVZeroBubble, V),
}
SPLIT = ("zero-bubble", "zbv")


def block(recipe, **settings):
    return nn.Sequential(
        octavo.Linear(WIDTH, WIDTH, recipe=recipe, **settings), nn.GELU(),
        octavo.LayerNormMLP(WIDTH, WIDTH, activation="swiglu", recipe=recipe, **settings),
    )  # fmt: skip


def blocks(number, recipe, settings):
    torch.manual_seed(0)
    return nn.ModuleList([block(recipe, **settings) for _ in range(number)])


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def end_step(part):
    """Updates the weights; returns the gradients, the state of the recipe, and how many weight gradients wait."""
    found = {name: p.grad.clone() for name, p in part.named_parameters()}
    with torch.no_grad():
        for p in part.parameters():
            p.sub_(0.1 * p.grad)
            p.grad = None
    octavo.step(part)
    return found, octavo.state_dict(part), sum(len(m._wgrad.queue) for m in part.modules() if hasattr(m, "_wgrad"))


def stages_by_rank(schedule, size):
    return [SCHEDULES[schedule][1](rank, size) for rank in range(size)]


def trained(group, rank, schedule, recipe, settings, built):
    """By stage of this rank, what `end_step` finds after each step."""
    kind, stages_of = SCHEDULES[schedule][0], stages_by_rank(schedule, group.size())
    whole = blocks(sum(map(len, stages_of)), recipe, settings)
    own = {i: whole[i] for i in stages_of[rank]}
    builders = {i: dw_builder(part) if built else None for i, part in own.items()}
    stages = [
        PipelineStage(part, i, len(whole), torch.device("cpu"), group=group, dw_builder=builders[i])
        for i, part in own.items()
    ]
    pipeline = kind(stages[0] if len(stages) == 1 else stages, MICROBATCHES, loss_fn=F.mse_loss, scale_grads=False)
    last = len(whole) - 1 in own
    found = {i: [] for i in own}
    for step in range(STEPS):
        x, target = batch(step)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            pipeline.step(*([x] if 0 in own else []), **({"target": target} if last else {}))
        for i, part in own.items():
            found[i].append(end_step(part))
    return found


def expected(schedule, recipe, settings, size):
    stages_of = stages_by_rank(schedule, size)
    model = blocks(sum(map(len, stages_of)), recipe, settings)
    for rank, stages in enumerate(stages_of):
        for i in stages:
            draw_as_rank(model[i], rank)
    found = {i: [] for i in range(len(model))}
    for step in range(STEPS):
        for a, b in zip(*(t.chunk(MICROBATCHES) for t in batch(step)), strict=True):
            for part in model:
                a = part(a)
            F.mse_loss(a, b).backward()
        for i, part in enumerate(model):
            found[i].append(end_step(part))
    return found


def assert_trains_alike(ranks, schedule, recipe, settings=None, built=False, size=2):
    found = ranks.run(trained, schedule, recipe, settings or {}, built, size=size)
    want = expected(schedule, recipe, {}, size)
    for part in found:
        for stage, steps in part.items():
            for step, (gradients, state, waiting) in enumerate(steps):
                assert waiting == 0
                for mine, theirs in ((gradients, want[stage][step][0]), (state, want[stage][step][1])):
                    assert mine.keys() == theirs.keys()
                    for name in mine:
                        assert_same(mine[name], theirs[name], f"stage {stage}, step {step}, {name}")


@pytest.mark.parametrize(
    ("schedule", "recipe"),
    [
        pytest.param("zero-bubble", "fp8-delayed", marks=needs_split_backward),
        pytest.param("zbv", "nvfp4", marks=needs_split_backward),
        ("interleaved", "fp8-current"),
    ],
)
def test_stages_train_as_one_process(ranks, schedule, recipe):
    assert_trains_alike(ranks, schedule, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SHIPPED)
@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=[needs_split_backward] if name in SPLIT else []) for name in SCHEDULES]
)
def test_stages_of_every_schedule_and_recipe_train_as_one_process(ranks, schedule, recipe):
    assert_trains_alike(ranks, schedule, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SHIPPED)
@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=[needs_split_backward] if name in SPLIT else []) for name in SCHEDULES]
)
def test_stages_of_four_ranks_train_as_one_process(ranks, schedule, recipe):
    assert_trains_alike(ranks, schedule, recipe, size=4)


@pytest.mark.parametrize("schedule", ["zbv"])
def test_deferred_gradients_of_a_builder_are_those_of_one_process(ranks, schedule):
    assert_trains_alike(ranks, schedule, "fp8-delayed", {"delay_wgrad_compute": True}, built=True)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SHIPPED)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_builder_serves_every_schedule_and_recipe(ranks, schedule, recipe):
    assert_trains_alike(ranks, schedule, recipe, {"delay_wgrad_compute": True}, built=True)


def test_a_builder_without_deferred_gradients_is_refused():
    with pytest.raises(octavo.errors.UnsupportedConfig, match="delay_wgrad_compute=True"):
        dw_builder(block("fp8-current"))


# -- the GEMMs of a backward in two passes -----------------------------------------------------------------------------


class Grouped(nn.Module):
    def __init__(self, recipe):
        super().__init__()
        self.layer = octavo.GroupedLinear(4, WIDTH, WIDTH, recipe=recipe)

    def forward(self, x):
        return self.layer(x, torch.full((4,), ROWS // 4, dtype=torch.int64, device="cpu"))


LAYERS = {
    "linear": lambda recipe: octavo.Linear(WIDTH, WIDTH, recipe=recipe),
    "mlp": lambda recipe: octavo.LayerNormMLP(WIDTH, WIDTH, recipe=recipe),
    "grouped": Grouped,
    "moe": lambda recipe: octavo.MoE(WIDTH, WIDTH, num_experts=4, top_k=2, recipe=recipe),
}


@pytest.fixture
def gemms(monkeypatch):
    """The names of the products of Octavo's layers, as they run."""
    ran = []

    def watch(place, name):
        product = getattr(place, name)

        def watched(*arguments, **keywords):
            ran.append(name)
            return product(*arguments, **keywords)

        monkeypatch.setattr(place, name, watched)

    watch(operands, "product")
    for name in ("rows", "plain_rows", "fresh_wgrad", "grouped_wgrad", "plain_wgrad"):
        watch(grouped_gemm, name)
    return ran


def in_one_pass(layer, x, dy, gemms):
    y = layer(x * 1)
    gemms.clear()
    y.backward(dy)
    return x.grad, [len(gemms)]


def in_two_passes(layer, x, dy, gemms):
    y = layer(x * 1)
    gemms.clear()
    (dx,), groups = stage_backward_input([y], [dy], [x], layer.parameters())
    first = len(gemms)
    stage_backward_weight(layer.parameters(), groups)
    return dx, [first, len(gemms) - first]


@needs_split_backward
@pytest.mark.parametrize("recipe", SHIPPED)
@pytest.mark.parametrize("kind", LAYERS)
def test_two_passes_run_the_gemms_of_one_backward(gemms, kind, recipe):
    results = []
    for backward in (in_one_pass, in_two_passes):
        torch.manual_seed(0)
        layer = LAYERS[kind](recipe)
        x, dy = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
        dx, counts = backward(layer, x, dy, gemms)
        results.append((counts, dx, [p.grad for p in layer.parameters()], octavo.state_dict(layer)))
    (whole, dx, grads, state), (parts, *split) = results
    assert sum(parts) == whole[0] and parts[1] == whole[0] // 2
    assert_same(split[0], dx, "dx")
    for mine, theirs in zip(split[1], grads, strict=True):
        assert_same(mine, theirs, "a parameter's gradient")
    for name in state:
        assert_same(split[2][name], state[name], name)
