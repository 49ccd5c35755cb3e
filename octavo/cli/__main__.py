"""`python -m octavo.cli`: the command without installing the package."""

import sys

from octavo.cli import main

if __name__ == "__main__":
    sys.exit(main())
