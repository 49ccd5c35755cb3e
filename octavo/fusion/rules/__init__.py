"""Fused operations, one file each: the patterns they match, the conditions they need, the code that runs instead.

Importing this file offers their rules to every Sequential. Each file defines `RULES`; the classes that the rules
name enter the registry when they are defined.
"""

from typing import Any

from octavo.fusion import rule as registry
from octavo.fusion.rules import (
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

FILES: tuple[Any, ...] = (
    mlp, grouped_mlp, add_norm_linear, norm_linear, linear_epilogue, activation_linear, activation_bias,
    linear_rotary, fork_sum,
)  # fmt: skip

if not registry.global_rules():
    registry.offer(rule for file in FILES for rule in file.RULES)
