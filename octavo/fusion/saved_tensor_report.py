"""The saved-tensor report of a call: the bytes that forward keeps for backward, by operation."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from octavo.runtime import chain
from octavo.runtime.dry_run import abstract, without_data

_WEIGHT_CODES = ("w_codes", "w_scale", "w_global_scale")  # names of fields of Saved


class KeptMemory(NamedTuple):
    """The memory that an operation keeps from forward to backward.

    Attributes:
        op: the name of the operation's class.
        activations: bytes of values and codes of values, scales and indices, that forward made.
        inputs: bytes of the operation's input that it keeps by reference, where the caller passed it.
        weight_codes: bytes of the codes of the weight that forward made.
    """

    op: str
    activations: int
    inputs: int
    weight_codes: int


class SavedTensorReport(tuple[KeptMemory, ...]):
    """The memory that the operations of a call keep for backward: a tuple of `KeptMemory`. It prints as a table.

    Parameters, extra inputs, and codes of weights that are cached or quantized exist anyway, and do not count.

    Example:
        >>> mlp = octavo.Sequential(octavo.Linear(64, 128, recipe="fp8-block"), octavo.ops.GELU())
        >>> saved_tensors = mlp.explain(torch.ones(8, 64, requires_grad=True)).saved_tensors
        >>> [entry.op for entry in saved_tensors]
        ['Linear', 'GELU']
        >>> saved_tensors[0].weight_codes >= 64 * 128
        True
    """

    def __str__(self) -> str:
        rows = [("kept for backward, bytes", "activations", "inputs", "weights' codes")]
        rows += [(e.op, f"{e.activations:,}", f"{e.inputs:,}", f"{e.weight_codes:,}") for e in self]
        sums = sum(e.activations for e in self), sum(e.inputs for e in self), sum(e.weight_codes for e in self)
        rows.append(("in all", f"{sums[0]:,}", f"{sums[1]:,}", f"{sums[2]:,}"))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *[row[i].rjust(widths[i]) for i in (1, 2, 3)]]) for row in rows
        )


def saved_tensor_report(names: Sequence[str], key: str, fields: Sequence[Any]) -> list[KeptMemory]:
    """Return an entry for each operation of a run, from its plan's key and its inputs. An operation that another one
    has replaced keeps nothing."""
    config = chain.layer.config(key)
    protos = abstract(tuple(fields))
    given = {id(t) for t in _flat(protos)}
    with without_data():
        stages, made = chain.abstract_stages(config, protos)
        kept = [layer.save(stage, own, m) for (layer, stage), own, m in zip(config.pairs, stages, made, strict=True)]
    found, seen = list[KeptMemory](), set[int]()
    for (layer, _), saved in zip(config.pairs, kept, strict=True):
        sums = {"activations": 0, "inputs": 0, "weight_codes": 0}
        columns = layer.Saved._fields
        for i, t in enumerate(saved):
            if t is None or id(t) in seen:
                continue
            seen.add(id(t))
            if t is protos[0]:
                sums["inputs"] += _bytes(t)
            elif id(t) not in given:
                is_weight = i < len(columns) and columns[i] in _WEIGHT_CODES
                sums["weight_codes" if is_weight else "activations"] += _bytes(t)
        found.append(KeptMemory("", **sums))
    if len(found) != len(names):  # an operation of a user's stands for several
        return [
            entry._replace(op=layer.title_of(stage)) for entry, (layer, stage) in zip(found, config.pairs, strict=True)
        ]
    return [entry._replace(op=name) for entry, name in zip(found, names, strict=True)]


def _flat(fields: Any) -> Iterator[Any]:
    for field in fields:
        if isinstance(field, tuple):
            yield from _flat(field)
        elif field is not None:
            yield field


def _bytes(t: Any) -> int:
    return int(math.prod(t.shape) * t.dtype.itemsize)
