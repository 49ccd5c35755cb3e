"""The tests that need no GPU, with one version of torch after another, and the page that is written from the results.

    make test-versions                                      # every version of TRITON_OF, one after another: hours
    python -m tests.versions --versions 2.11.0 2.15.0       # these
    python -m tests.versions --python ~/env/bin/python      # the torch that this interpreter has; installs nothing
    python -m tests.versions --python ... -- tests/quant    # some tests; the result stays in .versions
    python -m tests.versions --page                         # write docs/compatibility.md again, run nothing

Each version gets a virtual environment in .versions, gigabytes with a CUDA build of torch, which is removed before the
next one is made. The sources are those of the last commit, in .versions/sources, so that the checkout may be edited
meanwhile. A result is a file in benchmarks/results/versions. Run the command again after an interruption: it leaves out
the versions whose suite has run to its end since the last change of anything but results.
"""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Places(NamedTuple):
    """Where things are in a checkout."""

    root: Path = ROOT

    @property
    def folder(self) -> Path:
        """Environments, sources and logs; git ignores it."""
        return self.root / ".versions"

    @property
    def results(self) -> Path:
        return self.root / "benchmarks" / "results"

    @property
    def versions(self) -> Path:
        """The results of whole suites."""
        return self.results / "versions"

    @property
    def page(self) -> Path:
        return self.root / "docs" / "compatibility.md"


HERE = Places()

# torch from the oldest that Octavo runs on to the newest, the last patch of each, and the Triton that its CUDA build
# asks for. A CPU build brings no Triton, and gets this one.
TRITON_OF = {"2.11.0": "3.6.0", "2.12.1": "3.7.1", "2.13.0": "3.7.1", "2.14.1": "3.8.0", "2.15.0": "3.9.0"}
NEWEST = "2.15.0, with Triton 3.9.0 and CUDA 13.2"  # what a plain `pip install torch` gets
NEWEST_SEEN = "November 2026"
