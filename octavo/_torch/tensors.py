"""Kinds of tensors that torch has besides plain ones, their memory and layouts, and containers of them.

`same_layouts` is torch's own check that tensors have the layouts of given ones, in one call of C++. It compares type,
dispatch keys (which tell the device's type, views that negate, batches), dtype, device, whether a gradient is wanted,
sizes and strides, and no address. A wrong call of it ends the process. With a version of torch that was never tried,
another process makes the call first.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards
from torch.multiprocessing import reductions
from torch.utils import _pytree

from octavo._torch.dispatcher import plainly
from octavo._torch.fast_paths import FastPath, torch_version
from octavo.version import untried

# nested tuples, lists and dicts of tensors, which have no public module up to torch 2.15
register_pytree_node = _pytree.register_pytree_node  # graphs take and return QTensors as their tensors
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map

StorageWeakRef = reductions.StorageWeakRef  # a weak reference to memory: while it is held, no other looks the same
TensorBase = torch._C.TensorBase  # the class above Tensor, which has the default __torch_function__
is_alias: Any = torch._C._is_alias_of  # type: ignore[attr-defined]  # whether two tensors share memory
wrapper_subclass: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]  # makes a tensor without memory
PARAMETER_MARK = "_is_param"  # the attribute by which a tensor subclass is an nn.Parameter
# by kind of device: an allocation as Inductor makes it, without the dispatcher
EMPTY_STRIDED: dict[str, Any] = {kind: getattr(guards, f"_empty_strided_{kind}", None) for kind in ("cpu", "cuda")}

# memory of a tensor in another shape, as Inductor makes it: no dispatcher, no gradient, a version of its own
reinterpret: Any = getattr(guards, "_reinterpret_tensor", None)


def _check_memory() -> str:
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
    _check_memory,
    torch_version,
    is_quick=True,
)


def same_layouts(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that says whether as many tensors have the layouts of these. It keeps none of these."""
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    # the stubs say a list of sizes, torch.compile and the check itself take one for each tensor
    known = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]
    return known.check


_CALL = """
import torch
from torch._C._dynamo import guards
t = torch.zeros(4, 6, device="cpu")
known = guards.TensorGuards(t, t, dynamic_dims_sizes=[[4, 6]] * 2, dynamic_dims_strides=[[6, 1]] * 2)
known.check(t, t)
"""


def _check_guards() -> str:
    """Compare the guards' answers with what differs between tensors."""
    if any(name.startswith("torch ") for name in untried()):
        if subprocess.run([sys.executable, "-c", _CALL], capture_output=True).returncode != 0:
            return "a call of them ends the process, or raises"
    with plainly():
        first, second = (torch.zeros(shape, dtype=torch.float32, device="cpu") for shape in ((4, 6), (3,)))
        others = {
            "the same layout": torch.ones(4, 6, dtype=torch.float32, device="cpu"),
            "another size": torch.zeros(5, 6, dtype=torch.float32, device="cpu"),
            "another number of dims": torch.zeros(4, 6, 1, dtype=torch.float32, device="cpu"),
            "other strides": torch.zeros(6, 4, dtype=torch.float32, device="cpu").T,
            "another dtype": torch.zeros(4, 6, dtype=torch.bfloat16, device="cpu"),
            "another device": torch.zeros(4, 6, dtype=torch.float32, device="meta"),
            "a gradient": torch.zeros(4, 6, dtype=torch.float32, device="cpu", requires_grad=True),
            "another type": torch.nn.Parameter(first.clone(), requires_grad=False),
        }
        is_same = same_layouts((first, second))
        said = {what: bool(is_same(t, second)) for what, t in others.items()}
    wrong = [what for what, same in said.items() if same != (what == "the same layout")]
    return f"they are wrong about {', '.join(wrong)}" if wrong else ""


GUARDS = FastPath(
    "torch's guards for repeated calls",
    "Calls are compared in Python, with the same results and more host time.",
    _check_guards,
    torch_version,
)


def is_sharded(tensor: Any) -> bool:
    """Return whether it is a DTensor: FSDP2's, which are whole by the time of a call, or tensor parallelism's."""
    return is_dtensor(type(tensor))


def is_dtensor(kind: type) -> bool:
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed")


def local_part(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, as it is stored: `to_local` would make a view; any other tensor itself."""
    return tensor._local_tensor if is_sharded(tensor) else tensor
