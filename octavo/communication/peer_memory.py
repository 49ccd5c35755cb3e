"""Memory of each rank that all ranks of a group address: kernels put rows there, and get rows from there.

On GPUs it is torch's symmetric memory, over NVLink, of ranks on one machine. On a CPU it is a file that the ranks map,
so that processes over gloo run what GPUs run. A group of one rank has plain memory.

Ranks wait for each other at `barrier`: on a GPU the streams do, and the host does not, so that a CUDA graph takes it.
One memory serves all layers of a group, one after the other: nobody may keep a view of it beyond the next barrier.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any
from uuid import uuid4
from weakref import ref

import torch
from torch import Tensor

from octavo._torch import symmetric_memory
from octavo._torch.cuda import is_capturing
from octavo._torch.functional_collectives import all_reduce
from octavo.communication import collectives
from octavo.communication.groups import process_group, rank_of, registered_name, size_of
from octavo.errors import UnsupportedConfig, UnsupportedHardware
from octavo.kernels.peer_rows import Peers

ALIGNED = 256  # bytes at whose multiples a part begins
NAME = 256  # bytes of a file's name


class PeerMemory:
    """The same parts of memory on each rank of a group, by name.

    Args:
        group: the name of the group. All ranks make it together.
        device: where it is.
        sizes: the bytes of each part, alike on all ranks.
        where: who waits for the other ranks, for messages.
    """

    def __init__(self, group: str, device: torch.device, sizes: Mapping[str, int], where: str) -> None:
        self.group, self.device, self.sizes = group, device, dict(sizes)
        self.rank, self.ranks = rank_of(group), size_of(group)
        total = sum([_rounded(size) for size in sizes.values()])
        self._handle: Any = None
        if self.ranks == 1:
            whole = [torch.empty(total, dtype=torch.uint8, device=device)]
        elif device.type == "cpu":
            whole = _mapped_files(total, group, where)
        else:
            self._handle, whole = _mapped_gpus(total, group, device, where)
            self._timeout = symmetric_memory.timeout_of(process_group(group), device)
        self._parts: dict[str, Peers] = {}
        begin = 0
        for name, size in sizes.items():
            parts = [memory[begin : begin + size] for memory in whole]
            addresses = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=device)
            self._parts[name] = Peers(parts, addresses)
            begin += _rounded(size)

    def part(self, name: str) -> Peers:
        """Return a part of all ranks."""
        return self._parts[name]

    def own(self, name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return rows at the beginning of this rank's part, as a matrix in the memory where they are."""
        size = rows * width * dtype.itemsize
        return self._parts[name].memory[self.rank][:size].view(dtype).view(rows, width)

    def barrier(self, where: str) -> None:
        """Wait for all ranks: what they wrote before is there, and what they read before is read."""
        if self.ranks == 1:
            return
        if self._handle is not None:
            # a rank that is gone ends the kernel, and with it the process: it prints which rank did not come
            self._handle.barrier(channel=0, timeout_ms=int(self._timeout.total_seconds() * 1000))
        else:
            sign = torch.zeros(1, dtype=torch.int32, device=self.device)
            collectives.sent("barrier", all_reduce, where, self.group, sign, "sum")


def _rounded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


# -- one for all layers ------------------------------------------------------------------------------------------------


_known: dict[tuple[str, torch.device], tuple["ref[Any] | None", PeerMemory]] = {}
_captured: list[PeerMemory] = []  # of CUDA graphs, which know nothing but its addresses


def peer_memory(group: str, device: torch.device, sizes: Mapping[str, int], where: str) -> PeerMemory:
    """Return the memory of a group with parts of at least these sizes; a collective where it is made or grows."""
    alone = size_of(group) == 1
    now = None if alone else process_group(group)
    known = _known.get((group, device))
    found = None
    if known is not None and known[1].ranks == size_of(group) and (alone or (known[0] and known[0]() is now)):
        found = known[1]
    captures = device.type == "cuda" and is_capturing()
    if found is None or any(size > found.sizes.get(name, 0) for name, size in sizes.items()):
        if captures:
            raise UnsupportedConfig(
                f"{where} allocates memory that ranks share, which a CUDA graph cannot hold. Call the layer once with "
                "as many tokens before the capture."
            )
        grown = sizes if found is None else {name: max(size, found.sizes.get(name, 0)) for name, size in sizes.items()}
        with torch.inference_mode(False):  # training may come next
            found = PeerMemory(group, device, grown, where)
        _known[group, device] = None if alone else ref(now), found
    if captures and found not in _captured:
        _captured.append(found)
    return found


# -- how ranks map it --------------------------------------------------------------------------------------------------


def _mapped_gpus(size: int, group: str, device: torch.device, where: str) -> tuple[Any, list[Tensor]]:
    """Return torch's handle, and the memory of all ranks."""
    try:
        memory = symmetric_memory.allocate(size, device)
        handle = symmetric_memory.mapped(memory, registered_name(group))
        others = [None if rank == handle.rank else rank for rank in range(handle.world_size)]
        found = [memory if rank is None else handle.get_buffer(rank, (size,), torch.uint8) for rank in others]
        return handle, found  # its own memory lives as long as the list
    except (RuntimeError, ImportError, AttributeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UnsupportedHardware(
            f"{where} has ranks write to each other's memory, and torch's symmetric memory does not map that of the "
            f"process group {registered_name(group)!r}: {lines[0]} Its ranks must be on one machine, on a GPU each, "
            "with NVLink between them. Use engine='all-to-all', or engine='padded' for graphs, which need neither."
        ) from error


def _mapped_files(size: int, group: str, where: str) -> list[Tensor]:
    """Return files that the ranks of one machine map; nothing is left of them when the processes end."""
    ranks, mine = size_of(group), rank_of(group)
    # memory where there is enough: a write to a mapped file that has no room ends the process
    in_memory = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 2 * ranks * size
    own = os.path.join("/dev/shm" if in_memory else tempfile.gettempdir(), f"octavo-{uuid4().hex}")
    try:
        first = torch.from_file(own, shared=True, size=size, dtype=torch.uint8, device="cpu")
        name = torch.zeros(NAME, dtype=torch.uint8, device="cpu")
        name[: len(own.encode())] = torch.tensor(list(own.encode()), dtype=torch.uint8, device="cpu")
        names = collectives.gather(name, ranks, group, where).view(ranks, NAME).tolist()
        paths = [bytes(n).rstrip(b"\0").decode() for n in names]
        there = torch.tensor([all([os.path.exists(path) for path in paths])], dtype=torch.int64, device="cpu")
        if not collectives.gather(there, ranks, group, where).all():
            raise UnsupportedHardware(
                f"{where} has ranks write to each other's memory, and those of the process group "
                f"{registered_name(group)!r} are on several machines. Use engine='all-to-all' or engine='padded'."
            )
        found = [
            first if rank == mine else torch.from_file(path, shared=True, size=size, dtype=torch.uint8, device="cpu")
            for rank, path in enumerate(paths)
        ]
        collectives.gather(there, ranks, group, where)  # all have mapped it
        return found
    finally:
        with contextlib.suppress(OSError):
            os.unlink(own)
