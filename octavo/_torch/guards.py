"""torch's own check that tensors have the same layout as given ones, in one call of C++.

It compares type, dispatch keys (which tell the device's type, views that negate, batches), dtype, device, whether a
gradient is wanted, sizes and strides, and no address.

A wrong call of it ends the process. With a version of torch that was never tried, another process makes the call first.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C._dynamo import guards

from octavo._torch.dispatcher import plainly
from octavo._torch.fast_paths import FastPath, torch_version
from octavo.version import untried


def same_layouts(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that says whether as many tensors have the layouts of these. It keeps none of these."""
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    # the stubs say a list of sizes, torch.compile and the check itself take one for each tensor
    known = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]
    check: Callable[..., bool] = known.check
    return check


_CALL = """
import torch
from torch._C._dynamo import guards
t = torch.zeros(4, 6, device="cpu")
known = guards.TensorGuards(t, t, dynamic_dims_sizes=[[4, 6]] * 2, dynamic_dims_strides=[[6, 1]] * 2)
known.check(t, t)
"""


def _check() -> str:
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
    _check,
    torch_version,
)
