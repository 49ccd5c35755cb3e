"""Models and training loops of other packages, converted, trained, saved and loaded.

    pip install -r tests/integration/requirements.txt       in an environment of its own; the versions are exact
    python -m tests.integration                             everything; or some: llama peft --recipe nvfp4 --steps 3

Both commands run in the repository's root; the second takes six minutes on two cores. A subject is one model in one
package's loop. Each is tried in each recipe, on a CPU, from random weights and random tokens; nothing is downloaded.
The command prints what was converted and what was left, a table, and exits with 1 if anything failed.

pytest collects none of it, since no file here is called test_*: these packages are no requirement of the test suite.
Without a GPU every GEMM runs as the reference, so nothing here speaks of speed.
"""

import os

# oneDNN picks AMX for bfloat16 on CPUs that report it; under some hypervisors that is an illegal instruction
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
