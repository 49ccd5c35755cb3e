"""Tables of the pages, and the committed results that they show."""

import functools
import json
import re
from pathlib import Path

import octavo

ROOT = Path(octavo.__file__).parents[1]
README, BENCHMARKS, LOG = "README.md", "docs/benchmarks.md", "docs/benchmarks-log.md"
EXPERTS, LOSS, HOST = "docs/benchmarks-experts.md", "docs/benchmarks-loss.md", "docs/benchmarks-host.md"


@functools.cache
def results(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def section(page, heading):
    """Returns the text under a heading, up to the next heading of its level or above."""
    text = "\n" + (ROOT / page).read_text().replace("−", "-")
    level = heading.split()[0]
    return re.split(rf"\n#{{1,{len(level)}}} ", text.split(f"\n{heading}\n")[1])[0]


def tables(page, heading):
    """Returns the tables under a heading, each a list of rows of cells, its header first."""
    found = re.findall(r"(?:^\|.*\|\n)+", section(page, heading) + "\n", re.MULTILINE)
    rows = [[[cell.strip() for cell in line.strip("|").split("|")] for line in each.splitlines()] for each in found]
    return [[each[0], *each[2:]] for each in rows]


def keyed(rows):
    """Returns the rows of a table whose first cell is a recipe's name alone, as {recipe: the other cells}."""
    return {row[0].strip("`"): row[1:] for row in rows if re.fullmatch(r"`[\w-]+`", row[0])}


def cases(rows):
    return {row["case"].removeprefix("octavo "): row for row in rows}


def shapes(name):
    return [cases(shape["results"]) for shape in results(name)["shapes"]]


def kept(row):
    """Returns what forward keeps, codes of weights after it, and the peak of a step."""
    codes = f" + {row['codes_mib']:.0f}" if row["codes_mib"] else ""
    return f"{row['kept_mib']:.0f}{codes}; {row['peak_mib']:.0f}"
