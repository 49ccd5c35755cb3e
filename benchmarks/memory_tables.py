"""Write the tables of a step's memory from the results of three runs on a GPU.

    python3 -m benchmarks.memory_tables [moe-memory-h200.json model-h200.json llama-8b-h200.json]

The files are in benchmarks/results, and come from

    octavo bench moe --brief --weights cast,cached,codes,columns --optimizer --no-peers --json moe-memory-h200.json
    octavo bench model --recipes fp8-delayed --no-peers --json model-h200.json
    python3 -m benchmarks.llama_8b --json llama-8b-h200.json

The first two tables are for "Memory of a step" in docs/benchmarks-experts.md, without and with an
optimizer, the third for "A whole model" in docs/benchmarks.md, the fourth for "An 8B model on one GPU" there.
"""

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FILES = ("moe-memory-h200.json", "model-h200.json", "llama-8b-h200.json")
TRAINED = {"full": "all weights", "streamed": "all weights, each updated in backward", "lora": "adapters"}


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def label(case: str) -> str:
    words = case.removeprefix("octavo ").replace("grouped_mm bf16", "torch, bf16").split(", ")
    return ", ".join([f"`{words[0]}`" if words[0].startswith("fp8") else words[0], *words[1:]])


def of_mixtures(report: dict[str, Any], optimizer: bool) -> list[str]:
    """Return a row for each case whose step ends with an optimizer's, or with backward: time and memory for each shape.
    What forward keeps is the same with an optimizer."""
    shapes = report["shapes"]
    keys = ("held_mib", "peak_mib") if optimizer else ("held_mib", "kept_mib", "peak_mib")
    head = f"ms; MiB {', '.join(key.removesuffix('_mib') for key in keys)}"
    lines = [row([head, *(f"{entry['shape'][1]} experts" for entry in shapes)]), row(["---"] * (1 + len(shapes)))]
    for first in shapes[0]["results"]:
        found = [next(r for r in entry["results"] if r["case"] == first["case"]) for entry in shapes]
        if first["case"].endswith(", AdamW") == optimizer and all("ms" in r for r in found):
            cells = [f"{r['ms']:.2f}; " + ", ".join(f"{r[key]:.0f}" for key in keys) for r in found]
            lines.append(row([label(first["case"].removesuffix(", AdamW")), *cells]))
    return lines


def of_models(report: dict[str, Any]) -> list[str]:
    lines = [row(["", "ms", "of bf16 compiled", "tokens/s", "held MiB", "peak MiB"]), row(["---"] * 6)]
    for r in report["results"]:
        if "ms" in r:
            numbers = f"{r['ms']:.2f}", f"{r['of_bf16']:.3f}", f"{r['tokens_per_s']:,.0f}"
            lines.append(row([label(r["case"]), *numbers, f"{r['held_mib']:.0f}", f"{r['peak_mib']:.0f}"]))
    return lines


def of_the_8b_model(report: dict[str, Any]) -> list[str]:
    lines = [row(["trained", "recipe", "model GiB", "peak GiB", "ms", "tokens/s"]), row(["---"] * 6)]
    for r in report["results"]:
        if "ms" in r:
            numbers = f"{r['model_gib']:.2f}", f"{r['peak_gib']:.2f}", f"{r['ms']:.1f}", f"{r['tokens_per_s']:,.0f}"
            lines.append(row([TRAINED[r["how"]], f"`{r['recipe']}`", *numbers]))
    return lines


def main() -> None:
    names = sys.argv[1:] or FILES
    mixtures, models, large = (json.loads((RESULTS / name).read_text()) for name in names)
    tables = [of_mixtures(mixtures, optimizer=False), of_mixtures(mixtures, optimizer=True), of_models(models)]
    tables.append(of_the_8b_model(large))
    print("\n\n".join("\n".join(lines) for lines in tables))


if __name__ == "__main__":
    main()
