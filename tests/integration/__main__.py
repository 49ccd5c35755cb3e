"""Run what this folder has: python -m tests.integration [part] [its options]."""

import importlib
import sys
import time

import torch

# the table of docs/models.md, models in loops of their packages, runs that resume, published checkpoints, models that
# are split by their own plans, examples/
PARTS = ("models", "loops", "resuming", "published", "plans", "loggers", "scripts")


def main(given: list[str]) -> int:
    """Run one part with options, or all parts one after the other; return how many failed."""
    if given and given[0] not in PARTS:
        print(f"There is no part {given[0]!r}. There are {', '.join(PARTS)}.")
        return 2
    torch.set_num_threads(1)  # the sums of a CPU's GEMMs depend on it, and loads are compared bit for bit
    failed = []
    for name in given[:1] or PARTS:
        print(f"\n=== {name}", flush=True)
        started = time.perf_counter()
        if importlib.import_module(f"tests.integration.{name}").main(given[1:]):
            failed.append(name)
        print(f"=== {name}: {time.perf_counter() - started:.0f} s", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
