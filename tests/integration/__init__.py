"""Models and training loops of other packages, converted, trained, saved and loaded.

    pip install -r tests/integration/requirements.txt       in an environment of its own; the versions are exact
    python -m tests.integration                             all parts
    python -m tests.integration loops llama --recipe nvfp4  one of them, with options

Run these in the repository's root. The parts: `models` tries more than a hundred models of other packages in three
recipes, and writes the table of docs/models.md; `loops` takes a few of them through the loops of their own packages, in
every recipe; `resuming` stops and resumes such loops; `published` reads and writes FP8 checkpoints; `scripts` runs the
scripts of examples/. All run on a CPU, from random weights and random tokens; nothing is downloaded.

pytest collects none of it, since no file here is called test_*: these packages are no requirement of the test suite.
Without a GPU every GEMM runs as the reference, so nothing here speaks of speed.
"""

import os

# oneDNN picks AMX for bfloat16 on CPUs that report it; under some hypervisors that is an illegal instruction
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
