"""The MLP of `octavo bench mlp` by its one rule for both sides, beside the two rules for one side each that would apply
without it, recipe by recipe: milliseconds and what is kept. On a GPU:

python3 -m benchmarks.mlp_rules [--json PATH]
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from octavo.cli import machine
from octavo.cli.bench import mlp_bench
from octavo.cli.bench.timed_step import settled_step
from octavo.cli.timing import device_ms, eager_ms
from octavo.fusion import rule as pattern

RECIPES = ("fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block")
TURNS = 3  # of each, one after the other: a chip that gets warm gets slower


def measured(recipe: str) -> dict[str, float]:
    tokens, hidden, ffn = mlp_bench.SHAPE
    module = mlp_bench._ours(hidden, ffn, recipe)
    x, dy = mlp_bench._tensors(tokens, hidden)
    step = settled_step(module, x, dy)
    return {
        "ms": eager_ms(step, warmup=3, repeats=15)[0],
        "graph_ms": device_ms(step, warmup=3, repeats=15)[0],
        "kept_mib": mlp_bench._kept_mib(module, x),
    }


def compared() -> list[dict[str, Any]]:
    global_rules = pattern.global_rules()
    without = tuple(rule for rule in global_rules if rule.name != "mlp")
    found = []
    for recipe in RECIPES:
        for turn in range(TURNS):
            for name, rules in (("mlp", global_rules), ("activation-linear, activation-bias", without)):
                pattern.replace_global_rules(rules)
                found.append({"recipe": recipe, "rules": name, "turn": turn, **measured(recipe)})
                print(found[-1], flush=True)
                torch.cuda.empty_cache()
    pattern.replace_global_rules(global_rules)
    return found


if __name__ == "__main__":
    report = {
        "machine": machine.describe(torch.device("cuda", torch.cuda.current_device())),
        "shape": list(mlp_bench.SHAPE),
        "statistic": "median of 15",
        "results": compared(),
    }
    if "--json" in sys.argv:
        Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(report, indent=1) + "\n")
