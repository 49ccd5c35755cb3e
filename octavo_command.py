"""The `octavo` script. It answers --version and --help by itself: Octavo imports torch, which takes seconds, and the
import of any module of a package imports the package first. So this file lies beside the package, not in it."""

import re
import runpy
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path


def main() -> int:
    words = sys.argv[1:]
    # a sentence of torch's about a package that neither torch nor Octavo needs
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    if words and not words[0].startswith("-"):
        from octavo.cli import main as run

        return run()
    package = find_spec("octavo")
    assert package is not None and package.origin is not None
    folder = Path(package.origin).parent
    version = re.search(r'^__version__ = "(.+)"$', (folder / "version.py").read_text(), re.MULTILINE)
    assert version is not None
    parser = runpy.run_path(str(folder / "cli" / "commands.py"))["make_parser"](version[1])
    parser.parse_args(words)
    parser.print_help(sys.stderr)
    return 2
