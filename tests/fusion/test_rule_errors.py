"""Rules and requirements that are refused: for a subclass, without a side, misspelt, required and not fired."""

import pytest
from torch import nn

import octavo
from octavo import ops
from tests.support.custom_operations import LinearGelu
from tests.support.sequentials import H, linear, rows


def test_a_rule_for_a_subclass_would_fire_on_its_parent():
    class Mine(ops.GELU):
        pass

    with pytest.raises(octavo.errors.UnsupportedConfig, match="Activation"):
        ops.Rule("mine", (octavo.Linear, Mine), LinearGelu)


def test_a_rule_without_a_side_is_refused():
    with pytest.raises(octavo.errors.UnsupportedConfig, match="Forward"):
        octavo.Sequential(linear(), ops.GELU(), rules=(ops.Rule("mine", (octavo.Linear, ops.GELU), LinearGelu),))


@pytest.mark.parametrize(
    "settings", [{"pattern": (ops.GELU(),)}, {"conditions": ops.Condition("a", bool, "b")}], ids=str
)
def test_a_rule_says_what_it_is_made_of(settings):
    with pytest.raises(octavo.errors.UnsupportedConfig, match="tuple of"):
        ops.Rule("mine", **{"pattern": (octavo.Linear, ops.GELU), "op": LinearGelu, **settings})


def test_what_is_required_must_fire_in_every_run_that_has_it():
    parts = [ops.RMSNorm(H), linear(recipe="fp8-current"), nn.Identity(), ops.RMSNorm(H), linear()]
    with pytest.raises(octavo.errors.UnsupportedConfig, match="norm-linear"):
        octavo.Sequential(*parts, require="norm-linear")(rows())


def test_what_is_required_has_to_exist():
    with pytest.raises(octavo.errors.UnsupportedConfig, match="no rule has that name"):
        octavo.Sequential(ops.RMSNorm(H), linear(recipe="fp8-current"), require="nrom-linear")(rows())
