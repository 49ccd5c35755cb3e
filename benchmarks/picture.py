"""Draws the picture of README.md from the committed results: `python3 -m benchmarks.picture`.

Left: how much faster than bf16 a training step of a SwiGLU MLP is. The newest run has no peers, so torchao's bar comes
from another run, and is drawn against the bf16 of that run. Right: how far the loss of a small GPT is from bf16's, the
mean of four seeds and their standard deviation. Plain SVG, without any library: a light card, so that it reads the same
on a light and on a dark page.
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TARGET = Path(__file__).parents[1] / "docs" / "images" / "h200.svg"
WIDTH, HEIGHT, TOP, ROW, BAR = 860, 300, 92, 34, 18
INK, MUTED, GRID, OURS, THEIRS = "#1f2933", "#52606d", "#d9e2ec", "#2f6fde", "#9aa5b1"
BASE, PEER = "bf16 compiled", "torchao tensorwise compiled"
OURS_FILE, PEERS_FILE = "mlp-refactored-h200", "mlp-h200"
CASES = (BASE, "octavo fp8-delayed", "octavo fp8-current", "octavo fp8-block")
FONT = "font-family='Helvetica, Arial, sans-serif'"


def load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return data


def speeds(name: str, cases: tuple[str, ...]) -> list[tuple[str, float, float]]:
    """Return (case, milliseconds, times the speed of that run's bf16) of the fused MLP."""
    ms = {row["case"]: row["ms"] for row in load(name)["results"]}
    return [(case, ms[case], ms[BASE] / ms[case]) for case in cases]


def gaps() -> list[tuple[str, float, float]]:
    """Return (recipe, mean, standard deviation) of the gap of the loss, in percent."""
    rows = load("parity-h200")["results"]
    return [(row["recipe"], row["mean_percent"], row["stdev_percent"]) for row in rows if row["recipe"] != "bf16"]


def text(x: float, y: float, words: str, *, size: int = 13, fill: str = INK, anchor: str = "start") -> str:
    return f"<text x='{x:g}' y='{y:g}' {FONT} font-size='{size}' fill='{fill}' text-anchor='{anchor}'>{words}</text>"


def line(x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1) -> str:
    return f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' stroke='{color}' stroke-width='{width:g}'/>"


def speed_panel(left: float) -> list[str]:
    start, unit = left + 170, 104.0  # the zero of the bars, and the pixels of 1x
    parts = [
        text(left, 36, "Speed of a training step", size=16),
        text(left, 56, "RMSNorm and SwiGLU MLP, 8192 x 4096 x 14336, NVIDIA H200", size=11, fill=MUTED),
    ]
    bars = [*speeds(OURS_FILE, CASES), *speeds(PEERS_FILE, (PEER,))]
    for i, (case, ms, times) in enumerate(bars):
        y = TOP + i * ROW
        color = OURS if case.startswith("octavo") else THEIRS
        parts += [
            text(start - 10, y + 14, case.replace("octavo ", "").replace(" compiled", ""), anchor="end"),
            f"<rect x='{start:g}' y='{y}' width='{unit * times:.1f}' height='{BAR}' rx='2' fill='{color}'/>",
            text(
                start + unit * times + 8,
                y + 14,
                f"{times:.2f}x" if case == PEER else f"{times:.2f}x, {ms:.2f} ms",
                size=12,
            ),
        ]
    [(_, ms, _), (_, base, _)] = speeds(PEERS_FILE, (PEER, BASE))
    note = f"torchao: another run ({PEERS_FILE}.json), {ms:.2f} ms beside a bf16 of {base:.2f}"
    return [*parts, text(left, TOP + len(bars) * ROW + 20, note, size=11, fill=MUTED)]


def gap_panel(left: float) -> list[str]:
    zero, unit = left + 150, 70.0  # the pixel of no gap, and the pixels of one percent
    bottom = TOP + len(gaps()) * ROW - 6
    parts = [
        text(left, 36, "Loss against bf16", size=16),
        text(left, 56, "small GPT, 400 steps, mean and standard deviation of 4 seeds", size=11, fill=MUTED),
    ]
    for percent in (0, 1, 2):
        x = zero + unit * percent
        parts += [
            line(x, TOP - 8, x, bottom, GRID),
            text(x, bottom + 16, f"{percent:+d} %" if percent else "0 %", size=11, fill=MUTED, anchor="middle"),
        ]
    for i, (name, mean, spread) in enumerate(gaps()):
        y, x = TOP + i * ROW + 9, zero + unit * mean
        parts += [
            text(left + 96, y + 5, name, anchor="end"),
            line(x - unit * spread, y, x + unit * spread, y, OURS, 3),
            f"<circle cx='{x:.1f}' cy='{y}' r='5' fill='{OURS}'/>",
            text(x + unit * spread + 10, y + 4, f"{mean:+.2f} %", size=12),
        ]
    return parts


def draw() -> str:
    card = f"<rect x='0.5' y='0.5' width='{WIDTH - 1}' height='{HEIGHT + 39}' rx='8' fill='#ffffff' stroke='{GRID}'/>"
    parts = [card, *speed_panel(24), *gap_panel(480)]
    size = f"width='{WIDTH}' height='{HEIGHT + 40}' viewBox='0 0 {WIDTH} {HEIGHT + 40}'"
    title = "<title>Speed of a training step and loss against bf16, measured on one H200</title>"
    return "\n".join([f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img'>", title, *parts, "</svg>\n"])


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(draw())
    print(f"wrote {TARGET}")
