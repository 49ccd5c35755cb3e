"""Run the scripts of examples/, those that need other packages too: python -m tests.integration scripts [names].

Each runs in a process of its own, in a folder of its own; one whose package is not installed is skipped, with a
sentence. `tests/test_examples.py` runs those that need no other package.
"""

import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ON_RANKS = ("fsdp2",)  # run by torchrun
NEEDS = {
    "accelerate_loop": ("accelerate",), "hugging_face_trainer": ("transformers", "accelerate"),
    "lightning_trainer": ("lightning",), "lora_on_fp8": ("transformers", "peft"), "torchtitan_trainer": ("torchtitan",),
    "trl_sft": ("trl",),
}  # fmt: skip
WITHOUT_GPU = {"torchtitan_trainer": "tests.integration.titan_on_cpu"}  # what runs a script whose package asks for one


def command(path: Path) -> list[str]:
    """Return the command that runs a script in this environment."""
    if path.stem in WITHOUT_GPU and not torch.cuda.is_available():
        return [sys.executable, "-m", WITHOUT_GPU[path.stem]]
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if path.stem in ON_RANKS else []
    return [sys.executable, *ranks, str(path)]


def main(names: list[str]) -> int:
    failed = []
    for path in EXAMPLES:
        if names and not any(name in path.stem for name in names):
            continue
        if lacking := [package for package in NEEDS.get(path.stem, ()) if find_spec(package) is None]:
            print(f"{path.name}: skipped, {', '.join(lacking)} is not installed")
            continue
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                command(path), cwd=folder, capture_output=True, text=True, check=False,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1:]
        print(f"{path.name}: {time.perf_counter() - started:.0f} s, {' '.join(said)}", flush=True)
        failed += [path.name] if done.returncode else []
    print(f"failed: {', '.join(failed)}" if failed else "all ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
