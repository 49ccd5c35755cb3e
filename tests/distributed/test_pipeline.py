"""torch.distributed.pipelining over two ranks: a stage trains as the same layers do in one process, though torch runs
it once on memory without values, forward and backward, to learn shapes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import octavo
from tests.support.linear_oracle import assert_same
from tests.support.replicas import draw_as_rank

WIDTH, ROWS, MICROBATCHES, STEPS = 32, 16, 2, 3
RECIPES = ("fp8-delayed", "fp8-current", "nvfp4")
GARBAGE = {"nan": float("nan"), "huge": 1e30}


def whole_model(recipe, **settings):
    torch.manual_seed(0)
    return nn.ModuleList([
        nn.Sequential(octavo.Linear(WIDTH, WIDTH, recipe=recipe, **settings), nn.GELU(),
                      octavo.LayerNormMLP(WIDTH, WIDTH, recipe=recipe))
        for _ in range(2)
    ])  # fmt: skip


def with_main_grads(model):
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def end_step(part):
    """Updates the weights, and returns the state of the recipe."""
    for layer in part.modules():
        for _ in range(MICROBATCHES if getattr(layer, "delay_wgrad_compute", False) else 0):
            layer.backward_dw()
    with torch.no_grad():
        for p in part.parameters():
            p.sub_(0.1 * (p.main_grad if p.grad is None else p.main_grad + p.grad))
            p.grad = None
            p.main_grad.zero_()
    octavo.step(part)
    return octavo.state_dict(part)


def stage_losses(group, rank, recipe, schedule, garbage, settings, compiled=False):
    """The losses of each step, of the last rank, and the states of this rank's layers."""
    part = whole_model(recipe, **settings)[rank]
    with_main_grads(part)
    empty_strided, patch = torch.empty_strided, pytest.MonkeyPatch()

    def filled(*size, **place):
        made = empty_strided(*size, **place)
        return made.fill_(garbage) if made.is_floating_point() else made

    patch.setattr(torch, "empty_strided", filled)
    module = torch.compile(part, backend="aot_eager") if compiled else part
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
    pipeline = schedule(stage, MICROBATCHES, loss_fn=F.mse_loss, scale_grads=False)
    losses, states = [], []
    for step in range(STEPS):
        x, target = batch(step)
        if rank == 0:
            pipeline.step(x)
        else:
            found = []
            pipeline.step(target=target, losses=found)
            losses.append(torch.stack(found).detach())
        states.append(end_step(part))
    patch.undo()
    return losses, states


def expected(recipe, settings):
    model = whole_model(recipe, **settings)
    with_main_grads(model)
    for rank, part in enumerate(model):
        draw_as_rank(part, rank)
    losses, states = [], [[], []]
    for step in range(STEPS):
        x, target = batch(step)
        found = [F.mse_loss(model[1](model[0](a)), b) for a, b in zip(x.chunk(2), target.chunk(2), strict=True)]
        for loss in found:
            loss.backward()
        losses.append(torch.stack(found).detach())
        for part, kept in zip(model, states, strict=True):
            kept.append(end_step(part))
    return losses, states


def assert_trains_alike(found, want):
    losses, states = want
    for step, loss in enumerate(losses):
        assert_same(found[1][0][step], loss, f"step {step}")
    for rank, (_, kept) in enumerate(found):
        for mine, theirs in zip(kept, states[rank], strict=True):
            assert mine.keys() == theirs.keys()
            for name in mine:
                assert_same(mine[name], theirs[name], name)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize("recipe", RECIPES)
def test_stages_train_as_one_process(ranks, recipe, schedule, garbage):
    found = ranks.run(stage_losses, recipe, schedule, GARBAGE[garbage], {}, size=2)
    assert_trains_alike(found, expected(recipe, {}))


@pytest.mark.parametrize("setting", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
def test_gradients_that_bypass_autograd_are_those_of_the_steps_alone(ranks, setting):
    settings = {setting: True}
    found = ranks.run(stage_losses, "fp8-delayed", ScheduleGPipe, 1e30, settings, size=2)
    assert_trains_alike(found, expected("fp8-delayed", settings))


def test_a_compiled_stage_trains_as_one_process(ranks):
    found = ranks.run(stage_losses, "fp8-delayed", ScheduleGPipe, 1e30, {}, True, size=2)
    assert_trains_alike(found, expected("fp8-delayed", {}))
