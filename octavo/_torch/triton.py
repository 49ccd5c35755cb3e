"""Names that differ between the versions of Triton that Octavo runs on, 3.6 to 3.9. Kernels import them from here, so
that no kernel asks for a version.

    async_load, async_store    copies by TMA: `async_copy_global_to_shared` and `async_copy_shared_to_global` before 3.8
    wait_until_read            since 3.8 `store_wait` can wait for a copy's writes too, which no kernel here needs
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, no-check-untyped-defs

from inspect import signature
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import tma

# None where a version has neither: the kernels then fail their probes, which say so
async_load: Any = getattr(tma, "async_load", None) or getattr(tma, "async_copy_global_to_shared", None)
async_store: Any = getattr(tma, "async_store", None) or getattr(tma, "async_copy_shared_to_global", None)

if "read_only" in signature(tma.store_wait).parameters:

    @gluon.jit
    def wait_until_read():
        """Wait until TMA has read the shared memory of all copies that this warp has begun."""
        tma.store_wait(0, read_only=True)

else:

    @gluon.jit
    def wait_until_read():
        """Wait until TMA has read the shared memory of all copies that this warp has begun."""
        tma.store_wait(0)
