"""Published FP8 codes are refused where they would be taken for values: in state dicts, in convert and in calls."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig, UnsupportedDtype
from tests.support.dispatched_experts import Config, Gated
from tests.support.titan_experts import GroupedExperts

pytestmark = pytest.mark.usefixtures("expert_registry")
FP8 = torch.float8_e4m3fn
X = torch.linspace(-1, 1, 8 * 256).view(8, 256)


def published(weight, block=128):
    """Codes of a weight, and their scales, one for each block."""
    rows, columns = (-(-n // block) for n in weight.shape[-2:])
    scale = 1e-3 * torch.arange(1, rows * columns + 1, dtype=torch.float32).view(rows, columns)
    scale = scale.expand(*weight.shape[:-2], rows, columns).contiguous()
    whole = scale.repeat_interleave(block, -2)[..., : weight.shape[-2], :].repeat_interleave(block, -1)
    return (weight / whole[..., : weight.shape[-1]]).to(FP8), scale


def values_of(codes, scale, block=128):
    whole = scale.repeat_interleave(block, -2)[..., : codes.shape[-2], :].repeat_interleave(block, -1)
    return codes.float() * whole[..., : codes.shape[-1]]


def linear():
    return nn.Sequential(octavo.Linear(256, 200, recipe="fp8-block", dtype=torch.bfloat16))


def converted():
    model = nn.Sequential(nn.Linear(256, 200))
    octavo.convert(model, "fp8-current")
    return model


def quantized():
    model = linear()
    octavo.quantize_weights(model)
    return model


def grouped(**settings):
    return nn.Sequential(octavo.GroupedLinear(2, 256, 200, recipe="fp8-current", **settings))


def stacked():
    model = nn.Sequential(Gated(Config(), experts=3, hidden=256, ffn=160))
    octavo.convert(model, "fp8-current")
    return model


def titan():
    model = nn.Sequential(GroupedExperts(experts=3, hidden=256, ffn=160))
    octavo.convert(model, "fp8-current")
    return model


MODELS = {
    "Linear": (linear, "0.weight"), "converted": (converted, "0.weight"), "stored as codes": (quantized, "0.weight"),
    "without a recipe": (lambda: nn.Sequential(octavo.Linear(256, 200)), "0.weight"),
    "on meta": (lambda: linear().to("meta"), "0.weight"),
    "LayerNormLinear": (lambda: nn.Sequential(octavo.LayerNormLinear(256, 200)), "0.linear.weight"),
    "GroupedLinear": (grouped, "0.weight"),
    "a weight for each group": (lambda: grouped(single_grouped_weight=False), "0.weight1"),
    "experts of transformers": (stacked, "0.down_proj"), "experts of torchtitan": (titan, "0.w3_EFD"),
}  # fmt: skip
models = pytest.mark.parametrize("made", MODELS.values(), ids=MODELS)
assigns = pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])


def state_of(model, key):
    """The state dict of a model, with codes and scales in the place of one weight, and the values of these."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    weight = torch.randn(state[key].shape, generator=torch.Generator().manual_seed(0)) * 0.02
    codes, scale = published(weight)
    return {**state, key: codes, f"{key}_scale_inv": scale}, values_of(codes, scale)


def refused(model, state, sentence, **settings):
    """Loading raises that sentence, and leaves the matrices as they were."""
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters() if p.dim() > 1}
    with pytest.raises(UnsupportedDtype, match=re.escape(sentence)) as error:
        model.load_state_dict(state, **settings)
    matrices = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    for name, (same, tensor) in before.items():
        assert id(matrices[name]) == same and (tensor.is_meta or torch.equal(matrices[name], tensor)), name
    return str(error.value)


# -- state dicts -------------------------------------------------------------------------------------------------------


@models
@assigns
@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
def test_a_state_dict_with_codes_is_refused_and_its_line_makes_values(made, assign, strict):
    make, key = made
    model = make()
    state, values = state_of(model, key)
    said = refused(
        model, state, f"{key} of this state dict is {FP8}: published codes, which are values only if they are "
        f"multiplied by their scales ({key}_scale_inv).", strict=strict, assign=assign,
    )  # fmt: skip
    exec(said.partition("before load_state_dict: ")[2].removesuffix("."), {}, {"state": state})
    assert torch.equal(state[key], values)
    if not key.endswith("1"):  # of a weight for each group, torch assigns all or none
        model.load_state_dict(state, strict=True, assign=True)
        assert model.state_dict()[key].dtype == torch.float32 or made[0] is quantized


SCALES = {
    "one": ((), "FP8", "state.pop(*).float()"),
    "one of a dim": ((1,), "FP8", "state.pop(*).float()"),
    "of rows": ((200,), "FP8", "state.pop(*).float()[..., None]"),
    "of rows, a column": ((200, 1), "FP8", "state.pop(*).float()"),
    "of blocks": ((2, 2), "FP8", "state.pop(*).float().repeat_interleave(128, -2)[..., :200, :].repeat_interleave("
                  "128, -1)[..., :256]"),
    "of MX": ((200, 8), "FP8", "state.pop(*).float().repeat_interleave(32, -1)[..., :256]"),
    "of int8": ((200, 1), "int8", "state.pop(*).float()"),
}  # fmt: skip


@pytest.mark.parametrize(("shape", "kind", "line"), SCALES.values(), ids=SCALES)
def test_the_line_fits_the_scales(shape, kind, line):
    dtype = FP8 if kind == "FP8" else torch.int8
    codes = (torch.randn(200, 256, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
    scale = torch.rand(shape) + 0.5
    state = {"weight": codes, "bias": torch.zeros(200), "weight_scale": scale, "input_scale": torch.ones(())}
    said = refused(octavo.Linear(256, 200), dict(state), "(weight_scale, input_scale)", strict=False)
    line = line.replace("*", '"weight_scale"')
    assert said.endswith(f'state["weight"] = state["weight"].float() * {line}; del state["input_scale"].')
    exec(said.partition("before load_state_dict: ")[2].removesuffix("."), {}, {"state": state})
    assert set(state) == {"weight", "bias"}
    if scale.dim() == 1:
        scale = scale[:, None]
    if scale.dim() == 2:
        for dim, n in enumerate((200, 256)):
            block = {200: 1, 1: n, 2: 128, 8: 32}[scale.shape[dim]]
            scale = scale.repeat_interleave(block, dim).narrow(dim, 0, n)
    assert torch.equal(state["weight"], codes.float() * scale)
    octavo.Linear(256, 200).load_state_dict(state)


OTHERS = {
    "without scales": ({"weight": torch.zeros(16, 32).to(FP8)}, "(this state dict has none). Load the folder with "
        "octavo.load_fp8(model, folder), which keeps the codes, or dequantize it before "
        'load_state_dict: state["weight"] = state["weight"].float() * scales, by the scales that'),
    "E5M2": ({"weight": torch.zeros(16, 32).to(torch.float8_e5m2)}, "is torch.float8_e5m2: published codes"),
    "of two levels": ({"weight": torch.zeros(16, 16, dtype=torch.uint8), "weight_scale": torch.ones(16, 2).to(FP8),
                       "weight_scale_2": torch.ones(())}, "(weight_scale, weight_scale_2). Load the folder with "
        "octavo.load_fp8(model, folder), which keeps the codes, or dequantize it before "
        "load_state_dict: have the program that made the checkpoint write it in bfloat16."),
    "packed": ({"weight": torch.zeros(16, 16, dtype=torch.uint8), "weight_scale": torch.ones(16, 2)},
               "have the program that made the checkpoint write it"),
    "scales of another shape": ({"weight": torch.zeros(16, 32).to(FP8), "weight_scale": torch.ones(3, 5)},
                                "have the program that made the checkpoint write it"),
    "scales without codes": ({"weight_scale_inv": torch.ones(1, 1)}, "weight_scale_inv of this state dict is a scale of"
        " published codes, and Linear takes a weight of values. Multiply weight by its scales unless that is done, and "
        "drop the keys weight_scale_inv."),
    "codes that were cast": ({"weight": torch.zeros(16, 32), "weight_scale": torch.ones(())}, "drop the keys weight"),
    "a scale of x": ({"weight": torch.zeros(16, 32), "input_scale": torch.ones(())}, "drop the keys input_scale."),
    "packed under another name": ({"weight_packed": torch.zeros(16, 16, dtype=torch.uint8),
                                   "weight_scale": torch.ones(16, 2)}, "weight_scale of this state dict is a scale"),
}  # fmt: skip


@pytest.mark.parametrize(("state", "sentence"), OTHERS.values(), ids=OTHERS)
def test_other_codes_and_scales_are_named(state, sentence):
    refused(octavo.Linear(32, 16, bias=False), state, sentence, strict=False)


def test_weights_of_16_32_and_64_bits_load():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        layer = octavo.Linear(32, 16, bias=False, recipe="fp8-current")
        layer.load_state_dict({"weight": torch.full((16, 32), 0.5, dtype=dtype)})
        assert (layer.weight == 0.5).all()


class Scaled(nn.Linear):
    """A layer with a scale and a mask of its own, which its forward does not use."""

    def __init__(self):
        super().__init__(32, 16)
        self.weight_scale = nn.Parameter(torch.ones(16))
        self.register_buffer("mask", torch.ones(16, dtype=torch.uint8))


def test_a_subclass_keeps_a_scale_of_its_own():
    model = nn.Sequential(Scaled())
    octavo.convert(model, "fp8-current")
    state = {**model.state_dict(), "0.weight_scale": torch.full((16,), 2.0)}
    model.load_state_dict(state)
    assert (model[0].weight_scale == 2).all()


@pytest.mark.parametrize("make", [stacked, titan], ids=["transformers", "torchtitan"])
def test_copies_of_experts_refuse_codes_and_reverted_experts_do_not(make):
    model = make()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)) if make is stacked else model):
        key = next(name for name in other.state_dict())
        refused(other, state_of(other, key)[0], f"{key} of this state dict is", strict=False)
        octavo.revert(other)
        other.load_state_dict(state_of(other, key)[0], strict=False)
        assert not other[0]._load_state_dict_pre_hooks
    octavo.convert(model, "fp8-block", overwrite=True)
    key = next(name for name in model.state_dict())
    refused(model, state_of(model, key)[0], f"{key} of this state dict is", strict=False)
    assert len(model[0]._load_state_dict_pre_hooks) == 1


# -- conversions and calls ---------------------------------------------------------------------------------------------


class FP8Linear(nn.Linear):
    """As transformers has it: codes, their scales, and a forward that multiplies both."""

    def __init__(self, scale="weight_scale_inv"):
        super().__init__(256, 200, bias=False)
        codes, scales = published(self.weight.detach())
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_parameter(scale, nn.Parameter(scales))

    def forward(self, x):
        return x @ values_of(self.weight, self.weight_scale_inv).T


SENTENCE = (
    "convert cannot take 0: its weight is torch.float8_e4m3fn: published codes, which are values only if they are "
    "multiplied by their scales (weight_scale_inv). Build the model without codes, and fill it with "
    "octavo.load_fp8(model, folder), or load it dequantized (transformers: "
    "quantization_config=FineGrainedFP8Config(dequantize=True))"
)


@pytest.mark.parametrize("policy", [None, lambda path, module: "fp8-current"], ids=["by itself", "by a policy"])
def test_layers_of_codes_are_not_converted(policy):
    model = nn.Sequential(FP8Linear())
    with pytest.raises(UnsupportedConfig, match=re.escape(SENTENCE)):
        octavo.convert(model, "fp8-current", policy)
    with pytest.warns(UserWarning, match="found nothing to convert"):
        report = octavo.convert(model, "fp8-current", policy, strict=False)
    assert "published codes" in report.rows[0].why
    model.float()  # makes values of codes, and leaves the scales
    with pytest.raises(UnsupportedConfig, match=r"its weight is torch.float32: .* scales \(weight_scale_inv\)"):
        octavo.convert(model, "fp8-current", policy)
    assert type(model[0]) is FP8Linear


def test_plain_layers_and_experts_of_codes_are_not_converted():
    plain = nn.Sequential(nn.Linear(256, 200).to(FP8))
    experts = nn.Sequential(Gated(Config(), experts=3, hidden=256, ffn=160).to(FP8))
    rows = nn.Sequential(GroupedExperts(experts=3, hidden=256, ffn=160).to(FP8))
    with pytest.raises(UnsupportedConfig, match=r"its weight is torch\.float8_e4m3fn: published codes"):
        octavo.convert(plain, "fp8-current")
    for model, name in ((experts, "gate_up_proj"), (rows, "w1_EFD")):
        with pytest.warns(UserWarning, match=rf"its {name} is torch\.float8_e4m3fn: published codes"):
            octavo.convert(model, "fp8-current")
    cast = nn.Sequential(Gated(Config(), experts=3, hidden=256, ffn=160))
    cast[0].gate_up_proj_scale_inv = nn.Parameter(torch.ones(3, 3, 2))
    with pytest.warns(UserWarning, match=r"its gate_up_proj is torch.float32: .*\(gate_up_proj_scale_inv\)"):
        octavo.convert(cast, "fp8-current")
    for layer in (octavo.Linear(256, 200), octavo.GroupedLinear(2, 256, 200)):
        model = nn.Sequential(layer.to(FP8))
        with pytest.raises(UnsupportedConfig, match=r"its weight is torch.float8_e4m3fn: published codes"):
            octavo.convert(model, "fp8-current")


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
def test_a_call_on_codes_does_not_tell_to_cast_them(recipe):
    single, group = octavo.Linear(256, 200, recipe=recipe), octavo.GroupedLinear(2, 256, 200, recipe=recipe)
    biased = octavo.Linear(256, 200, recipe=recipe)
    biased.bias.data = biased.bias.data.to(FP8)
    for layer, sizes in ((single, ()), (group, (torch.tensor([4, 4]),))):
        for p in layer.parameters():
            p.data = p.data.to(FP8)
        with pytest.raises(UnsupportedDtype) as error:
            layer(X, *sizes)
        assert "got torch.float8_e4m3fn. These are published codes" in str(error.value)
        assert "codes.float() * scales" in str(error.value) and "Cast" not in str(error.value)
    with pytest.raises(UnsupportedDtype, match="These are published codes"):
        biased(X)
