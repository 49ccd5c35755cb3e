"""Figures of memory in the README and the pages, and those beside them, are those of the committed results."""

import re

from benchmarks import memory_tables
from tests.support.figures import BENCHMARKS, EXPERTS, LOG, README, cases, results, section, shapes, tables

MEMORY = "docs/memory.md"
MOE_MEMORY, MODEL_MEMORY = "moe-memory-h200", "model-h200"


def shares_of_bf16s_peak(wanted):
    """Returns the peaks of a mixture's steps as parts of bf16's, of the cases that are wanted."""
    found = [(rows, name) for rows in shapes(MOE_MEMORY) for name in rows if name.startswith("fp8") and wanted(name)]
    return [rows[name]["peak_mib"] / rows["grouped_mm bf16, compiled"]["peak_mib"] for rows, name in found]


def test_the_memory_that_the_limits_of_the_readme_name():
    found = shares_of_bf16s_peak(lambda _: True)
    text = " ".join(section(README, "## Limits").split())
    assert f"[{min(found):.2f} to {max(found):.2f} of bf16's]" in text


def test_the_page_about_memory():
    text = " ".join(section(MEMORY, "## What was measured").split())
    found = cases(results(MODEL_MEMORY)["results"])
    cast, codes = (found[f"fp8-delayed, {how}, compiled"] for how in ("blocks", "codes"))
    for row, said in (
        (cast, "Compiled, a model of fused operations needs {:,.0f} MiB"),
        (codes, "With weights that are codes it needs {:,.0f}"),
    ):
        held, peak = row["held_mib"], row["peak_mib"]
        assert f"{said.format(held + peak)}: {held:,.0f} held and a peak of {peak:,.0f}." in text
    (linear,) = [row["results"] for row in results("linear-h200")["shapes"] if row["shape"][2] == 14336]
    ours, plain = (cases(linear)[name] for name in ("fp8-delayed", "nn.Linear"))
    shown = [f"{row[key]:.0f}" for row in (ours, plain) for key in ("saved_mib", "peak_mib")]
    assert "kept {} MiB, peak {}; bf16 {} and {} ".format(*shown) in text
    fused = cases(results("mlp-h200")["results"])
    kept = [f"{fused[name]['kept_mib']:.0f}" for name in ("fp8-delayed", "bf16 compiled")]
    assert "kept {} MiB; bf16 compiled {} ".format(*kept) in text
    shares = shares_of_bf16s_peak(lambda _: True)
    assert f"peak of a step {min(shares):.2f} to {max(shares):.2f} of bf16's" in text
    large = {row["recipe"]: row for row in results("llama-8b-h200")["results"] if row["how"] == "full"}
    assert f"{large['fp8-block']['peak_gib']} GiB in `fp8-block`, {large['bf16']['peak_gib']} in bf16" in text


def table_of(lines):
    """Returns the rows of a table as `tables` does, its header first."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def test_the_tables_of_the_memory_of_a_step():
    heading, report = "### Memory of a step", results(MOE_MEMORY)
    steps, whole = tables(EXPERTS, heading)
    assert steps == table_of(memory_tables.of_mixtures(report, optimizer=False)) and len(steps) == 10
    assert whole == table_of(memory_tables.of_mixtures(report, optimizer=True)) and len(whole) == 8
    text = " ".join(section(EXPERTS, heading).split())
    assert f"{MOE_MEMORY}.json" in text
    given = shares_of_bf16s_peak(lambda name: re.search("cached|codes", name))
    cast = shares_of_bf16s_peak(lambda name: not re.search("cached|codes", name))
    ranges = [f"{end(part):.2f}" for part in (given, cast) for end in (min, max)]
    assert "codes {} to {} of it, cast in every step {} to {}".format(*ranges) in text
    eight, many, last = shapes(MOE_MEMORY)
    text = " ".join(section(LOG, "## A mixture of experts").split())
    assert f"{eight['fp8-delayed, codes, columns kept']['ms']:.2f} ms, goal 16.5" in text
    missed = [
        eight["fp8-delayed, codes"],
        many["fp8-delayed, codes"],
        eight["fp8-block, codes"],
        many["fp8-block, codes"],
    ]
    want = (
        "takes {:.2f} and {:.2f} ms for 8 and 128 experts, goals 16.5 and 9.8, and fp8-block {:.2f} for 8, goal 20.5, "
        "and {:.2f} for 128, goal 11.5"
    )
    assert want.format(*(row["ms"] for row in missed)) in text
    times = [
        last[f"{name}{how}, AdamW"]["ms"]
        for name in ("fp8-delayed", "fp8-block")
        for how in (", codes", ", codes, columns kept", "")
    ]
    want = "codes take {:.2f} and {:.2f} ms in fp8-delayed where casting and torch's AdamW take {:.2f}"
    assert f"{want}, and {{:.2f}} and {{:.2f}} in fp8-block where they take {{:.2f}}".format(*times) in text


def test_the_table_of_a_whole_models_memory():
    report = results(MODEL_MEMORY)
    assert tables(BENCHMARKS, "## A whole model")[0] == table_of(memory_tables.of_models(report))
    found = cases(report["results"])
    compiled = [found[f"{name}, compiled"] for name in ("bf16", "fp8-delayed, blocks", "fp8-delayed, codes")]
    bf16, cast, codes = (f"{row['held_mib'] + row['peak_mib']:,.0f}" for row in compiled)
    text = " ".join(section(BENCHMARKS, "## A whole model").split())
    assert f"compiled bf16 {bf16} MiB, compiled blocks {cast}, and compiled codes {codes}" in text


def test_the_tables_of_an_8b_model():
    report = results("llama-8b-h200")
    assert tables(BENCHMARKS, "### An 8B model on one GPU")[0] == table_of(memory_tables.of_the_8b_model(report))
    found = {row["recipe"]: row for row in report["results"] if row["how"] == "full"}
    for label, *shown in tables("docs/fp8-checkpoints.md", "## An 8B model on one GPU")[0][1:]:
        row = found["fp8-block" if "fp8-block" in label else "bf16"]
        assert shown == [f"{row['peak_gib']:.1f}", f"{row['tokens_per_s']:,.0f}"], label


def test_the_table_of_experts_over_one_rank():
    names = {"all-to-all of values": "all-to-all, values", "all-to-all of codes": "all-to-all, auto"}
    found = [cases(entry["results"]) for entry in results("expert-parallel-h200")["shapes"]]
    rows = tables(EXPERTS, "### Experts over ranks, with one rank")[0][1:]
    assert len(rows) == 6
    for label, *shown in rows:
        case = label.replace("`", "")
        assert shown == [f"{each[names.get(case, case)]['ms']:.3f}" for each in found], label
