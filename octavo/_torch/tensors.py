"""Kinds of tensors that torch has besides plain ones, and their memory."""

from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards
from torch.multiprocessing import reductions

from octavo._torch.dispatcher import plainly
from octavo._torch.fast_paths import FastPath, torch_version

StorageWeakRef = reductions.StorageWeakRef  # a weak reference to memory: while it is held, no other looks the same
TensorBase = torch._C.TensorBase  # the class above Tensor, which has the default __torch_function__
is_alias: Any = torch._C._is_alias_of  # type: ignore[attr-defined]  # whether two tensors share memory
wrapper_subclass: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]  # makes a tensor without memory
PARAMETER_MARK = "_is_param"  # the attribute by which a tensor subclass is an nn.Parameter
# by kind of device: an allocation as Inductor makes it, without the dispatcher
EMPTY_STRIDED: dict[str, Any] = {kind: getattr(guards, f"_empty_strided_{kind}", None) for kind in ("cpu", "cuda")}

# memory of a tensor in another shape, as Inductor makes it: no dispatcher, no gradient, a version of its own
reinterpret: Any = getattr(guards, "_reinterpret_tensor", None)


def _check() -> str:
    """Compare an allocation and a view with those of public functions."""
    if None in (*EMPTY_STRIDED.values(), reinterpret):
        return "this torch does not have them"
    with plainly():
        whole = torch.arange(8, dtype=torch.int64, device="cpu")
        view, want = reinterpret(whole, (2, 3), (1, 2), 1), whole.as_strided((2, 3), (1, 2), 1)
        kinds = ["cpu", *["cuda"] * bool(torch.cuda.is_initialized())]  # type: ignore[no-untyped-call]
        made = [EMPTY_STRIDED[kind]((2, 3), (1, 2), torch.bfloat16) for kind in kinds]
        found = [(tuple(t.shape), t.stride(), t.dtype, t.device.type) for t in made]
        same = torch.equal(view, want) and view.data_ptr() == want.data_ptr() and view.stride() == want.stride()
    alike = found == [((2, 3), (1, 2), torch.bfloat16, kind) for kind in kinds]
    return "" if same and alike else "they differ from torch's own"


WITHOUT_DISPATCHER = FastPath(
    "allocations and views of recorded calls without torch's dispatcher",
    "Calls are not recorded: every one runs as written, with the same results and more host time.",
    _check,
    torch_version,
    is_quick=True,
)


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor: FSDP2's, which are whole by the time of a call, or tensor parallelism's."""
    return is_dtensor(type(tensor))


def is_dtensor(kind: type) -> bool:
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed")
