"""Draws the picture of README.md, and the page of the gallery, from the committed results: `python3 -m
benchmarks.picture`.

Left: the time of a training step of a whole model. The parts of a bar are shares of the time of its kernels. Right: how
far the loss of a small GPT is from bf16's, the mean of four seeds and their standard deviation. Plain SVG, without any
library: a light card, so that it reads the same on a light and on a dark page. The gallery's page is that of a run of
`octavo train`.
"""

import json
from pathlib import Path
from typing import Any

from octavo.demo.page import render

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
TARGET, PAGE = DOCS / "images" / "h200.svg", DOCS / "gallery" / "llama-h200.html"
WIDTH, HEIGHT, TOP, ROW, BAR = 860, 300, 92, 34, 18
INK, MUTED, GRID, OURS = "#1f2933", "#52606d", "#d9e2ec", "#2f6fde"
PARTS = {"matrix products": "#2f6fde", "attention": "#9aa5b1", "AdamW": "#c3cbd4", "the rest": "#e4e7eb"}
CASES = {
    "bf16": "bf16",
    "bf16, compiled": "bf16, compiled",
    "octavo fp8-delayed, convert": "convert",
    "octavo fp8-delayed, convert, compiled": "convert, compiled",
    "octavo fp8-delayed, blocks": "blocks",
    "octavo fp8-delayed, blocks, compiled": "blocks, compiled",
}
BASE = "bf16, compiled"
FONT = "font-family='Helvetica, Arial, sans-serif'"


def load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return data


def part_of(kernel: str) -> str:
    """Return the part of a step that a GPU kernel belongs to."""
    words = {"nvjet": "matrix products", "cudnn": "attention", "FusedOptimizer": "AdamW"}
    return next((part for word, part in words.items() if word in kernel), "the rest")


def steps() -> dict[str, tuple[float, dict[str, float]]]:
    """Return the median milliseconds of a step of each case, and the share of each part in the time of its kernels."""
    found = {}
    for row in load("model-h200")["results"]:
        spent = dict.fromkeys(PARTS, 0.0)
        for each in row["kernels"]:
            spent[part_of(each["kernel"])] += each["ms"]
        found[row["case"]] = row["ms"], {part: ms / sum(spent.values()) for part, ms in spent.items()}
    return found


def gaps() -> list[tuple[str, float, float]]:
    """Return (recipe, mean, standard deviation) of the gap of the loss, in percent."""
    rows = load("parity-h200")["results"]
    return [(row["recipe"], row["mean_percent"], row["stdev_percent"]) for row in rows if row["recipe"] != "bf16"]


def text(x: float, y: float, words: str, *, size: int = 13, fill: str = INK, anchor: str = "start") -> str:
    return f"<text x='{x:g}' y='{y:g}' {FONT} font-size='{size}' fill='{fill}' text-anchor='{anchor}'>{words}</text>"


def line(x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1) -> str:
    return f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' stroke='{color}' stroke-width='{width:g}'/>"


def step_panel(left: float) -> list[str]:
    start, unit = left + 122, 2.05  # the zero of the bars, and the pixels of a millisecond
    parts = [
        text(left, 36, "A training step of a whole model, in fp8-delayed", size=16),
        text(left, 56, "Llama of 4 layers of 4096, 8192 tokens, with AdamW, NVIDIA H200", size=11, fill=MUTED),
    ]
    found = steps()
    for i, (case, label) in enumerate(CASES.items()):
        (ms, shares), y, x = found[case], TOP + i * ROW, start
        parts.append(text(start - 10, y + 14, label, anchor="end"))
        for part, share in shares.items():
            parts.append(
                f"<rect x='{x:.1f}' y='{y}' width='{unit * ms * share:.1f}' height='{BAR}' fill='{PARTS[part]}'/>"
            )
            x += unit * ms * share
        times = "" if case.startswith("bf16") else f", {found[BASE][0] / ms:.2f}x"
        parts.append(text(x + 8, y + 14, f"{ms:.1f} ms{times}", size=12))
    x, y = left, TOP + len(CASES) * ROW + 8
    for part, color in PARTS.items():
        parts += [
            f"<rect x='{x:g}' y='{y}' width='11' height='11' fill='{color}'/>",
            text(x + 16, y + 10, part, size=11, fill=MUTED),
        ]
        x += 36 + 5.5 * len(part)
    return parts


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
    parts = [card, *step_panel(24), *gap_panel(476)]
    size = f"width='{WIDTH}' height='{HEIGHT + 40}' viewBox='0 0 {WIDTH} {HEIGHT + 40}'"
    title = "<title>A training step of a whole model, and loss against bf16, measured on one H200</title>"
    return "\n".join([f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img'>", title, *parts, "</svg>\n"])


def page() -> str:
    """Return the page of a Llama in two recipes."""
    return render(load("llama-h200"))


if __name__ == "__main__":
    for target, written in ((TARGET, draw()), (PAGE, page())):
        target.parent.mkdir(exist_ok=True)
        target.write_text(written)
        print(f"wrote {target}")
