"""Run examples/torchtitan_trainer.py without a GPU: python -m tests.integration.titan_on_cpu [options].

torchtitan asks for a GPU as it is imported, and for the GPU's name and memory. Its release 0.3 calls one function that
torch 2.13 does not have.
"""

import runpy
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
from torchtitan.tools import utils

SCRIPT = Path(__file__).parents[2] / "examples" / "torchtitan_trainer.py"


def prepare() -> None:
    """Let torchtitan take the CPU for its device. Call it before anything else of torchtitan is imported."""
    cpu = SimpleNamespace(**vars(torch.cpu))
    cpu.get_device_name, cpu.current_device = lambda _: "CPU", lambda: 0
    cpu.get_device_properties = lambda _: SimpleNamespace(total_memory=1)
    cpu.memory_stats = cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: Counter()
    utils.device_type, utils.device_module = "cpu", cpu
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda *_: None


if __name__ == "__main__":
    prepare()
    runpy.run_path(str(SCRIPT), run_name="example")["main"](sys.argv[1:])
