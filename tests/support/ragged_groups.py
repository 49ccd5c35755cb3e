"""Ragged groups for tests: where they lie, found without the package; and sizes that a CPU refuses."""

from itertools import pairwise

import torch

from octavo.quant.groups import Groups, abstract, reference, split

BLOCK = 128
# unaligned, empty first, in the middle, last and everywhere, whole blocks, one group
SPLITS = [
    [65, 128, 0, 97], [15, 1, 0, 1011], [0, 200, 300], [300, 0, 200], [200, 300, 0], [0, 0, 0], [256, 128, 384], [129],
]  # fmt: skip


def laid_out(splits: torch.Tensor, rows: int) -> Groups:
    """The layout of any sizes, those too that a GPU cuts off and `split` refuses on a CPU."""
    groups = Groups._make((*(p.empty() for p in abstract(rows, splits.shape[0], splits.device)), rows))
    reference.split(splits, 0, groups)
    return groups


def layout(sizes: list[int], rows: int) -> tuple[list[int], ...]:
    """start, block, and of the blocks in use owner, source and live: one block at a time."""
    start, block, owner, source, live = [0], [0], [], [], []
    for g, size in enumerate(sizes):
        fits = min(max(size, 0), rows - start[-1])
        for at in range(0, fits, BLOCK):
            owner.append(g)
            source.append(start[-1] + at)
            live.append(min(BLOCK, fits - at))
        start.append(start[-1] + fits)
        block.append(len(owner))
    return start, block, owner, source, live


def pieces(x: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Each group's rows."""
    start = layout(sizes, x.shape[0])[0]
    return [x[a:b] for a, b in pairwise(start)]


def many(count: int) -> list[int]:
    """Sizes of that many groups: some empty, most small, some of several blocks."""
    return [(7 * g * g + 31 * g) % (300 if g % 8 == 0 else 40) * (g % 5 != 2) for g in range(1, count + 1)]


def both(sizes: list[int], rows: int) -> tuple[Groups, Groups]:
    """The same groups here and on the device."""
    return split(torch.tensor(sizes), rows), split(torch.tensor(sizes, device="cuda"), rows)
