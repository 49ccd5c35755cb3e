"""What the contract asks of every layer, answered for one with nothing to say: no buffers, no scales among what it
makes, no gradient that is another's, no GEMM. A layer imports what applies to it, under the same name."""

from typing import Any


def graph_buffers(config: Any, nothing: None) -> tuple[()]:
    return ()


def returned_elsewhere(config: Any) -> dict[int, int]:
    return {}


def fills(config: Any) -> bool:
    return False


def flat_places(config: Any) -> tuple[int, ...]:
    return ()


def passed(config: Any) -> dict[int, int]:
    return {}


def replays(config: Any, side: str) -> bool:
    return True


def flops(config: Any, inputs: Any) -> int:
    return 0


def gradient_flops(config: Any, saved: Any, *grads: Any) -> int:
    return 0
