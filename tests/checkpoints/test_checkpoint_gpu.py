"""Checkpoints of a run on a GPU: a resumed run is bitwise the same, with a fused optimizer and dropout."""

import pytest
import torch
from torch import nn

import octavo
from octavo.recipes import SHIPPED
from tests.support.small_run import assert_same, values

pytestmark = pytest.mark.gpu


def make(recipe, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Dropout(0.2), nn.Linear(384, 256))
    model.to("cuda", torch.bfloat16)
    octavo.convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    octavo.attach(model, optimizer)
    return model, optimizer


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.gpu_smoke
@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_resumed_run_is_bitwise_the_same(recipe, tmp_path):
    model, optimizer = make(recipe, seed=0)
    torch.manual_seed(1)
    first = train(model, optimizer, 3)
    octavo.save_checkpoint(tmp_path, model, optimizer, step=3)
    losses = first + train(model, optimizer, 3)
    resumed, other = make(recipe, seed=7)
    octavo.load_checkpoint(tmp_path, resumed, other)
    assert first + train(resumed, other, 3) == losses
    assert_same(values(resumed, other), values(model, optimizer))
    assert {tensor.device.type for tensor in resumed.state_dict().values()} == {"cuda"}


def test_a_run_of_a_gpu_loads_on_a_cpu(tmp_path):
    model, optimizer = make("fp8-delayed", seed=0)
    train(model, optimizer, 2)
    octavo.save_checkpoint(tmp_path, model, optimizer, step=2)
    other, _ = make("fp8-delayed", seed=7)
    octavo.load_checkpoint(tmp_path, other.cpu())
    wanted = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    assert_same(other.state_dict(), wanted)
    assert {tensor.device.type for tensor in other.state_dict().values()} == {"cpu"}
