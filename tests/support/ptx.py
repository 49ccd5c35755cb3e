"""A small part of PTX in numpy, for inline assembly that no CPU runs: 32-bit registers as arrays of uint32.

Sums of a float32 and a product of two are computed in float64 and rounded once more. For the instructions that Octavo
writes that is the fused result: the factors have few bits, or the sum is far from a tie.

A branch is taken by all elements or by none.
"""

import re

import numpy as np

ONE = np.float32(1)


def run(text: str, operands: list[np.ndarray], outputs: int) -> list[np.ndarray]:
    """Runs the lines between braces on operands $outputs, $outputs + 1 and so on, and returns $0, $1 and so on."""
    registers: dict[str, np.ndarray] = {f"${outputs + i}": bits(value) for i, value in enumerate(operands)}
    going_to = None
    for line in re.findall(r"[^;:{}]+[;:]", text):
        line = line.strip()
        if line.endswith(":"):
            going_to = None if going_to == line[:-1] else going_to
            continue
        words = line[:-1].split(None, 1)
        condition = True
        if words[0].startswith("@"):
            taken = np.unique(registers[words[0][1:]])
            assert len(taken) == 1, "some elements branch and others do not"
            condition, words = bool(taken[0]), words[1].split(None, 1)
        if going_to is not None or not condition or words[0] == ".reg":
            continue
        if words[0] == "bra":
            going_to = words[1].strip()
            continue
        target, *names = (name.strip() for name in words[1].split(","))
        registers[target] = _OPERATIONS[words[0]](*(_value(name, registers) for name in names))
    assert going_to is None, f"there is no {going_to}"
    return [registers[f"${i}"] for i in range(outputs)]


def bits(value: np.ndarray) -> np.ndarray:
    return value if value.dtype in (np.uint32, np.bool_) else np.ascontiguousarray(value, np.float32).view(np.uint32)


def _value(name: str, registers: dict[str, np.ndarray]) -> np.ndarray:
    if name in registers:
        return registers[name]
    if name.startswith("0f"):
        return np.array(int(name[2:], 16), np.uint32)
    assert re.fullmatch(r"0x[0-9A-Fa-f]+|\d+", name), f"{name} has no value yet"
    return np.array(int(name, 0), np.uint32)


def _floats(*values: np.ndarray) -> list[np.ndarray]:
    return [np.atleast_1d(v).view(np.float32) for v in values]


def _rounded(exact: np.ndarray, way: str, saturate: bool) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        found = exact.astype(np.float32)
        if way == "rz":
            found = np.where(np.abs(found) > np.abs(exact), np.nextafter(found, np.float32(0)), found)
        if saturate:
            found = np.where(np.isnan(found), np.float32(0), np.clip(found, np.float32(0), ONE))
    return bits(found)


def _multiply(a, b, saturate: bool = False) -> np.ndarray:
    a, b = _floats(a, b)
    with np.errstate(over="ignore", invalid="ignore"):
        return _rounded(a.astype(np.float64) * b, "rn", saturate)


def _fused(a, b, c, way: str = "rn", saturate: bool = False) -> np.ndarray:
    a, b, c = _floats(a, b, c)
    with np.errstate(over="ignore", invalid="ignore"):
        return _rounded(a.astype(np.float64) * b + c, way, saturate)


def _permute(a, b, selector) -> np.ndarray:
    """Bytes of a (0 to 3) and b (4 to 7); the sign of one, all over it, if the selector has an 8."""
    a, b = np.broadcast_arrays(a, b)
    found = np.zeros(a.shape, np.uint32)
    for place in range(4):
        which = int(selector) >> 4 * place & 0xF
        byte = (a if which & 7 < 4 else b) >> np.uint32(8 * (which & 3)) & np.uint32(0xFF)
        if which & 8:
            byte = np.where(byte & 0x80, np.uint32(0xFF), np.uint32(0))
        found |= byte.astype(np.uint32) << np.uint32(8 * place)
    return found


def _logic(a, b, c, table) -> np.ndarray:
    found = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for i in range(8):
        if int(table) >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


def _pair_of_halves(upper, lower) -> np.ndarray:
    """Two float32 as float16, rounded towards zero."""
    found = []
    for value in _floats(*np.broadcast_arrays(upper, lower)):
        with np.errstate(over="ignore", invalid="ignore"):
            half = value.astype(np.float16)
        found.append(half.view(np.uint16).astype(np.uint32) - (np.abs(half).astype(np.float64) > np.abs(value)))
    return found[0].astype(np.uint32) << np.uint32(16) | found[1].astype(np.uint32)


def _smaller_halves(a, b) -> np.ndarray:
    """The smaller ones of two pairs of float16; a NaN gives way."""
    a, b = (np.ascontiguousarray(v).view(np.float16) for v in np.broadcast_arrays(np.atleast_1d(a), b))
    return np.fmin(a, b).view(np.uint32)


_OPERATIONS = {
    "mov.b32": lambda a: a,
    "mov.f32": lambda a: a,
    "shl.b32": lambda a, n: a << n,
    "and.b32": lambda a, b: a & b,
    "abs.f32": lambda a: a & np.uint32(0x7FFFFFFF),
    "mul.rn.f32": _multiply,
    "mul.rn.sat.f32": lambda a, b: _multiply(a, b, True),
    "add.rn.f32": lambda a, b: _fused(a, bits(np.array([1.0])), b),
    "fma.rn.f32": _fused,
    "fma.rn.sat.f32": lambda a, b, c: _fused(a, b, c, "rn", True),
    "fma.rz.f32": lambda a, b, c: _fused(a, b, c, "rz"),
    "cvt.rz.f16x2.f32": _pair_of_halves,
    "min.f16x2": _smaller_halves,
    "shr.u32": lambda a, n: a >> n,
    "xor.b32": lambda a, b: a ^ b,
    "sub.u32": lambda a, b: a - b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "setp.gt.f32": lambda a, b: np.greater(*_floats(a, b)),
    "setp.le.u32": lambda a, b: a <= b,
    "setp.le.or.u32": lambda a, b, p: (a <= b) | p,
    "setp.ge.or.u32": lambda a, b, p: (a >= b) | p,
    "setp.neu.and.f32": lambda a, b, p: np.not_equal(*_floats(a, b)) & p,
    "prmt.b32": _permute,
    "lop3.b32": _logic,
    "setp.nan.f32": lambda a, b: np.isnan(_floats(a)[0]) | np.isnan(_floats(b)[0]),
    "selp.b32": lambda a, b, p: np.where(p, a, b),
}
