"""octavo.load_state_dict with a state of another recipe says which recipe, where the state tells."""

import pytest
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig


def made(*recipes):
    """A model with a layer for each recipe; None leaves torch's own."""
    return nn.Sequential(*[nn.Linear(16, 16) if r is None else octavo.Linear(16, 16, recipe=r) for r in recipes])


def refused(saved, loading, **options):
    with pytest.raises(UnsupportedConfig, match=r"^This model's recipes and the state do not match: ") as error:
        octavo.load_state_dict(loading, octavo.state_dict(saved), **options)
    return str(error.value).removeprefix("This model's recipes and the state do not match: ")


WAY = ". Convert the model with the recipe it was saved with, or pass strict=False."
CASES = {
    "fp8-delayed into fp8-block": (
        ("fp8-delayed",), ("fp8-block",), "the state of 0 is of fp8-delayed, and the layer is in fp8-block"
    ),
    "fp8-delayed into a layer with settings": (
        ("fp8-delayed",), ("fp8-block(wgrad='bf16')",),
        "the state of 0 is of fp8-delayed, and the layer is in fp8-block(wgrad='bf16')",
    ),
    "nvfp4 into bf16": (
        ("nvfp4",), ("bf16",),
        "the state of 0 is of nvfp4, or another that rounds stochastically, and the layer is in bf16"
    ),
    "fp8-block into fp8-delayed": (
        ("fp8-block",), ("fp8-delayed",), "the state has no scales of 0, and the layer is in fp8-delayed"
    ),
    "nvfp4 into fp8-delayed": (
        ("nvfp4",), ("fp8-delayed",),
        "the state of 0 is of nvfp4, or another that rounds stochastically, and the layer is in fp8-delayed",
    ),
    "several layers": (
        ("bf16", "fp8-delayed", "fp8-delayed", "fp8-delayed"), ("bf16", "fp8-delayed", "mxfp8", "fp8-current"),
        "the state of 2 is of fp8-delayed, and the layer is in mxfp8; 1 more layer differs too",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("saved", "loading", "sentence"), CASES.values(), ids=CASES)
def test_the_recipe_of_the_state_is_named(saved, loading, sentence):
    assert refused(made(*saved), made(*loading)) == sentence + WAY


def test_a_layer_alone_is_the_model():
    said = refused(octavo.Linear(8, 8, recipe="fp8-delayed"), octavo.Linear(8, 8, recipe="mxfp8"))
    assert said == "the state of the model is of fp8-delayed, and the layer is in mxfp8" + WAY


def test_a_model_that_was_not_converted_is_named():
    said = refused(made("fp8-delayed", "nvfp4"), made(None, None))
    assert said == "the state is of fp8-delayed, and the model has no layer of Octavo's" + WAY


def test_other_layers_are_told_by_the_names_of_their_tensors():
    said = refused(made("fp8-delayed"), made("fp8-delayed", "fp8-delayed"))
    assert said.startswith("the state has no scales of 1, and the layer is in fp8-delayed")
    said = refused(made("fp8-delayed", "fp8-delayed"), made("fp8-delayed"))
    assert said.startswith("missing nothing, unknown 1.scaling.forward.history, 1.scal")


def test_a_layer_that_follows_autocast_takes_any_state():
    model = made("fp8-delayed")
    follower = nn.Sequential(octavo.Linear(16, 16))
    octavo.load_state_dict(follower, octavo.state_dict(model))
    assert set(octavo.state_dict(follower)) == set(octavo.state_dict(model))
