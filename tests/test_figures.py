"""Figures of README.md and of docs/choosing-a-recipe.md are those of the committed results."""

import json
import re
from pathlib import Path

import octavo
from benchmarks import picture

ROOT = Path(octavo.__file__).parents[1]
PAGE = (ROOT / "docs" / "choosing-a-recipe.md").read_text()
LAYER = [8192, 4096, 14336]
EMULATED = ("mxfp8", "nvfp4")


def results(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def table(heading):
    """Returns the rows under a heading as {recipe: cells}."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0].replace("−", "-")
    return {
        name: cells.split(" | ") for name, cells in re.findall(r"^\| `([\w-]+)` \| (.*) \|$", section, re.MULTILINE)
    }


def cases(rows):
    return {row["case"].removeprefix("octavo "): row for row in rows}


def linear(recipe):
    """Returns (times nn.Linear's speed, MiB kept, MiB at the peak) of one layer."""
    shapes = results("linear-emulated-h200" if recipe in EMULATED else "linear-h200")["shapes"]
    (rows,) = [cases(shape["results"]) for shape in shapes if shape["shape"] == LAYER]
    row = rows[recipe]
    return rows["nn.Linear"]["graph_ms"] / row["graph_ms"], row["saved_mib"], row["peak_mib"]


def test_the_decision_table():
    mlp = cases(results("mlp-h200")["results"])
    parity = {row["recipe"]: row for row in results("parity-h200")["results"]}
    rows = table("Decision table")
    assert set(rows) == set(octavo.recipes.SHIPPED)
    for name, cells in rows.items():
        speed, kept, peak = linear(name)
        fused = mlp["bf16 compiled"]["ms"] / mlp[name]["ms"] if name in mlp else None
        gap = parity[name]
        assert cells[:5] == [
            f"{speed:.2f}",
            "–" if fused is None else f"{fused:.2f}",
            f"{kept:.0f}",
            f"{peak:.0f}",
            f"{gap['mean_percent']:+.2f} ± {gap['stdev_percent']:.2f}",
        ], name


def test_the_table_of_experts():
    shapes = [cases(shape["results"]) for shape in results("grouped-h200")["shapes"]]
    for name, cells in table("Layers of experts").items():
        want = [1 / rows[case]["graph_of_bf16"] for rows in shapes for case in (name, f"{name}, cached")]
        assert cells == [f"{times:.2f}" for times in want], name


def test_the_table_of_the_readme():
    section = (ROOT / "README.md").read_text().split("## Measured\n")[1].split("\n## ")[0].replace("−", "-")
    rows = [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in section.splitlines() if "|" in line]
    names, cells = rows[0][1:], rows[2:]
    (layer,) = [cases(s["results"]) for s in results("linear-h200")["shapes"] if s["shape"] == LAYER]
    (experts,) = [cases(s["results"]) for s in results("grouped-h200")["shapes"] if s["shape"][0] == 64]
    mlp = cases(results("mlp-h200")["results"])
    parity = {row["recipe"]: row for row in results("parity-h200")["results"]}

    def row(found, first, field, form):
        keys = (first, *names)
        return [format(found[key][field], form) if key in found else "–" for key in keys]

    gaps = [f"{parity[name]['mean_percent']:+.2f} ± {parity[name]['stdev_percent']:.2f}" for name in names]
    assert cells == [
        row(layer, "nn.Linear", "graph_ms", ".2f"),
        row(mlp, "bf16 compiled", "ms", ".2f"),
        row(mlp, "bf16 compiled", "kept_mib", ".0f"),
        row(experts, "grouped_mm bf16", "graph_ms", ".2f"),
        ["", *gaps],
    ]


def test_the_picture_is_drawn_from_the_results():
    assert picture.TARGET.read_text() == picture.draw(), "run python3 -m benchmarks.picture"
