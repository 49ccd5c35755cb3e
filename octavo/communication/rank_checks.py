"""Whether the ranks of a layer agree: on its settings, on the values of parameters that each of them has, and on which
layer they call.

They compare four numbers in one all-gather, in eager mode, before the layer sends anything else. A graph and a capture
compare nothing.
"""

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo._torch.cuda import is_capturing
from octavo._torch.fakes import FakeTensor
from octavo._torch.functional_collectives import backend_name
from octavo._torch.tensors import is_dtensor
from octavo.communication import collectives
from octavo.communication.groups import note_split, process_group, rank_of, size_of
from octavo.communication.tensor_parallel import Parallel
from octavo.errors import UnsupportedConfig
from octavo.recipes import Recipe

_MADE: Counter[tuple[str, str]] = Counter()  # layers that this process has made, by group and kind
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element


def number_layer(layer: Any) -> None:
    """Number a layer among those of its kind that this process has made over its group."""
    if layer.parallel is not None:
        kind = layer.parallel.group, f"{layer.parallel.mode} {layer.op_describe()}"
        _MADE[kind] += 1
        layer._number = kind, _MADE[kind]
        note_split(layer)


def check_ranks(layer: Any, parallel: Parallel, recipe: Recipe, x: Any, weight: Tensor, bias: Tensor | None) -> None:
    """Raise if ranks have different recipes, settings, shapes or gradients to compute, or call different layers: in
    eager mode, at a layer's first call, and on a CPU at each. gloo ends a process that receives more than it expects. A
    GPU would have to be waited for. At the first call, also raise if a row layer's bias, which all ranks have, has
    different values."""
    if torch.compiler.is_compiling() or (layer._ranks_checked and x.device.type != "cpu"):  # a graph would guard on it
        return
    own = (
        f"{recipe.key}, parallel_mode={parallel.mode!r}, sequence_parallel={parallel.sequence}, "
        f"column_blocks={parallel.blocks}, weight {_described(weight)}, bias {_described(bias)}"
        f"{', returned' if getattr(layer, 'return_bias', False) else ''}, x {_described(x)}"
        f"{_wanted(parallel, x, weight, bias)}"
    )
    mask = layer._scaling.uncalibrated  # operands of fp8-delayed whose amaxes ranks agree on, as no step has seen them
    if recipe.stateful and (mask.x or mask.w):
        own += f", no scale yet for {' and '.join(['x'] * mask.x + ['w'] * mask.w)}"
    shared: list[Tensor] = []
    if parallel.mode == "row" and not layer._ranks_checked:
        shared = [p for name, p in layer.named_parameters(recurse=False) if name.startswith("bias")]
    rule = f"{layer.op_describe()} is split over {parallel.size()} ranks, which must call it alike"
    way_out = "Give all ranks the same recipe, settings, number of tokens and gradients to compute."
    check_alike(layer, parallel.group, x, rule, own, way_out, shared)


def check_parameters(norm: Any, group: str, x: Any, parameters: Sequence[Tensor | None]) -> None:
    """Raise if the parameters that all ranks of a group have differ: in eager mode, at a norm's first call."""
    if torch.compiler.is_compiling() or norm._ranks_checked:
        return
    rule = f"All {size_of(group)} ranks have the parameters of {norm.op_describe()} in common"
    way_out = "Build the same norm on all ranks."
    own = f"its parameters as {', '.join([_described(p) for p in parameters])}"
    check_alike(norm, group, x, rule, own, way_out, [p for p in parameters if p is not None])


def check_alike(
    module: Any, group: str, x: Any, rule: str, own: str, way_out: str, shared: Sequence[Tensor] = ()
) -> None:
    """Raise if other ranks describe their call of a module in other words than `own`, call another layer, or have other
    values of shared parameters."""
    if x.device.type == "meta" or isinstance(x, FakeTensor) or (x.device.type == "cuda" and is_capturing()):
        return
    kind, number = getattr(module, "_number", None) or (("", ""), 0)
    text = zlib.crc32(f"{own} {getattr(module, '_path', '')}".encode())
    # over gloo numbers are compared on the CPU, whatever x is on (`collectives.refuse_gloo`)
    over_gloo = x.device.type == "cuda" and backend_name(process_group(group), x.device) == "gloo"
    device = torch.device("cpu") if over_gloo else x.device
    first = torch.tensor([text, number, _MADE[kind]], dtype=torch.int64, device=device)
    if type(first) is not Tensor:  # inside of a mode whose tensors have no values
        return
    module._ranks_checked = False
    with torch.no_grad():
        sent = torch.cat([first, _digest(shared, device)])
        found = collectives.gather(sent, size_of(group), group, module.op_describe()).view(-1, len(sent)).tolist()
    mine = rank_of(group)
    texts, numbers, made, values = zip(*found, strict=True)
    if others := [rank for rank, one in enumerate(texts) if one != texts[mine]]:
        differ = "rank {} differs" if len(others) == 1 else "ranks {} differ"
        raise UnsupportedConfig(
            f"{rule}. Rank {mine} has {own}; {differ.format(', '.join(map(str, others)))}. {way_out}"
        )
    # a rank that has made more layers than another one numbers them otherwise
    if len(set(made)) == 1 and (others := [rank for rank, one in enumerate(numbers) if one != number]):
        raise UnsupportedConfig(
            f"{rule}. Rank {mine} calls number {number} of the {made[mine]} such layers that it has made, and rank "
            f"{others[0]} its number {numbers[others[0]]}. Make the layers in the same order on all ranks, and call "
            "them in the same order."
        )
    if others := [rank for rank, one in enumerate(values) if one and values[mine] and one != values[mine]]:
        raise UnsupportedConfig(
            f"{module.op_describe()} has parameters that all ranks have in common, and their values on rank "
            f"{others[0]} are not those on rank {mine}. Seed all ranks alike before they make the model, load the same "
            "checkpoint on all of them, or send the values: torch.distributed.broadcast(parameter.detach(), src=0)."
        )
    module._ranks_checked = True


def _digest(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a number [1] that follows from the bits of these tensors and is odd; 0 if there are none."""
    found = torch.zeros(1, dtype=torch.int64, device=device)
    for tensor in [t for t in tensors if not t.is_meta]:
        values: Any = tensor.to_local() if is_dtensor(type(tensor)) else tensor  # type: ignore[attr-defined]
        bits = values.detach().reshape(-1).view(_BITS[values.element_size()]).to(device=device, dtype=torch.int64)
        places = torch.arange(1, len(bits) + 1, dtype=torch.int64, device=device)
        found = 2 * (found * 31 + (bits * (places * 0x9E3779B1)).sum()) + 1  # of equal sizes on all ranks
    return found


def _described(tensor: Any) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def _wanted(parallel: Parallel, x: Any, weight: Tensor, bias: Tensor | None) -> str:
    """Return the settings that decide the collectives of a call and its backward: the gradients that are wanted."""
    column, sequence = parallel.mode == "column", parallel.sequence
    wants = {name: torch.is_grad_enabled() and t is not None and t.requires_grad for name, t in
             (("dx", x), ("dw", weight), ("db", bias))}  # fmt: skip
    if column and sequence:
        how = f", gather_again={parallel.gather_again}, row_codes_only={parallel.row_codes_only}"
        return f", dx={wants['dx']}, dw={wants['dw']}{how}"
    if column:
        return f", dx={wants['dx']}"
    if not sequence:
        return ""
    how = f", row_codes_only={parallel.row_codes_only}" if parallel.row_codes_only else ""
    return f", dx or dw={wants['dx'] or wants['dw']}, db={wants['db']}{how}"
