"""The compilations that decode codes to bfloat16."""

import torch

from octavo.kernels.decode.triton import CONFIG, _decode_kernel
from octavo.quant.groups import BLOCK
from octavo.quant.tile import POINTERS, Variant


def variants() -> list[Variant]:
    found = []
    for fmt, kind, reach, tall in (
        (torch.float8_e4m3fn, "e8m0", 32, 1),
        (torch.float8_e4m3fn, "e8m0", 32, 32),
        (torch.float8_e5m2, "e8m0", 32, 1),
        (torch.uint8, "e4m3", 16, 1),
        (torch.uint8, "e4m3", 16, 16),
    ):
        fastest, other = ("scale_row_stride", "scale_block_stride")[:: 1 if tall == 1 else -1]
        sizes = ("M", "K", "row_stride", "out_stride", other)
        found.append(
            Variant(
                f"decode {fmt} {kind} {tall}x{reach} {CONFIG}",
                _decode_kernel,
                {"codes": POINTERS[fmt], "scale": "*u8", "out": "*bf16", **dict.fromkeys(sizes, "i32")},
                {
                    "source": None, "live": None, fastest: 1, "REACH": reach, "SCALE_ROWS": tall, "KIND": kind,
                    "PACKED": fmt == torch.uint8, "R": CONFIG.rows, "C": CONFIG.columns, "SIZE": BLOCK,
                },
                CONFIG.warps,
            )
        )  # fmt: skip
    return found
