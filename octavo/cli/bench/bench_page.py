"""The page of a bench: which case is the fastest and by how much, a card for each recipe, and bars for each shape."""

import re
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from octavo.cli.bench.cases import SHAPES, Columns, Row
from octavo.inspection import webpage as web
from octavo.inspection.provenance import provenance
from octavo.recipes import SHIPPED
from octavo.text import plural

NAMES = sorted((name for name in SHIPPED if name != "bf16"), key=len, reverse=True)
RECIPE = re.compile(rf"\b(?:{'|'.join(NAMES)})(?![\w-])(?:\([^)]*\))?")
READ = "Shorter bars are faster. The first case is what the others are compared with. A case that failed has no bar."
MEMORY = ("peak_mib", "kept_mib", "saved_mib")


class Section(NamedTuple):
    """The cases of one shape."""

    title: str
    unit: str  # "ms" or "us"
    rows: list[Row]

    def times(self) -> list[Row]:
        return [row for row in self.rows if row.get(self.unit)]

    def baseline(self) -> Row | None:
        """Return the first case, if Octavo's come after it."""
        first = next(iter(self.times()), None)
        return None if first is None or is_ours(first) or not any(map(is_ours, self.rows)) else first

    def ratio(self, row: Row) -> float | None:
        """Return how many times as fast as the baseline a case is."""
        base = self.baseline()
        return None if base is None else base[self.unit] / row[self.unit]

    def fastest(self, recipe: str = "") -> Row | None:
        """Return the fastest case of Octavo, or of one recipe of Octavo's."""
        own = [row for row in self.times() if is_ours(row) and (not recipe or recipe_of(row) == recipe)]
        return min(own, key=lambda row: row[self.unit], default=None)


def is_ours(row: Row) -> bool:
    return str(row["case"]).startswith("octavo")


def recipe_of(row: Row) -> str:
    """Return the recipe that a case names; "" if it names none."""
    found = RECIPE.search(row["case"])
    return "" if found is None else found[0]


def sections_of(report: Row) -> list[Section]:
    """Return the cases of a report by shape, whichever suite wrote it."""
    found = [Section("", "ms", report["results"])] if report.get("results") else []
    for entry in report.get("shapes", ()):
        names = SHAPES.get(report["suite"], ("",) * len(entry["shape"]))
        title = ", ".join(f"{n} {name}".strip() for n, name in zip(entry["shape"], names, strict=True))
        found.append(Section(title, "ms", entry["results"]))
    for subject, modes in report.get("subjects", {}).items():
        rows = []
        for case, readings in modes.items():
            medians = {mode: statistics.median(us) for mode, us in readings.items() if us}
            rows.append({"case": case, "us": next(iter(medians.values()), None), **medians})
        found.append(Section(subject, "us", rows))
    return [one for one in found if one.times()]


def render(report: Row, columns: Columns, text: str) -> str:
    """Return the page. `columns` are those of the suite's tables, and `text` is the report as text."""
    found, facts = sections_of(report), report["machine"]
    recipes = dict.fromkeys(name for one in found for row in one.times() if is_ours(row) and (name := recipe_of(row)))
    parts = [
        web.cards([_card(name, found) for name in recipes]),
        web.section("Times", web.paragraph(READ, soft=True), *(_bars(one, columns) for one in found)),
        _next(report["suite"], found),
        web.folded("All tables as text", web.plain_text(text)),
    ]
    peers = ", ".join(f"{name} {version}" for name, version in (report.get("peers") or {}).items() if version)
    triton = f", triton {facts['triton']}" if facts.get("triton") else ""
    cases = plural(sum(len(one.rows) for one in found), "case")
    measured = f"the suite {report['suite']}: {cases}, {report.get('dtype', 'bfloat16')}"
    size = report.get("size") or {}
    made = provenance(
        model=", ".join(f"{name} {n}" for name, n in size.items()) or " × ".join(map(str, report.get("shape", ()))),
        recipes=", ".join(recipes),
        measured=measured + (". Interrupted." if report.get("interrupted") else ""),
        device=facts["gpu"] or "a CPU",
        made_with=f"octavo {facts['octavo']}, torch {facts['torch']}{triton}" + (f", {peers}" if peers else ""),
        command=report.get("command", ""),
    )
    return web.document(headline(found), made, parts)


def headline(found: Sequence[Section]) -> str:
    """Return which case is the fastest, beside the baseline; over several shapes the range of its ratios."""
    best = [(one, row) for one in found if (row := one.fastest()) is not None]
    if not best:
        rates = [row["of_copy"] for one in found for row in one.times() if row.get("of_copy")]
        if not rates:
            return "No case of Octavo was timed"
        span = f"{100 * min(rates):.0f} to {100 * max(rates):.0f} %"
        return f"{plural(len(rates), 'case')} run at {span} of a plain copy's rate"
    ratios = [ratio for one, row in best if (ratio := one.ratio(row)) is not None]
    one, row = best[0]
    if len(ratios) < len(best) or not ratios:
        return f"{row['case']} is the fastest: {_time(row, one.unit)}"
    base = one.baseline()
    assert base is not None
    if len(best) == 1:
        return f"{row['case']} takes {_time(row, one.unit)}: {ratios[0]:.2f} × as fast as {base['case']}"
    low, high = min(ratios), max(ratios)
    shapes = plural(len(best), "shape" if one.unit == "ms" else "case")
    return f"The fastest case of Octavo is {low:.2f} to {high:.2f} × as fast as {base['case']}, over {shapes}"


def _card(recipe: str, found: Sequence[Section]) -> web.Card:
    """Return the fastest case of a recipe in the first shape that has one."""
    one = next(one for one in found if one.fastest(recipe) is not None)
    row, base = one.fastest(recipe), one.baseline()
    assert row is not None
    ratio = one.ratio(row)
    lines = [f"{row['case']}: {_time(row, one.unit)}" + (f", {one.title}" if one.title else "")]
    name = next((name for name in MEMORY if row.get(name) is not None), None)
    if name is not None:
        other = None if base is None else base.get(name)
        said = f"{name.removesuffix('_mib').capitalize()} memory: {row[name]:.0f} MiB"
        lines.append(said + (f", {row[name] / other:.2f} × {base['case']}" if other and base else ""))
    if ratio is None or base is None:
        return web.Card(recipe, _time(row, one.unit), "its fastest case", lines)
    return web.Card(recipe, f"{ratio:.2f} ×", f"as fast as {base['case']}", lines, "ok" if ratio >= 1 else "look")


def _bars(one: Section, columns: Columns) -> web.Markup:
    """Return a bar and the numbers of each case."""
    # the ratio to bf16 is there already
    shown = [c for c in columns if c[1] != "of_bf16" and any(row.get(c[1]) is not None for row in one.rows)]
    if one.unit == "us":
        shown = [(mode, mode, ".0f") for mode in ("eager", "compiled") if any(mode in row for row in one.rows)]
    longest = max(row[one.unit] for row in one.times())
    rows = []
    for row in one.rows:
        if "error" in row:
            rows.append(web.Bar(row["case"], 0.0, [f"failed: {row['error']}"], "look"))
            continue
        ratio = one.ratio(row) if row.get(one.unit) else None
        cells = ["–" if ratio is None else f"{ratio:.2f} ×"]
        cells += ["–" if row.get(key) is None else format(row[key], form) for _, key, form in shown]
        kind = "ours" if is_ours(row) else ""
        rows.append(web.Bar(row["case"], (row.get(one.unit) or 0.0) / longest, cells, kind))
    base = one.baseline()
    header = [
        "case",
        "time",
        "as fast" if base is None else f"as fast as {base['case']}",
        *(name for name, *_ in shown),
    ]
    return web.bars(one.title or "All cases", header, rows)


def _next(suite: str, found: Sequence[Section]) -> web.Markup:
    best = next((row for one in found if (row := one.fastest()) is not None and recipe_of(row)), None)
    if best is None:
        return web.Markup("")
    recipe = recipe_of(best)
    other = "model" if suite != "model" else "moe"
    commands = [f'octavo train --recipe "{recipe}" --html train.html', f'octavo bench {other} --recipes "{recipe}"']
    return web.try_next("See what the fastest recipe costs in loss, and what it gains elsewhere.", commands)


def _time(row: dict[str, Any], unit: str) -> str:
    return f"{row[unit]:.3g} ms" if unit == "ms" else f"{row[unit]:.0f} µs"
