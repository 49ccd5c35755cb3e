"""Rows in memory of other ranks, put and got: against a loop, and the kernels against the reference."""

import pytest
import torch

from octavo.kernels import peer_rows
from octavo.kernels.peer_rows import HEIGHT, Peers, reference

RANKS, HEIGHT_OF_EACH, TOKENS = 3, 40, 20
# dtype and width: rows of 8, 4 and 1 bytes at a time; more words than one program moves
ROWS = {"words": (torch.bfloat16, 64), "halves": (torch.float32, 5), "bytes": (torch.uint8, 33),
        "numbers": (torch.int64, 9), "wide": (torch.bfloat16, 4104), "codes": (torch.float8_e4m3fn, 132)}  # fmt: skip
rows = pytest.mark.parametrize("kind", ROWS)


def peers_of(dtype, width, device):
    size = HEIGHT_OF_EACH * width * dtype.itemsize
    memory = [torch.randint(0, 256, (size,), dtype=torch.uint8, device=device) for _ in range(RANKS)]
    addresses = torch.tensor([part.data_ptr() for part in memory], dtype=torch.int64, device=device)
    return Peers(memory, addresses)


def places(device):
    """A place for each of some rows, in any order; some have none."""
    every = torch.tensor([rank * HEIGHT + row for rank in range(RANKS) for row in range(HEIGHT_OF_EACH)])
    chosen = every[torch.randperm(len(every))[:50]]
    chosen[::9] = -1
    return chosen.to(device)


def data(dtype, width, device):
    x = torch.randint(0, 256, (TOKENS, width * dtype.itemsize), dtype=torch.uint8, device=device).view(dtype)
    return x, torch.randint(0, TOKENS, (50,), dtype=torch.int32, device=device), places(device)


def copied(peers):
    return [part.clone() for part in peers.memory]


@rows
def test_rows_are_put_to_their_places_and_nowhere_else(kind):
    dtype, width = ROWS[kind]
    x, source, target = data(dtype, width, "cpu")
    peers = peers_of(dtype, width, "cpu")
    want = copied(peers)
    for i, at in enumerate(target.tolist()):
        if at >= 0:
            row = at % HEIGHT * width * dtype.itemsize
            want[at // HEIGHT][row : row + width * dtype.itemsize] = x[source[i]].view(torch.uint8)
    peer_rows.put(x, source, target, peers)
    assert all(torch.equal(a, b) for a, b in zip(peers.memory, want, strict=True))


@rows
def test_what_was_put_is_got(kind):
    dtype, width = ROWS[kind]
    x, source, target = data(dtype, width, "cpu")
    peers = peers_of(dtype, width, "cpu")
    peer_rows.put(x, source, target, peers)
    out = torch.zeros(len(target), width * dtype.itemsize, dtype=torch.uint8).view(dtype)
    assert peer_rows.get(out, target, peers) is out
    want = torch.where(target[:, None] >= 0, x.view(torch.uint8)[source.long()], 0)
    assert torch.equal(out.view(torch.uint8), want)


def test_a_slice_of_a_tensor_is_put_whatever_its_alignment_is():
    peers = peers_of(torch.uint8, 8, "cpu")
    x = torch.arange(8 * 8 + 1, dtype=torch.uint8)[1:].view(8, 8)
    peer_rows.put(x, None, torch.arange(8), peers)
    assert torch.equal(peers.memory[0][:64], x.flatten())


@pytest.mark.gpu
@pytest.mark.gpu_smoke
@rows
@pytest.mark.parametrize("numbered", [True, False])
def test_kernels_move_the_bytes_of_the_reference(kind, numbered):
    from octavo.kernels.peer_rows import triton

    dtype, width = ROWS[kind]
    x, source, target = data(dtype, width, "cuda")
    if not numbered:
        source, target = None, target[:TOKENS]
    peers = peers_of(dtype, width, "cuda")
    begin = copied(peers)
    found = []
    for implementation in (reference, triton):
        for part, before in zip(peers.memory, begin, strict=True):
            part.copy_(before)
        words = peer_rows._words(x)
        implementation.put(words, source, target, peers)
        out = torch.zeros(len(target), words.shape[1], dtype=words.dtype, device="cuda")
        implementation.get(out, target, peers)
        found.append([*copied(peers), out])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
