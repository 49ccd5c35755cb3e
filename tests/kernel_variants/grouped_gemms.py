"""The configurations of the grouped GEMMs, which `tests.offline` compiles: those that the Hopper kernels, the decoded
products and the kernels for any GPU are launched with."""


def grouped_gemms() -> list:
    """Every configuration that the grouped GEMMs launch."""
    return [*grouped_for_hopper(), *decoded_for_hopper(), *grouped_emulated(), *grouped_plain(), *grouped_around()]


BIASES = (("", None, None), (", bias", "*bf16", None), (", scaled bias", "*bf16", "*fp32"))
LEVEL1 = dict.fromkeys(("a_global", "b_global"))  # no global scales
WHERE = dict.fromkeys(("owner", "block", "source", "live"), "*i32")


def some(pointers: dict) -> tuple[dict, dict]:
    """(signature, constants) of pointers that may be missing."""
    there = {name: kind for name, kind in pointers.items() if kind is not None}
    return there, {name: None for name, kind in pointers.items() if kind is None}


def grouped_for_hopper() -> list:
    """Matrices come as tensor descriptors, whose type names their layout."""
    from octavo.kernels.grouped_gemm.hopper import contraction, fast_row_groups, plain, row_groups, wgrad
    from octavo.kernels.grouped_gemm.hopper.tiles import HALF_TILE, TILE
    from octavo.quant.tile import Variant

    found = []
    sizes = dict.fromkeys(("G", "N", "K"), "i32")

    def tiles(kind: str, down: int = 128) -> str:
        return f"tensordesc<{kind}[{down}, 128],{TILE!r}>"

    def add(name: str, kernel, pointers: dict, numbers: dict, **constants) -> None:
        signature, missing = some(pointers)
        found.append(Variant(name, kernel, signature | numbers, missing | constants, 4, is_matmul=True))

    for left, right, out in (
        ("fp8e4nv", "fp8e4nv", "bf16"),
        ("fp8e5", "fp8e4nv", "fp16"),
        ("fp8e4nv", "fp8e4nv", "fp32"),
    ):
        codes, name = {"a": tiles(left), "b": tiles(right), "out": f"*{out}"}, f"{left} by {right} to {out}"
        scales, apart = {"a_scale": "*fp32", "b_scale": "*fp32"}, dict.fromkeys(("group_rows", "group_columns"), "i32")
        steps = dict.fromkeys(("a_scale_step", "b_scale_row"), "i32")
        groups = {"a_scale_group": "i32", "b_scale_group": "i32"}
        half = f"tensordesc<{out}[64, 128],{HALF_TILE!r}>"
        for way, bias, scaled in BIASES:
            whole = None if out == "fp32" else half
            pointers = {**codes, "whole": whole, "bias": bias, "scales": scaled, **scales, **WHERE}
            add(f"grouped rows {name}{way}", row_groups.rows_kernel, pointers, sizes | steps | apart, b_scale_step=1)
            for each in (False, True):
                kind, own = ("rowwise" if each else "tensorwise"), {"A_EACH": each, "B_EACH": each}
                numbers = sizes | groups | apart
                add(f"grouped {kind} rows {name}{way}", row_groups.whole_rows_kernel, pointers, numbers, **own)
                for across, stages in ((256, 4), (128, 6)):
                    fast = f"grouped fast {kind} rows {name}, 128x{across}{way}"
                    wide = pointers | {"b": tiles(right, across)}
                    add(fast, fast_row_groups.fast_rows_kernel, wide, numbers, COUNT=stages, **own)
        for way, adds, whole in (("", False, None), (", added", True, None), (", by halves", False, half)):
            if whole is None or out != "fp32":
                for kind, of in (("", wgrad.NARROW), (" wide", wgrad.WIDE)):
                    lines = {
                        f"{n}_lines": f"tensordesc<fp32[1, {c}],{wgrad.LINE!r}>"
                        for n, c in (("a", 128), ("b", of.across))
                    }
                    part = None if whole is None else f"tensordesc<{out}[64, {of.part}],{of.layout!r}>"
                    pointers = {**codes, "b": tiles(right, of.across), **lines, "whole": part, "block": "*i32"}
                    add(f"grouped{kind} depth {name}{way}", of.kernel, pointers, sizes | {"span": "i32"}, ADD=adds)
                pointers = {**codes, "whole": whole, **scales, "block": "*i32"}
                for each in (False, True):
                    kind, own = ("rowwise" if each else "tensorwise"), {"A_EACH": each, "B_EACH": each}
                    kernel, numbers = contraction.whole_depth_kernel, sizes | groups | {"span": "i32"}
                    add(f"grouped {kind} depth {name}{way}", kernel, pointers, numbers, ADD=adds, **own)
    for kind, out, across, stages in (("bf16", "bf16", 256, 4), ("fp16", "fp16", 128, 6), ("bf16", "fp32", 128, 6)):
        for turned in (False, True):
            shapes = {"a": [128, 64], "b": [64, across] if turned else [across, 64]}
            matrices = {n: f"tensordesc<{kind}{s},{plain.plain_layout(s)!r}>" for n, s in shapes.items()}
            for way, bias, scaled in BIASES:
                name = f"grouped plain rows {kind} to {out}, 128x{across}{', turned' if turned else ''}{way}"
                pointers = {**matrices, "out": f"*{out}", "bias": bias, "scales": scaled, **LEVEL1, **WHERE}
                numbers = sizes | dict.fromkeys(("group_rows", "group_columns"), "i32")
                add(name, plain.plain_rows_kernel, pointers, numbers, TRANSPOSED=turned, COUNT=stages)
    return found


def decoded_for_hopper() -> list:
    """Decoded codes, with and without global scales: rows in groups, dense products and dW."""
    from octavo.kernels.gemm import hopper
    from octavo.kernels.grouped_gemm.hopper import plain
    from octavo.quant.tile import Variant

    found = []

    def add(name: str, kernel, pointers: dict, numbers: tuple, **constants) -> None:
        signature, missing = some(pointers)
        signature |= dict.fromkeys(numbers, "i32")
        found.append(Variant(name, kernel, signature, missing | constants, 4, is_matmul=True))

    for out, across, stages in (("bf16", 256, 4), ("bf16", 128, 6), ("fp16", 256, 4), ("fp32", 128, 6)):
        shapes = {"a": [128, 64], "b": [across, 64]}
        matrices = {n: f"tensordesc<bf16{s},{plain.plain_layout(s)!r}>" for n, s in shapes.items()}
        for levels, level2 in (("", LEVEL1), (", two levels", dict.fromkeys(LEVEL1, "*fp32"))):
            name, common = f"to {out}, 128x{across}{levels}", {**matrices, "out": f"*{out}", **level2}
            for way, bias, scaled in BIASES:
                if levels:
                    pointers, numbers = {**common, "bias": bias, "scales": scaled, **WHERE}, ("G", "N", "K")
                    numbers += ("group_rows", "group_columns")
                    kernel = plain.plain_rows_kernel
                    add(f"decoded rows {name}{way}", kernel, pointers, numbers, TRANSPOSED=False, COUNT=stages)
                if scaled is None:
                    pointers = {**common, "bias": bias, "block": None}
                    constants = {"G": 1, "ADD": False, "COUNT": stages}
                    add(f"decoded gemm {name}{way}", hopper.product_kernel, pointers, ("M", "N", "K"), **constants)
            for adds in (False, True):
                pointers, numbers = {**common, "bias": None, "block": "*i32"}, ("G", "M", "N", "K")
                constants = {"ADD": adds, "COUNT": stages}
                kind = f"decoded wgrad {name}{', added' if adds else ''}"
                add(kind, hopper.product_kernel, pointers, numbers, **constants)
    return found


def grouped_emulated() -> list:
    from octavo.kernels.grouped_gemm import emulated
    from octavo.quant.tile import Variant

    found = []
    where = {name: "*i32" for name in ("owner", "source", "live")}
    strides = dict.fromkeys(("N", "K", "a_stride", "b_stride"), "i32") | {
        f"{side}_scale_{step}": "i32" for side in "ab" for step in ("group", "row", "block")
    }
    for reach, left, right, scale, kind, tall in (  # tall: rows of b's blocks
        (0, "fp8e4nv", "fp8e5", "fp32", "float32", 1),
        (128, "fp8e4nv", "fp8e4nv", "fp32", "float32", 128),
        (32, "fp8e4nv", "fp8e4nv", "u8", "e8m0", 32),
        (16, "u8", "u8", "u8", "e4m3", 16),
    ):
        bm, bn, bk, warps, stages = emulated.CODES[reach]
        level2 = "*fp32" if reach == 16 else None
        operands = {
            "a": f"*{left}", "b": f"*{right}", "a_scale": f"*{scale}", "b_scale": f"*{scale}",
            "a_global": level2, "b_global": level2,
        }  # fmt: skip
        for out in ("bf16", "fp32"):
            for part in ("rows", "depth"):
                kernel = emulated._rows_kernel if part == "rows" else emulated._depth_kernel
                signature, missing = some(
                    {**operands, "out": f"*{out}", "bias": "*bf16", "scales": "*fp32", **where}
                    if part == "rows"
                    else {**operands, "out": f"*{out}", "start": "*i32", "block": "*i32"}
                )
                constants = missing | {
                    "REACH": reach, "A_ROWS": 1, "B_ROWS": tall if part == "rows" else 1, "KIND": kind,
                    "PACKED": reach == 16, "BM": bm, "BN": bn, "BK": bk, "SIZE": 128,
                }  # fmt: skip
                signature |= strides | ({"apart": "i32"} if part == "rows" else {})
                constants |= {} if part == "rows" else {"ADD": out == "fp32"}
                name = f"grouped emulated {part} reach={reach} {kind} to {out}"
                found.append(Variant(name, kernel, signature, constants, warps, stages, is_matmul=True))
    return found


def grouped_plain() -> list:
    import torch

    from octavo.kernels.grouped_gemm import emulated
    from octavo.quant.tile import Variant

    found = []
    where = {name: "*i32" for name in ("owner", "source", "live")}
    for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        bm, bn, bk, warps, stages = emulated.PLAIN[dtype]
        shape = {"BM": bm, "BN": bn, "BK": bk}
        matrices = {"a": f"*{kind}", "b": f"*{kind}", "out": f"*{kind}"}
        sizes = dict.fromkeys(("N", "K", "a_row", "b_row"), "i32")
        for contiguous, other in (("b_k", "b_row"), ("b_row", "b_k")):
            signature = {**matrices, "bias": "*bf16", "scales": "*fp32", **where, **sizes, "b_group": "i32"}
            signature = {k: v for k, v in signature.items() if k != contiguous} | {other: "i32"}
            constants = {"a_k": 1, contiguous: 1, **shape, "SIZE": 128}
            name = f"grouped plain rows in Triton {kind}, {contiguous} = 1"
            kernel = emulated._plain_rows_kernel
            found.append(Variant(name, kernel, signature, constants, warps, stages, is_matmul=kind != "fp32"))
        for out in dict.fromkeys((kind, "fp32")):  # in one order, in every process
            signature = {**matrices, "out": f"*{out}", "start": "*i32", **sizes}
            constants = {"a_column": 1, "b_column": 1, "ADD": out != kind, **shape}
            name = f"grouped plain depth in Triton {kind} to {out}"
            kernel = emulated._plain_depth_kernel
            found.append(Variant(name, kernel, signature, constants, warps, stages, is_matmul=kind != "fp32"))
    return found


def grouped_around() -> list:
    from octavo.kernels.grouped_gemm import triton as module
    from octavo.quant.tile import Variant

    found = []
    for out in ("bf16", "fp16", "fp32"):
        signature = {"out": f"*{out}", "start": "*i32", "ROWS": "i32", "N": "i32", "G": "i32"}
        found.append(Variant(f"grouped zero_tail {out}", module._zero_tail_kernel, signature, {"SIZE": 2048}, 4))
    for dy in ("bf16", "fp32"):
        strides = {"N": "i32", "stride_m": "i32"}
        for way, scales in (("", None), (", scaled", "*fp32")):
            signature, missing = some({"dy": f"*{dy}", "out": "*fp32", "start": "*i32", "scales": scales})
            constants = missing | {"stride_n": 1, "ROWS": 32, "COLUMNS": 128}
            kernel = module._column_sums_kernel
            found.append(Variant(f"grouped column_sums {dy}{way}", kernel, signature | strides, constants, 4))
        signature = {"dy": f"*{dy}", "bias": "*bf16", "out": "*fp32"} | strides
        signature |= {name: "*i32" for name in ("owner", "source", "live")}
        constants = {"stride_n": 1, "ROWS": 16, "COLUMNS": 256, "SIZE": 128}
        found.append(Variant(f"grouped bias_products {dy}", module._bias_products_kernel, signature, constants, 4))
    return found
