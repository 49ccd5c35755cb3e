"""The compilations of stochastic rounding."""

from octavo.kernels.stochastic_codes.triton import CONFIGS, _launch
from octavo.quant import tile
from octavo.quant.tile import Variant


def variants() -> list[Variant]:
    shape, found = tile.EXAMPLE[0], []
    for name, block in (("of a matrix", shape), ("of rows", (1, shape[1])), ("128 x 128", (128, 128))):
        for config in CONFIGS:
            launch = _launch(shape, (shape[1], -(-shape[1] // block[1]), *block, 0), config)
            pointers = {"values": "*fp32", "scale": "*fp32", "codes": "*u8", "seed": "*i64"}
            found.append(tile.variant_of(f"stochastic_codes, scales {name} {config}", launch, **pointers))
    return found
