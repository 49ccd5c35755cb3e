"""Rows that ranks put into each other's memory: the engine `symmetric`.

Each rank says how many rows it has for each expert. From these numbers, and without the host, each knows where every
row of its tokens lies among the rows of its expert, and puts it there, straight from the tokens. Results stay where
the experts' GEMMs write them; each rank gets those of its tokens from there.

A call has three barriers each way: before rows are put, since other ranks may still read the rows of an earlier call;
after they are put; and before results are read. All calls of a group share one memory, so that rows which backward
keeps are copied out of it.
"""

import torch
from torch import Tensor

from octavo._torch.autograd import mapped
from octavo._torch.fakes import FakeTensor
from octavo.communication.peer_memory import PeerMemory, peer_memory
from octavo.errors import UnsupportedShape
from octavo.kernels.peer_rows import HEIGHT, get, put
from octavo.moe.expert_exchange import Ranks
from octavo.moe.permutation import Permutation, sort, unpermute
from octavo.runtime.caller_memory import release

BESIDE = 16  # bytes of a row of codes beyond its values' in the memory


class Symmetric:
    """The plan of `symmetric`."""

    source = None

    def __init__(self, x: Tensor, index: Tensor, experts: int, ranks: Ranks, capacity: int | None) -> None:
        self.ranks, self.local = ranks, experts // ranks.size
        each = index.shape[0] * index.shape[1] if capacity is None else capacity
        self.rows, self.width, self.dtype = each * ranks.size, x.shape[1], x.dtype
        if self.rows >= HEIGHT:
            raise UnsupportedShape(
                f"{ranks.where} has at most {HEIGHT - 1} rows on a rank, got {each} for each of {ranks.size} ranks. "
                "Pass a capacity, or fewer tokens."
            )
        made = sort(index, experts)
        self.memory = None if index.is_meta or isinstance(index, FakeTensor) else self._memory(experts, x)
        self.kept: Tensor | None = None
        rank = 0 if self.memory is None else self.memory.rank
        counts = self._counts(made.sizes)
        sizes, rooms = counts[:, :experts], counts[:, experts]
        by_rank = sizes.sum(0).view(ranks.size, self.local)
        begins = (by_rank.cumsum(1) - by_rank).flatten() + sizes.cumsum(0)[rank] - sizes[rank]
        own = made.sizes.cumsum(0)
        row = torch.arange(made.assignments.shape[0], dtype=torch.int64, device=index.device)
        expert = torch.searchsorted(own, row, right=True).clamp_max(experts - 1)
        there = torch.div(expert, self.local, rounding_mode="floor")
        place = begins[expert] + row - (own - made.sizes)[expert]
        has_row = (row < own[-1]) & (place < rooms[there])
        self.places = torch.where(has_row, there * HEIGHT + place, -1)
        self.dropped = own[-1] - has_row.sum()
        known = made.positions.clamp_min(0).long()
        has_place = (made.positions >= 0) & (_taken(has_row, known) if len(row) else made.positions >= 0)
        self.permutation = Permutation(
            made.sizes,
            torch.where(has_place, made.positions, -1),
            torch.where(has_row | (made.assignments < 0), made.assignments, -1),
        )
        arriving = by_rank[rank].cumsum(0).clamp_max(self.rows)
        self.sizes = torch.diff(arriving, prepend=arriving.new_zeros(1))

    def _memory(self, experts: int, x: Tensor) -> PeerMemory:
        values = self.rows * self.width * x.element_size()
        sizes = {
            "counts": (experts + 1) * 8,
            "arriving": max(values, self.rows * (2 * self.width + BESIDE)),
            "leaving": values,
        }
        return peer_memory(self.ranks.group, x.device, sizes, self.ranks.where)

    def _counts(self, sizes: Tensor) -> Tensor:
        """Return the rows of each rank for each expert, and the rows that it has room for [ranks, experts + 1]."""
        own = torch.cat([sizes, torch.full((1,), self.rows, dtype=torch.int64, device=sizes.device)])
        if self.memory is None:
            return own.expand(self.ranks.size, -1)
        self.memory.own("counts", 1, len(own), torch.int64).copy_(own)
        self._barrier()
        ranks = torch.arange(self.ranks.size, dtype=torch.int64, device=sizes.device)
        return get(own.new_empty(self.ranks.size, len(own)), ranks * HEIGHT, self.memory.part("counts"))

    # -- there ---------------------------------------------------------------------------------------------------------

    def send_tokens(self, x: Tensor) -> Tensor:
        return self._put(x, self.permutation.sources)

    def send(self, rows: Tensor) -> Tensor:
        if self.memory is not None:
            self._barrier()  # all ranks have read the rows that arrived in an earlier call
        return self._put(rows, None)

    def wait(self) -> None:
        if self.memory is None:
            return
        self._barrier()
        if self.kept is not None:
            # out of the memory that the next call overwrites
            row = torch.arange(self.rows, dtype=torch.int64, device=self.kept.device)
            here = self.memory.rank * HEIGHT + row
            get(self.kept, torch.where(row < self.sizes.sum(), here, -1), self.memory.part("arriving"))
            self.kept = None

    def tokens_to_experts(self, x: Tensor) -> Tensor:
        keeps = torch.is_grad_enabled()

        def there(x: Tensor) -> Tensor:
            arriving = self.send_tokens(x)
            if self.memory is None or not keeps:
                return arriving
            self.kept = torch.empty_like(arriving)
            return self.kept

        # dx is read where the first GEMM's backward wrote it, and summed
        return mapped(x, there, lambda dy: unpermute(self.returned(dy), self.permutation))

    def _put(self, x: Tensor, source: Tensor | None) -> Tensor:
        """Put rows to their places, and return where rows arrive, which they have after the next barrier."""
        if self.memory is None:
            return x.new_empty(self.rows, x.shape[1])
        put(x.detach(), source, self.places, self.memory.part("arriving"))
        return self.memory.own("arriving", self.rows, x.shape[1], x.dtype)

    # -- and back ------------------------------------------------------------------------------------------------------

    def buffers(self) -> tuple[Tensor | None, Tensor | None]:
        """Return where the experts write results and dx, for the other ranks to get. dx lies where dy arrived, of which
        backward has its own copy by then."""
        if self.memory is None:
            return None, None
        shape = self.rows, self.width, self.dtype
        return self.memory.own("leaving", *shape), self.memory.own("arriving", *shape)

    def to_tokens(self, rows: Tensor) -> Tensor:
        return mapped(rows, self.returned, self.sent_there)  # read from where the last GEMM wrote; dy is put to experts

    def returned(self, rows: Tensor) -> Tensor:
        """Return the experts' rows of this rank's tokens."""
        out = rows.new_empty(self.permutation.assignments.shape[0], rows.shape[1])
        if self.memory is None:
            return out
        results, dx = self.buffers()
        assert results is not None
        part = "arriving" if _is_in(rows, dx) else "leaving"
        if part == "leaving" and not _is_in(rows, results):
            results.copy_(rows.detach())  # of layers that write where they like
        self._barrier()
        get(out, self.places, self.memory.part(part))
        if part == "arriving" and dx is not None:
            release(dx)  # the next layer of this backward writes its dx there
        return out

    def sent_there(self, rows: Tensor) -> Tensor:
        """Return rows of this rank's experts that tokens send, in memory of their own."""
        arrived = self.send(rows)
        if self.memory is not None:
            self.kept = torch.empty_like(arrived)
            arrived = self.kept
        self.wait()
        return arrived

    def _barrier(self) -> None:
        assert self.memory is not None
        self.memory.barrier(self.ranks.where)


def _taken(flags: Tensor, at: Tensor) -> Tensor:
    return flags[at.flatten()].view(at.shape)


def _is_in(rows: Tensor, buffer: Tensor | None) -> bool:
    return buffer is not None and rows.data_ptr() == buffer.data_ptr() and rows.stride() == buffer.stride()
