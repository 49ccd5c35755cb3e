"""The memory of a step by module: what is counted equals what the tensors are, and saved tensors have an owner."""

import json

import pytest
import torch
from torch import nn

import octavo


def model(recipe="fp8-block", quantized=True):
    torch.manual_seed(0)
    first = octavo.Linear(256, 512, bias=False, recipe=recipe, dtype=torch.bfloat16)
    second = octavo.Linear(512, 128, bias=False, recipe=recipe, dtype=torch.bfloat16)
    found = nn.Sequential(first, nn.GELU(), second)
    if quantized:
        octavo.quantize_weights(found, trainable=True)
    return found


def stepped(found, optimizer):
    found(torch.randn(32, 256, device=next(found.parameters()).device).bfloat16()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def memory_of(found, optimizer=None):
    device = next(found.parameters()).device
    report = octavo.explain(found, torch.randn(64, 256, device=device).bfloat16(), memory=True, optimizer=optimizer)
    return report, {module.path: module for module in report.memory.modules}


def test_weights_states_and_gradients_are_those_of_the_tensors():
    found = model()
    optimizer = octavo.optim.AdamW(found.parameters(), states="bfloat16")
    stepped(found, optimizer)
    report, modules = memory_of(found, optimizer)
    n = 256 * 512
    assert n < modules["0"].weights <= 1.02 * n
    assert modules["0"].states == n * (4 + 2 + 2) + 4  # a master copy, two averages and the count of steps
    assert modules["0"].gradients == 2 * n
    assert modules["0"].values == 0
    assert report.memory.sum_of("states") == sum(m.states for m in modules.values())
    assert found[0].weight.grad is None


def test_values_that_are_kept_for_other_optimizers_are_shown():
    found = model()
    optimizer = torch.optim.SGD(found.parameters(), lr=0.1)
    stepped(found, optimizer)
    _, modules = memory_of(found, optimizer)
    assert modules["0"].values == 4 * 256 * 512


def test_what_forward_saves_belongs_to_the_module_that_ran():
    _, quantized = memory_of(model())
    _, plain = memory_of(model(quantized=False))
    codes_of_x = 64 * 256
    assert codes_of_x <= quantized["0"].saved < 1.1 * codes_of_x  # x by column; the weight itself is no saved tensor
    assert plain["0"].saved == quantized["0"].saved  # nothing wants the gradient of its input
    assert plain["2"].saved >= quantized["2"].saved + 512 * 128  # and the codes of the weight
    assert plain["0"].weights == 2 * 256 * 512
    assert quantized["1"].saved == 64 * 512 * 2  # GELU's input
    assert all(module.saved == 0 for path, module in quantized.items() if path == "")


def test_a_cache_is_shown_beside_the_weight():
    found = model(quantized=False)
    with octavo.microbatch(first=True):
        found(torch.randn(4, 256).bfloat16()).float().sum().backward()
    found.zero_grad()
    _, modules = memory_of(found)
    assert 256 * 512 <= modules["0"].cached_codes < 1.02 * 256 * 512  # nothing wants dx here, which needs columns


def test_the_report_prints_and_is_plain_data():
    report, _ = memory_of(model())
    text = str(report)
    assert "predicted" in text
    assert "cached codes" in text
    data = json.loads(json.dumps(report.as_dict()))["memory"]
    assert data["modules"][0]["weights"] > 0
    assert data["measured_peak"] is None
    assert octavo.explain(model(), torch.randn(4, 256).bfloat16()).memory is None


@pytest.mark.gpu
@pytest.mark.parametrize("quantized", [False, True], ids=["cast", "codes"])
def test_the_measured_peak_is_that_of_the_allocator(quantized):
    found = model("fp8-current", quantized).cuda()
    report, modules = memory_of(found)
    assert report.memory.measured_peak >= report.memory.sum_of("gradients")
    # what operations allocate while they run comes on top, and nothing as large as the model
    extra = report.memory.measured_peak - report.memory.predicted_peak
    assert abs(extra) <= 4 * sum(m.weights for m in modules.values()) + 2**21
