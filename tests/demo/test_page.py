"""The page of a training report: one file that needs nothing else, for any report that a run can leave behind."""

import math
import re

import pytest

from octavo.demo import page
from octavo.inspection import charts
from tests.support.page_reader import PageReader

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
BOTH = report(BASE, run("fp8-block", [v * 1.02 for v in FALLING], 1.53, gap_percent=2.0, gap_noise_percent=0.04))


def test_a_page_is_whole_and_loads_nothing():
    text = page.render(BOTH)
    found = PageReader(text)
    assert len(found.points) == 3  # two losses, and one gap
    assert all(len(points.split()) == 40 for points in found.points)
    for said in (
        "bf16 (torch)",
        "fp8-block",
        "1.5300",
        "+2.00 ± 0.04 %",
        "<dt>Measured</dt><dd>40 steps of 8 × 128 bytes, seed 0</dd><dt>Device</dt><dd>a CPU</dd>",
        "<dt>Versions</dt><dd>octavo 0.1.0, torch 2.13.0</dd>",
        "<h1>fp8-block ends above bf16, after too few steps to tell from seed noise (+2.00 %)</h1>",
        "octavo train --model gpt --size 128 --steps 40 --batch 8 --recipe &quot;fp8-block(wgrad=",
    ):
        assert said in text


def test_what_to_try_next_is_the_run_with_its_data_and_compiled():
    other = report(BASE, run("fp8-block", FALLING, 1.501, gap_percent=0.1))
    other["plan"] = {**other["plan"], "compile": True, "data": "my text.txt"}
    said = "--batch 8 --data &#x27;my text.txt&#x27; --compile --recipe &quot;fp8-block&quot; --seed 1"
    assert said in page.render(other)
    assert "--data" not in page.render(BOTH) and "--compile" not in page.render(BOTH)


def test_curves_stay_inside_of_their_charts():
    for points in PageReader(page.render(BOTH)).points:
        for x, y in (map(float, point.split(",")) for point in points.split()):
            assert charts.LEFT <= x <= charts.WIDE - charts.RIGHT and charts.TOP <= y <= charts.HIGH - charts.BOTTOM


def test_a_band_is_explained_where_one_is_drawn():
    assert page.BAND in page.render(BOTH)  # the mean of two steps
    short = report(BASE, run("nvfp4", FALLING[:20], gap_percent=1.0))
    short["plan"] = {**short["plan"], "steps": 20}
    assert page.BAND not in page.render(short)  # of one


def test_short_times_are_in_milliseconds():
    cells = PageReader(page.render(report(run("bf16 (torch)", FALLING, first_step_s=0.0314, seconds=2.5)))).cells
    assert {"31.4 ms", "2.5 s"} <= set(cells)


def test_the_settings_of_a_mixture_have_a_row_each():
    found = report(BASE)
    found["plan"]["shape"] = {**found["plan"]["shape"], "mixture": {"experts": 8, "top_k": 2}}
    text = page.render(found)
    assert (
        '<th scope="row">experts</th><td>8</td>' in text
        and '<th scope="row">top_k</th><td>2</td>' in text
        and "{" not in text.split("</style>")[1]
    )


def test_names_are_text_and_no_markup():
    text = page.render(report(run("fp8-block(scale='<b>&')", FALLING)))
    PageReader(text)
    assert "<b>" not in text and "&lt;b&gt;&amp;" in text


@pytest.mark.parametrize(
    "losses", [[2.0], [2.0, 2.0], [math.nan] * 5, [1.0, math.inf, 2.0], [0.0, 0.0], [1e-8, 3e-8], [1e6, 2e6]], ids=str
)
def test_any_losses_make_a_page(losses):
    text = page.render(report(run("bf16 (torch)", losses), run("nvfp4", losses, gap_percent=0.0)))
    assert not re.search(r'points="[^"]*(nan|inf)', text)
    PageReader(text)


def test_an_interrupted_run_says_so():
    text = page.render(report(run("bf16 (torch)", FALLING), run("nvfp4", FALLING[:7], None), interrupted=True))
    assert "interrupted after step 7" in text and "seed 0. Interrupted.</dd>" in text
    assert page.render(report(run("bf16 (torch)", FALLING), run("nvfp4", [], None))).count("nvfp4") == 0


def test_load_and_routes_are_shown_where_they_are_known():
    more = run("fp8-block", FALLING, load=[[0.25, 0.75]])
    route = {"recipe": "fp8-block", "fprop": "native", "dgrad": "emulated", "wgrad": "reference"}
    cells = PageReader(page.render(report(more, routes=[route]))).cells
    assert {"25.0 %", "75.0 %", "native", "emulated", "reference"} <= set(cells)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.2, 5.9), (-3.0, 0.2), (2.0, 2.0), (1e-9, 2e-9), (0.0, 0.0)])
def test_ticks_cover_their_range_in_round_steps(low, high):
    ticks = charts.round_ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 1 <= len(ticks) <= 8
    assert len(set(ticks)) == len(ticks)


def test_smoothing_keeps_the_length_and_a_constant():
    assert page.smooth([3.0] * 40, 40) == [3.0] * 40
    assert page.smooth(FALLING, 40)[0] == FALLING[0] and len(page.smooth(FALLING, 40)) == 40


def sampled(step, **tensors):
    return {"step": step, "layers": {"blocks.0.down": tensors}, "findings": [f"blocks.0.down: <dy> at {step}"]}


def test_regions_of_two_recipes_with_the_same_layers_have_names_of_their_own():
    samples = [sampled(step, x={"underflow": 0.5, "sqnr": 31.0, "scale": 1.0}) for step in (10, 20)]
    made = report(BASE, *(run(name, FALLING, numerics=samples) for name in ("mxfp8", "nvfp4")))
    made["plan"] = {**made["plan"], "every": 10}
    found = PageReader(page.render(made)).regions
    assert {"blocks.0.down in mxfp8 by step, table", "blocks.0.down in nvfp4 by step, table"} <= set(found)


def test_numbers_of_tensors_are_means_over_the_steps_and_shaded():
    samples = [
        sampled(10, x={"underflow": 0.5, "saturated": 0.0, "sqnr": 31.0}, dw={"cosine": 0.999}),
        sampled(20, x={"underflow": 0.3, "saturated": 0.0, "sqnr": 29.0}, dw={"cosine": 0.98}),
    ]
    text = page.render(report(BASE, run("nvfp4", FALLING, numerics=samples)))
    PageReader(text)
    assert '--shade:1.00" title="step 10: 50.00 %, step 20: 30.00 %">40.00 %<' in text
    assert '<td title="step 10: 31.0 dB, step 20: 29.0 dB">30.0 dB<' in text
    assert '<a href="#run1-0">blocks.0.<wbr>down</a>: &lt;dy&gt; at 20' in text and '<tr id="run1-0">' in text
    assert "nvfp4, steps 10, 20" in text and "x saturated" not in text and "w underflow" not in text
    assert ">0.9895<" in text


def test_the_band_of_a_gap_is_two_standard_errors():
    base = [2.0] * 100
    values, band = page.gaps([2.0 + 0.02 * (1 + (-1) ** n) for n in range(100)], base, 100)
    assert values[-1] == pytest.approx(0.8)  # of the last five steps two are 0.04 above
    assert band[-1] == pytest.approx(100 * 2 * 0.0219 / 5**0.5 / 2, rel=0.02)
    assert math.isnan(band[0]) and len(values) == len(band) == 100
    text = page.render(report(run("bf16 (torch)", base), run("nvfp4", [2.0 + 0.01 * (n % 3) for n in range(100)])))
    assert text.count("<polygon") == 1


def test_time_memory_and_rules_are_shown():
    policy = {"rules": [{"layers": "*", "recipe": "nvfp4"}], "layers": [8], "notes": ["A rule decides for no layer."]}
    more = run("mine.toml", FALLING, kept_mib=12.34, peak_mib=56.78, first_step_s=3.21)
    cells = set(PageReader(text := page.render(report(BASE, more, policies={"mine.toml": policy}))).cells)
    assert {"1024.0 ms", "3.2 s", "12.3 MiB", "56.8 MiB", "8"} <= cells
    assert "A rule decides for no layer." in text and "Rules of mine.toml" in text


def test_headlines_answer_and_claim_no_more_than_one_seed_shows():
    def said(*gaps, steps=200):
        runs = [run(f"r{n}", FALLING, gap_percent=gap, gap_noise_percent=0.1) for n, gap in enumerate(gaps)]
        found = report(BASE, *runs)
        found["plan"] = {**found["plan"], "steps": steps}
        return PageReader(page.render(found)).headings[0]

    assert said(0.0, 0.34) == "r0 and r1 end within seed noise of bf16 (+0.00 %, +0.34 %)"
    # a Llama of 200 steps in fp8-block, by seeds: no recipe trains better than bf16
    assert said(-0.69, 0.14, -0.02).startswith("r0, r1 and r2 end within seed noise of bf16 (")
    assert said(1.01) == "r0 ends above bf16 by more than seed noise (+1.01 %)"
    assert said(-0.2, 3.0) == (
        "r1 ends above bf16 by more than seed noise (+3.00 %); r0 ends within seed noise of bf16 (-0.20 %)"
    )
    assert said(-0.1, steps=8) == "r0 ends near bf16, after too few steps to tell (-0.10 %)"
    assert said(math.nan) == "r0 diverged: the loss is not finite"
    assert "After 40 steps, as here, by more." in page.render(report(BASE, run("r", FALLING, gap_percent=0.1)))


def test_many_layers_are_folded_after_those_with_findings():
    layers = {f"layers.{n}": {"x": {"underflow": 0.01 * n}} for n in range(30)}
    sample = {"step": 1, "layers": layers, "findings": ["layers.3: x is bad", "layers.29: x is worse"]}
    text = page.render(report(BASE, run("nvfp4", FALLING, numerics=[sample])))
    PageReader(text)
    shown, rest = text.split("22 more layers without a finding")
    assert shown.index('id="run1-29"') < shown.index('id="run1-3"') < shown.index('id="run1-28"')
    assert 'id="run1-0"' in rest and 'id="run1-0"' not in shown


def test_an_unfinished_run_is_smoothed_as_far_as_a_whole_one():
    """Curves of runs that ended at different steps coincide where their losses do."""
    assert page.smooth(FALLING[:20], 100) == page.smooth(FALLING, 100)[:20]
    assert page.gaps(FALLING[:20], FALLING, 100)[0] == [0.0] * 20
