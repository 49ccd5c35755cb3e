"""Published folders in another layout, without a model: `octavo convert-checkpoint`."""

import json

import pytest
import torch
from torch import nn

import octavo
from octavo.checkpoints import tensor_file
from octavo.checkpoints.published.layouts import LAYOUTS
from octavo.checkpoints.published.rewriting import rewrite
from octavo.cli import main
from tests.support.published_folders import WRITTEN, bytes_of, on_meta, saved, tensors


def values(folder):
    """The values of each weight of a folder, by name."""
    model = on_meta()
    octavo.load_fp8(model, folder, device="cpu", dequantize="*")
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", WRITTEN)
def test_the_same_layout_is_copied_to_the_byte(layout, tmp_path):
    folder = saved(tmp_path / "out", layout)
    (folder / "tokenizer.json").write_text("{}")
    found = rewrite(folder, tmp_path / "again", layout)
    before, after = tensors(folder), tensors(tmp_path / "again")
    assert before.keys() == after.keys() and not found.requantized
    assert all(torch.equal(bytes_of(before[name]), bytes_of(after[name])) for name in before)
    assert (tmp_path / "again" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("layout", WRITTEN)
def test_each_layout_becomes_values_and_codes_again(layout, tmp_path):
    folder = saved(tmp_path / "out", layout)
    rewrite(folder, tmp_path / "bf16", "bf16")
    plain = tensors(tmp_path / "bf16")
    assert {plain[f"{name}.weight"].dtype for name in ("up", "down", "experts")} == {torch.bfloat16}
    for name, tensor in values(folder).items():
        assert torch.equal(plain[name], tensor.to(plain[name].dtype))
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    found = rewrite(tmp_path / "bf16", tmp_path / "codes", layout, ignore=["head"])
    assert set(found.quantized) == {"down.weight", "up.weight"}
    entry = json.loads((tmp_path / "codes" / "config.json").read_text())["quantization_config"]
    assert set(entry[LAYOUTS[layout].left_out]) == {"head", "experts"}


def test_scales_that_are_repeated_keep_every_value(tmp_path):
    folder = saved(tmp_path / "out", "compressed-tensors-tensor")
    found = rewrite(folder, tmp_path / "channel", "compressed-tensors-channel")
    assert set(found.regrouped) == {"up.weight", "down.weight", "experts.weight"}
    mine, theirs = values(folder), values(tmp_path / "channel")
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_codes_of_other_blocks_are_quantized_again(tmp_path):
    folder = saved(tmp_path / "out", "fp8-block")
    found = rewrite(folder, tmp_path / "mx", "mxfp8")
    assert set(found.requantized) == {"up.weight", "down.weight", "experts.weight"}
    mine, theirs = values(folder), values(tmp_path / "mx")
    assert torch.allclose(mine["up.weight"], theirs["up.weight"], atol=0.02)
    expected = octavo.quant.MX().quantize(mine["up.weight"])
    assert torch.equal(bytes_of(tensors(tmp_path / "mx")["up.weight"]), bytes_of(expected.codes))


def test_the_command_shows_progress_and_what_it_did(tmp_path, capsys):
    folder = saved(tmp_path / "out", "fp8-block")
    assert main(["convert-checkpoint", str(folder), str(tmp_path / "new"), "--layout", "modelopt-fp8"]) == 0
    shown = capsys.readouterr()
    assert "3 tensors quantized again, with other values" in shown.out
    assert "convert  11/11  tensors" in shown.err
    assert main(["convert-checkpoint", str(folder), str(tmp_path / "new"), "--layout", "modelopt-fp8"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["convert-checkpoint", str(folder), str(tmp_path / "more"), "--layout", "gpt-oss-mxfp4"]) == 2
    assert main(["convert-checkpoint", str(tmp_path / "none"), str(tmp_path / "more"), "--layout", "mxfp8"]) == 2
    assert not (tmp_path / "more").exists()


def test_experts_one_by_one_become_codes(tmp_path):
    torch.manual_seed(0)
    folder = tmp_path / "out"
    folder.mkdir()
    names = ("mlp.experts.0.up_proj.weight", "mlp.gate.weight", "model.embed_tokens.weight", "lm_head.weight")
    content = {name: torch.randn(128, 256).bfloat16() for name in names}
    tensor_file.write(folder / "model.safetensors", content)
    found = rewrite(folder, tmp_path / "new", "fp8-block")
    assert found.quantized == [names[0]] and set(found.left) == set(names[1:])
    now = tensors(tmp_path / "new")
    model = nn.Sequential(octavo.Linear(256, 128, bias=False, recipe=LAYOUTS["fp8-block"].recipe))
    with torch.no_grad():
        model[0].weight.copy_(content[names[0]])
    own = octavo.fp8_state_dict(model, layout="fp8-block")
    assert torch.equal(bytes_of(now[names[0]]), bytes_of(own["0.weight"]))
    assert torch.equal(now[names[0] + "_scale_inv"], own["0.weight_scale_inv"])
