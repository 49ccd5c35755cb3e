"""`python -m octavo.cli`: the command without installing the package."""

import sys

from octavo.cli import main

sys.exit(main())
