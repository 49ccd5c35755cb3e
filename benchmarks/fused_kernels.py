# ruff: noqa: B023
"""Times of activations and norms into codes beside the same in two steps, parity first. On a GPU:

python3 -m benchmarks.fused_kernels [forward|backward|measured|norm|groups ...]
"""

import statistics
import sys

import torch

from octavo.formats import E4M3, E5M2
from octavo.kernels import activation, grouped_gemm, norm
from octavo.kernels.activation import ACTIVATIONS, Inputs, Wanted
from octavo.kernels.activation.cast import triton as actq
from octavo.kernels.norm import Norm, Residual
from octavo.kernels.norm.cast import triton as normq
from octavo.kernels.tile_cast import Target
from octavo.quant import Block1D, Block2D, TensorProto, Tensorwise
from octavo.quant.casts import fill_pair
from octavo.quant.grouped import grouped_proto
from octavo.quant.groups import split
from octavo.quant.quantizer import CastArgs
from octavo.quant.tile import Config

M, H, N = 8192, 14336, 4096
REPS, WARM = 20, 5
FN = ACTIVATIONS["swiglu"]
C = Config
FLUSH = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")


def timed(f):
    """Median ms; the cache is flushed before each."""
    for _ in range(WARM):
        f()
    found = []
    for _ in range(REPS):
        FLUSH.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        f()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def pair_of(spec, m, k, sides):
    like = TensorProto((m, k), torch.bfloat16, torch.device("cuda"))
    return (spec.proto(like).empty() if "r" in sides else None, spec.proto(like, 0).empty() if "c" in sides else None)


def given_to(spec, inverse_scale=0.5):
    if not spec.takes_inverse_scale:
        return CastArgs()
    return CastArgs(
        inverse_scale=torch.tensor([inverse_scale], device="cuda"), running_amax=torch.zeros(1, device="cuda")
    )


def nbytes(*things):
    total = 0
    for t in things:
        for part in t if isinstance(t, tuple) else (t,):
            total += (
                0 if part is None else part.nbytes() if hasattr(part, "codes") else part.numel() * part.element_size()
            )
    return total


def filled(pair, given):
    tensors = [t for q in pair if q is not None for t in q.tensors()]
    return [t.clone() for t in tensors] + ([given.running_amax.clone()] if given.running_amax is not None else [])


def poison(pair, given):
    """So that what a kernel does not write is not what another wrote."""
    for q in pair:
        for t in () if q is None else q.tensors():
            t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,)).view(torch.uint8).fill_(0xA5)
    if given.running_amax is not None:
        given.running_amax.zero_()


def same(a, b, what):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        differ = int((x.contiguous().view(torch.uint8) != y.contiguous().view(torch.uint8)).sum())
        assert differ == 0, f"{what}: {differ} of {x.numel()} differ"


def report(what, name, ms, size, plain):
    print(f"{what:44} {name:20} {ms:7.3f} ms {size / ms / 1e6:7.0f} GB/s  {plain / ms:5.2f}x", flush=True)


def compare(what, plain, fused, configs, outputs, size):
    """outputs: (pair, given) of all that is filled."""

    def clear():
        for output in outputs:
            poison(*output)

    def state():
        return [t for output in outputs for t in filled(*output)]

    clear()
    plain()
    want = state()
    ms = timed(plain)
    report(what, "unfused", ms, size, ms)
    for config in configs:
        name = "its own choice" if config is None else f"{config.rows}x{config.columns}, {config.warps} warps"
        try:
            clear()
            fused(config)
            same(state(), want, f"{what} {config}")
            report(what, name, timed(lambda config=config: fused(config)), size, ms)
        except Exception as error:
            print(f"{what:44} {config}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def forward():
    x = torch.randn(M, 2 * H, device="cuda", dtype=torch.bfloat16)
    blocks = (C(128, 128, 16), C(128, 128, 8))
    for spec, sides, configs in (
        (Tensorwise(), "r", (*actq.CONFIGS, C(64, 256, 8), C(32, 128, 4))),
        (Tensorwise(), "rc", (*actq.CONFIGS, C(64, 64, 8), C(64, 64, 4))),
        (Block1D(), "rc", blocks),
        (Block2D(E4M3, "fp32"), "rc", blocks),
    ):
        pair, given = pair_of(spec, M, H, sides), given_to(spec)

        def plain():
            fill_pair(activation.forward(FN, x), pair, given)

        def fused(config):
            actq.forward(FN, Inputs(x), Target(pair, given), config)

        compare(f"swiglu {M}x{2 * H} {spec} {sides}", plain, fused, configs, [(pair, given)], nbytes(x, pair))


def backward():
    x = torch.randn(M, 2 * H, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(M, H, device="cuda", dtype=torch.bfloat16) * 1e-3
    blocks = (C(128, 128, 16), C(128, 128, 8))
    tiles = (*actq.GATED_CONFIGS, C(64, 64, 4), C(32, 128, 8), C(128, 128, 16))
    for spec, again, sums, configs in (
        (Tensorwise(E5M2), Tensorwise(), None, tiles),
        (Tensorwise(E4M3), None, None, tiles),
        (Tensorwise(E5M2), Tensorwise(), torch.bfloat16, actq.GATED_CONFIGS),
        (Block1D(), None, None, blocks),
        (Block1D(), Block1D(), None, blocks),
    ):
        pair, given = pair_of(spec, M, 2 * H, "rc"), given_to(spec, 1e3)
        second = pair_of(again, M, H, "c")[1] if again is not None else None
        other = given_to(again) if again is not None else CastArgs()

        def plain():
            fill_pair(activation.backward(FN, dy, x, wanted=Wanted(bias=sums)).x, pair, given)
            if second is not None:
                fill_pair(activation.forward(FN, x), (None, second), other)

        def fused(config):
            actq.backward(FN, dy, Inputs(x), Target(pair, given), Target((None, second), other), sums, None, config)

        what = f"dswiglu {spec}{', again' if again else ''}{', sums' if sums else ''}"
        size = nbytes(x, dy, pair, second)
        compare(what, plain, fused, configs, [(pair, given), ((None, second), other)], size)


def measured():
    """By a scale of the values themselves: two passes that compute them, or values written and read twice."""
    x = torch.randn(M, 2 * H, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(M, H, device="cuda", dtype=torch.bfloat16) * 1e-3
    given = CastArgs()
    for sides in ("r", "rc"):
        pair = pair_of(Tensorwise(), M, H, sides)

        def plain():
            fill_pair(activation.forward(FN, x), pair, given)

        def fused(config):
            actq.forward(FN, Inputs(x), Target(pair, given), config)

        configs = (None, *actq.CONFIGS, C(64, 64, 8), C(32, 128, 4))
        compare(f"swiglu {sides}, measured", plain, fused, configs, [(pair, given)], 2 * nbytes(x) + nbytes(pair))
    pair, second = pair_of(Tensorwise(E5M2), M, 2 * H, "rc"), pair_of(Tensorwise(), M, H, "c")[1]

    def plain_backward():
        fill_pair(activation.backward(FN, dy, x).x, pair, given)
        fill_pair(activation.forward(FN, x), (None, second), given)

    def fused_backward(config):
        actq.backward(FN, dy, Inputs(x), Target(pair, given), Target((None, second), given), None, None, config)

    outputs, size = [(pair, given), ((None, second), given)], 2 * nbytes(x, dy) + nbytes(pair, second)
    for measuring in (actq.MEASURING, C(32, 64, 4), C(64, 128, 8)):
        actq.MEASURING = measuring
        what = f"dswiglu measured by {measuring.rows}x{measuring.columns}, {measuring.warps}"
        compare(what, plain_backward, fused_backward, (None, *actq.GATED_CONFIGS), outputs, size)


def norms():
    x = torch.randn(M, N, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(N, device="cuda", dtype=torch.bfloat16)
    rms = Norm("rms", 1e-5)
    statistics_ms = timed(lambda: normq.statistics(rms, x, weight, None))
    print(f"rms statistics alone {statistics_ms:.3f} ms; y {timed(lambda: norm.forward(rms, x, weight, None)):.3f} ms")
    residual = Residual(torch.randn_like(x), torch.empty_like(x))
    sum_ms = timed(lambda: norm.summed(x, residual))
    fused_ms = timed(lambda: normq.statistics(rms, x, weight, None, residual))
    floor = 1.5 * timed(lambda: residual.z.copy_(x))  # it reads two and writes one
    print(f"x + extra {sum_ms:.3f} ms; with rms statistics {fused_ms:.3f} ms; floor by copy {floor:.3f} ms")
    for spec, sides in ((Tensorwise(), "r"), (Tensorwise(), "rc"), (Block1D(), "rc"), (Block2D(), "rc")):
        pair, given = pair_of(spec, M, N, sides), given_to(spec)
        configs = [c for c in normq.CONFIGS if spec.takes_inverse_scale or c.rows == c.columns == 128]

        def plain():
            fill_pair(norm.forward(rms, x, weight, None).y, pair, given)

        def fused(config):
            normq.forward(rms, x, weight, None, pair, given, config=config)

        size = nbytes(x, pair) + nbytes(x)  # x is read twice
        compare(f"rms {M}x{N} {spec} {sides}", plain, fused, configs, [(pair, given)], size)


SHAPES = ((8192 * 8, 1536, 128), (8192 * 2, 14336, 8))  # rows, columns of y, experts


def grouped_target(spec, groups, k, sides, delayed=True, inverse_scale=0.5):
    """Codes of groups, poisoned before every comparison, and the arguments of their cast."""
    where = torch.bfloat16, torch.device("cuda")
    row, column = (
        grouped_proto(spec, groups.padded, groups.number, k, side, *where).empty() if side[0] in sides else None
        for side in ("row", "column")
    )
    given = CastArgs(groups=groups)
    if delayed and spec.takes_inverse_scale:
        encodes = torch.full((groups.number,), inverse_scale, device="cuda")
        given = given._replace(inverse_scale=encodes, running_amax=torch.zeros_like(encodes))
    return Target((row, column), given)


def sizes_of(rows, experts):
    """Skewed sizes, one expert without rows, and a tail of some rows."""
    shares = torch.rand(experts, generator=torch.Generator().manual_seed(0)) + 0.1
    shares[experts // 2] = 0
    return (shares / shares.sum() * (rows - 100)).int().cuda()


def groups():
    """Rows in groups, with row scales and their gradients: every tile of the table, by a multiplier that is given and
    by one that is measured."""
    for rows, h, experts in SHAPES:
        places = split(sizes_of(rows, experts), rows)
        x = torch.randn(rows, 2 * h, device="cuda", dtype=torch.bfloat16)
        dy = torch.randn(rows, h, device="cuda", dtype=torch.bfloat16) * 1e-3
        inputs = Inputs(x, torch.rand(rows, device="cuda"))
        title = f"{experts} groups, {rows}x{h}"
        for spec, delayed, configs in (
            (Tensorwise(), True, (*actq.CONFIGS, C(64, 64, 8))),
            (Tensorwise(), False, (*actq.CONFIGS, C(64, 64, 8))),
            (Block1D(), True, (C(128, 128, 16), C(128, 128, 8))),
        ):
            y = grouped_target(spec, places, h, "rc", delayed)

            def plain():
                fill_pair(activation.forward(FN, *inputs), *y)

            def fused(config):
                actq.forward(FN, inputs, y, config)

            what = f"swiglu {title} {spec} {'' if delayed else 'measured'}"
            compare(what, plain, fused, configs, [y], nbytes(x, y.pair))
        for spec, again, delayed, sums in (
            (Tensorwise(E5M2), Tensorwise(), True, None),
            (Tensorwise(E5M2), Tensorwise(), True, torch.bfloat16),
            (Tensorwise(E5M2), Tensorwise(), False, None),
            (Block1D(), Block1D(), True, None),
        ):
            dx = grouped_target(spec, places, 2 * h, "rc", delayed, 1e3)
            y = grouped_target(again, places, h, "c", delayed)

            def plain():
                found = activation.backward(FN, dy, *inputs, wanted=Wanted(scales=torch.float32))
                fill_pair(found.x, *dx)
                if sums is not None:
                    grouped_gemm.column_sums_of(found.x, places, sums)
                fill_pair(activation.forward(FN, *inputs), *y)

            def fused(config):
                actq.backward(FN, dy, inputs, dx, y, sums, torch.float32, config)

            what = f"dswiglu {title} {spec}{', sums' if sums else ''} {'' if delayed else 'measured'}"
            configs = actq.GROUP_CONFIGS if spec.takes_inverse_scale else (None,)
            compare(what, plain, fused, configs, [dx, y], nbytes(x, dy, dx.pair, y.pair))


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), torch.__version__)
    parts = {"forward": forward, "backward": backward, "measured": measured, "norm": norms, "groups": groups}
    for name, part in parts.items():
        if name in (sys.argv[1:] or parts):
            part()
            torch.cuda.empty_cache()
