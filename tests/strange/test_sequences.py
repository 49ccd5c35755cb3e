"""No sequence of environments leaves a trace in a layer, whichever two or three follow each other."""

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.strange.environments import ENVIRONMENTS
from tests.strange.harness import traces
from tests.strange.layers import LAYERS

HERE = [each for each in ENVIRONMENTS if torch.cuda.is_available() or not each.needs_gpu]
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@st.composite
def sequences(draw, compiles):
    """Draws a layer, a recipe, and environments that take both."""
    layer = draw(st.sampled_from(LAYERS))
    recipe = draw(st.sampled_from(layer.recipes))
    fit = [each for each in HERE if each.takes(layer, recipe) and (compiles or not each.compiles)]
    drawn = draw(st.lists(st.sampled_from(fit), min_size=2, max_size=3, unique=True))
    return layer, recipe, *sorted(drawn, key=lambda environment: environment.place)


def check(case, device):
    note(f"traces{tuple(map(str, case))}")
    torch._dynamo.reset()
    assert traces(*case, device=device) == []


@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_in_a_sequence_of_environments(device):
    @settings(max_examples=100)
    @given(sequences(compiles=False))
    def run(case):
        check(case, device)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_in_many_sequences_of_environments(device):
    @settings(max_examples=3000)
    @given(sequences(compiles=True))
    def run(case):
        check(case, device)

    run()
