"""The peak memory of a step of octavo.moe.Experts, at the shapes of the bench, by what the Hopper path allocates."""

import json

import pytest
import torch

from octavo.cli.bench import moe_bench
from octavo.weights.quantized_weight import QuantizedWeight
from tests.support import hopper_memory
from tests.support.processes import output_of

# MiB beyond parameters and gradients that compiled bf16 peaks at on an H200 (benchmarks/results/moe-h200.json)
BF16 = dict(zip(moe_bench.SHAPES, (1088, 960, 1067), strict=True))
# of a replayed step with weights that are codes, as on an H200 (docs/benchmarks-experts.md, "Memory of a step")
PEAKS = {"fp8-delayed": (368, 507, 672), "fp8-block": (378, 521, 636)}
# steps that run as written hold what Python still names
AS_WRITTEN = {"fp8-delayed": (369, 509, 674), "fp8-block": (378, 523, 638)}


def peaks(shape, recipe, weights):
    def make():
        module = moe_bench.Ours(shape, recipe, weights, device="cpu")
        assert (weights == "codes") == isinstance(module.experts.fc1.weight, QuantizedWeight)
        return module

    return hopper_memory.peaks(make, lambda: moe_bench.batch(shape[0], shape[3], shape[3], "cpu"))


def report():
    """Print the peaks of all cases, of the first step and the last, and how many calls were recorded."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        hopper_memory.imitate(patch)
        patch.setattr(moe_bench, "_preference", lambda experts, device: torch.rand(experts, device=device))
        for recipe in PEAKS:
            for number, shape in enumerate(moe_bench.SHAPES):
                first, *_, last = peaks(shape, recipe, "codes")
                found[f"{recipe} {number}"] = first, last, hopper_memory.recordings()
        first, *_, last = peaks(moe_bench.SHAPES[1], "fp8-delayed", "cast")
        found["cast"] = first, last, hopper_memory.recordings()
    print(json.dumps(found))


@pytest.fixture(scope="module")
def measured():
    """What `report` prints in a process of its own: steps that run as written hold what other code of theirs does."""
    return json.loads(output_of("from tests.moe.test_experts_memory import report; report()").splitlines()[-1])


@pytest.mark.parametrize("recipe", PEAKS)
@pytest.mark.parametrize("number", range(3), ids=lambda number: f"{moe_bench.SHAPES[number][1]} experts")
def test_a_step_needs_less_than_one_in_bf16(number, recipe, measured):
    first, last, recordings = measured[f"{recipe} {number}"]
    most = 0.64 * BF16[moe_bench.SHAPES[number]]
    assert recordings == 2
    assert round(last) == PEAKS[recipe][number] < most
    assert first < AS_WRITTEN[recipe][number] < most


def test_a_replay_frees_codes_of_weights_that_forward_has_cast(measured):
    shape = moe_bench.SHAPES[1]
    first, last, _ = measured["cast"]
    codes = 3 * shape[1] * shape[3] * shape[4] / 2**20
    assert last < BF16[shape] < codes < first
