"""Memory that the ranks of a group map: parts, growth, and what a machine says that maps none."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from octavo._torch import symmetric_memory
from octavo.communication import peer_memory
from octavo.communication.groups import name_of
from octavo.errors import UnsupportedHardware

CPU = torch.device("cpu")
WHERE = "this test"


def _seen(group, rank):
    memory = peer_memory.PeerMemory(name_of(group), CPU, {"first": 10, "second": 4 * 6}, WHERE)
    memory.own("first", 1, 10, torch.uint8).fill_(rank + 1)
    memory.own("second", 2, 3, torch.int32).fill_(100 * rank)
    memory.barrier(WHERE)
    first, second = memory.part("first"), memory.part("second")
    found = [part.tolist() for part in first.memory], [part.view(torch.int32).tolist() for part in second.memory]
    memory.barrier(WHERE)
    assert first.addresses.tolist() == [part.data_ptr() for part in first.memory]
    assert all(address % 16 == 0 for address in second.addresses.tolist())
    return found


def test_each_rank_reads_the_parts_of_all(ranks):
    for first, second in ranks.run(_seen, size=4):
        assert first == [[rank + 1] * 10 for rank in range(4)]
        assert second == [[100 * rank] * 6 for rank in range(4)]


def _grown(group, rank):
    name = name_of(group)
    one = peer_memory.peer_memory(name, CPU, {"part": 1000}, WHERE)
    assert peer_memory.peer_memory(name, CPU, {"part": 900}, WHERE) is one
    more = peer_memory.peer_memory(name, CPU, {"part": 2000}, WHERE)
    assert more is not one and peer_memory.peer_memory(name, CPU, {"part": 1000}, WHERE) is more
    return more.sizes["part"]


def test_one_memory_serves_all_calls_and_grows(ranks):
    assert ranks.run(_grown, size=2) == [2000, 2000]


def _apart(group, rank):
    """Rank 1 sees no file of another rank, as on another machine."""
    exists = os.path.exists
    if rank == 1:
        peer_memory.os.path.exists = lambda path: False
    try:
        peer_memory.PeerMemory(name_of(group), CPU, {"part": 100}, WHERE)
    except UnsupportedHardware as error:
        return str(error)
    finally:
        peer_memory.os.path.exists = exists
    return ""


def test_ranks_of_several_machines_all_raise(ranks):
    for error in ranks.run(_apart, size=2):
        assert error.startswith("this test has ranks write to each other's memory, and those of the process group ")
        assert error.endswith("are on several machines. Use engine='all-to-all' or engine='padded'.")


def _left(group, rank):
    made = []
    real = torch.from_file
    torch.from_file = lambda path, **given: made.append(path) or real(path, **given)
    try:
        peer_memory.PeerMemory(name_of(group), CPU, {"part": 100}, WHERE)
    finally:
        torch.from_file = real
    return made


def test_no_file_is_left(ranks):
    paths = {path for made in ranks.run(_left, size=2) for path in made}
    assert len(paths) == 2 and not any(Path(path).exists() for path in paths)


class Handle:
    """What torch's rendezvous returns, for rank 1 of 3."""

    rank, world_size = 1, 3

    def __init__(self, memory):
        self.waits, self.memory = [], memory

    def get_buffer(self, rank, sizes, dtype):
        return torch.full(sizes, rank, dtype=dtype)

    def barrier(self, channel=0, timeout_ms=0):
        self.waits.append(timeout_ms)


def test_on_a_gpu_the_streams_wait_as_long_as_the_group(monkeypatch):
    """By a stand-in for torch's symmetric memory, on a CPU that says that it is none."""
    handles = []

    def mapped(memory, group):
        handles.append(Handle(memory))
        return handles[0]

    monkeypatch.setattr(symmetric_memory, "allocate", lambda size, device: torch.full((size,), 1, dtype=torch.uint8))
    monkeypatch.setattr(symmetric_memory, "mapped", mapped)
    monkeypatch.setattr(symmetric_memory, "timeout_of", lambda group, device: timedelta(seconds=7))
    for name, value in {"registered_name": "0", "rank_of": 1, "size_of": 3, "process_group": None}.items():
        monkeypatch.setattr(peer_memory, name, lambda group, value=value: value)
    handle, whole = peer_memory._mapped_gpus(64, "", torch.device("cuda", 0), WHERE)
    assert [int(part[0]) for part in whole] == [0, 1, 2] and whole[1] is handle.memory
    memory = peer_memory.PeerMemory.__new__(peer_memory.PeerMemory)
    memory.ranks, memory._handle, memory._timeout = 3, handle, timedelta(seconds=7)
    memory.barrier(WHERE)
    assert handle.waits == [7000]


def test_a_gpu_that_maps_no_memory_is_told_with_the_way_out(monkeypatch):
    def refuse(*given):
        raise RuntimeError("CUDASymmetricMemory: no peer access\nat a line of C++")

    monkeypatch.setattr(symmetric_memory, "allocate", refuse)
    for name, value in {"registered_name": "0", "rank_of": 0, "size_of": 2}.items():
        monkeypatch.setattr(peer_memory, name, lambda group, value=value: value)
    with pytest.raises(UnsupportedHardware, match="no peer access Its ranks must be on one machine") as error:
        peer_memory.PeerMemory("", torch.device("cuda", 0), {"part": 100}, WHERE)
    assert "C++" not in str(error.value) and "Use engine='all-to-all', or engine='padded'" in str(error.value)
