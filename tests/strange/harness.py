"""The harness: it runs a layer for a few steps in an environment, and compares all that the layer computes and holds,
bit for bit, with a run of the same layer that never saw the environment."""

import fnmatch
import functools
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from octavo.runtime import call_cache as calls
from tests.strange.environments import Environment
from tests.strange.layers import Layer
from tests.strange.run import Record, Run

PLAIN = Environment("plain")
# the end of a step reads and clears this count if it has arrived from the device
TIMED = ("version of *dropped",)
# torch.compile traces a layer again in another state of torch, which writes these buffers once more
RETRACED = ("version of *scaling_*",)


def record_of(
    layer: Layer, recipe: str, *environments: Environment, device: str = "cpu", backend: str | None = None
) -> Record:
    """Runs a new layer for a step, and two for each environment: one in it, and one after it."""
    calls.forget()  # nothing is reused that was recorded in another environment
    with ExitStack() as stack:
        for environment in environments:
            stack.enter_context(environment.around())
        run = Run(layer, recipe, device, backend)
        for environment in environments:
            environment.first(run)
        run.step()
        for environment in environments:
            with environment.during(run):
                run.step()
            environment.between(run)
            run.step()
        return run.finish()


@functools.cache
def plain_record(
    layer: Layer, recipe: str, device: str = "cpu", backend: str | None = None, environments: int = 1
) -> Record:
    """Returns the record of a layer that never saw an environment."""
    return record_of(layer, recipe, *[PLAIN] * environments, device=device, backend=backend)


def differences(found: Record, want: Record, may_differ: tuple[str, ...] = ()) -> list[str]:
    """Lists the names of values that differ between two records: in a bit, in a dtype, a device or a layout."""
    names = sorted(found.keys() ^ want.keys())
    names += [name for name in want if name in found and not same(found[name], want[name])]
    return [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in may_differ)]


def same(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and a == b
    alike = (a.dtype, a.device, a.shape, a.stride()) == (b.dtype, b.device, b.shape, b.stride())
    return alike and torch.equal(bits(a), bits(b))


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


def traces(
    layer: Layer, recipe: str, *environments: Environment, device: str = "cpu", backend: str | None = None
) -> list[str]:
    """Lists what a layer computes or holds otherwise in environments, one after another, than without them."""
    want = plain_record(layer, recipe, device, backend, len(environments))
    found = record_of(layer, recipe, *environments, device=device, backend=backend)
    may_differ = [pattern for environment in environments for pattern in environment.may_differ]
    return differences(found, want, (*may_differ, *TIMED, *(RETRACED if backend else ())))
