"""Published layouts of codes: in, trained, out. What did not change is equal to the byte."""

import json
import warnings

import pytest
import torch
from torch import nn

import octavo
from octavo.checkpoints import tensor_file
from octavo.checkpoints.published.layouts import LAYOUTS
from octavo.formats import E2M1, E8M0, pack_nibbles
from octavo.weights.quantized_weight import QuantizedWeight
from tests.support.published_folders import WRITTEN, Net, bytes_of, change, contents, on_meta, saved, tensors, trained

x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))


def same_outputs(y, other, layout):
    """Equal, but for a second level of scales that the file divides by: its reciprocal is rounded."""
    return torch.allclose(y, other, atol=1e-4, rtol=1e-5) if LAYOUTS[layout].divides else torch.equal(y, other)


@pytest.mark.parametrize("layout", WRITTEN)
def test_a_round_trip_is_equal_to_the_byte(layout, tmp_path):
    model = trained(layout)
    octavo.save_fp8(model, tmp_path / "out", layout=layout, shard_bytes=150_000)
    loaded = on_meta()
    report = octavo.load_fp8(loaded, tmp_path / "out", device="cpu")
    assert set(report.codes) == {"up.weight", "down.weight", "experts.weight"}
    assert set(report.codes.values()) == {octavo.recipe(LAYOUTS[layout].recipe).key}
    assert same_outputs(loaded(x), model(x), layout)
    octavo.save_fp8(loaded, tmp_path / "again", layout=layout, shard_bytes=150_000)
    octavo.save_fp8(loaded, tmp_path / "like", like=tmp_path / "out", shard_bytes=150_000)
    assert contents(tmp_path / "again") == contents(tmp_path / "out")
    like = contents(tmp_path / "like")
    assert tensors(tmp_path / "like").keys() == tensors(tmp_path / "out").keys()
    assert like["config.json"] == contents(tmp_path / "out")["config.json"]
    for name, tensor in tensors(tmp_path / "out").items():
        assert torch.equal(bytes_of(tensors(tmp_path / "like")[name]), bytes_of(tensor)), name


@pytest.mark.parametrize("layout", WRITTEN)
def test_a_step_on_some_layers_leaves_the_others_equal(layout, tmp_path):
    loaded = on_meta()
    octavo.load_fp8(loaded, saved(tmp_path / "out", layout), device="cpu")
    optimizer = octavo.optim.AdamW([*loaded.up.parameters(), *loaded.experts.parameters()], lr=0.1)
    loaded(x).square().mean().backward()
    optimizer.step()
    octavo.save_fp8(loaded, tmp_path / "trained", layout=layout)
    before, after = tensors(tmp_path / "out"), tensors(tmp_path / "trained")
    changed = {name for name in before if not torch.equal(bytes_of(after[name]), bytes_of(before[name]))}
    codes = LAYOUTS[layout].codes
    assert {f"up.weight{codes}", f"experts.weight{codes}"} <= changed
    assert not [name for name in changed if name.startswith(("down", "head", "steps"))]
    again = on_meta()
    octavo.load_fp8(again, tmp_path / "trained", device="cpu")
    assert same_outputs(again(x), loaded(x), layout)


def test_a_model_of_values_is_saved_as_the_codes_that_its_forward_multiplies(tmp_path):
    model = trained("fp8-block", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x.bfloat16()).square().mean().backward()
    optimizer.step()
    octavo.save_fp8(model, tmp_path / "out", layout="fp8-block")
    loaded = on_meta().to(torch.bfloat16)
    octavo.load_fp8(loaded, tmp_path / "out", device="cpu")
    assert torch.equal(loaded(x.bfloat16()), model(x.bfloat16()))


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("fp8-block", "fp8-block-ue8m0"), ("fp8-current", "compressed-tensors-channel"), ("fp8-current", "fp8-block"),
        ("nvfp4", "modelopt-nvfp4"), ("mxfp8(square_weights=True)", "mxfp8"),
    ],
)  # fmt: skip
def test_codes_of_larger_blocks_keep_their_values_in_a_layout_of_smaller_ones(recipe, layout, tmp_path):
    torch.manual_seed(0)
    model = Net(recipe)
    octavo.quantize_weights(model)
    octavo.save_fp8(model, tmp_path / "out", layout=layout)
    loaded = on_meta()
    octavo.load_fp8(loaded, tmp_path / "out", device="cpu")
    for name in ("up", "down", "experts"):
        ours, theirs = getattr(model, name).weight, getattr(loaded, name).weight
        assert torch.equal(ours.dequantize(), theirs.dequantize())


def test_codes_that_a_layout_cannot_have_are_refused(tmp_path):
    with pytest.raises(octavo.errors.UnsupportedConfig, match=r"up.weight runs in fp8-block.*blocks of 1 x all"):
        octavo.save_fp8(Net("fp8-block"), tmp_path / "out", layout="compressed-tensors-channel")
    with pytest.raises(octavo.errors.UnsupportedConfig, match="powers of two"):
        octavo.save_fp8(Net("fp8-block(scale='fp32')"), tmp_path / "out", layout="fp8-block-ue8m0")
    with pytest.raises(octavo.errors.UnsupportedConfig, match="earlier steps"):
        octavo.save_fp8(Net("fp8-delayed"), tmp_path / "out", layout="modelopt-fp8")
    with pytest.raises(octavo.errors.UnsupportedConfig, match="Pass one of them"):
        octavo.save_fp8(Net("fp8-block"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_static_scales_of_activations_are_missed_aloud(tmp_path):
    with pytest.warns(UserWarning, match="modelopt-fp8 has a scale for the activations of each layer"):
        saved(tmp_path / "out", "modelopt-fp8")
    loaded = on_meta()
    octavo.load_fp8(loaded, tmp_path / "out", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        octavo.save_fp8(loaded, tmp_path / "like", like=tmp_path / "out")


def test_layers_without_a_recipe_are_values_and_listed(tmp_path):
    saved(tmp_path / "out", "fp8-block")
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert entry["modules_to_not_convert"] == ["head"]


def test_a_dict_for_servers_aliases_the_codes():
    model = trained("fp8-block")
    octavo.quantize_weights(model)
    found = octavo.fp8_state_dict(model, layout="fp8-block")
    assert found["up.weight"].dtype == torch.float8_e4m3fn
    assert found["up.weight"].data_ptr() == model.up.weight.row_codes.data_ptr()
    scale = found["up.weight_scale_inv"].repeat_interleave(128, 0)[:320].repeat_interleave(128, 1)
    assert torch.equal(found["up.weight"].float() * scale, model.up.weight.dequantize())


def test_scales_of_bytes_and_narrow_floats_come_back_as_they_were(tmp_path):
    folder = saved(tmp_path / "out", "fp8-block")
    before = tensors(folder)
    change(folder, {"up.weight_scale_inv": before["up.weight_scale_inv"].bfloat16()})
    loaded = on_meta()
    octavo.load_fp8(loaded, folder, device="cpu")
    octavo.save_fp8(loaded, tmp_path / "like", like=folder)
    now = tensors(tmp_path / "like")
    assert now["up.weight_scale_inv"].dtype == torch.bfloat16
    assert torch.equal(now["up.weight_scale_inv"], before["up.weight_scale_inv"].bfloat16())


def test_mxfp4_becomes_mxfp8_of_the_same_values_or_values(tmp_path):
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (3, 256, 192), dtype=torch.uint8)
    scale = torch.randint(120, 130, (3, 256, 6), dtype=torch.uint8)
    blocks = pack_nibbles(codes).view(3, 256, 6, 16)
    values = E2M1.decode(codes) * E8M0.decode(scale).repeat_interleave(32, -1)
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    tensor_file.write(folder / "model.safetensors", {"0.weight_blocks": blocks, "0.weight_scales": scale})
    with torch.device("meta"):
        model = nn.Sequential(octavo.GroupedLinear(3, 192, 256, bias=False))
    octavo.load_fp8(model, folder, device="cpu")
    assert isinstance(model[0].weight, QuantizedWeight)
    assert torch.equal(model[0].weight.dequantize(), values)
    plain = nn.Sequential(octavo.GroupedLinear(3, 192, 256, bias=False))
    report = octavo.load_fp8(plain, folder, dequantize="0.*")
    assert report.dequantized == ("0.weight",)
    assert torch.equal(plain[0].weight.detach(), values)
    octavo.save_fp8(plain, tmp_path / "like", like=folder)
    assert torch.equal(tensors(tmp_path / "like")["0.weight_blocks"], blocks)
    with torch.no_grad():
        plain[0].weight.add_(1)
    with pytest.raises(octavo.errors.UnsupportedConfig, match="trained as values"):
        octavo.save_fp8(plain, tmp_path / "more", like=folder)
    assert not (tmp_path / "more").exists()
