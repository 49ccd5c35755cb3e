"""Published folders that are damaged, mixed, or of another model are refused in a sentence, and change nothing."""

import json
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import InvalidCheckpoint, Unsupported, UnsupportedConfig, UnsupportedDevice
from tests.support.published_folders import Net, change, contents, on_meta, saved, tensors


def refused(folder, sentence, error=Unsupported, model=None, **options):
    """Loading raises, and the model is as before."""
    model = Net() if model is None else model
    kinds, before = [type(m) for m in model.modules()], {k: id(p) for k, p in model.named_parameters()}
    values = {k: p.detach().clone() for k, p in model.named_parameters() if not p.is_meta}
    with pytest.raises(error, match=sentence) as unsupported_reason:
        octavo.load_fp8(model, folder, **options)
    assert [type(m) for m in model.modules()] == kinds
    assert {k: id(p) for k, p in model.named_parameters()} == before
    assert all(torch.equal(p.detach(), values[k]) for k, p in model.named_parameters() if k in values)
    return str(unsupported_reason.value)


def test_damaged_files_are_refused(tmp_path):
    folder = saved(tmp_path / "out", "fp8-block")
    for name in [n for n in contents(folder) if n.endswith((".safetensors", ".index.json"))]:
        content = (folder / name).read_bytes()
        for length in (0, 4, 8, 100, len(content) - 2):
            (folder / name).write_bytes(content[:length])
            refused(folder, re.escape(name), InvalidCheckpoint)
        (folder / name).write_bytes(content)
    file = next(folder.glob("model-00001*.safetensors"))
    content = file.read_bytes()
    for at in (0, 7, 8, 20):
        file.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        refused(folder, "model-", InvalidCheckpoint)
    file.unlink()
    refused(folder, "could not be read", InvalidCheckpoint)


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path):
    folder = saved(tmp_path / "out", "fp8-block")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for weight_map, sentence in [
        ({**index["weight_map"], "more": "model-00001-of-00003.safetensors"}, "lacks 'more'"),
        ({k: v for k, v in index["weight_map"].items() if k != "up.bias"}, "does not list it"),
        ({**index["weight_map"], "up.bias": "../secret.safetensors"}, "is no file here"),
        ({}, "no weight_map"),
    ]:
        path.write_text(json.dumps({**index, "weight_map": weight_map}))
        refused(folder, sentence, InvalidCheckpoint)


SCALE = "up.weight_scale_inv"
FORGED = {
    "no scale": ({SCALE: None}, f"without {SCALE}, which fp8-block has"),
    "no codes": ({"up.weight": None}, "1 tensor that the model lacks.*the model has up.weight"),
    "a scale of another shape": ({SCALE: torch.ones(3, 3)}, r"is F32 \[3, 3\], and fp8-block .* F32 or .* \[3, 2\]"),
    "a scale of another dtype": ({SCALE: torch.ones(3, 2).double()}, "is F64"),
    "codes of another shape": ({"up.weight": torch.zeros(320, 128).to(torch.float8_e4m3fn)}, r"\[320, 128\]"),
    "codes of another dtype": ({"up.weight": torch.zeros(320, 256).to(torch.float8_e5m2)}, "is F8_E5M2"),
    "values beside a scale": ({"up.weight": torch.zeros(320, 256)}, f"has {SCALE}"),
    "a NaN scale": ({SCALE: torch.full((3, 2), torch.nan)}, f"{SCALE} has a scale that is not finite"),
    "a negative scale": ({SCALE: -torch.ones(3, 2)}, f"{SCALE} has a scale that is not finite"),
    "values of another shape": ({"up.bias": torch.zeros(3)}, r"up.bias .* is F32 \[3\]"),
    "a missing tensor": ({"head.bias": None}, "lacks 1 tensor of the model, such as head.bias"),
    "an unknown tensor": ({"more.weight": torch.ones(1)}, "1 tensor that the model lacks, such as more.weight"),
    "codes in a head that is left out": ({"head.weight": torch.ones(8, 256).to(torch.float8_e4m3fn)}, "leaves it out"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_folder_that_does_not_fit_is_refused(what, tmp_path):
    changes, sentence = FORGED[what]
    change(saved(tmp_path / "out", "fp8-block"), changes)
    refused(tmp_path / "out", sentence, InvalidCheckpoint)
    refused(tmp_path / "out", sentence, InvalidCheckpoint, on_meta(), device="cpu")


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\].*and Octavo reads fp8-block"),
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({"scale_fmt": "ue8m0"}, "no power of two"),
        ({"modules_to_not_convert": ["up", "head"]}, "config.json leaves it out"),
        ({"modules_to_not_convert": ["re:("]}, "regular expression"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo 'W4A8'"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_refused(entry, sentence, tmp_path):
    change(saved(tmp_path / "out", "fp8-block"), entry=entry)
    refused(tmp_path / "out", sentence)


def test_a_folder_without_a_config_needs_the_layouts_name(tmp_path):
    folder = saved(tmp_path / "out", "fp8-block")
    (folder / "config.json").unlink()
    refused(folder, "Name it: layout= one of fp8-block", InvalidCheckpoint)
    octavo.load_fp8(Net(), folder, layout="fp8-block")
    refused(folder, "without up.weight_scale, which compressed", InvalidCheckpoint, layout="compressed-tensors-block")
    refused(folder, "layout must be one of", UnsupportedConfig, layout="fp8")


def test_arguments_are_checked(tmp_path):
    folder = saved(tmp_path / "out", "fp8-block")
    refused(folder, "Pass the device that it goes to", UnsupportedDevice, on_meta())
    refused(tmp_path / "none", "There is no folder", InvalidCheckpoint)
    refused(3, "takes the path of a folder", UnsupportedConfig)
    with pytest.raises(octavo.errors.UnsupportedDtype, match=r"octavo.load_fp8 takes a model"):
        octavo.load_fp8(folder, Net())
    with pytest.raises(UnsupportedConfig, match="exists already"):
        octavo.save_fp8(Net("fp8-block"), folder, layout="fp8-block")


def test_layers_that_cannot_hold_the_codes_are_refused(tmp_path):
    folder = saved(tmp_path / "out", "fp8-block")
    refused(folder, r"has the recipe mxfp8.*Build the layer without a recipe, or with fp8-block", model=Net("mxfp8"))
    octavo.load_fp8(Net("fp8-block(scale='fp32')"), folder)
    model = Net()
    model.up.weight = nn.Parameter(torch.zeros(320, 256))
    model.tied = nn.Linear(256, 320, bias=False)
    model.tied.weight = model.up.weight
    refused(folder, "the model has that parameter in 2 places. Untie them", model=model)
    report = octavo.load_fp8(model, folder, dequantize="up.weight")
    assert report.dequantized == ("up.weight",) and model.tied.weight is model.up.weight


def test_scales_that_training_does_not_need_are_skipped_with_a_word(tmp_path):
    folder = saved(tmp_path / "out", "compressed-tensors-tensor")
    one = torch.ones(1)
    change(folder, {"up.input_scale": one, "attn.k_scale": one, "attn.v_scale": one, "mtp.0.weight": one})
    refused(folder, "such as mtp.0.weight", InvalidCheckpoint)
    report = octavo.load_fp8(Net(), folder, ignore="mtp.*")
    assert set(report.skipped) == {"up.input_scale", "attn.k_scale", "attn.v_scale", "mtp.0.weight"}
    assert "Skipped 2 tensors, such as attn.k_scale: a scale of the key-value cache" in str(report)
    model = Net()
    octavo.load_fp8(model, folder, ignore="mtp.*")
    octavo.save_fp8(model, tmp_path / "like", like=folder)
    assert tensors(tmp_path / "like").keys() == tensors(folder).keys()


def test_weights_that_are_codes_already_are_filled_in_place(tmp_path):
    folder = saved(tmp_path / "out", "fp8-block")
    with octavo.quantized_init("fp8-block(scale='fp32')"):
        model = Net("fp8-block(scale='fp32')")
    codes = model.up.weight.row_codes
    x = torch.randn(64, 256)
    y = model(x)
    octavo.load_fp8(model, folder)
    assert model.up.weight.row_codes is codes and not torch.equal(model(x), y)
    fresh = on_meta()
    octavo.load_fp8(fresh, folder, device="cpu")
    assert torch.equal(model(x), fresh(x))


MEASURED = """
import sys, torch, octavo
from torch import nn
def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
folder, recipe = sys.argv[1:]
with torch.device("meta"):
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16) for _ in range(16)])
octavo.load_fp8(nn.Sequential(nn.Linear(128, 128)), folder + "/small")  # imports, allocators
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = status("VmHWM")
octavo.load_fp8(model, folder + "/large", device="cpu")
own = sum(t.nbytes for p in model.parameters() for t in p.tensors().values())
print(status("VmHWM") - before - own)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_host_holds_less_than_a_shard_beside_the_model(tmp_path):
    recipe, shard = "fp8-block(scale='fp32')", 8 * 2048 * 2049
    octavo.save_fp8(nn.Sequential(octavo.Linear(128, 128, recipe=recipe)), tmp_path / "small", layout="fp8-block")
    with octavo.quantized_init(recipe):
        model = nn.Sequential(*[octavo.Linear(2048, 2048, bias=False, dtype=torch.bfloat16) for _ in range(16)])
    octavo.save_fp8(model, tmp_path / "large", layout="fp8-block", shard_bytes=shard)
    assert len(list((tmp_path / "large").glob("*.safetensors"))) == 2
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path), recipe], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) <= 1.1 * shard, done.stdout
