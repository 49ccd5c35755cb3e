"""The compilations of the emulated GEMM: every configuration, with scales that reach as far as each serves."""

import torch

from octavo.kernels.gemm.triton import CONFIGS, _gemm_kernel
from octavo.quant import tile
from octavo.quant.tile import Variant


def variants() -> list[Variant]:
    kinds = {  # reach -> (codes of a, codes of b, scale pointer, kind, (rows a, rows b), packed)
        0: ("*fp8e4nv", "*fp8e5", "*fp32", "float32", (1, 0), False),
        128: ("*fp8e4nv", "*fp8e4nv", "*fp32", "float32", (1, 128), False),
        32: ("*fp8e4nv", "*fp8e4nv", "*u8", "e8m0", (1, 32), False),
        16: ("*u8", "*u8", "*u8", "e4m3", (1, 16), True),
    }
    found = []
    for reach, configs in CONFIGS.items():
        a, b, scale, kind, (a_rows, b_rows), packed = kinds[reach]
        level2 = {"a_global": "*fp32", "b_global": "*fp32"}
        for bm, bn, bk, warps, stages in configs:
            for dtype in (torch.bfloat16, torch.float32):
                found.append(
                    Variant(
                        f"gemm reach={reach} {kind} {dtype} {bm}x{bn}x{bk} warps={warps} stages={stages}",
                        _gemm_kernel,
                        {
                            "a": a, "b": b, "y": tile.POINTERS[dtype], "a_scale": scale, "b_scale": scale,
                            "bias": tile.POINTERS[dtype], **(level2 if packed else {}),
                            **dict.fromkeys(("M", "N", "K", "a_stride", "b_stride"), "i32"),
                            **dict.fromkeys(("a_scale_row", "b_scale_row", "a_scale_block", "b_scale_block"), "i32"),
                        },
                        {
                            **({} if packed else dict.fromkeys(level2)), "REACH": reach, "A_ROWS": a_rows,
                            "B_ROWS": b_rows, "KIND": kind, "PACKED": packed, "BM": bm, "BN": bn, "BK": bk,
                        },
                        warps,
                        stages,
                        is_matmul=True,
                    )
                )  # fmt: skip
    return found
