"""Run cases by their seeds: see the package's docstring."""

import argparse
import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from tests.fuzz import test_grouped_fuzz, test_linear_fuzz, test_quantize_fuzz

CHECKS = {m.__name__.rsplit("_")[1]: m for m in (test_linear_fuzz, test_grouped_fuzz, test_quantize_fuzz)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("what", choices=CHECKS)
    parser.add_argument("first", type=int, help="a seed")
    parser.add_argument("end", type=int, nargs="?", help="the seed after the last; default: only the first")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nonfinite", action="store_true", help="some values are Inf or NaN")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + 1 if arguments.end is None else arguments.end)
    for seed in seeds:
        if len(seeds) == 1:
            print(CHECKS[arguments.what].draw(seed, arguments.nonfinite))
        CHECKS[arguments.what].check(seed, arguments.device, arguments.nonfinite)
    print(f"{len(seeds)} cases agree with the oracle")


if __name__ == "__main__":
    main()
