"""Experts in published checkpoints: one by one in the file, stacked in the model; and weights that are tied."""

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import InvalidCheckpoint
from octavo.weights.quantized_weight import QuantizedWeight
from tests.support.dispatched_experts import Config, Gated, call
from tests.support.published_folders import bytes_of, change, tensors

pytestmark = pytest.mark.usefixtures("expert_registry")
RECIPE, FFN, HIDDEN = "fp8-block(scale='fp32')", 256, 128


def stacked(**place):
    torch.manual_seed(0)
    return nn.ModuleDict({"mlp": nn.ModuleDict({"experts": Gated(Config(), hidden=HIDDEN, ffn=FFN, **place)})})


def output(model):
    (x, *rest), _ = call(hidden=HIDDEN)
    return model["mlp"]["experts"](x, *rest)


@pytest.fixture
def folder(tmp_path):
    model = stacked()
    octavo.convert(model, RECIPE)
    octavo.save_fp8(model, tmp_path / "out", layout="fp8-block")
    return tmp_path / "out"


def loaded(folder):
    model = stacked(device="meta")
    octavo.load_fp8(model, folder, device="cpu")
    return model


def test_stacked_experts_are_published_one_by_one(folder, tmp_path):
    names = tensors(folder)
    assert names["mlp.experts.3.up_proj.weight"].shape == (FFN, HIDDEN)
    assert names["mlp.experts.3.down_proj.weight_scale_inv"].shape == (1, 2)
    assert len(names) == 4 * 3 * 2
    model, original = loaded(folder), stacked()
    octavo.convert(original, RECIPE)
    assert isinstance(model["mlp"]["experts"].gate_up_proj, QuantizedWeight)
    assert torch.equal(output(model), output(original))
    octavo.save_fp8(model, tmp_path / "like", like=folder)
    again = tensors(tmp_path / "like")
    assert all(torch.equal(bytes_of(again[name]), bytes_of(names[name])) for name in names)


def test_stacked_files_load_too(folder):
    one = tensors(folder)
    whole = {}
    for own, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        for suffix, last in (("", ""), ("_scale_inv", "_scale_inv")):
            rows = [[one[f"mlp.experts.{i}.{part}.weight{suffix}"] for part in parts] for i in range(4)]
            as_bytes = [torch.cat([t.view(torch.uint8) for t in each]) for each in rows]
            whole[f"mlp.experts.{own}{last}"] = torch.stack(as_bytes).view(rows[0][0].dtype)
    change(folder, {**dict.fromkeys(one), **whole})
    original = stacked()
    octavo.convert(original, RECIPE)
    assert torch.equal(output(loaded(folder)), output(original))


def test_experts_of_codes_train_and_reach_state_dicts_as_values(folder):
    model = loaded(folder)
    optimizer = octavo.optim.AdamW(model.parameters(), lr=1e-2)
    before = output(model)
    before.square().mean().backward()
    optimizer.step()
    assert not torch.equal(output(model), before)
    state = model.state_dict()
    assert set(state) == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert {type(t) for t in state.values()} == {torch.Tensor}
    other = loaded(folder)
    other.load_state_dict(state)
    assert torch.allclose(output(other), output(model), rtol=0.05, atol=1e-3)
    octavo.revert(model)
    assert not any(isinstance(p, QuantizedWeight) for p in model.parameters())


def test_a_mixed_stack_is_refused(folder):
    name = "mlp.experts.2.up_proj.weight"
    change(folder, {name: torch.zeros(FFN, HIDDEN), f"{name}_scale_inv": None})
    with pytest.raises(InvalidCheckpoint, match=r"gate_up_proj .* its parts are mixed: fp8-block, values"):
        loaded(folder)


def test_quantized_weights_of_another_layout_are_saved_as_values_aloud(tmp_path):
    model = nn.Sequential(nn.MultiheadAttention(128, 4))
    octavo.convert(model, RECIPE)
    with pytest.warns(UserWarning, match=r"2 quantized weights will be values .*, such as 0.in_proj_weight"):
        octavo.save_fp8(model, tmp_path / "out", layout="fp8-block")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 128), nn.Linear(128, 16, bias=False)
        self.up = nn.Linear(128, 128, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_load_from_either_name_or_both(tmp_path):
    torch.manual_seed(0)
    model = Tied()
    octavo.convert(model, RECIPE, exclude="head")
    folder = tmp_path / "out"
    octavo.save_fp8(model, folder, layout="fp8-block")
    weight = tensors(folder)["embedding.weight"]
    for changes in (
        {},
        {"head.weight": weight.clone()},
        {"embedding.weight": None},
    ):
        change(folder, changes)
        with torch.device("meta"):
            fresh = Tied()
        octavo.load_fp8(fresh, folder, device="cpu")
        assert fresh.head.weight is fresh.embedding.weight and torch.equal(fresh.head.weight.detach(), weight)
    change(folder, {"embedding.weight": weight + 1})
    with pytest.raises(InvalidCheckpoint, match=r"the model ties it to embedding.weight, and they differ"):
        octavo.load_fp8(Tied(), folder)
