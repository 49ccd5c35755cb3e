"""A training report as one HTML page: curves, tables, and how they were made. The charts are SVG, which scales with the
window."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from octavo.cli.train_text import gap_text, runs_of
from octavo.webpage import document, key, paragraph, table

SMOOTH = 0.05  # of the steps: how far the running mean of a curve reaches
COLOURS = ("#8a8f98", "#2f7ed8", "#d9822b", "#2a9d6f", "#a855c7", "#c2416b", "#5b6ee1", "#7a8b00")  # the baseline first


class Curve(NamedTuple):
    name: str
    values: Sequence[float]
    colour: str


def render(report: dict[str, Any]) -> str:
    """Returns the page of a report of `octavo train`, as far as it got."""
    runs = runs_of(report)
    colours = {run["recipe"]: COLOURS[i % len(COLOURS)] for i, run in enumerate(runs)}
    facts, plan = report["machine"], report["plan"]
    model = "A small mixture of experts" if plan["shape"].get("mixture") else "A small GPT"
    title = f"{model}: {', '.join(run['recipe'] for run in runs)}"
    parts = [
        paragraph(_head(report), soft=True),
        "<h2>Loss</h2>",
        _figure(
            [Curve(run["recipe"], _smooth(run["losses"]), colours[run["recipe"]]) for run in runs],
            f"Training loss, mean over {100 * SMOOTH:.0f} % of the steps",
        ),
        _summary(runs, colours),
    ]
    if len(runs) > 1:
        parts += [
            _figure(
                [Curve(run["recipe"], _gaps(run, runs[0]), colours[run["recipe"]]) for run in runs[1:]],
                f"Training loss above {runs[0]['recipe']}, in percent, smoothed alike",
                zero=True,
            ),
            paragraph(
                "One run is no ranking: at this size two runs in bf16 that differ in rounding alone end up to half a "
                "percent apart. Compare means over seeds.",
                soft=True,
            ),
        ]
    parts += [_load(run) for run in runs if run.get("load")]
    parts += [_routes(report["routes"])] if report.get("routes") else []
    settings = [[escape(name), escape(str(value))] for name, value in _settings(plan, facts)]
    parts += ["<h2>How it was made</h2>", table((), settings, left=True)]
    return document(title, parts)


def _head(report: dict[str, Any]) -> str:
    facts, plan = report["machine"], report["plan"]
    said = f"{plan['steps']} steps of {plan['batch']} × {plan['shape']['context']} bytes, seed {plan['seed']}, on "
    said += facts["gpu"] or "a CPU"
    return said + (". Interrupted." if report.get("interrupted") else ".")


def _settings(plan: dict[str, Any], facts: dict[str, Any]) -> list[tuple[str, Any]]:
    listed = [("compiled", "yes" if plan["compile"] else "no"), *facts.items(), *plan["shape"].items()]
    return [(name, value) for name, value in listed if value is not None]


# -- tables ------------------------------------------------------------------------------------------------------------


def _summary(runs: Sequence[dict[str, Any]], colours: dict[str, str]) -> str:
    rows = []
    for run in runs:
        ended = run["loss"] is not None
        rows.append([
            key(colours[run["recipe"]]) + escape(run["recipe"]),
            f"{run['losses'][-1]:.4f}",
            f"{run['loss']:.4f}" if ended else f"interrupted after step {len(run['losses'])}",
            gap_text(run),
            f"{run['tokens_per_s']:.0f}" if ended else "",
        ])  # fmt: skip
    return table(("recipe", "last step", "held-out text", "gap", "tokens/s"), rows)


def _load(run: dict[str, Any]) -> str:
    """Returns a table of the share of the held-out text that each expert of each layer got."""
    rows = [[f"layer {n}", *(f"{100 * share:.1f} %" for share in shares)] for n, shares in enumerate(run["load"], 1)]
    experts = [f"expert {n}" for n in range(1, len(run["load"][0]) + 1)]
    return f"<h2>Load of the experts: {escape(run['recipe'])}</h2>" + table(["", *experts], rows)


def _routes(routes: Sequence[dict[str, str]]) -> str:
    rows = [[escape(row[name]) for name in ("recipe", "fprop", "dgrad", "wgrad")] for row in routes]
    note = "Native: by the chip; emulated: the same codes, multiplied in bfloat16; reference: in float64."
    return "<h2>What ran how</h2>" + table(("recipe", "fprop", "dgrad", "wgrad"), rows) + paragraph(note, soft=True)


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
    legend = " ".join(f"<span>{key(curve.colour)}{escape(curve.name)}</span>" for curve in curves)
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
