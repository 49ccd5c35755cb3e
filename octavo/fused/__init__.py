"""Fused operations, a folder each: what they match, when they refuse, what they run instead.

Importing this package offers their rules to every Sequential and makes them known to chains by name.
"""

import sys
from typing import Any

from octavo.fused import activation_bias, activation_linear, fork_sum, linear_epilogue, mlp, norm_linear
from octavo.fuser import pattern
from octavo.layers import chain

PACKAGES: tuple[Any, ...] = (mlp, norm_linear, linear_epilogue, activation_linear, activation_bias, fork_sum)


def _offer() -> None:
    for package in PACKAGES:
        fused = getattr(package, "FUSED", None) or {package.NAME: sys.modules[package.__name__]}
        chain.FUSED.update(fused)
        pattern.offer(rule.on(package.SIDE) for rule in package.RULES)


if not pattern.global_rules():
    _offer()
