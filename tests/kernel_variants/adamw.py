"""The compilations of AdamW: values, gradients and moments in each dtype."""

from octavo.kernels.adamw import BLOCK
from octavo.kernels.adamw.triton import ROWS, WARPS, _adamw_kernel
from octavo.quant.tile import Variant


def variants() -> list[Variant]:
    found = []
    for values, copy in (("*fp32", None), ("*fp32", "*bf16"), ("*bf16", None)):
        for grad in ("*fp32", "*bf16"):
            for moment in ("*fp32", "*bf16", "*u8"):
                # a copy is a plain parameter's, which is not measured
                for amaxes in ("none",) if copy else ("one", "many") if grad == "*bf16" else ("one",):
                    found.append(_variant(values, copy, grad, moment, amaxes))
    return found


def _variant(values: str, copy: str | None, grad: str, moment: str, amaxes: str) -> Variant:
    scale = "*fp32" if moment == "*u8" else None
    types = {
        "values": values, "grad": grad, "average": moment, "square": moment, "average_scale": scale,
        "square_scale": scale, "settings": "*fp32", "seed": "*i64" if values == "*bf16" else None, "copy": copy,
        "amax": None if amaxes == "none" else "*fp32", "N": "i32", "SIZE": "i32" if amaxes == "many" else None,
    }  # fmt: skip
    name = f"adamw of {values} by {grad}, moments {moment}, copy {copy}" + ", many amaxes" * (amaxes == "many")
    signature = {key: kind for key, kind in types.items() if kind is not None}
    absent = {key: None for key, kind in types.items() if kind is None}
    return Variant(name, _adamw_kernel, signature, {**absent, "R": ROWS, "B": BLOCK}, WARPS)
