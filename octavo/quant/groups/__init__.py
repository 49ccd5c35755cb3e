"""Ragged groups of rows: only the device knows how many rows each group has.

The caller packs the rows, one group after the other, in a tensor of a fixed number of rows; the rows after the last
group are the tail, which no kernel reads. Inside, in the padded layout, a group begins at a multiple of 128 rows and is
filled up with zeros, so that a block of 128 belongs to one group: GEMMs then see whole tiles, and scale blocks along
the rows restart with every group. `Groups` holds the places of both layouts:

    start   [G + 1]   packed row at which a group begins; the last entry is where the tail begins
    block   [G + 1]   block at which it begins inside
    owner   [B]       the group that a block belongs to; -1 past the last group
    source  [B]       packed row at which a block begins
    live    [B]       number of rows of the block that belong to the group; 0 past the last group

B is fixed: the most blocks that any split of that many rows can need. Sizes that are negative or do not fit raise where
the host has them. On a GPU the host does not read them: there they are cut off at the end, and negative ones count as
empty, so that no kernel accesses memory outside its tensors, whatever the sizes are.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo import backend
from octavo._torch.fakes import is_fake
from octavo.errors import UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.quant.proto import TensorProto
from octavo.values import excerpt

BLOCK = 128
MAX_GROUPS = 4096


class Groups(NamedTuple):
    """The places of groups of rows, in the packed tensor and in the padded layout. The tensors are int32.

    Attributes:
        start: the packed row at which each group begins [G + 1]; the last entry is where the tail begins.
        block: the block of 128 rows at which each group begins in the padded layout [G + 1].
        owner: the group that each block belongs to [B]; -1 past the last group.
        source: the packed row at which each block begins [B].
        live: the number of rows of each block that belong to its group [B]; 0 past the last group.
        rows: the number of rows of the packed tensor, tail included.
    """

    start: Tensor
    block: Tensor
    owner: Tensor
    source: Tensor
    live: Tensor
    rows: int

    @property
    def number(self) -> int:
        """The number of groups."""
        return self.start.shape[0] - 1

    @property
    def padded(self) -> int:
        """The number of rows in the padded layout."""
        return self.owner.shape[0] * BLOCK

    @property
    def is_ragged(self) -> bool:
        """Whether the padded layout has room for any sizes, as that of `split` has; that of `equal` may have less."""
        return self.owner.shape[0] == blocks_for(self.rows, self.number)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors inside.

        Returns:
            `start`, `block`, `owner`, `source` and `live`.
        """
        return self[:5]

    def sizes(self) -> list[int]:
        """Read the sizes of the groups on the host, which waits for the device.

        Returns:
            The number of rows of each group.
        """
        return self.start.diff().tolist()


def blocks_for(rows: int, groups: int) -> int:
    """Return the most blocks that `groups` groups of `rows` rows in total can fill."""
    most = (rows + (BLOCK - 1) * groups) // BLOCK
    if torch.compiler.is_dynamo_compiling():  # it takes min() for sym_min, which torch 2.11 does not trace on ints
        return min(rows, most)
    return torch.sym_min(rows, most)  # type: ignore[no-untyped-call]  # min() would add a guard to a graph


def abstract(rows: int, groups: int, device: torch.device) -> tuple[TensorProto, ...]:
    """Return `Groups.tensors()` without data."""
    b = blocks_for(rows, groups)
    return tuple(TensorProto((n,), torch.int32, device) for n in (groups + 1, groups + 1, b, b, b))


def split(splits: Tensor, rows: int) -> Groups:
    """Return groups of these sizes, in a packed tensor of `rows` rows. Reads nothing of a GPU on the host."""
    if not isinstance(splits, Tensor):
        raise UnsupportedDtype(f"Group sizes must be a tensor, got {type(splits).__name__}. Use torch.as_tensor first.")
    if splits.dtype not in (torch.int32, torch.int64):
        raise UnsupportedDtype(f"Group sizes must be int32 or int64, got {splits.dtype}. Use .to(torch.int32).")
    if splits.dim() != 1:
        raise UnsupportedShape(
            f"Group sizes must be a vector of 1 to {MAX_GROUPS} elements, got {tuple(splits.shape)}. "
            "Give one size for each group."
        )
    _check_number(splits.shape[0], rows)
    groups = Groups._make((*(p.empty() for p in abstract(rows, splits.shape[0], splits.device)), rows))
    if not is_fake(splits):
        check_values(splits, rows)
        backend.implementation(__name__, splits).split(splits, 0, groups)
    return groups


def equal(number: int, size: int, device: torch.device) -> Groups:
    """Return groups of one size, known on the host: a stack of matrices [number * size, K]. They fill their blocks and
    have no tail, so that group g begins inside at g times the size rounded up to whole blocks."""
    _check_number(number, number * size)
    blocks = number * (-(-size // BLOCK))
    sizes = (number + 1, number + 1, blocks, blocks, blocks)
    memory = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    groups = Groups._make((*memory.split_with_sizes(sizes), number * size))
    backend.implementation(__name__, memory).split(None, size, groups)
    return groups


def check_values(splits: Tensor, rows: int) -> None:
    """Raise for sizes that `rows` rows cannot have. On a GPU, where the host would wait for the sizes, the device does
    under `octavo.backend.use("checked")`."""
    if splits.device.type == "meta":
        raise UnsupportedDevice("Group sizes on the meta device have no values. Put them and x on a CPU or a GPU.")
    if splits.device.type != "cpu":
        rule = f"Octavo: group sizes must be 0 or more, and their sum at most the {rows} rows"
        # cut off before they are added: a sum of such sizes may not fit into 64 bits
        backend.check_on_device(lambda: (splits >= 0).all() & (splits.long().clamp(0, rows + 1).sum() <= rows), rule)
        return
    sizes = splits.tolist()
    if min(sizes) < 0 or sum(sizes) > rows:
        raise UnsupportedShape(
            f"Group sizes must be 0 or more, and their sum at most the {rows} rows, got {excerpt(str(sizes))}. Count "
            "the rows of each group anew."
        )


def _check_number(number: int, rows: int) -> None:
    if not 1 <= number <= MAX_GROUPS:
        raise UnsupportedShape(f"There are 1 to {MAX_GROUPS} groups, got {number}. Give one size for each group.")
    if rows >= 2**31 - BLOCK * (MAX_GROUPS + 1):
        raise UnsupportedShape(f"Rows are counted in 32 bits, got {rows}. Run them in pieces.")
