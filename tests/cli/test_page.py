"""The page of a training report: one file that needs nothing else, for any report that a run can leave behind."""

import math
import re
from html.parser import HTMLParser

import pytest

from octavo.cli import page

FACTS = {"octavo": "0.1.0", "torch": "2.13.0", "cuda": None, "device": "cpu", "gpu": None}


def run(recipe, losses, loss=1.5, **more):
    return {
        "recipe": recipe,
        "losses": losses,
        "loss": loss,
        "tokens_per_s": 1000.0,
        "seconds": 1.0,
        "load": [],
        **more,
    }


def report(*runs, **more):
    shape = {"context": 128, "family": "gpt", "mixture": None}
    plan = {"steps": 40, "batch": 8, "seed": 0, "compile": False, "shape": shape, "data": None}
    return {"machine": FACTS, "plan": plan, "bf16": runs[0], "recipes": list(runs[1:]), **more}


FALLING = [5.0 * 0.9**n + 1 for n in range(40)]
BASE = run("bf16 (torch)", FALLING)
BOTH = report(BASE, run("fp8-block", [v * 1.01 for v in FALLING], 1.515, gap_percent=1.0, gap_noise_percent=0.04))


class Reader(HTMLParser):
    """Checks that every element is closed in its turn, and lists what the page refers to."""

    EMPTY = ("meta", "line", "polyline")

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.points, self.cells = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.links += [given[name] for name in ("src", "href") if name in given]
        if tag == "polyline":
            self.points.append(given["points"])
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def test_a_page_is_whole_and_loads_nothing():
    text = page.render(BOTH)
    found = Reader(text)
    assert found.links == [] and "<script" not in text and "@import" not in text and "url(" not in text
    assert len(found.points) == 3  # two losses, and one gap
    assert all(len(points.split()) == 40 for points in found.points)
    for said in (
        "bf16 (torch)",
        "fp8-block",
        "1.5150",
        "+1.00 ± 0.04 %",
        "40 steps of 8 × 128 bytes, seed 0, on a CPU.",
    ):
        assert said in text


def test_curves_stay_inside_of_their_charts():
    for points in Reader(page.render(BOTH)).points:
        for x, y in (map(float, point.split(",")) for point in points.split()):
            assert page.LEFT <= x <= page.WIDE - page.RIGHT and page.TOP <= y <= page.HIGH - page.BOTTOM


def test_names_are_text_and_no_markup():
    text = page.render(report(run("fp8-block(scale='<b>&')", FALLING)))
    Reader(text)
    assert "<b>" not in text and "&lt;b&gt;&amp;" in text


@pytest.mark.parametrize(
    "losses", [[2.0], [2.0, 2.0], [math.nan] * 5, [1.0, math.inf, 2.0], [0.0, 0.0], [1e-8, 3e-8], [1e6, 2e6]], ids=str
)
def test_any_losses_make_a_page(losses):
    text = page.render(report(run("bf16 (torch)", losses), run("nvfp4", losses, gap_percent=0.0)))
    assert not re.search(r'points="[^"]*(nan|inf)', text)
    Reader(text)


def test_an_interrupted_run_says_so():
    text = page.render(report(run("bf16 (torch)", FALLING), run("nvfp4", FALLING[:7], None), interrupted=True))
    assert "interrupted after step 7" in text and "on a CPU. Interrupted." in text
    assert page.render(report(run("bf16 (torch)", FALLING), run("nvfp4", [], None))).count("nvfp4") == 0


def test_load_and_routes_are_shown_where_they_are_known():
    more = run("fp8-block", FALLING, load=[[0.25, 0.75]])
    route = {"recipe": "fp8-block", "fprop": "native", "dgrad": "emulated", "wgrad": "reference"}
    cells = Reader(page.render(report(more, routes=[route]))).cells
    assert {"25.0 %", "75.0 %", "native", "emulated", "reference"} <= set(cells)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.2, 5.9), (-3.0, 0.2), (2.0, 2.0), (1e-9, 2e-9), (0.0, 0.0)])
def test_ticks_cover_their_range_in_round_steps(low, high):
    ticks = page._ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 1 <= len(ticks) <= 8
    assert len(set(ticks)) == len(ticks)


def test_smoothing_keeps_the_length_and_a_constant():
    assert page._smooth([3.0] * 40) == [3.0] * 40
    assert page._smooth(FALLING)[0] == FALLING[0] and len(page._smooth(FALLING)) == 40
