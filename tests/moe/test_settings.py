"""Settings that octavo.MoE and octavo.moe.Experts hand on to their layers, and those that they refuse."""

import math

import pytest
import torch

import octavo
from octavo import moe
from octavo.errors import UnknownSetting, UnsupportedConfig, UnsupportedDtype, UnsupportedShape


def mixture(**settings):
    return octavo.MoE(32, 48, 4, 2, **settings)


def dispatched(**settings):
    return mixture(dispatcher=octavo.moe.LocalDispatch(), **settings)


def experts(**settings):
    return octavo.moe.Experts(4, 32, 48, **settings)


every = pytest.mark.parametrize("make", [mixture, dispatched, experts])
PARALLEL = {"parallel_mode": "column", "tp_group": None, "column_blocks": 2, "sequence_parallel": True,
            "gather_again": False, "row_codes_only": False, "ep_group": None}  # fmt: skip
OF_A_MIXTURE = {"tp_group", "ep_group"}


@pytest.mark.parametrize(
    ("make", "name"),
    [(make, name) for make in (mixture, dispatched, experts) for name in PARALLEL
     if make is experts or name not in OF_A_MIXTURE],
)  # fmt: skip
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
    assert len(set(listed)) == len(listed) and not (set(PARALLEL) - OF_A_MIXTURE) & set(listed)
    assert OF_A_MIXTURE & set(listed) == (set() if make is experts else OF_A_MIXTURE)
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


def test_features_are_split_with_a_dispatcher_alone():
    with pytest.raises(UnsupportedConfig, match=r"^MoE\(tp_group=...\) .* Pass ep_group too"):
        mixture(tp_group="")


def test_ranks_of_experts_are_given_once():
    for given in ({"dispatcher": octavo.moe.LocalDispatch()}, {"num_local_experts": 2}):
        with pytest.raises(UnsupportedConfig, match=r"^MoE\(ep_group=...\) makes a dispatcher"):
            mixture(ep_group="", **given)
    assert mixture(ep_group="").dispatcher is None  # one rank


REFUSED_RANKS = {
    "a capacity for exact numbers": ({"capacity": 4, "engine": "all-to-all"}, "capacity=4. is a number of rows for"),
    "no number of rows": ({"capacity": -1}, "capacity is a number of rows, from 0 up, got -1"),
    "an unknown engine": ({"engine": "nccl"}, "ExpertParallel.engine"),
    "an unknown payload": ({"payload": "fp8"}, "ExpertParallel.payload"),
    "no group": ({"group": "elsewhere"}, "'elsewhere'"),
}


@pytest.mark.parametrize("case", REFUSED_RANKS)
def test_settings_of_ranks_are_checked_at_once(case):
    settings, message = REFUSED_RANKS[case]
    with pytest.raises(UnsupportedConfig, match=message):
        moe.ExpertParallel(**settings)


NO_CODES = {
    "bf16": "bf16 does not quantize x",
    "nvfp4": "rows of x that nv quantizes do not have scales of their own",
    "fp8-rowwise(wgrad='bf16')": "dw has no quantizer for the columns of x",
}


@pytest.mark.parametrize("recipe", NO_CODES)
def test_codes_of_rows_that_do_not_travel_are_refused(recipe):
    model = mixture(dispatcher=moe.ExpertParallel(payload="codes"), recipe=recipe)
    with pytest.raises(UnsupportedConfig, match=rf"payload='codes'\): {NO_CODES[recipe]}.* Use payload='auto' or"):
        model(torch.randn(6, 32))


def test_the_storage_reaches_experts_without_a_dispatcher():
    assert mixture(fc1_output_storage="fp8").experts.fc1_output_storage == "fp8"
    with pytest.raises(UnsupportedConfig, match="a dispatcher takes the place"):
        dispatched(fc1_output_storage="fp8")


def test_a_misspelt_setting_of_experts_is_found():
    with pytest.raises(UnknownSetting, match=r"^Experts has no setting 'fc1_storage'. Did you mean 'fc1_output_st"):
        experts(fc1_storage="fp8")


# -- values that make no sense ---------------------------------------------------------------------------------------

NO_NUMBERS = [math.nan, math.inf, -math.inf, 1e39, "0.1", True, None, torch.tensor(1.0)]
no_numbers = pytest.mark.parametrize("value", [*NO_NUMBERS, -1.0], ids=str)
sizes = pytest.mark.parametrize("value", [0, -1, 2.0, "4", True, math.nan], ids=str)
INDEX, COUNTS = torch.zeros(6, 2, dtype=torch.int64), torch.tensor([1, 2, 3, 4])


@no_numbers
@pytest.mark.parametrize("name", ["scale", "aux_loss_coef", "z_loss_coef"])
def test_a_factor_that_is_no_finite_number_from_0_up_is_refused(name, value):
    with pytest.raises(UnsupportedConfig, match=f"^{name} must be a finite number from 0 up, got "):
        mixture(**{name: value})


@no_numbers
def test_functions_refuse_such_factors_too(value):
    with pytest.raises(UnsupportedConfig, match=r"^scale must be a finite number from 0 up"):
        moe.route(torch.randn(6, 4), 2, scale=value)
    bias = torch.zeros(4)
    with pytest.raises(UnsupportedConfig, match=r"^rate must be a finite number from 0 up"):
        moe.update_bias(bias, COUNTS, rate=value)
    assert not bias.any()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_route_takes_factors_that_change_and_refuses_others():
    call = torch.compile(lambda x, scale: moe.route(x, 2, scale=scale), backend="aot_eager", fullgraph=True)
    x = torch.randn(6, 4)
    for scale in (1.0, 2.0, 2.5, 3, 0.5, 0.25):
        assert torch.equal(call(x, scale)[0], moe.route(x, 2, scale=scale)[0])
    with pytest.raises(Exception, match="scale must be a finite number from 0 up"):
        call(x, math.nan)


@pytest.mark.parametrize("value", [0, 1, 0.5])
def test_whole_numbers_and_zero_are_factors(value):
    model = mixture(scale=value, aux_loss_coef=value, z_loss_coef=value)
    assert model(torch.randn(6, 32)).isfinite().all()


@sizes
@every
@pytest.mark.parametrize("name", ["hidden_size", "ffn_hidden_size", "num_experts"])
def test_a_size_that_is_no_number_from_1_up_is_refused(make, name, value):
    arguments = {"hidden_size": 32, "ffn_hidden_size": 48, "num_experts": 4, name: value}
    own = {} if make is experts else {"top_k": 1}
    if make is dispatched:
        own["dispatcher"] = moe.LocalDispatch()
    with pytest.raises(
        (UnsupportedConfig, UnsupportedShape), match=rf"({name}.*from 1 up|1 to 4096 (experts|groups)), got"
    ):
        (moe.Experts if make is experts else octavo.MoE)(**arguments, **own)


@sizes
def test_other_sizes_of_a_mixture_are_refused_too(value):
    with pytest.raises(UnsupportedConfig, match="shared_ffn_size must be a whole number from 1 up"):
        mixture(shared_ffn_size=value)
    with pytest.raises(UnsupportedConfig, match="num_local_experts"):
        dispatched(num_local_experts=value)
    for name in ("in_features", "out_features"):
        with pytest.raises(UnsupportedConfig, match=f"{name} must be a whole number from 1 up"):
            moe.Router(**{"in_features": 32, "out_features": 4, name: value})
    with pytest.raises(UnsupportedConfig, match="ffn_hidden_size must be a whole number from 1 up"):
        octavo.LayerNormMLP(32, value)


@pytest.mark.parametrize("value", ["no", 1, None, math.nan], ids=str)
@pytest.mark.parametrize("name", ["expert_bias", "shared_gate"])
def test_a_switch_is_true_or_false(name, value):
    with pytest.raises(UnsupportedConfig, match=f"{name} must be one of True, False"):
        mixture(**{name: value}, shared_ffn_size=40)


@sizes
def test_functions_refuse_numbers_of_experts_that_cannot_be(value):
    for call in (lambda: moe.sort(INDEX, value), lambda: moe.counts(INDEX, value)):
        with pytest.raises((UnsupportedConfig, UnsupportedShape), match=r"experts.* got"):
            call()
    with pytest.raises(UnsupportedConfig, match="align must be a whole number from 1 up"):
        moe.sort(INDEX, 4, align=value)
    with pytest.raises(UnsupportedConfig, match=r"top_k"):
        moe.sort(torch.ones(6, 4, dtype=torch.bool), top_k=value)


@pytest.mark.parametrize("value", [-1, True, False])
def test_a_number_of_tokens_is_an_int_from_0_up(value):
    for call in (lambda: mixture()(torch.randn(6, 32), tokens=value), lambda: moe.counts(INDEX, 4, value)):
        with pytest.raises((UnsupportedConfig, TypeError), match="tokens"):
            call()


@pytest.mark.parametrize("value", [0, -1, 2.0, "4", True, None], ids=str)
def test_groups_of_a_grouped_layer_are_counted_by_an_int(value):
    with pytest.raises(UnsupportedShape, match=r"1 to 4096 groups, got"):
        octavo.GroupedLinear(value, 48, 32)


@pytest.mark.parametrize("value", [-1, 2.0, "4", True, None], ids=str)
@pytest.mark.parametrize("name", ["in_features", "out_features"])
def test_features_of_a_grouped_layer_are_counted_by_an_int(name, value):
    with pytest.raises(UnsupportedConfig, match=f"{name} must be a whole number from 0 up, got"):
        octavo.GroupedLinear(**{"num_groups": 4, "in_features": 48, "out_features": 32, name: value})


def test_a_mask_is_no_count():
    bias = torch.zeros(4)
    with pytest.raises(UnsupportedDtype, match=r"counts as numbers, got torch.bool"):
        moe.update_bias(bias, COUNTS > 2)
    assert not bias.any()
