"""Triton == torch on the GPU == torch on the CPU, byte for byte, into poisoned outputs, in every configuration."""

import importlib

import pytest
import torch

from octavo import backend
from octavo.formats import E4M3, E5M2
from octavo.kernels.gemm import gemm
from octavo.quant import MX, NVFP4, Block1D, Block2D, DelayedState, QTensor, Rowwise, TensorProto, Tensorwise
from octavo.quant.quantizer import CastArgs
from tests.support.filled_codes import assert_same_bytes
from tests.support.same_tensors import poison, raw
from tests.support.waiting import no_waiting

pytestmark = pytest.mark.gpu

SEED = (0x1234_5678_9ABC, 7)
# one of each kind of kernel, for the sweeps that compile many variants
KERNELS = [
    Tensorwise(), Rowwise(), Block1D(), Block1D(E5M2, "fp32"), Block2D(), MX(), MX(square=True),
    NVFP4(), NVFP4(square=True), NVFP4(rht=True), NVFP4(rht=True, stochastic=True),
]  # fmt: skip
SPECS = [
    *KERNELS,
    Tensorwise(E5M2), Tensorwise(pow2=True), Tensorwise(eps=1e-3),
    Rowwise(E5M2), Rowwise(pow2=False),
    Block1D(scale="fp32"), Block2D(E5M2, "fp32"),
    MX(E5M2), MX(rounding="floor"), MX(rounding="ceil"), MX(rounding="even"), MX(E5M2, "even", square=True),
    NVFP4(stochastic=True),
]  # fmt: skip
# Triton compiles anew when a size is 1 or a multiple of 16: sizes are grouped so that each group is one compilation
ODD = [(15, 33), (17, 300), (129, 255), (1000, 129), (31, 4100)]
ALIGNED = [(16, 32), (128, 256), (272, 128), (48, 4096), (512, 384), (208, 272)]
ONES = [(1, 17), (300, 1), (1, 1)]
EDGES = (0.0, -0.0, 1e-45, 1e-40, 1e-38, 2.0**-133, 3.4e38, -3.4e38, float("inf"), float("-inf"), float("nan"))


def wide(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Normal data, every row at its own magnitude, whole blocks of zeros and of subnormals among it."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-20, 20, (shape[0], 1)))
    x[::7] = 0
    x[3::11] *= 1e-38
    return x.to(dtype)


def outputs(spec, x: torch.Tensor, sides: str) -> tuple[QTensor | None, QTensor | None]:
    like = TensorProto.of(x)
    row = poison(spec.proto(like).empty()) if "r" in sides else None
    column = poison(spec.proto(like, 0).empty()) if "c" in sides else None
    return row, column


def run(twin: str, spec, x: torch.Tensor, sides: str, **settings) -> list[torch.Tensor]:
    """Bytes of everything written, on the CPU."""
    module = importlib.import_module(f"{spec.package}.{twin}")
    pair = outputs(spec, x, sides)
    specs = [q and q.spec for q in pair]
    amax = module.amax(x, *specs, None) if spec.two_pass else (None, None)
    seed = torch.tensor(SEED, device=x.device) if spec.is_stochastic else None
    module.cast(x, *pair, CastArgs(amax=amax, seed=seed), **settings)
    return [t.cpu().reshape(-1).view(torch.uint8) for q in pair if q is not None for t in q.tensors()]


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_every_configuration_writes_the_reference_bytes(spec, dtype):
    """Of float16, some rows overflow, so Inf is among it."""
    configs = importlib.import_module(f"{spec.package}.triton").CONFIGS
    for shape in ODD + ALIGNED:
        x = wide(shape, dtype)
        want = run("reference", spec, x, "rc")
        assert_same_bytes(run("reference", spec, x.cuda(), "rc"), want, f"torch on cuda {shape}")
        for config in configs:
            assert_same_bytes(run("triton", spec, x.cuda(), "rc", config=config), want, f"{config} {shape}")


@pytest.mark.parametrize("kernel", ["tile", "rowwise.triton"])
def test_every_configuration_of_the_amax_finds_the_same(kernel):
    module = importlib.import_module(f"octavo.quant.{kernel}")
    for config in module.AMAX_CONFIGS:
        for shape in ((129, 255), (256, 512)):
            x = wide(shape, torch.bfloat16)
            if kernel == "tile":
                assert torch.equal(module.tensor_amax(x.cuda(), None, config).cpu(), x.abs().amax().float().view(1, 1))
            else:
                row, column = module.amax(x.cuda(), Rowwise(), Rowwise(), None, config=config)
                assert torch.equal(row.cpu(), x.abs().amax(1, keepdim=True).float())
                assert torch.equal(column.cpu(), x.T.abs().amax(1, keepdim=True).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("spec", SPECS[len(KERNELS) :], ids=str)
def test_every_other_setting(spec, dtype):
    for shape in ODD + ALIGNED:
        x = wide(shape, dtype)
        assert_same_bytes(run("triton", spec, x.cuda(), "rc"), run("reference", spec, x, "rc"), shape)


@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_sizes_of_one(spec):
    for shape in ONES:
        x = wide(shape, torch.bfloat16)
        assert_same_bytes(run("triton", spec, x.cuda(), "rc"), run("reference", spec, x, "rc"), shape)


@pytest.mark.parametrize("spec", KERNELS, ids=str)
@pytest.mark.parametrize("sides", ["r", "c"])
def test_one_orientation_alone(spec, sides):
    for dtype in DTYPES:
        for shape in ((15, 33), (257, 300), (256, 384)):
            x = wide(shape, dtype)
            assert_same_bytes(run("triton", spec, x.cuda(), sides), run("reference", spec, x, sides), (dtype, shape))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_float32_zero_subnormal_huge_infinite_and_nan(spec):
    """float32: a tensor of each edge value alone, and one that has all of them."""
    for value in EDGES:
        x = torch.full((40, 150), value)
        assert_same_bytes(run("triton", spec, x.cuda(), "rc"), run("reference", spec, x, "rc"), value)
    x = torch.tensor(EDGES).repeat(150)[: 40 * 40].view(40, 40) * torch.randn(40, 1).sign()
    assert_same_bytes(run("triton", spec, x.cuda(), "rc"), run("reference", spec, x, "rc"), "mixed")


@pytest.mark.parametrize("spec", [Tensorwise(), Rowwise(), Block1D(), Block2D(), MX(), NVFP4(rht=True)], ids=str)
def test_strided_expanded_and_empty(spec):
    base = wide((300, 520), torch.bfloat16)
    views = [base.T, base[::2, 1::3], base[:1].expand(64, 520), base[:, :1].expand(300, 70), base[:0], base[:, :0]]
    for i, view in enumerate(views):
        # strides survive the move only through the base
        moved = base.cuda().as_strided(view.shape, view.stride(), view.storage_offset())
        assert_same_bytes(run("triton", spec, moved, "rc"), run("reference", spec, view, "rc"), i)


@pytest.mark.gpu_smoke
@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_public_entry_matches_the_cpu_and_skip_leaves_everything(spec):
    x = wide((200, 330), torch.bfloat16)
    seed = {"seed": torch.tensor(SEED)} if spec.is_stochastic else {}
    on_gpu = {name: t.cuda() for name, t in seed.items()}
    want = [t for q in spec.quantize_both(x, **seed) for t in q.tensors()]
    pair = spec.quantize_both(x.cuda(), **on_gpu)
    got = [t for q in pair for t in q.tensors()]
    assert_same_bytes([raw(t) for t in got], [raw(t) for t in want], spec)
    before = [raw(t).clone() for t in got]
    spec.quantize_into(pair, 3 * x.cuda(), torch.ones(1, device="cuda"), **on_gpu)
    assert_same_bytes([raw(t) for t in got], before, "skipped")
    spec.quantize_into(pair, 3 * x.cuda(), torch.zeros(1, device="cuda"), **on_gpu)
    with backend.use("reference"):
        fresh = [t for q in spec.quantize_both(3 * x.cuda(), **on_gpu) for t in q.tensors()]
    assert_same_bytes([raw(t) for t in got], [raw(t) for t in fresh], "written")


@pytest.mark.parametrize("spec", [s for s in KERNELS if not s.is_stochastic], ids=str)
def test_given_amax(spec):
    x = wide((200, 330), torch.bfloat16)
    amax = tuple(factor * a for factor, a in zip((2, 3), spec.amax_both(x), strict=True))  # each side its own
    got = spec.quantize_both(x.cuda(), amax=tuple(a.cuda() for a in amax))
    want = spec.quantize_both(x, amax=amax)
    for g, w in zip(got, want, strict=True):
        assert_same_bytes([raw(t) for t in g.tensors()], [raw(t) for t in w.tensors()], spec)


def test_observe_measures_and_casts_in_one_read():
    x = wide((200, 330), torch.bfloat16)
    inverse_scale = torch.tensor([0.37])
    got, want = Tensorwise().observe(x.cuda(), inverse_scale.cuda()), Tensorwise().observe(x, inverse_scale)
    for g, w in zip(got[:2], want[:2], strict=True):
        assert_same_bytes([raw(t) for t in g.tensors()], [raw(t) for t in w.tensors()], "observe")
    assert torch.equal(got[2].cpu(), want[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_by_a_given_multiplier_infinities_stay_visible(fmt, dtype):
    """In every configuration, with and without the amax measured beside it; products that overflow saturate."""
    spec, configs = Tensorwise(fmt), importlib.import_module("octavo.quant.tensorwise.triton").CONFIGS
    for shape in ((15, 33), (129, 255), (272, 128), (1, 1)):
        x = wide(shape, dtype)
        x.view(-1)[::7] = torch.tensor(EDGES).repeat(x.numel())[: x.view(-1)[::7].numel()].to(dtype)
        for inverse_scale in (0.37, 3e38):
            for sides in ("rc", "r", "c"):
                want, want_amax = cast_by(inverse_scale, "reference", spec, x, sides)
                for config in configs:
                    for observe in (True, False):
                        got, amax = cast_by(inverse_scale, "triton", spec, x.cuda(), sides, observe, config=config)
                        assert_same_bytes(got, want, (shape, inverse_scale, sides, config, observe))
                        assert not observe or torch.equal(amax.isnan(), want_amax.isnan())


def cast_by(inverse_scale: float, twin: str, spec, x: torch.Tensor, sides: str, observe: bool = True, **settings):
    """(bytes of codes and scales, amax) of a cast by this multiplier."""
    pair = outputs(spec, x, sides)
    running_amax = torch.zeros(1, 1, device=x.device) if observe else None
    given = CastArgs(inverse_scale=torch.tensor([inverse_scale], device=x.device), running_amax=running_amax)
    importlib.import_module(f"{spec.package}.{twin}").cast(x, *pair, given, **settings)
    codes = [raw(t) for q in pair if q is not None for t in q.tensors()]
    return codes, None if running_amax is None else running_amax.cpu()


def test_a_bool_flag_skips_too():
    row = Tensorwise().quantize(torch.ones(16, 16, device="cuda"))
    Tensorwise().quantize_into(row, torch.full((16, 16), 2.0, device="cuda"), torch.tensor([True], device="cuda"))
    assert row.dequantize()[0, 0] == 1
    Tensorwise().quantize_into(row, torch.full((16, 16), 2.0, device="cuda"), torch.tensor([False], device="cuda"))
    assert row.dequantize()[0, 0] == 2


def test_nvfp4_pairs_of_different_settings_share_a_read():
    x = wide((100, 330), torch.bfloat16)
    row, column = NVFP4(stochastic=True), NVFP4(rht=True, stochastic=True)
    seed = torch.tensor(SEED)
    got = row.quantize_both(x.cuda(), column=column, seed=seed.cuda())
    want = row.quantize_both(x, column=column, seed=seed)
    for g, w in zip(got, want, strict=True):
        assert_same_bytes([raw(t) for t in g.tensors()], [raw(t) for t in w.tensors()], "pair")


def test_same_bits_a_hundred_times():
    x = wide((513, 777), torch.bfloat16).cuda()
    for spec in (Tensorwise(), Rowwise(), Block1D(), MX(), NVFP4(rht=True)):
        first = run("triton", spec, x, "rc")
        for _ in range(100):
            assert_same_bytes(run("triton", spec, x, "rc"), first, spec)


@pytest.mark.usefixtures("large_memory")
def test_offsets_beyond_two_to_the_31():
    """The last rows of a matrix of more than 2^31 elements, against the same rows alone."""
    x = torch.zeros(33, 2**26, device="cuda", dtype=torch.bfloat16)
    x[-1] = torch.randn(2**26, device="cuda", dtype=torch.bfloat16)
    for spec in (Block1D(), MX()):
        whole, alone = spec.quantize(x), spec.quantize(x[-1:])
        assert torch.equal(whole.codes[-1:].view(torch.uint8), alone.codes.view(torch.uint8))
        assert torch.equal(whole.scale[-1], alone.scale[0])
        column = spec.quantize(x, axis=0)
        assert torch.equal(
            column.codes[-64:].view(torch.uint8), spec.quantize(x[:, -64:], axis=0).codes.view(torch.uint8)
        )


def test_capturable_in_a_cuda_graph():
    """Replays follow new data and a changed skip flag: nothing is read on the host, nothing allocated lazily."""
    x, skip = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16), torch.zeros(1, device="cuda")
    for spec in (Tensorwise(), Rowwise(), Block1D(), Block2D(), MX(), NVFP4(rht=True)):
        pair = spec.quantize_both(x)
        spec.quantize_into(pair, x, skip)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            spec.quantize_into(pair, x, skip)
        x.copy_(torch.randn_like(x) * 3)
        graph.replay()
        fresh = [raw(t) for q in spec.quantize_both(x) for t in q.tensors()]
        assert_same_bytes([raw(t) for q in pair for t in q.tensors()], fresh, spec)
        x.mul_(7)
        skip.fill_(1)
        graph.replay()
        assert_same_bytes([raw(t) for q in pair for t in q.tensors()], fresh, f"{spec} skipped")
        skip.zero_()


def test_nothing_waits_for_the_device():
    """No host read hides in a quantizer: a synchronization raises here."""
    x, skip = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16), torch.zeros(1, device="cuda")
    seed, inverse_scale = torch.tensor([1, 2], device="cuda"), torch.ones(1, device="cuda")
    calls = [
        lambda: Tensorwise().observe(x, inverse_scale),
        lambda: Tensorwise().quantize_both(x, inverse_scale=inverse_scale),
    ]
    for spec in (Tensorwise(), Rowwise(), Block1D(), Block2D(), MX(), NVFP4(rht=True, stochastic=True)):
        drawn = {"seed": seed} if spec.is_stochastic else {}
        calls.append(
            lambda spec=spec, drawn=drawn: spec.quantize_into(spec.quantize_both(x, **drawn), x, skip, **drawn)
        )
        other = Block1D() if spec == Block2D() else spec  # two square operands are refused
        pair = spec.quantize(x, **drawn), other.quantize(x, **drawn)
        calls += [lambda pair=pair: gemm(*pair), lambda pair=pair: pair[0].dequantize()]
    for call in calls:
        call()  # compiles
        with no_waiting():
            call()


def test_delayed_state_updates_inside_a_cuda_graph():
    """Replays advance the window exactly as the CPU does, an infinite step and an unused slot included."""
    formats, amax = (E4M3, E5M2), torch.zeros(2, device="cuda")
    here, there = DelayedState.create(formats, 3, "cuda"), DelayedState.create(formats, 3)

    def step(state: DelayedState, values: torch.Tensor) -> None:
        for slot in range(2):
            state.observe(slot, values[slot])
        state.update(margin=1)

    amax.fill_(1.0)
    step(here, amax)
    step(there, torch.ones(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(here, amax)
    for values in ([3.0, 0.5], [float("inf"), 2.0], [0.0, 7.0], [0.25, 0.125], [0.5, 0.25], [0.5, 0.25], [0.5, 0.25]):
        amax.copy_(torch.tensor(values))
        graph.replay()
        step(there, torch.tensor(values))
        for name in ("history", "head", "inverse_scale", "running_amax", "nonfinite"):
            assert torch.equal(getattr(here, name).cpu(), getattr(there, name)), (name, values)
