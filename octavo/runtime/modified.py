"""The error for a tensor that backward needs and that was written to after forward, by an optimizer's step, say."""

import re
from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor

from octavo.errors import ModifiedInPlace
from octavo.recipes import Delayed

TORCHS = "one of the variables needed for gradient computation has been modified by an inplace operation"
PARAMETER = "a parameter or an input"
FOUND = re.compile(  # torch writes torch.FloatTensor and torch.cuda.FloatTensor, but CPUBFloat16Type
    r"modified by an inplace operation: \[(?:torch\.)?(.+?) \[(.*?)\]\](, which is output \d+ of \w+,)? is at version "
    r"(\d+); expected version (\d+)"
)
CODES = re.compile(r"ByteTensor|Float8|Float4")


def versions_of(operands: Iterable[Any]) -> tuple[int, ...]:
    """Return the versions of those of the operands that are plain tensors, which may be the caller's own memory."""
    return tuple([t._version for t in operands if isinstance(t, Tensor)])


def title_of(owner: Any, layer: Any) -> str:
    """Return a name for the layer of a call: its module's, or else its kind."""
    kind = layer.Config.registered_name.replace("-", " ")
    article = "An" if kind[0] in "aeiou" else "A"
    return f"{article} {kind} layer" if owner is None else str(owner.op_describe())


def refuse_modified(title: str, what: str, then: int, now: int, writes: str = "optimizer.step()") -> NoReturn:
    raise ModifiedInPlace(
        f"{TORCHS}: {title} needs {what}, in backward as it was in forward. Its version was {then} then, and is {now} "
        f"now. Call backward() before {writes} or any other write to it, or run forward again after "
        "the write."
    )


def explain_modified(error: RuntimeError, title: str, config: str) -> None:
    """Raise ModifiedInPlace from torch's own error about a tensor that a call of this config has saved; return if the
    error is about something else."""
    found = FOUND.search(str(error))
    if found is None:
        return
    kind, sizes, made, now, then = found.groups()
    what, writes = PARAMETER, "optimizer.step()"
    if made:
        what = "a value that it was given"
    elif CODES.search(kind):
        what = "codes of its weight"
    elif Delayed.registered_name in config and "," not in sizes:  # one scale, or one for each group
        writes = f"octavo.step(), {writes}"
        scale = f"a scale of {Delayed.registered_name}"
        what = scale if sizes == "1" else f"{PARAMETER}, or {scale}"
    try:
        refuse_modified(title, f"{what}, {kind} ({sizes})", int(then), int(now), writes)
    except ModifiedInPlace as ours:
        raise ours from error
