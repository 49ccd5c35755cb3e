"""How rows get from the ranks of tokens to the ranks of experts, and back: an engine for each way.

An engine plans each call: which rows each rank sends, and how many each expert of this rank gets. All engines deliver
the rows of an expert in the order of ranks and of their tokens, which is that of one process with the tokens of all
ranks: results have its bits.

    all-to-all    exactly the rows that there are. The host reads their numbers once, and so waits for the device. Rows
                  go out and in expert by expert, so that each lies where the experts' GEMMs read or wrote it
    padded        a fixed number of rows for each pair of ranks. The host reads nothing: CUDA graphs and torch.compile
                  take it. Assignments beyond are dropped, and counted
    symmetric     ranks write to each other's memory (`symmetric_exchange`)
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo._torch.autograd import mapped
from octavo._torch.fakes import FakeTensor
from octavo.communication import all_to_all
from octavo.communication.all_to_all import Pieces
from octavo.moe.chunk_sort import sort_chunks
from octavo.moe.permutation import Permutation, permute, sort, unpermute
from octavo.moe.rank_sort import sort_by_rank


class Ranks(NamedTuple):
    """The ranks of a call."""

    group: str
    size: int
    where: str  # who sends, for messages


class Plan(Protocol):
    """The rows of one call, on their way there and back.

    Attributes:
        ranks: the ranks.
        permutation: the rows that this rank sends, sorted by where they go.
        sizes: the rows of each expert of this rank, on the device.
        source: the place among the arrived rows of each row of the experts; None if they arrive in order.
        dropped: the assignments that got no row, on the device; None if none can be dropped.
    """

    ranks: Ranks
    permutation: Permutation
    sizes: Tensor
    source: Tensor | None
    dropped: Tensor | None

    def send(self, rows: Tensor) -> Tensor:
        """Start to send rows to their experts; return what arrives, which `wait` waits for. No gradient."""

    def wait(self) -> None:
        """Wait for what was sent."""

    def send_tokens(self, x: Tensor) -> Tensor:
        """Start to send tokens to their experts, as `send` does for their rows."""

    def tokens_to_experts(self, x: Tensor) -> Tensor:
        """Start to send tokens, and return their rows in the order of the experts; differentiable."""

    def to_tokens(self, rows: Tensor) -> Tensor:
        """Send the experts' rows back to the rows that their tokens sent; differentiable."""

    def buffers(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the memory that the experts write results and dx to, if they must leave from there."""


class _Copied:
    """A plan whose rows are copied where they are sent from."""

    permutation: Permutation
    send: Callable[[Tensor], Tensor]
    to_experts: Callable[[Tensor], Tensor]

    def send_tokens(self, x: Tensor) -> Tensor:
        return self.send(permute(x, self.permutation, tail="untouched")[0])

    def tokens_to_experts(self, x: Tensor) -> Tensor:
        return self.to_experts(permute(x, self.permutation, tail="untouched")[0])

    def buffers(self) -> tuple[None, None]:
        return None, None


# -- exact numbers of rows ---------------------------------------------------------------------------------------------


class Exact(_Copied):
    """The plan of `all-to-all`."""

    source = None
    dropped = None

    def __init__(self, x: Tensor, index: Tensor, experts: int, ranks: Ranks, capacity: None) -> None:
        self.ranks, local = ranks, experts // ranks.size
        # by the place of the expert on its rank, then by rank: what goes out for one place is one all-to-all
        there = (index >= 0) & (index < experts)
        place = (index % local) * ranks.size + torch.div(index, local, rounding_mode="floor")
        self.permutation = sort(torch.where(there, place, -1) if ranks.size > 1 else index, experts)
        counts = self.permutation.sizes.view(local, ranks.size)
        shapes_only = index.is_meta or isinstance(index, FakeTensor)
        arriving = counts
        if ranks.size > 1 and not shapes_only:  # how many rows each rank sends for each expert of this one
            by_rank = counts.t().contiguous()
            arriving = all_to_all.exchanged(by_rank, ranks.size, ranks.group, ranks.where).t().contiguous()
        self.sizes = arriving.sum(1)
        self.pending: list[Pieces] = []
        self.rows = index.numel()  # of tensors without values, which have shapes only
        if shapes_only:
            return
        self.sent, self.received = torch.stack([counts, arriving]).tolist()  # the host waits here
        self.rows = sum([sum(piece) for piece in self.received])

    def _start(self, rows: Tensor, back: bool) -> Tensor:
        """Send expert by expert. What is sent back lies in the rows that were sent, whose tail is left."""
        number = self.permutation.assignments.shape[0] if back else self.rows
        out = torch.empty(number, rows.shape[1], dtype=rows.dtype, device=rows.device)
        if out.is_meta or isinstance(out, FakeTensor):
            return out
        pieces = (self.sent, self.received) if back else (self.received, self.sent)
        self.pending.append(Pieces(out, rows.detach().contiguous(), *pieces, self.ranks.group, self.ranks.where))
        return out

    def send(self, rows: Tensor) -> Tensor:
        return self._start(rows, False)

    def wait(self) -> None:
        while self.pending:
            self.pending.pop().wait()

    def to_experts(self, rows: Tensor) -> Tensor:
        # forward starts, and leaves the waiting to its caller; dx comes back out of the memory that the experts write
        return mapped(rows, self.send, self.sent_back)

    def to_tokens(self, rows: Tensor) -> Tensor:
        # out of the memory that the last GEMM wrote
        return mapped(rows, self.sent_back, self.sent_there)

    def sent_back(self, rows: Tensor) -> Tensor:
        out = self._start(rows, True)
        self.wait()
        return out

    def sent_there(self, rows: Tensor) -> Tensor:
        out = self._start(rows, False)
        self.wait()
        return out


# -- a fixed number of rows --------------------------------------------------------------------------------------------


class Padded(_Copied):
    """The plan of `padded`."""

    def __init__(self, x: Tensor, index: Tensor, experts: int, ranks: Ranks, capacity: int | None) -> None:
        self.ranks, local = ranks, experts // ranks.size
        each = index.shape[0] * index.shape[1] if capacity is None else capacity
        self.permutation = sort_by_rank(index, experts, ranks.size, each)
        counts = self.permutation.sizes.view(ranks.size, local)
        self.dropped = None
        if capacity is not None:
            there = (index >= 0) & (index < experts)
            self.dropped = there.sum() - counts.sum()
        arriving = all_to_all.exchanged(counts, ranks.size, ranks.group, ranks.where)
        self.arrivals = sort_chunks(arriving, ranks.size * each, stride=each)
        self.sizes, self.source = self.arrivals.sizes, self.arrivals.assignments

    def send(self, rows: Tensor) -> Tensor:
        return all_to_all.exchanged(rows, self.ranks.size, self.ranks.group, self.ranks.where)

    def wait(self) -> None:
        pass

    def to_experts(self, rows: Tensor) -> Tensor:
        arrived = all_to_all.exchange(rows, self.ranks.size, self.ranks.group, self.ranks.where)
        return permute(arrived, self.arrivals, tail="untouched")[0]

    def to_tokens(self, rows: Tensor) -> Tensor:
        back = unpermute(rows, self.arrivals, tail="untouched")
        return all_to_all.exchange(back, self.ranks.size, self.ranks.group, self.ranks.where)
