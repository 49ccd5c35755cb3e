"""Fused operations, one folder each: the patterns they match, the conditions they need, the code that runs instead.

Importing this package offers their rules to every Sequential. Each folder defines `RULES`; the classes that the rules
name enter the registry when they are defined.
"""

from typing import Any

from octavo.fused import (
    activation_bias,
    activation_linear,
    add_norm_linear,
    fork_sum,
    grouped_mlp,
    linear_epilogue,
    linear_rotary,
    mlp,
    norm_linear,
)
from octavo.fuser import pattern

PACKAGES: tuple[Any, ...] = (
    mlp, grouped_mlp, add_norm_linear, norm_linear, linear_epilogue, activation_linear, activation_bias,
    linear_rotary, fork_sum,
)  # fmt: skip

if not pattern.global_rules():
    pattern.offer(rule for package in PACKAGES for rule in package.RULES)
