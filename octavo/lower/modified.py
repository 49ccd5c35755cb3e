"""The error for a tensor that backward needs and that was written to after forward, by an optimizer's step, say."""

import re
from typing import Any, NoReturn

from octavo.errors import ModifiedInPlace

TORCHS = "one of the variables needed for gradient computation has been modified by an inplace operation"
PARAMETER = "a parameter or an input"
FOUND = re.compile(  # torch writes torch.FloatTensor and torch.cuda.FloatTensor, but CPUBFloat16Type
    r"modified by an inplace operation: \[(?:torch\.)?(.+?) \[(.*?)\]\](, which is output \d+ of \w+,)? is at version "
    r"(\d+); expected version (\d+)"
)
CODES = re.compile(r"ByteTensor|Float8|Float4")


def title_of(owner: Any, layer: Any) -> str:
    """A name for the layer of a call: its module's, or else its kind."""
    kind = layer.Config.registered_name.replace("-", " ")
    article = "An" if kind[0] in "aeiou" else "A"
    return f"{article} {kind} layer" if owner is None else str(owner.op_describe())


def refuse_modified(title: str, what: str, then: int, now: int) -> NoReturn:
    raise ModifiedInPlace(
        f"{TORCHS}: {title} needs {what}, in backward as it was in forward. Its version was {then} then, and is {now} "
        f"now. Call backward() before optimizer.step() or any other write to it, or run forward again after "
        "the write."
    )


def explain_modified(error: RuntimeError, title: str) -> None:
    """Raise ModifiedInPlace from torch's own error about a saved tensor; return if the error is about something
    else."""
    found = FOUND.search(str(error))
    if found is None:
        return
    kind, sizes, made, now, then = found.groups()
    what = "a value that it was given" if made else "codes of its weight" if CODES.search(kind) else PARAMETER
    try:
        refuse_modified(title, f"{what}, {kind} ({sizes})", int(then), int(now))
    except ModifiedInPlace as ours:
        raise ours from error
