"""Grouped GEMMs for Hopper's tensor cores, in Gluon: one producer warp, two warpgroups that multiply.

The producer copies tiles of codes to shared memory (TMA) as buffers become free; each warpgroup owns 64 rows of a
128x128 tile of the result. Both wait for the same buffers and otherwise run free of each other: while one scales and
adds what it has multiplied, the other multiplies. A product of FP8 covers 128 of the contraction, which is as far as
the tensor cores' own sum can be trusted; it is then added in float32, scaled before where a scale reaches 128 far, or
at the end where it reaches over all of the contraction. Sums of unquantized products stay in the tensor cores.

Programs are as many as the chip has processors. They take tiles by number until there are none, and find out on the
device which group a number belongs to: how many tiles there are depends on the groups, the grid does not.
"""

from octavo.kernels.grouped_gemm.hopper.contraction import grouped_wgrad as grouped_wgrad
from octavo.kernels.grouped_gemm.hopper.contraction import takes_wgrad as takes_wgrad
from octavo.kernels.grouped_gemm.hopper.plain import plain_rows as plain_rows
from octavo.kernels.grouped_gemm.hopper.plain import takes_plain_rows as takes_plain_rows
from octavo.kernels.grouped_gemm.hopper.row_groups import rows as rows
from octavo.kernels.grouped_gemm.hopper.row_groups import takes_rows as takes_rows
from octavo.kernels.grouped_gemm.hopper.tiles import processors as processors
