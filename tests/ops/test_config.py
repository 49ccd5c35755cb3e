"""Configs of layers: fields that choose a mode are checked, and the string that a module writes is the config's own."""

import pytest

from octavo.errors import UnsupportedConfig
from octavo.ops.linear_config import call_key
from octavo.recipes import SHIPPED, recipe
from octavo.runtime.contract import LAYERS

MODES = {
    "linear": ("x", "weight", "main_grad", "deferred_wgrad", "x_columns", "dtype", "bias_dtype"),
    "grouped-linear": ("weight", "main_grad", "deferred_wgrad", "tail", "dtype", "scales_dtype"),
}


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, found in MODES.items() for field in found])
def test_a_mode_that_does_not_exist_is_refused(name, field):
    with pytest.raises(UnsupportedConfig, match=rf"{field} must be one of .*, got 'psot'"):
        LAYERS[name].config(f"{name}({field}='psot')")


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("field", ["wants_dq", "measures_b"])
def test_a_field_that_does_not_exist_is_refused(name, field):
    with pytest.raises(UnsupportedConfig, match=field):
        LAYERS[name].config(f"{name}({field}=True)")


@pytest.mark.parametrize("given", SHIPPED)
@pytest.mark.parametrize("name", MODES)
def test_a_written_key_is_read_back(name, given):
    key = call_key(name, recipe(given), dtype="bfloat16", wants_dx=True, main_grad="add", dummy_grad=True)
    config = LAYERS[name].config(key)
    assert (config.recipe, config.dtype) == (recipe(given), "bfloat16")
    assert (config.wants_dx, config.wants_dw) == (True, False)
    assert (config.main_grad, config.dummy_grad) == ("add", True)


def test_every_layer_answers_the_whole_contract():
    """Nothing is probed: each member is there, and documented where it is declared."""
    from octavo.runtime.contract import Layer

    members = [value for value in vars(Layer).values() if callable(value)]
    assert len(members) > 20
    assert all(member.__doc__ for member in members if member.__name__ != "__init__")
    # users' operations, which other tests define, register layers too
    layers = {
        name: layer
        for name, layer in LAYERS.items()
        if isinstance(layer, Layer) and not name.startswith(("custom.", "fused."))
    }
    assert set(layers) == {
        "activation", "add", "amaxes", "chain", "changed-linear", "coded-activation", "dy-cast", "fork",
        "grouped-linear", "linear", "norm", "permute", "permute-probs", "raise-amax", "rotary", "rounding",
        "router-logits", "shard-cast", "token-sort", "unpermute",
    }  # fmt: skip
    assert all(layer.title and layer.config(layer.Config().key) == layer.Config() for layer in layers.values())


def test_a_fused_operation_is_registered_beside_the_layers_it_runs():
    from octavo.fusion.rules import FILES

    named = {rule.op for file in FILES for rule in file.RULES}
    assert all(LAYERS[op.op_name] is op and op.op_is_step for op in named)
