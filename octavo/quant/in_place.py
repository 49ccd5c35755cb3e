"""A cast into codes that exist: those of a cached weight, or of a member of a GroupedTensor."""

from typing import TYPE_CHECKING

from torch import Tensor

from octavo.errors import UnsupportedConfig, UnsupportedShape
from octavo.quant.cast_checks import check_fits, check_scaling, check_seed, checked
from octavo.quant.casts import QTensorPair, as_matrix, fill_pair
from octavo.quant.grouped import GroupedTensor, both_orientations, fill_groups
from octavo.quant.orientation import column_axis, is_column
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import QProto, QTensor

if TYPE_CHECKING:
    from octavo.quant.quantizer import AmaxPair, CastArgs, Quantizer

Out = QTensor | tuple[QTensor, QTensor] | GroupedTensor


def quantize_into(
    spec: "Quantizer", out: Out, x: Tensor, axis: int, amax: "Tensor | AmaxPair | None", cast_args: "CastArgs"
) -> None:
    """Cast x by `spec`, or each orientation of a pair by its own quantizer. `amax` has an entry for each orientation of
    a pair, and is that of `axis` otherwise."""
    if isinstance(out, GroupedTensor):
        return _into_groups(spec, out, x, cast_args, amax)
    if isinstance(out, QTensor):
        proto = spec.proto(TensorProto.of(x), axis)
        if _is_part(out, proto):  # cast aside, in the strides that kernels write
            aside = proto.empty()
            if cast_args.skip is not None:
                _copy_codes(out, aside)
            quantize_into(spec, aside, x, axis, amax, cast_args)
            return _copy_codes(aside, out)
        check_fits(out, proto, "quantize_into", "proto()")
        pair: QTensorPair = (None, out) if is_column(x.dim(), axis) else (out, None)
    elif isinstance(out, tuple):
        (row, column), like = out, TensorProto.of(x)
        check_fits(row, spec.proto(like), "quantize_into", "proto()")
        second = column.spec if spec._fuses_with(column.spec) else spec
        check_fits(column, second.proto(like, column_axis(x.dim())), "quantize_into", "proto()")
        pair = out
    else:
        raise UnsupportedConfig(
            f"quantize_into writes to a QTensor, a pair of them or a GroupedTensor, got {type(out).__name__}."
        )
    if not isinstance(amax, tuple):
        amax = (None, amax) if pair[0] is None else (amax, None)
    matrix, specs = as_matrix(x), [None if q is None else q.spec for q in pair]
    fill_pair(matrix, pair, checked(cast_args._replace(amax=amax), matrix, specs[0], specs[1]))


def _is_part(q: QTensor, proto: QProto) -> bool:
    """Tell whether q fits but for larger strides of its rows, or of its columns if those are slower: a view of a larger
    one, as the members of a GroupedTensor are."""
    why = proto.unsupported_reason(q)
    if why == "" or not all(" with strides " in part for part in why.split("; ")):
        return False
    wanted = [(proto.codes.shape[1], 1), q.spec._scale_strides(*q.scale.shape) or (q.scale.shape[1], 1)]
    return all(
        n < 2 or has == want or has > want > 1
        for t, strides in zip((q.codes, q.scale), wanted, strict=True)
        for n, has, want in zip(t.shape, t.stride(), strides, strict=True)
    )


def _copy_codes(q: QTensor, out: QTensor) -> None:
    for source, target in zip(q.tensors(), out.tensors(), strict=True):
        target.copy_(source)


def _into_groups(
    spec: "Quantizer", out: GroupedTensor, x: Tensor, cast_args: "CastArgs", amax: "Tensor | AmaxPair | None"
) -> None:
    if amax is not None or cast_args.inverse_scale is not None:
        raise UnsupportedConfig(
            "quantize_into measures each group of a GroupedTensor. Leave out amax and inverse_scale."
        )
    if out.q.spec != spec:
        raise UnsupportedShape(f"{spec} cannot write into {out!r}, which {out.q.spec} made. Use out.q.spec.")
    pair = both_orientations(out)
    specs = [None if t is None else t.q.spec for t in pair]
    check_scaling(specs, cast_args)
    check_seed(specs, cast_args.seed, x)
    fill_groups(x, pair, cast_args)
