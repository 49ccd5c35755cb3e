"""Fused operations, a folder each: what they match, when they refuse, what they run instead.

Importing this package offers their rules to every Sequential. A folder states `RULES`; the classes that these name have
entered the registry when they were defined.
"""

from typing import Any

from octavo.fused import activation_bias, activation_linear, fork_sum, linear_epilogue, mlp, norm_linear
from octavo.fuser import pattern

PACKAGES: tuple[Any, ...] = (mlp, norm_linear, linear_epilogue, activation_linear, activation_bias, fork_sum)

if not pattern.global_rules():
    pattern.offer(rule for package in PACKAGES for rule in package.RULES)
