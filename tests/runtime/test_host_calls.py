"""What a step that is like the one before costs the host, in calls of Octavo's own Python functions. Times differ
between machines and are not asserted; calls are the same everywhere."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import octavo

PACKAGE = str(Path(octavo.__file__).parent) + "/"
K, ROWS = 64, 32
# calls of one training step, forward and backward; 14 of grouped make the tiles that Hopper's kernels copy by
MOST = {"linear": 26, "mlp": 56, "grouped": 38}
MOST_MORE = 9  # for each further layer of a Sequential


def build(kind, recipe, device):
    where = {"device": device, "dtype": torch.bfloat16, "recipe": recipe}
    if kind == "grouped":
        return octavo.GroupedLinear(2, K, K, **where), (torch.tensor([ROWS // 2, ROWS // 2], device=device),)
    if kind == "mlp":
        return octavo.LayerNormMLP(K, 2 * K, normalization="RMSNorm", activation="swiglu", **where), ()
    return octavo.Linear(K, K, **where), ()


def stack(layers, recipe, device):
    return octavo.Sequential(*[build("linear", recipe, device)[0] for _ in range(layers)])


def calls(module, device, *extra_inputs):
    """Of each file of Octavo, in one step after others like it. Comprehensions are no functions in later Pythons."""
    x = torch.randn(ROWS, K, device=device, dtype=torch.bfloat16, requires_grad=True)

    def step():
        module(x, *extra_inputs).backward(torch.ones_like(x))

    found = Counter()

    def seen(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            found[code.co_filename.removeprefix(PACKAGE)] += 1

    with torch.autograd.set_multithreading_enabled(False):  # a profile is of one thread
        step()
        octavo.step(module)  # delayed scaling's first step is not like the others
        for _ in range(4):
            step()
        readings = []
        for _ in range(2):
            found.clear()
            sys.setprofile(seen)
            try:
                step()
            finally:
                sys.setprofile(None)
            readings.append(dict(found))
    assert readings[0] == readings[1], "a step is as the step before"
    return found


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "fp8-current", "fp8-block"])
@pytest.mark.parametrize("kind", MOST)
def test_a_step_like_the_one_before_is_few_calls(kind, recipe, device):
    if kind == "grouped" and device == "cpu":
        pytest.skip("on a CPU the reference reads the sizes of groups, so that nothing replays")
    module, extra_inputs = build(kind, recipe, device)
    found = calls(module, device, *extra_inputs)
    assert found.total() <= MOST[kind], found
    busy = [name for name in found if name.split("/")[0] in ("quant", "kernels", "recipes", "formats.py")]
    assert not busy, "what a replay holds was found out again"


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "fp8-block"])
def test_another_layer_in_a_sequential_is_a_few_more(recipe, device):
    few, many = (calls(stack(layers, recipe, device), device).total() for layers in (2, 10))
    assert many - few <= 8 * MOST_MORE, (few, many)
