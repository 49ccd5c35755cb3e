"""Rows that change ranks: each rank sends some to each, and gets some from each.

`exchange` sends parts of one size, is differentiable, and is a node of a graph beside those of layers. `Pieces` sends
rows of any numbers, in several pieces at once, out of the memory where they lie and into the memory where they belong:
the host knows the numbers. Both name the layer that waits, `where`, if they fail.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from octavo._torch.autograd import mapped
from octavo._torch.functional_collectives import all_to_all_single
from octavo.communication import collectives
from octavo.communication.groups import process_group
from octavo.errors import UnsupportedShape

KIND = "all-to-all"


def exchange(x: Tensor, size: int, group: str, where: str) -> Tensor:
    """Send equal parts of the rows to all ranks, and return those of all ranks, in their order. dx is dy, sent back."""
    return x if size == 1 else mapped(x, exchanged, exchanged, size, group, where)


def exchanged(x: Tensor, size: int, group: str, where: str) -> Tensor:
    """Exchange rows as `exchange` does, without a gradient."""
    if size == 1:
        return x
    if x.shape[0] % size:
        raise UnsupportedShape(f"{where} sends equal parts of {x.shape[0]} rows to {size} ranks. Pad the rows.")
    parts = [x.shape[0] // size] * size
    return collectives.sent(KIND, all_to_all_single, where, group, x.contiguous(), parts, parts)


class Pieces:
    """Rows on their way, in pieces: piece i of x has `sent[i][rank]` rows for each rank, one rank after another, and
    piece i of `out` gets `received[i][rank]`. The pieces follow one another in both. `wait` before `out` is read."""

    def __init__(
        self, out: Tensor, x: Tensor, received: Sequence[list[int]], sent: Sequence[list[int]], group: str, where: str
    ) -> None:
        self.call, self.works = (KIND, where, group, x), []
        if len(received) and len(received[0]) == 1:  # one rank has all rows, where they are
            rows = sum([sum(piece) for piece in sent])
            out[:rows].copy_(x[:rows])
            return
        begin = start = 0
        with collectives.told(*self.call):
            for ins, outs in zip(received, sent, strict=True):
                end, stop = begin + sum(ins), start + sum(outs)
                work = dist.all_to_all_single(
                    out[begin:end], x[start:stop], ins, outs, group=process_group(group), async_op=True
                )  # type: ignore[no-untyped-call]
                self.works.append(work)
                begin, start = end, stop

    def wait(self) -> None:
        """Wait for all pieces; on a GPU the stream does, not the host."""
        with collectives.told(*self.call):
            for work in self.works:
                work.wait()
        self.works = []
