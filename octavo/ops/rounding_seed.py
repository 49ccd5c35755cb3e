"""The seed of a layer's stochastic rounding. It follows from torch's generator, so that a program repeats; ranks that
see other rows draw other numbers, so that the errors of their gradients average out.

The buffer has [seed, step], as casts read it. A rank's seed is the one of a single process, with bits flipped by the
number of its replica. Checkpoints have the former: they are the same on all ranks, and load on any number of them.
"""

import ctypes
import zlib
from typing import Any

import torch
from torch import Tensor

from octavo._torch.fakes import FakeTensor
from octavo.communication.groups import replica

SEED = "rounding_seed"  # the name of the buffer


def seed_of(module: Any, path: str) -> int:
    """Return the seed in a single process: a hash of torch's generator state, the layer's path and its sizes. It draws
    no random numbers, so parameters and dropout are the same as without it."""
    generator = torch.get_rng_state()
    state = zlib.crc32(ctypes.string_at(generator.data_ptr(), generator.nbytes))  # real bytes, even under fake tensors
    shape = f"{module.out_features}x{module.in_features}"
    return state << 30 | zlib.crc32(f"{path} {shape}".encode("utf-8", "surrogatepass")) >> 2


def follow_replica(layer: Any) -> None:
    """Flip the seed's bits for the replica that this process is part of by now."""
    seed = layer._hidden._buffers.get(SEED)
    if seed is None or seed.is_meta or isinstance(seed, FakeTensor):
        return
    number = replica()
    bits = zlib.crc32(str(number).encode()) >> 2 if number else 0
    if bits != layer._seed_bits:
        with torch.no_grad():
            seed[:1].bitwise_xor_(bits ^ layer._seed_bits)
        layer._seed_bits = bits


def exported(layer: Any, seed: Tensor) -> Tensor:
    """Return a copy of the buffer, as a single process has it."""
    found = seed.clone()
    found[:1].bitwise_xor_(layer._seed_bits)
    return found


def load(layer: Any, seed: Tensor, loaded: Tensor) -> None:
    """Load what `exported` returned."""
    seed.copy_(loaded)
    seed[:1].bitwise_xor_(layer._seed_bits)
