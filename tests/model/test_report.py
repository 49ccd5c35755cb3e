"""The report of octavo.convert: blocks, shares, kinds of layers that are left, and conversions that gain nothing."""

import pytest
import torch
from torch import nn

import octavo
from tests.support.convertible_models import skipped


class Classifier(nn.Module):
    def __init__(self, name="classifier"):
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(32, 32)}) for _ in range(6))
        self.add_module(name, nn.Linear(32, 3))


def edges(path, module):
    return "bf16" if path in ("layers.0.up", "layers.5.up") else None


def test_blocks_are_named_where_their_recipes_differ():
    lines = str(octavo.convert(Classifier(), "fp8-current", edges)).splitlines()
    names = [line.split()[0] for line in lines if line.startswith("layers.")]
    assert names == ["layers.{0,5}.up", "layers.{1-4}.up"]


def test_quantized_and_unquantized_shares_are_apart():
    report = octavo.convert(Classifier(), "fp8-current", edges)
    total = 6 * 32 * 32 + 3 * 32
    assert report.unquantized().layers == 2 and report.unquantized().share == pytest.approx(2 * 32 * 32 / total)
    assert "of which unquantized: 2 layers (32.8% of the weights)" in report.summary()
    assert report.as_dict()["unquantized"]["layers"] == 2


def test_tables_are_no_part_of_the_weights_that_are_multiplied():
    report = octavo.convert(Classifier(), "fp8-current")
    assert report.shares()["converted"].share == pytest.approx(64 / 65)
    assert report.summary().endswith("output head: 1 layer (1.5% of the weights); embedding: 1 layer.")


@pytest.mark.parametrize("name", ["classifier", "score", "qa_outputs", "proj_out", "proj_out_2"])
def test_the_last_layer_is_a_head_by_its_name(name):
    assert skipped(octavo.convert(Classifier(name), "fp8-current")) == {"embed": "embedding", name: "output head"}


def test_another_last_layer_is_converted():
    assert skipped(octavo.convert(Classifier("after"), "fp8-current")) == {"embed": "embedding"}


def test_conditioning_stays_in_high_precision():
    class AdaLayerNormZero(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 192)

    block = nn.ModuleDict({"norm1": AdaLayerNormZero(), "up": nn.Linear(32, 32), "adaLN_modulation": nn.Linear(32, 64)})
    model = nn.ModuleDict({"time_embed": nn.Sequential(nn.Linear(16, 32)), "blocks": nn.ModuleList([block])})
    found = skipped(octavo.convert(model, "fp8-current"))
    assert found == dict.fromkeys(
        ["time_embed.0", "blocks.0.norm1.linear", "blocks.0.adaLN_modulation"], "conditioning"
    )


def test_small_layers_stay_if_asked():
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 24), nn.Linear(24, 512))
    report = octavo.convert(model, "fp8-current", high_precision=("head", "small"))
    assert skipped(report) == {"1": "small", "2": "small"}
    assert "24 is below the 512 inputs and outputs" in report.rows[1].why


def test_a_pointless_conversion_is_said():
    model = nn.Sequential(*[nn.Conv2d(32, 32, 3) for _ in range(4)], nn.Flatten(), nn.Linear(32, 10))
    with pytest.warns(UserWarning, match=r"took 0\.9% of the weights, .*convolution: 4 layers .*gains nothing"):
        octavo.convert(model, "fp8-current")
    assert torch.is_tensor(model[5].weight)
