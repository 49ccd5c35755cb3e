"""The one protocol of every scaling scheme. A scheme is a folder: its `Quantizer` value, `reference.py`, `triton.py`.

A quantizer holds settings, never state: the orientation, a reduced amax, a delayed inverse scale and the seed of
stochastic rounding are arguments. Its `block` and `scale_format` define every shape of codes and scales.

Both implementations of a scheme have two functions over a matrix x [M, K]:

    amax(x, row, column, skip, groups=None) -> (Tensor | None, Tensor | None)
        returns the tensors that a collective may reduce before the cast, for each orientation that has a quantizer
    cast(x, row, column, cast_args) -> None
        fills the codes and scales of the QTensors that are given

A dense matrix is one group. Both functions also take rows in groups (`octavo.quant.groups`), and quantize each group as
if it were alone. If the scheme `gathers`, both also read the rows that `source` names, which `amax` takes as its last
argument; for other schemes, `octavo.quant.casts` copies those rows first.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from octavo import backend
from octavo.errors import UnsupportedConfig
from octavo.formats import Format, unpack_nibbles
from octavo.quant import cast_checks, scale_blocks, traced_cast
from octavo.quant.byte_transpose import transpose_bytes
from octavo.quant.casts import QTensorPair, as_matrix, quantize_pair, take_number
from octavo.quant.groups import Groups
from octavo.quant.orientation import is_column, oriented_shape
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import QProto, QTensor
from octavo.values import Value

if TYPE_CHECKING:
    from octavo.quant.grouped import GroupedTensor

AmaxPair = tuple[Tensor | None, Tensor | None]
QuantizerPair = tuple["Quantizer | None", "Quantizer | None"]  # the two orientations of an operand: row, column
GroupCounts = tuple[int, int]  # of a matrix: groups of rows, groups of columns


class CastArgs(NamedTuple):
    """Optional tensors that the caller passes to a cast."""

    amax: AmaxPair = (None, None)  # row's, column's
    inverse_scale: Tensor | None = None  # float32 [1], or one for each group, of delayed scaling
    seed: Tensor | None = None  # [2] int64: seed and step of stochastic rounding
    skip: Tensor | None = None  # [1] bool or number: where it is not zero, nothing is written
    running_amax: Tensor | None = None  # float32 like inverse_scale: the cast raises it to the amax of x, or each group
    groups: Groups | None = None  # the groups of x's rows; no two groups share a block
    source: Tensor | None = None  # int32 [groups.rows]: the row of x for each row; one that x does not have is zeros


class Quantizer(Value):
    """Base class of quantizers: the settings that turn one operand of a GEMM into codes and scales, and back.

    A quantizer is a value without state. The orientation, a reduced amax, a delayed inverse scale and a seed are
    arguments of its methods. A scheme is a registered subclass that declares its fields and the class attributes
    `block` (rows and columns that share a scale; None for all), `scale_format` (None for float32) and `package`.

    Args:
        *args: the subclass's fields, in order.
        **settings: the subclass's fields, by name.

    Raises:
        UnsupportedConfig: the subclass is not registered, or a field has a value without a meaning.
        UnknownSetting: there is no field of that name.

    Example:
        >>> spec, x = octavo.quant.Block2D(scale="fp32"), torch.randn(512, 1024)
        >>> isinstance(spec, octavo.quant.Quantizer), str(spec), spec.fmt, spec.block
        (True, "block-2d(scale='fp32')", E4M3, (128, 128))
        >>> row, column = spec.quantize_both(x)  # codes of x and of x.T, from one read of x
        >>> spec.quantize(x, axis=0), torch.equal(spec.transpose(row).codes, column.codes)
        (QTensor(1024x512, block-2d(scale='fp32'), cpu), True)
        >>> again = spec.quantize(x, amax=spec.amax(x))  # the amax of all ranks, for example
        >>> torch.equal(again.codes, spec.quantize_both(x, amax=spec.amax_both(x))[0].codes)
        True
        >>> out = spec.proto(octavo.quant.TensorProto.of(x)).empty()
        >>> spec.quantize_into(out, x)
        >>> torch.equal(spec.dequantize(out), spec.values(row)), spec.code_values(row).max()
        (True, tensor(448.))
        >>> spec.scale_values(row).shape
        torch.Size([4, 8])
        >>> spec.assemble(list(row.tensors()), row.shape, row.dtype)  # from a file
        QTensor(512x1024, block-2d(scale='fp32'), cpu)
        >>> source = torch.tensor([2, 0, 2], dtype=torch.int32)  # rows 2 and 0 for the first expert, 2 for the second
        >>> spec.quantize_groups(x, torch.tensor([2, 1]), source=source)
        GroupedTensor(3x1024 in 2 groups, row, block-2d(scale='fp32'), cpu)
    """

    fmt: Format
    number: int  # equal for equal quantizers of one class: caches keyed by it compare without Python
    block: ClassVar[scale_blocks.Block]  # (rows, columns) that share a scale; a scheme may make it a property
    scale_format: Format | None = None  # None: float32
    two_level: ClassVar[bool] = False  # a [1] global_scale besides the block scales
    two_pass: ClassVar[bool] = False  # the cast needs an amax that is known only after a full read of x
    takes_inverse_scale: ClassVar[bool] = False  # the caller may give the inverse scale
    gathers: ClassVar[bool] = False  # implementations read rows by `CastArgs.source`; others get a gathered copy
    is_stochastic: bool = False  # rounds stochastically, from a seed
    basis: str = ""  # rotation of the values along the contraction before rounding; operands must agree
    package: ClassVar[str]  # the package of the implementations

    def __post_init__(self) -> None:
        super().__post_init__()
        take_number(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "number"}  # a process's own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        take_number(self)

    @cached_property
    def shipped(self) -> bool:
        """Whether Octavo ships this quantizer, as opposed to one of yours, which may run any code."""
        return type(self).__module__.partition(".")[0] == "octavo"

    # -- shapes, stated once -------------------------------------------------------------------------------------

    def proto(self, x: TensorProto, axis: int = -1) -> QProto:
        """Return the shapes, dtypes and layouts of `quantize(x, axis)`, without data.

        Args:
            x: the description of the tensor: `TensorProto.of(tensor)`.
            axis: -1 for a contraction over the last dim, 0 for one over all others.

        Returns:
            The description of the QTensor. Its `empty()` allocates one.

        Raises:
            UnsupportedShape: axis is another number.
        """
        return self._proto(oriented_shape(x.shape, axis), x.dtype, x.device)

    def _proto(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, groups: GroupCounts | None = None
    ) -> QProto:
        """Return the description of codes of this shape. Each of the `groups` is quantized alone; None stands for a
        dense matrix, which is one group."""
        m, k = math.prod(shape[:-1]), shape[-1] if shape else 1
        codes = TensorProto((m, self._code_columns(k)), self.fmt.dtype, device)
        grid = scale_blocks.grid(m, k, self.block, groups or (1, 1))
        kind = torch.float32 if self.scale_format is None else torch.uint8
        scale = TensorProto(grid, kind, device, self._scale_strides(*grid, is_grouped=groups is not None))
        number = 1 if groups is None else groups[0] * groups[1]
        level2 = TensorProto((number,), torch.float32, device) if self.two_level else None
        return QProto(codes, scale, self, shape, dtype, level2)

    def assemble(self, parts: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> QTensor:
        """Return the QTensor that consists of given tensors: the way to load one from a file.

        Args:
            parts: codes, scale and, for NVFP4, global_scale, as `QTensor.tensors()` yields them. Codes may be uint8,
                and the scale may be flat.
            shape: the shape of the QTensor.
            dtype: the default dtype of its `dequantize`.

        Returns:
            A QTensor that shares the memory of `parts`.
        """
        codes, scale = parts[0], parts[1]
        if codes.dtype != self.fmt.dtype:
            codes = codes.view(self.fmt.dtype)
        if scale.dim() == 1:
            scale = self._unflattened(scale, codes.shape[0], shape[-1])
        return QTensor(codes, scale, self, shape, dtype, parts[2] if self.two_level else None)

    def _unflattened(self, scale: Tensor, m: int, k: int, groups: GroupCounts | None = None) -> Tensor:
        """Return a flat scale in the layout of `_proto`."""
        grid = scale_blocks.grid(m, k, self.block, groups or (1, 1))
        return scale.as_strided(grid, self._scale_strides(*grid, is_grouped=groups is not None) or (grid[1], 1))

    def _code_columns(self, k: int) -> int:
        """Return the stored elements of a row of k codes. Packed codes are padded with zeros to whole blocks."""
        if self.fmt.packed == 1:
            return k
        whole = self.block[1] or 1
        return scale_blocks.ceil_div(k, whole) * whole // self.fmt.packed

    def _scale_strides(self, rows: int, columns: int, *, is_grouped: bool = False) -> tuple[int, int] | None:
        """Return the strides of the scale; None for row-major. If every row has its own scales, rows are fastest: a
        tile then writes contiguous scales, in the layout that the block GEMM reads. One scale a row is row-major too,
        unless groups have one each."""
        is_long = self.block[0] == 1 and (is_grouped or self.block[1] is not None)
        return (1, max(rows, 1)) if is_long else None

    # -- quantize ------------------------------------------------------------------------------------------------

    def quantize(
        self,
        x: Tensor,
        axis: int = -1,
        *,
        amax: Tensor | None = None,
        inverse_scale: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> QTensor:
        """Return the codes and scales of x, or of its transpose.

        Args:
            x: float32, bfloat16 or float16, of any shape and strides; leading dims are rows. No gradient flows
                through the cast.
            axis: the dim over which a GEMM will contract: -1 for the last one, 0 for all others, for codes of x.T.
            amax: what `amax(x, axis)` returns, for example after ranks have reduced it; None measures x.
            inverse_scale: float32 [1], the inverse scale. Only Tensorwise takes it, for delayed scaling.
            seed: int64 [seed, step] on x's device, for stochastic rounding. Advance the step at every call.

        Returns:
            A QTensor of x's shape, or of shape [K, rows] for axis 0.

        Raises:
            UnsupportedDtype: x is no tensor of these dtypes.
            UnsupportedShape: axis, amax, inverse_scale or seed does not fit x.
            UnsupportedConfig: the quantizer does not use an argument that is given, or needs a seed.
        """
        wants_column = is_column(cast_checks.check_tensor(x).dim(), axis)
        if torch.compiler.is_compiling():
            return traced_cast.quantize(self, x, wants_column, amax, inverse_scale, seed)
        return self._cast(x, wants_column, amax, inverse_scale, seed)

    def _cast(
        self, x: Tensor, wants_column: bool, amax: Tensor | None, inverse_scale: Tensor | None, seed: Tensor | None
    ) -> QTensor:
        """Run `quantize`, outside of a graph that is being traced."""
        pair = (None, self) if wants_column else (self, None)
        cast_args = CastArgs((None, amax) if wants_column else (amax, None), inverse_scale, seed)
        found = quantize_pair(x, pair[0], pair[1], cast_checks.checked(cast_args, x, pair[0], pair[1]))[wants_column]
        assert found is not None
        return found

    def quantize_both(
        self,
        x: Tensor,
        *,
        amax: AmaxPair = (None, None),
        inverse_scale: Tensor | None = None,
        seed: Tensor | None = None,
        column: "Quantizer | None" = None,
    ) -> tuple[QTensor, QTensor]:
        """Return the codes and scales of x and of its transpose, from one read of x. Raise what `quantize` raises.

        Args:
            x: as in `quantize`.
            amax: a pair of largest magnitudes, as `amax_both(x)` returns it; None entries measure x.
            inverse_scale: as in `quantize`.
            seed: as in `quantize`.
            column: the quantizer of the transpose; None is this one. Only two NVFP4 of the same `square` may differ.

        Returns:
            The QTensor of x and the QTensor of x.T.

        Raises:
            UnsupportedConfig: the two quantizers cannot share one read of x.
        """
        column = self if column is None else cast_checks.check_fuses(self, column)
        cast_args = cast_checks.checked(CastArgs(amax, inverse_scale, seed), cast_checks.check_tensor(x), self, column)
        first, second = quantize_pair(x, self, column, cast_args)
        assert first is not None and second is not None
        return first, second

    def quantize_groups(
        self,
        x: Tensor,
        sizes: Tensor,
        axis: int = -1,
        *,
        seed: Tensor | None = None,
        source: Tensor | None = None,
        column: "Quantizer | None" = None,
    ) -> "GroupedTensor":
        """Return codes and scales of rows in ragged groups, each group quantized as if it were alone.

        If x requires a gradient, the result carries it: a row's gradient goes to the row of x that it was copied from.

        Args:
            x: [..., K], leading dims are rows: one group's after another's, then a tail, which is not read.
            sizes: int32 or int64 [groups] on the device of x: how many rows each group has. Not read on the host.
            axis: -1 for a contraction over K, as x of a GroupedLinear; 0 for one over the rows of each group.
            seed: int64 [seed, step] on the device of x, for a quantizer that rounds stochastically.
            source: int32 [rows] on the device of x: quantizes x[source], rows in the order of their groups. -1 makes a
                row of zeros. Entries in the tail are not used. Tensorwise, Block1D and Block2D read x directly; other
                quantizers copy the rows first. None takes the rows of x as they are.
            column: a quantizer for the columns as well, `recipe.linear().wgrad.right` of a recipe: a GroupedLinear then
                casts nothing for its weight gradient. Only with axis -1.

        Returns:
            A GroupedTensor. Its `dequantize()` returns values [rows, K], zero in the tail; `members()` returns each
            group's QTensor.

        Raises:
            UnsupportedShape: sizes or source has more than one dim, or there are no groups or more than 4096.
            UnsupportedDtype: sizes, source or x has another dtype.
            UnsupportedDevice: sizes or source is not on x's device.
            UnsupportedConfig: the seed is missing or not used, or `column` is given with axis 0.
        """
        from octavo.quant.grouped_cast import cast_groups  # it imports this file

        wants_column = is_column(cast_checks.check_tensor(x).dim(), axis)
        if wants_column and column is not None:
            raise UnsupportedConfig("column= adds columns to the codes of rows, and axis=0 asks for columns. Give one.")
        pair = (None, self) if wants_column else (self, column)
        cast_checks.check_scaling(pair, CastArgs(seed=seed))
        cast_checks.check_seed(pair, seed, x)
        return cast_groups(x, sizes, pair, seed, source)

    def quantize_into(
        self,
        out: "QTensor | tuple[QTensor, QTensor] | GroupedTensor",
        x: Tensor,
        skip: Tensor | None = None,
        *,
        axis: int = -1,
        amax: Tensor | AmaxPair | None = None,
        inverse_scale: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> None:
        """Quantize x into the memory of an existing QTensor, of a pair, or of a GroupedTensor. Raise what `quantize`
        raises.

        Args:
            out: the QTensor to overwrite, which may be a member of a GroupedTensor, or a pair of them for x and x.T.
                A GroupedTensor keeps its groups and takes neither `axis` nor `amax` nor `inverse_scale`.
            x: float32, bfloat16 or float16, of the shape that `out` was made for.
            skip: one element on x's device. If it is not zero, `out` stays as it is: a captured CUDA graph thereby
                reuses a cached weight. None always writes.
            axis: the orientation of a single `out`: -1 for x, 0 for x.T.
            amax: largest magnitudes as `amax(x, axis)` returns them, or a pair as `amax_both(x)` does; None measures x.
            inverse_scale: as in `quantize`.
            seed: as in `quantize`.

        Raises:
            UnsupportedShape: `out` does not fit x.
            UnsupportedDevice: skip is not one element on x's device.
        """
        from octavo.quant.in_place import quantize_into  # it imports this file

        cast_args = CastArgs(inverse_scale=inverse_scale, seed=seed, skip=cast_checks.check_flag(skip, as_matrix(x)))
        quantize_into(self, out, x, axis, amax, cast_args)

    def amax(self, x: Tensor, axis: int = -1, *, skip: Tensor | None = None) -> Tensor:
        """Return the largest magnitudes of x, for `quantize(x, axis, amax=...)`. Take the maximum of them over ranks to
        give all ranks equal scales.

        Args:
            x: as in `quantize`.
            axis: the orientation: -1 for x, 0 for x.T.
            skip: one element on x's device. If it is not zero, the result is unspecified. None always measures.

        Returns:
            float32, of the scale's shape: one for each block. NVFP4 returns [1], the amax of the tensor.

        Raises:
            UnsupportedDevice: skip is not one element on x's device.
        """
        matrix, wants_column = as_matrix(x), is_column(x.dim(), axis)
        row, column = (None, self) if wants_column else (self, None)
        found = self._measured(matrix, row, column, cast_checks.check_flag(skip, x))[wants_column]
        assert found is not None
        return found

    def amax_both(self, x: Tensor, *, column: "Quantizer | None" = None) -> AmaxPair:
        """Return the largest magnitudes of x and of its transpose, for `quantize_both(x, amax=...)`.

        Args:
            x: as in `quantize`.
            column: the quantizer of the transpose if its settings differ; None uses this one for both.

        Returns:
            `amax(x)` and `amax(x, axis=0)`.
        """
        column = self if column is None else cast_checks.check_fuses(self, column)
        return self._measured(as_matrix(x), self, column)

    def _measured(
        self, x: Tensor, row: "Quantizer | None", column: "Quantizer | None", skip: Tensor | None = None,
        groups: Groups | None = None, source: Tensor | None = None,
    ) -> AmaxPair:  # fmt: skip
        """Return the largest magnitudes of the matrix x, which a two-pass cast takes. Check nothing. Only a scheme
        that `gathers` takes a `source`."""
        more = () if source is None else (source,)
        return backend.implementation(self.package, x).amax(x, row, column, skip, groups, *more)

    def _fill(self, x: Tensor, pair: QTensorPair, cast_args: CastArgs) -> None:
        """Cast the matrix x into the orientations of `pair` that are not None, which must fit it. Check nothing."""
        row, column = pair
        amax, is_given = cast_args.amax, cast_args.inverse_scale is not None
        if self.two_pass and not is_given and amax[0] is None and amax[1] is None:
            specs = None if row is None else row.spec, None if column is None else column.spec
            found = self._measured(x, *specs, cast_args.skip, cast_args.groups, cast_args.source)
            cast_args = cast_args._replace(amax=found)
        backend.implementation(self.package, x).cast(x, row, column, cast_args)

    def _fuses_with(self, column: "Quantizer") -> bool:
        """Tell whether one kernel casts x with this quantizer and x.T with `column`, as `quantize_both` requires."""
        return column == self

    # -- and back ------------------------------------------------------------------------------------------------

    def code_values(self, q: QTensor) -> Tensor:
        """Return the values of a QTensor's codes, without scales.

        Args:
            q: a QTensor of this quantizer.

        Returns:
            float32 [rows, K]. Packed codes include their padding.
        """
        return self.fmt.decode(unpack_nibbles(q.codes) if self.fmt.packed == 2 else q.codes)

    def scale_values(self, q: QTensor) -> Tensor:
        """Return the scales of a QTensor as numbers. Those of MX and NVFP4 are stored as bytes.

        Args:
            q: a QTensor of this quantizer.

        Returns:
            float32 of the shape of `q.scale`.
        """
        return q.scale if self.scale_format is None else self.scale_format.decode(q.scale)

    def values(self, q: QTensor) -> Tensor:
        """Return code times block scale: the numbers that a GEMM multiplies. `dequantize` also applies NVFP4's global
        scale, rotates back and removes the padding.

        Args:
            q: a QTensor of this quantizer.

        Returns:
            float32 [rows, K], padding of packed codes included.
        """
        return self.code_values(q) * self._spread_scale(q)

    def _spread_scale(self, q: QTensor) -> Tensor:
        """Return block scales as float32 [M, padded K], or a shape that broadcasts to it."""
        return scale_blocks.spread(self.scale_values(q), self.block, q.rows, q.codes.shape[1] * self.fmt.packed)

    def dequantize(self, q: QTensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values that a QTensor stands for. `q.dequantize()` calls it and keeps the gradient.

        Args:
            q: a QTensor of this quantizer.
            dtype: float32, bfloat16 or float16; None for the dtype of the tensor that was quantized.

        Returns:
            Values of the shape of `q`, saturated to the dtype's range. A code of Inf stays Inf.

        Raises:
            UnsupportedDtype: dtype is another one.
        """
        dtype = cast_checks.check_float(q.dtype if dtype is None else dtype, "dequantize")
        values = self.values(q) if q.global_scale is None else self.values(q) * q.global_scale
        return self._finished(values, q.codes, q.columns, dtype).view(q.shape)

    def _finished(self, values: Tensor, codes: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """Return decoded values in x's own basis and without padding, saturated unless their code is Inf."""
        inside = self._rotated_back(values)[:, :columns]
        finite = scale_blocks.no_larger(inside, torch.finfo(dtype).max).to(dtype)
        if self.fmt.inf is None:
            return finite
        infinite = (codes.view(torch.uint8)[:, :columns] & 0x7F) == self.fmt.inf
        return torch.where(infinite, inside.to(dtype), finite)

    def _rotated_back(self, values: Tensor) -> Tensor:
        """Return decoded values without the rotation of `basis`."""
        return values

    def transpose(self, q: QTensor) -> QTensor:
        """Return the QTensor of x.T from that of x, without x, if blocks are the same in both orientations: those of
        Tensorwise, Block2D, and MX and NVFP4 with square=True. `q.transpose()` calls it.

        Args:
            q: a QTensor of this quantizer.

        Returns:
            The other orientation, in memory of its own.

        Raises:
            TypeError: the blocks are not square, so the codes would have to be quantized a second time.
        """
        return self._transposed(q, self._proto((q.columns, q.rows), q.dtype, q.device))

    def _transposed(self, q: QTensor, out: QProto) -> QTensor:
        """Return the other orientation of q, as `out` describes it. The bytes are those of a cast of the same values
        with the same amax or inverse scale."""
        cast_checks.check_square(self)
        made = out.empty()
        self._transpose_codes(q, made.codes.view(torch.uint8))
        made.scale.copy_(q.scale.T)
        if q.global_scale is not None and made.global_scale is not None:
            made.global_scale.copy_(q.global_scale)
        return made

    def _transpose_codes(self, q: QTensor, out: Tensor) -> None:
        transpose_bytes(q.codes.view(torch.uint8), out)
