"""Weight gradients put off: backward leaves the operands here, `backward_dw()` takes them, oldest first."""

from collections import deque
from typing import NamedTuple

from torch import Tensor

from octavo.errors import UnsupportedConfig
from octavo.layers.linear import Config, Operand


class Letter(NamedTuple):
    """The operands of one microbatch's dw."""

    config: Config
    dy: Operand
    x: Operand
    versions: tuple[int, ...]  # of the operands that are the caller's own tensors


def _versions(*operands: Operand) -> tuple[int, ...]:
    return tuple(t._version for t in operands if isinstance(t, Tensor))


class Mailbox:
    def __init__(self) -> None:
        self._letters: deque[Letter] = deque()

    def __len__(self) -> int:
        return len(self._letters)

    def put(self, config: Config, dy: Operand, x: Operand) -> None:
        self._letters.append(Letter(config, dy, x, _versions(dy, x)))

    def take(self) -> Letter:
        if not self._letters:
            raise UnsupportedConfig(
                "backward_dw() has no backward to finish: each call takes one backward that has run with "
                "delay_wgrad_compute=True, oldest first. Call it once for each."
            )
        letter = self._letters.popleft()
        if letter.versions != _versions(letter.dy, letter.x):
            raise UnsupportedConfig(
                "backward_dw() needs the unquantized x and dy of that backward, and one of them was written to since. "
                "Call it before their buffers are used again, or let wgrad be quantized: codes are copies."
            )
        return letter
