"""The doctor, reports, checkpoints and conversions give the same in every state of torch, and leave the same model."""

import functools
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.strange.functions import FUNCTIONS
from tests.strange.harness import differences
from tests.strange.states import DEFAULTS, GPU_DEFAULTS, WITHOUT_GRADIENTS

CONTEXTS = DEFAULTS | GPU_DEFAULTS | WITHOUT_GRADIENTS


def cases():
    """Yields the whole grid; all but a sample, in which every function meets every context, is marked slow."""
    for i, function in enumerate(FUNCTIONS):
        for j, context in enumerate(CONTEXTS):
            for k, recipe in enumerate(function.recipes):
                for device in function.devices:
                    marks = [pytest.mark.gpu] * (device == "cuda" or context in GPU_DEFAULTS)
                    marks += [pytest.mark.slow] * ((i + j // 4) % len(function.recipes) != k)
                    name = f"{function}-{recipe}-{context}-{device}"
                    yield pytest.param(function, recipe, context, device, marks=marks, id=name)


@functools.cache
def plain_result(function, recipe, device):
    with tempfile.TemporaryDirectory() as folder:
        return function.call(nullcontext, recipe, device, Path(folder))


@pytest.mark.usefixtures("fresh_compiler")  # octavo.explain compiles
@pytest.mark.parametrize(("function", "recipe", "context", "device"), list(cases()))
def test_a_function_in_a_state_of_torch(function, recipe, context, device, tmp_path):
    want = (plain_result if function.is_lasting else plain_result.__wrapped__)(function, recipe, device)
    found = function.call(CONTEXTS[context], recipe, device, tmp_path)
    # on a GPU torch's own embedding and attention have other gradients with deterministic algorithms
    may_differ = context in WITHOUT_GRADIENTS or (context == "deterministic algorithms" and device == "cuda")
    assert differences(found, want, function.may_differ if may_differ else ()) == []
