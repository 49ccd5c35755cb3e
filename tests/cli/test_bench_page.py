"""The page of a bench, from the committed results of an H200 and from small reports."""

import json
from pathlib import Path

import pytest

from octavo.cli.bench import SUITES, bench_page, suite_of
from tests.support.page_reader import PageReader

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FACTS = {"octavo": "0.1.0", "torch": "2.13.0", "triton": None, "gpu": None}


def report(*rows, **more):
    return {"suite": "mlp", "machine": FACTS, "results": list(rows), **more}


def case(name, ms, **more):
    return {"case": name, "ms": ms, **more}


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_has_a_page(suite):
    found = json.loads((RESULTS / f"{suite}-h200.json").read_text())
    module = suite_of(suite)
    text = bench_page.render(found, getattr(module, "COLUMNS", ()), module.render(found))
    read = PageReader(text)
    assert "No case" not in read.headings[0] and "NVIDIA H200" in text
    bars = sum(len(one.rows) for one in bench_page.sections_of(found))
    assert text.count('<td class="bar">') == bars > 0


def test_the_headline_is_the_fastest_case_beside_the_first():
    rows = (case("bf16", 3.0, peak_mib=10.0), case("octavo fp8-block", 2.0, peak_mib=5.0), case("octavo mxfp8", 4.0))
    text = bench_page.render(report(*rows, command="octavo bench mlp"), (("ms", "ms", ".3f"),), "")
    assert PageReader(text).headings[0] == "octavo fp8-block takes 2 ms: 1.50 × as fast as bf16"
    assert "Peak memory: 5 MiB, 0.50 × bf16" in text and "<code>octavo bench mlp</code>" in text
    assert text.count('class="card ok"') == 1 and text.count('class="card look"') == 1
    assert "octavo train --recipe &quot;fp8-block&quot;" in text


def test_a_case_that_failed_has_its_error_and_no_bar():
    rows = (case("bf16", 3.0), {"case": "octavo fp8-block", "error": "RuntimeError: <out>"}, case("octavo mxfp8", 2.0))
    text = bench_page.render(report(*rows), (("ms", "ms", ".3f"),), "")
    assert "failed: RuntimeError: &lt;out&gt;" in text and text.count("width:0.0%") == 1


def test_recipes_are_read_from_the_names_of_cases():
    names = {"octavo fp8-block(scale='fp32'), cached": "fp8-block(scale='fp32')", "octavo.MoE mxfp8, captured": "mxfp8",
             "octavo bf16": ""}  # fmt: skip
    assert {name: bench_page.recipe_of({"case": name}) for name in names} == names
