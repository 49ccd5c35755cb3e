"""Weight gradients put off: backward leaves the operands here, `backward_dw()` takes them, oldest first."""

from collections import deque
from typing import NamedTuple

from octavo.errors import UnsupportedConfig
from octavo.layers.linear import Config, Operand


class Letter(NamedTuple):
    """The operands of one microbatch's dw."""

    config: Config
    dy: Operand
    x: Operand


class Mailbox:
    def __init__(self) -> None:
        self._letters: deque[Letter] = deque()

    def __len__(self) -> int:
        return len(self._letters)

    def put(self, config: Config, dy: Operand, x: Operand) -> None:
        self._letters.append(Letter(config, dy, x))

    def take(self) -> Letter:
        if not self._letters:
            raise UnsupportedConfig(
                "backward_dw() has no backward to finish: each call takes one backward that has run with "
                "delay_wgrad_compute=True, oldest first. Call it once for each."
            )
        return self._letters.popleft()
