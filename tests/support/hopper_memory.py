"""Runs layers as on a Hopper chip, on tensors without data and without launches, and adds up what they allocate.

The host's code is the same as on a GPU, replays included: which kernels run, which tensors they get, and when each is
let go. The peaks of the H200 in benchmarks/results/moe-memory-h200.json are found to a MiB by this way.
"""

from importlib import import_module
from types import SimpleNamespace

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree

from octavo import backend, launch
from octavo._torch.dispatcher import TorchDispatchMode
from octavo._torch.fakes import FakeTensor, FakeTensorMode
from octavo.fusion import runs
from octavo.kernels.grouped_gemm import hopper_support
from octavo.kernels.probe import Support
from octavo.ops import linear, operation
from octavo.quant import grouped
from octavo.runtime import call_cache
from octavo.runtime.replay import recorder
from octavo.scaling.delayed_scaling import NO_OPERANDS

MIB = 2**20


class Allocations(TorchDispatchMode):
    """Counts the bytes of the tensors that are made while it is on, as long as they live."""

    def __init__(self):
        super().__init__()
        self.alive, self.now, self.peak = {}, 0, 0

    def let_go(self):
        for key, (reference, nbytes) in list(self.alive.items()):
            if reference.expired():
                self.now -= nbytes
                del self.alive[key]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.let_go()
        given = {t.untyped_storage()._cdata for t in _pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        self.let_go()
        for t in _pytree.tree_leaves(made):
            storage = t.untyped_storage() if isinstance(t, torch.Tensor) else None
            if storage is not None and storage._cdata not in given and storage._cdata not in self.alive:
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return made


class _Loaded:
    """A compiled kernel that does nothing."""

    head, packs = (), True

    def launch(self, *arguments):
        pass


def _heard(self, *arguments):
    """A launch, which only those hear of who listen."""
    listener = getattr(launch._threads, "listener", None)
    if listener is not None:
        listener(self, arguments)


class _Recorder(recorder.Recorder):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # which fakes ask for
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _opening(self):
        return ["stream = 0"]


def imitate(patch):
    """Make tensors on the CPU without data take a Hopper chip's way, by this `pytest.MonkeyPatch`."""
    patch.setattr(backend, "_implementation", lambda package, device, force: import_module(f"{package}.triton"))
    patch.setattr(backend, "choose", lambda device: "triton")
    patch.setattr(hopper_support, "is_hopper", lambda device: True)
    patch.setattr(hopper_support, "support", lambda kernel, device: Support(True))
    patch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=132))
    for module, name in ((linear, "takes_nodes"), (operation, "takes_nodes"), (runs, "run_takes_nodes")):
        patch.setattr(module, name, lambda *_: False)
    patch.setattr(grouped, "is_fake", lambda _: False)  # else no cast of groups is heard
    patch.setattr(launch.Launch, "__call__", _heard)
    patch.setattr(launch.Launch, "direct", lambda self, *pointers: _Loaded())
    patch.setattr(launch, "enter_context", lambda index: None)
    patch.setattr(call_cache, "DEVICES", {"cpu"})
    patch.setattr(call_cache, "_is_recordable", lambda place: True)
    patch.setattr(call_cache, "_PLAIN", frozenset((torch.Tensor, torch.nn.Parameter, FakeTensor)))
    patch.setattr(call_cache, "GUARDS", SimpleNamespace(is_on=lambda: False))
    patch.setattr(call_cache, "WITHOUT_DISPATCHER", SimpleNamespace(is_on=lambda: True))
    patch.setattr(call_cache, "Recorder", _Recorder)
    empty = {"cpu": lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cpu")}
    patch.setattr(recorder, "EMPTY_STRIDED", empty)
    patch.setattr(recorder, "reinterpret", lambda t, shape, strides, offset: t.as_strided(shape, strides, offset))


def peaks(make, batch, steps=4):
    """Return the MiB that each step of a module peaks at, beyond what the last step's gradients have. `make` builds it,
    `batch` returns x and dy; both run on tensors without data. The scales of fp8-delayed count as calibrated after one
    step, which is not in the list."""
    call_cache.forget()
    with FakeTensorMode():
        module = make()
        x, dy = batch()
        leaves = [x, *module.parameters()]

        def step():
            for leaf in leaves:
                leaf.grad = None
            module(x).backward(dy)

        step()
        for part in module.modules():
            if hasattr(part, "_scaling"):
                part._scaling.uncalibrated = NO_OPERANDS
        found = []
        for _ in range(steps):
            gradients = sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
            with Allocations() as allocations:
                step()
            found.append((allocations.peak - gradients) / MIB)
    return found


def recordings():
    """The calls that are replayed by now."""
    return sum(kind.replay is not None for kind in call_cache._recordings.values())
