"""A training report as one HTML file that needs nothing else: curves, tables, and how they were made.

The page has no script and loads nothing. Its charts are SVG, which scales with the window; colours follow the reader's
light or dark setting.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

SMOOTH = 0.05  # of the steps: how far the running mean of a curve reaches
COLOURS = ("#8a8f98", "#2f7ed8", "#d9822b", "#2a9d6f", "#a855c7", "#c2416b", "#5b6ee1", "#7a8b00")  # the baseline first

STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --soft: #5f6672; --line: #d9dde3; --ground: #fff; --panel: #f6f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaee; --soft: #9aa2ae; --line: #333943; --ground: #15181d; --panel: #1c2026; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); margin: 0; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
p { margin: .5rem 0; max-width: 46rem; } .soft { color: var(--soft); }
figure { margin: 1rem 0; background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .75rem; }
figcaption { color: var(--soft); font-size: .875rem; padding: 0 .25rem; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; min-width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .35rem .75rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--soft); } th:first-child, td:first-child { text-align: left; padding-left: 0; }
.facts td { text-align: left; } .facts table { min-width: 0; } figcaption span { white-space: nowrap; }
.key { display: inline-block; width: .75rem; height: .75rem; border-radius: 2px; margin-right: .5rem; }
"""


class Curve(NamedTuple):
    name: str
    values: Sequence[float]
    colour: str


def render(report: dict[str, Any]) -> str:
    """Returns the page of a report of `octavo train`."""
    runs = [run for run in report["runs"] if run["losses"]]
    colours = {run["recipe"]: COLOURS[i % len(COLOURS)] for i, run in enumerate(runs)}
    facts, plan = report["machine"], report["plan"]
    title = f"{plan['model']}: {', '.join(run['recipe'] for run in runs)}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _paragraph(_head(report), soft=True),
        "<h2>Loss</h2>",
        _figure(
            [Curve(run["recipe"], _smooth(run["losses"]), colours[run["recipe"]]) for run in runs],
            f"Training loss, mean over {100 * SMOOTH:.0f} % of the steps",
        ),
        _summary(report, runs, colours),
    ]
    if len(runs) > 1:
        parts += [
            _figure(
                [Curve(run["recipe"], _gaps(run, runs[0]), colours[run["recipe"]]) for run in runs[1:]],
                f"Training loss above {runs[0]['recipe']}, in percent, smoothed alike",
                zero=True,
            ),
            _paragraph(
                "One run is no ranking: at this size two runs in bf16 that differ in rounding alone end up to half a "
                "percent apart. Compare means over seeds.",
                soft=True,
            ),
        ]
    parts += [_load(run) for run in runs if run.get("load")]
    parts += [_routes(report["routes"])] if report.get("routes") else []
    facts_table = _table((), [[name, str(value)] for name, value in _settings(plan, facts)])
    parts += ["<h2>How it was made</h2>", f'<div class="facts">{facts_table}</div>']
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        "</body>\n</html>\n"
    )


def _head(report: dict[str, Any]) -> str:
    facts, plan = report["machine"], report["plan"]
    said = f"{plan['steps']} steps of {plan['batch']} × {plan['shape']['context']} bytes, seed {plan['seed']}, on "
    said += facts["gpu"] or "a CPU"
    return said + (". Interrupted." if report.get("interrupted") else ".")


def _settings(plan: dict[str, Any], facts: dict[str, Any]) -> list[tuple[str, Any]]:
    listed = [("data", plan.get("data")), ("compiled", "yes" if plan["compile"] else "no")]
    listed += [(name, value) for name, value in facts.items() if value is not None]
    listed += [(name, value) for name, value in plan["shape"].items() if value is not None]
    return [(name, value) for name, value in listed if value is not None]


def _paragraph(text: str, *, soft: bool = False) -> str:
    return f'<p class="soft">{escape(text)}</p>' if soft else f"<p>{escape(text)}</p>"


# -- tables ------------------------------------------------------------------------------------------------------------


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], keys: Sequence[str] = ()) -> str:
    """Returns a table, which scrolls by itself in a narrow window. `keys` are the colours of its rows."""
    head = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in header)}</tr>" if header else ""
    lines = []
    for i, row in enumerate(rows):
        key = f'<span class="key" style="background:{keys[i]}"></span>' if keys else ""
        lines.append(
            "<tr>" + "".join(f"<td>{key if n == 0 else ''}{escape(cell)}</td>" for n, cell in enumerate(row)) + "</tr>"
        )
    return f'<div class="scroll"><table>{head}{"".join(lines)}</table></div>'


def _summary(report: dict[str, Any], runs: Sequence[dict[str, Any]], colours: dict[str, str]) -> str:
    rows = []
    for run in runs:
        ended = run["loss"] is not None
        gap = run.get("gap_percent")
        rows.append([
            run["recipe"],
            f"{run['losses'][-1]:.4f}",
            f"{run['loss']:.4f}" if ended else f"interrupted after step {len(run['losses'])}",
            f"{gap:+.2f} %" if gap is not None else "",
            f"{run['tokens_per_s']:.0f}" if ended else "",
            f"{run['peak_mib']:.0f}" if run.get("peak_mib") else "",
        ])  # fmt: skip
    header = ("recipe", "last step", "held-out text", "gap", "tokens/s", "peak MiB")
    empty = [n for n in range(len(header)) if n and not any(row[n] for row in rows)]
    kept = [n for n in range(len(header)) if n not in empty]
    return _table([header[n] for n in kept], [[row[n] for n in kept] for row in rows], list(colours.values()))


def _load(run: dict[str, Any]) -> str:
    """Returns the shares of the experts of each layer, as bars."""
    rows = [[f"layer {n}", *(f"{100 * share:.1f} %" for share in shares)] for n, shares in enumerate(run["load"], 1)]
    experts = [f"expert {n}" for n in range(1, len(run["load"][0]) + 1)]
    return f"<h2>Load of the experts: {escape(run['recipe'])}</h2>" + _table(["", *experts], rows)


def _routes(routes: Sequence[dict[str, str]]) -> str:
    rows = [[row["recipe"], row["fprop"], row["dgrad"], row["wgrad"]] for row in routes]
    note = "native: by the chip; emulated: the same codes, multiplied in bfloat16; reference: in float64."
    return (
        "<h2>What ran how</h2>"
        + _table(("recipe", "fprop", "dgrad", "wgrad"), rows)
        + _paragraph(note[0].upper() + note[1:], soft=True)
    )


# -- charts ------------------------------------------------------------------------------------------------------------

WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM = 800, 300, 52, 12, 12, 28


def _figure(curves: Sequence[Curve], caption: str, *, zero: bool = False) -> str:
    """Returns curves over the steps, with a legend. `zero` keeps zero in view, and draws it."""
    values = [v for curve in curves for v in curve.values if math.isfinite(v)]
    if not values:
        return ""
    low, high = min(values), max(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    steps = max(len(curve.values) for curve in curves)

    def x(step: float) -> float:
        return LEFT + (WIDE - LEFT - RIGHT) * (step - 1) / max(steps - 1, 1)

    def y(value: float) -> float:
        return TOP + (HIGH - TOP - BOTTOM) * (high - value) / ((high - low) or 1.0)

    drawn = []
    for tick in ticks:
        stroke = "var(--soft)" if zero and tick == 0 else "var(--line)"
        drawn.append(f'<line x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="{stroke}"/>')
        drawn.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for step in sorted({1, *(round(steps * part / 4) for part in range(1, 5))} - {0}):
        anchor = "end" if step == steps and steps > 1 else "middle"
        drawn.append(f'<text x="{x(step):.1f}" y="{HIGH - 8}" text-anchor="{anchor}">{step}</text>')
    for curve in curves:
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(curve.values, 1) if math.isfinite(v))
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{curve.colour}" stroke-width="2"/>')
    legend = " ".join(
        f'<span><span class="key" style="background:{curve.colour}"></span>{escape(curve.name)}</span>'
        for curve in curves
    )
    names = ", ".join(curve.name for curve in curves)
    return (
        f'<figure><svg viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{escape(caption)}: {escape(names)}">'
        + "".join(drawn)
        + f"</svg><figcaption>{escape(caption)}. {legend}</figcaption></figure>"
    )


def _ticks(low: float, high: float) -> list[float]:
    """Returns about five round numbers that cover a range."""
    span = (high - low) or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next(unit * factor for factor in (1, 2, 5, 10) if span / (unit * factor) <= 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(n * step, 12) for n in range(first, last + 1)]


def _smooth(values: Sequence[float]) -> list[float]:
    """Returns the mean of each value and those before it."""
    reach = max(1, round(SMOOTH * len(values)))
    return [sum(values[max(0, i - reach) : i]) / min(i, reach) for i in range(1, len(values) + 1)]


def _gaps(run: dict[str, Any], base: dict[str, Any]) -> list[float]:
    pairs = zip(_smooth(run["losses"]), _smooth(base["losses"]), strict=False)
    return [100 * (mine / theirs - 1) if theirs else math.nan for mine, theirs in pairs]
