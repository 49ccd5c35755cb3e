"""Settings that octavo.MoE and octavo.moe.Experts hand on to their layers, and those that they refuse."""

import pytest

import octavo
from octavo.errors import UnknownSetting, UnsupportedConfig


def mixture(**settings):
    return octavo.MoE(32, 48, 4, 2, **settings)


def dispatched(**settings):
    return mixture(dispatcher=octavo.moe.LocalDispatch(), **settings)


def experts(**settings):
    return octavo.moe.Experts(4, 32, 48, **settings)


every = pytest.mark.parametrize("make", [mixture, dispatched, experts])
PARALLEL = {"parallel_mode": "column", "tp_group": None, "column_blocks": 2, "sequence_parallel": True,
            "gather_again": False}  # fmt: skip


@every
@pytest.mark.parametrize("name", PARALLEL)
def test_a_split_over_ranks_is_refused_with_the_way_to_one(make, name):
    title = "Experts" if make is experts else "MoE"
    with pytest.raises(UnsupportedConfig, match=rf"^{title}\({name}=...\): .*octavo.GroupedLinear\(parallel_mode"):
        make(**{name: PARALLEL[name]})


@every
def test_an_unknown_setting_lists_those_of_the_mixture_and_of_its_layers(make):
    with pytest.raises(UnknownSetting) as error:
        make(colour=1)
    text = str(error.value)
    listed = text.split("It takes ")[1].rstrip(".").replace(", and of octavo.GroupedLinear: ", ", ").split(", ")
    assert len(set(listed)) == len(listed) and not set(PARALLEL) & set(listed)
    assert {"recipe", "dtype", "activation", "keep_weight_codes", "tail"} <= set(listed)
    assert ("top_k" in listed) == (make is not experts)
    assert ("fc1_output_storage" in listed) == (make is not dispatched)


@pytest.mark.parametrize("make", [mixture, dispatched])
@pytest.mark.parametrize(
    ("name", "meant"), [("n_groups", "groups"), ("topk", "top_k"), ("keep_weight_code", "keep_weight_codes")]
)
def test_a_misspelt_setting_of_a_mixture_is_found(make, name, meant):
    with pytest.raises(UnknownSetting, match=rf"^MoE has no setting '{name}'. Did you mean '{meant}'\?"):
        make(**{name: 4})


@every
def test_settings_reach_the_layers(make):
    model = make(keep_weight_codes=False, bias=True, strict=False)
    layers = (model if make is experts else model.experts).fc1
    assert not layers.keep_weight_codes and not layers.strict and layers.bias is not None


def test_the_storage_reaches_experts_without_a_dispatcher():
    assert mixture(fc1_output_storage="fp8").experts.fc1_output_storage == "fp8"
    with pytest.raises(UnsupportedConfig, match="a dispatcher takes the place"):
        dispatched(fc1_output_storage="fp8")


def test_a_misspelt_setting_of_experts_is_found():
    with pytest.raises(UnknownSetting, match=r"^Experts has no setting 'fc1_storage'. Did you mean 'fc1_output_st"):
        experts(fc1_storage="fp8")
