"""Octavo: low-precision training for PyTorch, in pure Python and Triton."""

from octavo.version import __version__  # isort: skip  (checks the version of torch first)

from octavo import backend, errors, formats, quant, recipes
from octavo.recipes import recipe

__all__ = ["__version__", "backend", "errors", "formats", "quant", "recipe", "recipes"]
