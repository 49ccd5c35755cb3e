"""Weights that are codes, saved and loaded: a resumed run is bit-equal to one that was not interrupted."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import octavo
from octavo.checkpoints.tensor_file import bytes_of
from octavo.errors import UnsupportedConfig, UnsupportedShape
from octavo.weights.quantized_weight import INNER

RECIPES = (
    "fp8-block", "fp8-block(scale='fp32')", "fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-rowwise(pow2=False)",
    "mxfp8", "nvfp4", "nvfp4(square_weights=False)",
)  # fmt: skip
OPTIMIZERS = {
    "float32": lambda p: octavo.optim.AdamW(p, lr=3e-3),
    "bfloat16": lambda p: octavo.optim.AdamW(p, lr=3e-3, master="bfloat16"),
    "none": lambda p: octavo.optim.AdamW(p, lr=3e-3, master="none"),
    "torch": lambda p: torch.optim.AdamW(p, lr=3e-3),
}


class Net(nn.Module):
    """A layer by itself, groups in one parameter, and groups with a parameter each."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(144, 160, bias=False)
        self.experts = octavo.GroupedLinear(2, 160, 144)
        self.parts = octavo.GroupedLinear(2, 144, 144, single_grouped_weight=False)

    def forward(self, x):
        sizes = torch.tensor([len(x) // 2, len(x) // 2])
        return self.parts(self.experts(torch.relu(self.up(x)), sizes), sizes)


def made(recipe, optimizer, *, seed=0, columns=False, dtype=torch.bfloat16):
    torch.manual_seed(seed)
    model = Net().to(dtype)
    octavo.convert(model, recipe)
    octavo.quantize_weights(model, trainable=True, keep_columns=columns)
    found = OPTIMIZERS[optimizer](model.parameters())
    octavo.attach(model, found)
    return model, found


def train(model, optimizer, first, steps=2):
    """Return the outputs and losses of steps, each with data of its own."""
    seen = []
    for i in range(first, first + steps):
        x = torch.randn(32, 144, generator=torch.Generator().manual_seed(i)).to(model.up.weight.dtype)
        y = model(x)
        (y.float() - x.float()).square().mean().backward()
        seen += [y.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def codes_of(model):
    return {
        (name, inner): getattr(p, inner).clone()
        for name, p in model.named_parameters() for inner in INNER if getattr(p, inner, None) is not None
    }  # fmt: skip


def assert_equal(found, wanted):
    pairs = zip(found, wanted, strict=True) if isinstance(found, list) else ((found[k], wanted[k]) for k in wanted)
    for one, other in pairs:
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert bytes_of(one) == bytes_of(other)


def through_folder(saved, new, folder):
    octavo.save_checkpoint(folder, *saved, step=2)
    octavo.load_checkpoint(folder, *new)


def states_of(model):
    return {"model": model.state_dict(), "octavo": octavo.state_dict(model)}


def load_states(model, states):
    model.load_state_dict(states["model"])
    octavo.load_state_dict(model, states["octavo"])


def through_dicts(saved, new, folder):
    load_states(new[0], copy.deepcopy(states_of(saved[0])))
    new[1].load_state_dict(copy.deepcopy(saved[1].state_dict()))


def through_torch_save(saved, new, folder):
    """In the other order: Octavo's state before the values."""
    file = io.BytesIO()
    torch.save({**states_of(saved[0]), "optimizer": saved[1].state_dict()}, file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    octavo.load_state_dict(new[0], states["octavo"])
    new[1].load_state_dict(states["optimizer"])
    new[0].load_state_dict(states["model"])


def through_dcp(saved, new, folder):
    dcp.save({**states_of(saved[0]), "optimizer": get_optimizer_state_dict(*saved)}, checkpoint_id=folder / "dcp")
    optimizer = get_optimizer_state_dict(*new)  # first: it makes the optimizer's state, and values of the weights
    states = {**states_of(new[0]), "optimizer": optimizer}
    dcp.load(states, checkpoint_id=folder / "dcp")
    set_optimizer_state_dict(*new, states["optimizer"])
    load_states(new[0], states)


WAYS = {
    f.__name__.removeprefix("through_"): f for f in (through_folder, through_dicts, through_torch_save, through_dcp)
}
SAMPLE = [
    ("fp8-block(scale='fp32')", "float32", "folder"), ("fp8-block(scale='fp32')", "torch", "torch_save"),
    ("fp8-current", "none", "dicts"), ("fp8-delayed", "bfloat16", "folder"), ("fp8-current", "torch", "dcp"),
    ("fp8-block", "none", "dcp"), ("mxfp8", "none", "torch_save"), ("nvfp4", "float32", "dicts"),
    ("fp8-rowwise(pow2=False)", "torch", "folder"), ("nvfp4", "torch", "folder"),
]  # fmt: skip


def check_resumed(recipe, optimizer, way, folder, **settings):
    saved = made(recipe, optimizer, **settings)
    train(*saved, 0)
    new = made(recipe, optimizer, seed=9, **settings)
    train(*new, 7, 1)
    WAYS[way](saved, new, folder)
    assert_equal(codes_of(new[0]), codes_of(saved[0]))
    assert_equal(train(*new, 2), train(*saved, 2))
    assert_equal(codes_of(new[0]), codes_of(saved[0]))


@pytest.mark.parametrize(("recipe", "optimizer", "way"), SAMPLE)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(recipe, optimizer, way, tmp_path):
    check_resumed(recipe, optimizer, way, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_recipe_and_optimizer_resumes_in_every_way(recipe, optimizer, way, dtype, tmp_path):
    if optimizer == "none" and recipe.startswith("nvfp4"):
        pytest.skip("codes of E2M1 need a master copy")
    check_resumed(recipe, optimizer, way, tmp_path, dtype=dtype)


@pytest.mark.parametrize("recipe", ["fp8-block(scale='fp32')", "mxfp8"])
def test_column_codes_come_back_too(recipe, tmp_path):
    """Where they are not the row codes, transposed, they are saved."""
    saved, new = made(recipe, "float32", columns=True), made(recipe, "float32", seed=9, columns=True)
    train(*saved, 0, 1)
    through_folder(saved, new, tmp_path)
    assert_equal(codes_of(new[0]), codes_of(saved[0]))
    assert any("column" in name for name in octavo.state_dict(saved[0])) == (recipe == "mxfp8")


def test_published_codes_come_back(tmp_path):
    """Their scales are anybody's: no quantizer would make these."""

    def build(codes, scale):
        layer = octavo.Linear(384, 256, bias=False, recipe="fp8-block", device="meta")
        layer.weight = octavo.weight_from_codes(codes, scale, "fp8-block")
        return layer

    saved = build(torch.randint(0, 120, (256, 384), dtype=torch.uint8), torch.rand(2, 3) + 0.1)
    new = build(torch.zeros(256, 384, dtype=torch.uint8), torch.ones(2, 3))
    octavo.load_checkpoint(octavo.save_checkpoint(tmp_path, saved), new)
    assert_equal(new.weight.tensors(), saved.weight.tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_and_pickles_keep_codes_and_tied_groups(dtype):
    model, _ = made("fp8-block(scale='fp32')", "float32", dtype=dtype)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert_equal(codes_of(copied), codes_of(model))
        assert copied.parts.weight0.row_codes is copied.parts.weight1.row_codes
        assert copied.up.weight.row_codes.data_ptr() != model.up.weight.row_codes.data_ptr()
        assert_equal(octavo.state_dict(copied), octavo.state_dict(model))


def test_values_load_into_a_stock_model_and_old_states_still_load():
    model, optimizer = made("fp8-block(scale='fp32')", "float32")
    train(model, optimizer, 0, 1)
    stock = nn.Linear(144, 160, bias=False, dtype=torch.bfloat16)
    stock.load_state_dict(model.up.state_dict())
    assert torch.equal(stock.weight, model.up.weight.dequantize())
    new, _ = made("fp8-block(scale='fp32')", "float32", seed=9)
    new.load_state_dict(model.state_dict())
    octavo.load_state_dict(new, octavo.state_dict(model, codes=False))  # as every state before codes were in it
    torch.testing.assert_close(new.up.weight.dequantize(), model.up.weight.dequantize(), rtol=0.13, atol=1e-3)


def test_values_that_codes_stand_for_leave_the_codes():
    model, optimizer = made("fp8-block(scale='fp32')", "float32")
    train(model, optimizer, 0, 1)
    before, version = codes_of(model), model.up.weight.row_codes._version
    model.load_state_dict(model.state_dict())
    assert_equal(codes_of(model), before)
    assert model.up.weight.row_codes._version == version
    state = model.state_dict()
    state["up.weight"].flatten()[7] += 1
    model.load_state_dict(state)
    assert model.up.weight.row_codes._version > version


@pytest.mark.parametrize("order", ["codes first", "values first"])
def test_a_model_on_the_meta_device_takes_codes(order):
    saved, _ = made("fp8-block(scale='fp32')", "float32")
    new = copy.deepcopy(saved).to("meta")
    states = states_of(saved)
    if order == "codes first":
        octavo.load_state_dict(new, states["octavo"])
    new.load_state_dict(states["model"], assign=True)
    if order == "values first":
        octavo.load_state_dict(new, states["octavo"])
    assert_equal(codes_of(new), codes_of(saved))
    assert_equal(octavo.state_dict(new), states["octavo"])


def test_what_does_not_fit_is_refused_before_anything_is_written():
    model, _ = made("fp8-block(scale='fp32')", "float32")
    before = codes_of(model)
    state = octavo.state_dict(model)
    scale = "up.codes.fp8-block(scale='fp32').row_scale"
    plain = Net()
    octavo.convert(plain, "fp8-block(scale='fp32')")
    with pytest.raises(UnsupportedConfig, match=r"missing up.codes.*row_scale"):
        octavo.load_state_dict(model, {k: v for k, v in state.items() if k != scale})
    with pytest.raises(UnsupportedShape, match=r"up.codes.*row_scale is torch.float32"):
        octavo.load_state_dict(model, {**state, scale: torch.ones(7, 7)})
    with pytest.raises(UnsupportedConfig, match=r"call octavo.quantize_weights as for the saved model"):
        octavo.load_state_dict(plain, state)
    other, _ = made("fp8-block", "float32")
    with pytest.raises(UnsupportedConfig, match=r"unknown up.codes"):
        octavo.load_state_dict(other, state)
    assert_equal(codes_of(model), before)
