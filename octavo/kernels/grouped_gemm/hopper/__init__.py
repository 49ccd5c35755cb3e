"""Grouped GEMMs for Hopper's tensor cores, in Gluon: one producer warp, two warpgroups that multiply.

The producer copies tiles of codes to shared memory (TMA) as buffers become free; each warpgroup owns 64 rows of a
128x128 tile of the result. Both wait for the same buffers and otherwise run independently: while one scales and adds
its product, the other multiplies. An FP8 product covers 128 elements of the contraction, the most for which the tensor
cores' own sum is accurate enough; the warpgroup then adds it in float32. A scale per 128 elements multiplies it before
the addition, a scale over the whole contraction the final sum.

dw with a scale per 128 elements has tiles of 128x256, whose products are computed a quarter at a time (`quarters`).

Sums of unquantized products stay in the tensor cores, and so do those of codes if the recipe permits it (`fast_rows`).
Without products beside them there are registers for tiles of 128x256, which read less for each product.

The grid has one program per multiprocessor. A program takes tiles by number until none are left, and finds the group of
a tile on the device: the number of tiles depends on the groups, the grid does not.
"""

from octavo.kernels.grouped_gemm.hopper.fast_row_groups import fast_rows as fast_rows
from octavo.kernels.grouped_gemm.hopper.plain import plain_rows as plain_rows
from octavo.kernels.grouped_gemm.hopper.plain import takes_plain_rows as takes_plain_rows
from octavo.kernels.grouped_gemm.hopper.row_groups import rows as rows
from octavo.kernels.grouped_gemm.hopper.row_groups import takes_rows as takes_rows
from octavo.kernels.grouped_gemm.hopper.tiles import processors as processors
from octavo.kernels.grouped_gemm.hopper.wgrad import grouped_wgrad as grouped_wgrad
from octavo.kernels.grouped_gemm.hopper.wgrad import takes_wgrad as takes_wgrad
