"""Pages of inspections and comparisons, pictures of tensors in their formats, and pages that are rewritten as a model
trains."""

import copy
import re
import struct
import zlib

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig
from octavo.inspection.heat import HeatMap, Sample
from octavo.inspection.raster import Box, Label, png
from octavo.inspection.statistics import LOWEST, SHAPE, SUMS, fold
from octavo.inspection.timeline import LISTED, POINTS, timelines
from octavo.inspection.webpage import STYLE
from tests.support.inspected import by_tensor, pair, train
from tests.support.page_reader import PageReader


def sick(recipe="fp8-current"):
    model = pair(recipe)
    with torch.no_grad():
        model[2].weight[0, 0] = 1e6
    return model


def pixels(data):
    """Return the pixels of a PNG file as [height, width, 3], and check its parts."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, parts = 8, {}
    while place < len(data):
        (size,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + size]
        assert struct.unpack(">I", data[place + 8 + size : place + 12 + size]) == (zlib.crc32(kind + body),)
        parts[kind], place = body, place + 12 + size
    width, height = struct.unpack(">II", parts[b"IHDR"][:8])
    raw = torch.tensor(list(zlib.decompress(parts[b"IDAT"])), dtype=torch.uint8).view(height, 1 + 3 * width)
    assert raw[:, 0].eq(0).all()
    return raw[:, 1:].reshape(height, width, 3)


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_a_picture_shows_magnitudes_in_units_of_the_scale(tmp_path):
    model = nn.Sequential(octavo.Linear(64, 64, bias=False, recipe="fp8-current"))
    x = torch.full((16, 64), 448.0)
    x[1:] = 2.0**-12  # with a scale of 1, below half the smallest code, 2**-9
    with octavo.inspect(model) as report:
        model(x)
    row = by_tensor(report, "0")["x"]
    assert {LOWEST + i: n for i, n in enumerate(row.values) if n} == {8: 64, -12: 15 * 64}
    drawn = report.draw("0", "x")
    assert "0, x in tensorwise: 93.75 % of its values become zero" in drawn.svg and drawn.svg in drawn._repr_html_()
    assert "93.75 % from 2⁻¹²" in drawn.svg and "becomes zero" not in report.draw("0", "y").svg
    for name, beginning in (("x.svg", b"<svg"), ("x.png", b"\x89PNG")):
        drawn.save(str(tmp_path / name))
        assert (tmp_path / name).read_bytes().startswith(beginning)
    with pytest.raises(UnsupportedConfig, match=r"Nothing was measured of .dy. of .0.\. Measured there: x, w, y\."):
        report.draw("0", "dy")
    with pytest.raises(UnsupportedConfig, match=r"Layers of this report: 0\."):
        report.draw("1", "x")


def test_a_drawing_is_pixels():
    colours = {"ground": (255, 255, 255), "bar": (10, 20, 30), "text": (0, 0, 0)}
    found = pixels(png(40, 20, [Box(0, 0, 10, 10, "bar"), Box(20, 0, 5, 5, "bar", 0.5), Label(30, 18, "l")], colours))
    assert found.shape == (40, 80, 3)
    assert found[:20, :20].eq(torch.tensor([10, 20, 30], dtype=torch.uint8)).all()
    assert found[0, 45].tolist() == [132, 138, 142] and found[30, 30].tolist() == [255] * 3
    assert found[20:, 60:].eq(0).all(2).sum() == 4 * 10  # an l has ten dots, each of four pixels


# -- colours -----------------------------------------------------------------------------------------------------------


def luminance(colour):
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (value / 255 for value in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    """Return the ratio of the guidelines for accessible pages, which ask for 4.5 between text and its ground."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_stands_out_on_every_ground_and_on_every_shade(scheme):
    found = re.findall(r":root \{([^}]*)\}", STYLE)[scheme]
    hexes = {name: value * 2 if len(value) == 3 else value for name, value in re.findall(r"--(\w+): #(\w+)", found)}
    colours = {name: tuple(bytes.fromhex(value)) for name, value in hexes.items()}
    bad = tuple(map(int, re.search(r"--bad: (\d+) (\d+) (\d+)", found).groups()))
    assert {"ink", "soft", "link", "ground", "panel"} <= set(colours)
    for text in ("ink", "soft", "link"):
        for ground in ("ground", "panel"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for shade in (0.0, 0.5, 1.0):  # of a cell: `calc(var(--shade) * 55%)`
        part = 0.55 * shade
        cell = tuple(part * own + (1 - part) * under for own, under in zip(bad, colours["panel"], strict=True))
        assert contrast(colours["ink"], cell) >= 4.5, shade


def test_a_column_of_a_comparison_breaks_before_the_name_of_its_recipe():
    """fp8-block was cut at its hyphen."""
    text = octavo.compare(nn.Linear(64, 64), [torch.randn(32, 64)], "fp8-block", "nvfp4").html()
    PageReader(text)
    assert '<th scope="col">cosine <span class="unbroken">fp8-block</span></th>' in text
    assert "\n.unbroken { white-space: nowrap; }" in text


# -- one page ----------------------------------------------------------------------------------------------------------


def test_every_page_has_landmarks_names_and_links_that_lead_to_rows():
    model, x = sick(), torch.randn(20, 64)
    with octavo.inspect(model) as report:
        train(model, x)
    report.try_recipes([x])
    found = PageReader(report.html("octavo inspect mine:model"))
    assert found.headings[0].startswith("1 of 2 layers needs a look in fp8-current; the worst is 2, w underflow 99.")
    order = ["Findings", "Tried on the same batches", "What each recipe does to its layers",
             "The worst tensors in their formats", "Try next"]  # fmt: skip
    assert [name for name in found.headings if name in order] == order
    compared = PageReader(octavo.compare(sick(), [x], "fp8-current", "mxfp8").html())
    at = compared.headings.index("The worst tensors in their formats")
    assert compared.headings[at + 1 : at + 3] == ["fp8-current", "mxfp8"]


def test_the_page_has_the_policy_of_the_recipes_that_helped():
    model, x = sick(), torch.randn(20, 64)
    with octavo.inspect(model) as report:
        train(model, x)
    (advice,) = report.try_recipes([x])
    text = report.html("octavo inspect mine:model --recipe fp8-current")
    assert f'recipe = "{advice.recipe}"' in text.replace("&quot;", '"')
    assert "octavo inspect mine:model --recipe &quot;fp8-current&quot; --write-policy policy.toml" in text
    text = report.html("octavo inspect mine:model --policy first.toml --html page.html")
    assert "octavo inspect mine:model --policy first.toml --write-policy policy.toml" in text, "its cures are kept"


# -- pages that are rewritten ------------------------------------------------------------------------------------------


def test_a_live_page_has_a_time_axis_and_the_log_the_numbers_of_each_step(tmp_path):
    model, x, page, seen = sick(), torch.randn(20, 64), tmp_path / "live.html", []
    twin = copy.deepcopy(model)
    with octavo.inspect(twin) as whole:
        for _ in range(4):
            train(twin, x)
            whole.next_step()

    def log(step, numbers):
        seen.append((step, numbers["2/w/underflow"]))
        assert page.exists() == (step > 1), "the page of earlier steps is there"

    with octavo.inspect(model, html=page, log=log) as report:
        for _ in range(4):
            train(model, x)
            report.next_step()
        running = page.read_text()
    assert [step for step, _ in seen] == [1, 2, 3, 4] and all(value > 0.9 for _, value in seen)
    assert report.to_dict() == pytest.approx(whole.to_dict()), "the report has all steps, as without a page"
    assert 'http-equiv="refresh"' in running and "The program still runs" in running
    text = page.read_text()
    found = PageReader(text)
    assert "refresh" not in text and "By step: fp8-current" in found.headings
    assert [len(points.split()) for points in found.points] == 15 * [4]  # 7 numbers of the first layer, which has no dx


def test_a_live_page_measures_one_step_of_so_many(tmp_path):
    model, seen = pair(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with octavo.inspect(model, every=3, log=lambda step, numbers: seen.append((step, numbers["0/x/amax"]))):
        for step in range(7):
            train(model, torch.full((20, 64), float(step + 1)))
            optimizer.step()
    assert seen == [(1, 1.0), (4, 4.0), (7, 7.0)]


def test_sums_of_two_blocks_are_those_of_one():
    torch.manual_seed(0)
    first, second = torch.rand(2, *SHAPE, dtype=torch.float64)
    whole = first.clone()
    fold(whole, second)
    assert torch.equal(whole[:, : len(SUMS)], (first + second)[:, : len(SUMS)])
    assert torch.equal(whole[:, len(SUMS)], torch.maximum(first, second)[:, len(SUMS)])


def test_a_long_run_of_a_large_model_stays_below_a_mebibyte():
    numbers = {
        tensor: {"underflow": 0.123, "cosine": 0.98765, "scale": 2.0**-7} for tensor in ("x", "w", "dy", "dx", "dw")
    }
    layers = {f"model.layers.{n}.mlp.down_proj": numbers for n in range(200)}
    samples = [Sample(step, layers) for step in range(100, 50000, 100)]
    heat = HeatMap("run", samples[:1], [])
    text = timelines(samples, heat, "mxfp8")
    assert len(text) < 2**20 and "136 more layers are not drawn" in text
    few = timelines(
        [Sample(s, {"a": numbers}) for s in range(1, 500)], HeatMap("run", [Sample(1, {"a": numbers})], []), "mxfp8"
    )
    assert max(line.count(",") for line in few.split('points="')[1:]) >= POINTS // 2
    assert few.count('<th scope="row">') <= LISTED


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_a_bell_curve_in_fp8_is_healthy(dtype):
    x = torch.randn(2**16, dtype=torch.float64)
    multiplier = torch.finfo(dtype).max / x.abs().max()
    noise = (x * multiplier).to(dtype).double() / multiplier - x
    sqnr = 10 * torch.log10(x.square().sum() / noise.square().sum()).item()
    assert 24 < sqnr < 33
    assert HeatMap("run", [Sample(1, {"layer": {"dy": {"sqnr": sqnr}}})], []).worst() is None
