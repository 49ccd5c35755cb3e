"""The one protocol of every scaling scheme. A scheme is a folder: its `Quantizer` value, `reference.py`, `triton.py`.

A quantizer holds settings, never state: the orientation, a reduced amax, a delayed inverse scale and the seed of
stochastic rounding are arguments. Its `block` and `scale_format` define the layout of codes and scales, and this file
derives every shape from those two.

A scheme's twins define two functions over a matrix x [M, K], with the same signature in both files:

    amax(x, row, column, skip, groups=None) -> (Tensor | None, Tensor | None)
        returns the tensors that a collective may reduce before the cast, for each orientation that has a quantizer
    cast(x, row, column, cast_args) -> None
        fills the codes and scales of the QTensors that are given

Both handle groups of rows (`octavo.quant.groups`) and quantize each group as if it were alone. `octavo.quant.grouped`
defines the shapes that they then write. If the scheme `gathers`, both also read the rows that `source` names, which
`amax` takes as its last argument; for other schemes, `octavo.quant.grouped` copies those rows first.
"""

import itertools
import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from octavo import backend
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.formats import FLOATS, Format, unpack_nibbles
from octavo.quant import scale_blocks
from octavo.quant.byte_transpose import transpose_bytes
from octavo.quant.groups import Groups
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import QProto, QTensor
from octavo.values import Value

if TYPE_CHECKING:
    from octavo.quant.grouped import GroupedTensor

MAX_DIM = 2**31 - 256  # kernels count rows and columns in 32 bits, rounded up to a tile, and address in 64
AmaxPair = tuple[Tensor | None, Tensor | None]
QuantizerPair = tuple["Quantizer | None", "Quantizer | None"]  # the two orientations of an operand: row, column


class CastArgs(NamedTuple):
    """Optional tensors that the caller passes to a cast."""

    amax: AmaxPair = (None, None)  # row's, column's
    inverse_scale: Tensor | None = (
        None  # [1] float32, or one for each group: the inverse scale itself (delayed scaling)
    )
    seed: Tensor | None = None  # [2] int64: seed and step of stochastic rounding
    skip: Tensor | None = None  # [1] bool or number: where it is not zero, nothing is written
    running_amax: Tensor | None = (
        None  # as many float32, not negative: the cast raises it to the amax of x, or each group
    )
    groups: Groups | None = None  # the groups of x's rows; no two groups share a block
    source: Tensor | None = None  # int32 [groups.rows]: the row of x that each row is; a zero row where x has none such


KNOWN: dict[int, "Quantizer"] = {}  # by number
_NUMBERS: dict[Any, int] = {}  # by class and key
_COUNTER = itertools.count()


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
        >>> q = octavo.quant.Block1D(scale="fp32")
        >>> isinstance(q, octavo.quant.Quantizer), str(q), q.fmt, q.block
        (True, "block-1d(scale='fp32')", E4M3, (1, 128))
    """

    fmt: Format
    number: int  # equal for equal quantizers of one class: caches keyed by it compare without Python
    block: ClassVar[scale_blocks.Block]  # (rows, columns) that share a scale; a scheme may make it a property
    scale_format: Format | None = None  # None: float32
    two_level: ClassVar[bool] = False  # a [1] global_scale besides the block scales
    two_pass: ClassVar[bool] = False  # the cast needs an amax that is known only after a full read of x
    takes_inverse_scale: ClassVar[bool] = False  # the caller may give the inverse scale
    gathers: ClassVar[bool] = False  # the twins read rows by `CastArgs.source` themselves; others get a gathered copy
    is_stochastic: bool = False  # rounds stochastically, from a seed
    basis: str = ""  # rotation of the values along the contraction before rounding; operands must agree
    package: ClassVar[str]  # the package of the twins

    def __post_init__(self) -> None:
        super().__post_init__()
        self._take_number()

    def _take_number(self) -> None:
        number = _NUMBERS.setdefault((type(self), self.key), next(_COUNTER))
        object.__setattr__(self, "number", number)
        KNOWN.setdefault(number, self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "number"}  # a process's own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take_number()

    @cached_property
    def shipped(self) -> bool:
        """Whether Octavo ships this quantizer, as opposed to one of yours, which may run any code."""
        return type(self).__module__.partition(".")[0] == "octavo"

    # -- shapes, stated once -------------------------------------------------------------------------------------

    def proto(self, x: TensorProto, axis: int = -1) -> QProto:
        """Returns the shapes, dtypes and layouts of `quantize(x, axis)`, without data.

        Args:
            x: the description of the tensor: `TensorProto.of(tensor)`.
            axis: -1 for a contraction over the last dim, 0 for one over all others.

        Returns:
            The description of the QTensor. Its `empty()` allocates one.

        Raises:
            UnsupportedShape: axis is another number.

        Example:
            >>> x = octavo.quant.TensorProto.of(torch.ones(512, 1024, dtype=torch.bfloat16))
            >>> proto = octavo.quant.MX().proto(x, axis=0)
            >>> proto.codes.shape, proto.scale.shape
            ((1024, 512), (1024, 16))
        """
        shape = oriented_shape(x.shape, axis)
        m, k = math.prod(shape[:-1]), (shape[-1] if shape else 1)
        codes = TensorProto((m, self._code_columns(k)), self.fmt.dtype, x.device)
        grid = scale_blocks.grid(m, k, self.block)
        dtype = torch.float32 if self.scale_format is None else torch.uint8
        scale = TensorProto(grid, dtype, x.device, self._scale_strides(*grid))
        level2 = TensorProto((1,), torch.float32, x.device) if self.two_level else None
        return QProto(codes, scale, self, shape, x.dtype, level2)

    def assemble(self, parts: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> QTensor:
        """Returns the QTensor that consists of given tensors: the way to load one from a file.

        Args:
            parts: codes, scale and, for NVFP4, global_scale, as `QTensor.tensors()` yields them. Codes may be uint8,
                and the scale may be flat.
            shape: the shape of the QTensor.
            dtype: the default dtype of its `dequantize`.

        Returns:
            A QTensor that shares the memory of `parts`.

        Example:
            >>> q = octavo.quant.MX().quantize(torch.randn(4, 64))
            >>> same = q.spec.assemble(list(q.tensors()), q.shape, q.dtype)
            >>> torch.equal(same.dequantize(), q.dequantize())
            True
        """
        codes = parts[0] if parts[0].dtype == self.fmt.dtype else parts[0].view(self.fmt.dtype)
        scale = parts[1]
        if scale.dim() == 1:  # flat
            grid = scale_blocks.grid(codes.shape[0], shape[-1], self.block)
            scale = scale.as_strided(grid, self._scale_strides(*grid) or (grid[1], 1))
        return QTensor(codes, scale, self, shape, dtype, parts[2] if self.two_level else None)

    def _code_columns(self, k: int) -> int:
        """Return the stored elements of a row of k codes. Packed codes are padded with zeros to whole blocks."""
        if self.fmt.packed == 1:
            return k
        whole = self.block[1] or 1
        return scale_blocks.ceil_div(k, whole) * whole // self.fmt.packed

    def _scale_strides(self, rows: int, columns: int) -> tuple[int, int] | None:
        """Return the strides of the scale; None for row-major. If every row has its own scales, rows are fastest: a
        tile then writes contiguous scales, in the layout that the block GEMM reads."""
        return (1, max(rows, 1)) if self.block[0] == 1 and self.block[1] is not None else None

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
        """Returns the codes and scales of x, or of its transpose.

        Args:
            x: float32, bfloat16 or float16, of any shape and strides; leading dims are rows. No gradient flows
                through the cast.
            axis: the dim over which a GEMM will contract: -1 for the last one, 0 for all others, which makes the
                codes of x.T.
            amax: largest magnitudes to derive the scales from, as `amax(x, axis)` returns them. Pass it if ranks have
                reduced them; None measures x.
            inverse_scale: float32 [1], the inverse scale. Only Tensorwise takes it, for delayed scaling.
            seed: int64 [seed, step] on x's device, for stochastic rounding. Advance the step at every call.

        Returns:
            A QTensor of x's shape, or of shape [K, rows] for axis 0.

        Raises:
            UnsupportedDtype: x is no tensor of these dtypes.
            UnsupportedShape: axis, amax, encode or seed does not fit x.
            UnsupportedConfig: the quantizer does not use an argument that is given, or needs a seed.

        Example:
            >>> x = torch.randn(512, 1024)
            >>> octavo.quant.Block1D().quantize(x), octavo.quant.Block1D().quantize(x, axis=0)
            (QTensor(512x1024, block-1d, cpu), QTensor(1024x512, block-1d, cpu))
        """
        column = is_column(check_tensor(x).dim(), axis)
        cast_args = CastArgs((None, amax) if column else (amax, None), inverse_scale, seed)
        row, other = (None, self) if column else (self, None)
        found = quantize_pair(x, row, other, self._checked(cast_args, x, row, other))[column]
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
        """Returns the codes and scales of x and of its transpose, from one read of x.

        Args:
            x: float32, bfloat16 or float16, of any shape and strides; leading dims are rows.
            amax: a pair of largest magnitudes, as `amax_both(x)` returns it; None entries measure x.
            inverse_scale: float32 [1], the inverse scale. Only Tensorwise takes it.
            seed: int64 [seed, step] on x's device, for stochastic rounding.
            column: the quantizer of the transpose if its settings differ; None uses this one for both. Only two NVFP4
                with the same `square` may differ.

        Returns:
            The QTensor of x and the QTensor of x.T.

        Raises:
            UnsupportedDtype: x is no tensor of these dtypes.
            UnsupportedShape: amax, encode or seed does not fit x.
            UnsupportedConfig: the two quantizers cannot share one read, the quantizer does not use an argument that
                is given, or needs a seed.

        Example:
            >>> row, column = octavo.quant.MX().quantize_both(torch.randn(512, 1024))
            >>> row.codes.shape, column.codes.shape
            (torch.Size([512, 1024]), torch.Size([1024, 512]))
        """
        column = self if column is None else column
        self._check_fuses(column)
        pair = quantize_pair(
            x, self, column, self._checked(CastArgs(amax, inverse_scale, seed), check_tensor(x), self, column)
        )
        assert pair[0] is not None and pair[1] is not None
        return pair[0], pair[1]

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
        """Returns codes and scales of rows in ragged groups, each group quantized as if it were alone.

        If x requires a gradient, the result carries it: the gradient of the values is that of the rows of x. In a graph
        the cast is one node.

        Args:
            x: [..., K], leading dims are rows: one group's after another's, then a tail, which is not read.
            sizes: int32 or int64 [groups] on the device of x: how many rows each group has. Not read on the host.
            axis: -1 for a contraction over K, as x of a GroupedLinear; 0 for one over the rows of each group.
            seed: int64 [seed, step] on the device of x, for a quantizer that rounds stochastically.
            source: int32 [rows] on the device of x: quantizes x[source], rows in the order of their groups. -1 makes a
                row of zeros. Entries in the tail are not used. Tensorwise, Block1D and Block2D read x directly; other
                quantizers copy the rows first. None takes the rows of x as they are. A row's gradient goes to the row
                of x that it was copied from.
            column: a quantizer for the columns as well, from the same read of x: the result then holds both
                orientations, and a GroupedLinear casts nothing for its weight gradient. For a recipe that is
                `recipe.linear().wgrad.right`. Only with axis -1.

        Returns:
            A GroupedTensor. Its `dequantize()` returns values [rows, K], zero in the tail; `members()` returns each
            group's QTensor.

        Raises:
            UnsupportedShape: sizes or source has more than one dim, or there are no groups or more than 4096.
            UnsupportedDtype: sizes is no tensor of int32 or int64, source none of int32, or x no tensor of floats.
            UnsupportedDevice: sizes or source is not on x's device.
            UnsupportedConfig: a quantizer rounds stochastically without a seed, or none does and there is one; or
                `column` is given with axis 0.

        Example:
            >>> q = octavo.quant.Block1D().quantize_groups(torch.ones(300, 256), torch.tensor([100, 0, 180]))
            >>> q
            GroupedTensor(300x256 in 3 groups, row, block-1d, cpu)
            >>> octavo.GroupedLinear(3, 256, 512, recipe="fp8-block")(q).shape
            torch.Size([300, 512])

            The rows of two experts, from four tokens: the first expert gets tokens 2 and 0, the second token 2.

            >>> x, source = torch.arange(4.0)[:, None].expand(4, 64), torch.tensor([2, 0, 2], dtype=torch.int32)
            >>> rows = octavo.quant.Tensorwise().quantize_groups(x, torch.tensor([2, 1]), source=source)
            >>> rows.dequantize()[:, 0]
            tensor([2., 0., 2.])
        """
        from octavo.quant.grouped_cast import cast_groups  # it imports this file

        is_columns = is_column(check_tensor(x).dim(), axis)
        if is_columns and column is not None:
            raise UnsupportedConfig("column= adds columns to the codes of rows, and axis=0 asks for columns. Give one.")
        pair = (None, self) if is_columns else (self, column)
        self._check_seed(CastArgs(seed=seed), x, any([spec is not None and spec.is_stochastic for spec in pair]))
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
        """Quantizes x into the memory of an existing QTensor, of a pair, or of a GroupedTensor.

        Args:
            out: the QTensor to overwrite, or a pair of them for x and x.T. `proto(...).empty()` allocates one. A
                GroupedTensor keeps its groups and takes neither `axis` nor `amax` nor `encode`. A member of one may
                have strides of the whole: its codes are cast aside and copied.
            x: float32, bfloat16 or float16, of the shape that `out` was made for.
            skip: one element on x's device. If it is not zero, `out` stays as it is: a captured CUDA graph thereby
                reuses a cached weight. None always writes.
            axis: the orientation of a single `out`: -1 for x, 0 for x.T.
            amax: largest magnitudes as `amax(x, axis)` returns them, or a pair as `amax_both(x)` does; None measures x.
            inverse_scale: float32 [1], the inverse scale. Only Tensorwise takes it.
            seed: int64 [seed, step] on x's device, for stochastic rounding.

        Raises:
            UnsupportedShape: `out`, amax, encode or seed does not fit x.
            UnsupportedDtype: x is no tensor of these dtypes.
            UnsupportedDevice: skip is not one element on x's device.
            UnsupportedConfig: the quantizer does not use an argument that is given, or needs a seed.

        Example:
            >>> spec, x = octavo.quant.Block2D(), torch.randn(256, 384)
            >>> out = spec.proto(octavo.quant.TensorProto.of(x)).empty()
            >>> spec.quantize_into(out, x)
            >>> torch.equal(out.dequantize(), spec.quantize(x).dequantize())
            True
        """
        matrix, like = as_matrix(x), TensorProto.of(x)
        if not isinstance(out, (QTensor, tuple)):
            self._quantize_into_groups(out, matrix, CastArgs((amax, None), inverse_scale, seed, check_flag(skip, x)))  # type: ignore[arg-type]
            return
        if isinstance(out, QTensor) and _is_part(out, self.proto(like, axis)):
            aside = self.proto(like, axis).empty()
            if skip is not None:
                _copy_codes(out, aside)
            self.quantize_into(aside, x, skip, axis=axis, amax=amax, inverse_scale=inverse_scale, seed=seed)
            _copy_codes(aside, out)
            return
        if isinstance(out, tuple):
            row, column = out
            _check_fits(row, self.proto(like))
            second = column.spec if self._fuses_with(column.spec) else self
            _check_fits(column, second.proto(like, column_axis(x.dim())))
            pair: tuple[QTensor | None, QTensor | None] = out
        else:
            _check_fits(out, self.proto(like, axis))
            pair = (None, out) if is_column(x.dim(), axis) else (out, None)
        if not isinstance(amax, tuple):
            amax = (None, amax) if pair[0] is None else (amax, None)
        specs = [None if q is None else q.spec for q in pair]
        self._fill(
            matrix, pair, self._checked(CastArgs(amax, inverse_scale, seed, check_flag(skip, x)), matrix, *specs)
        )

    def _quantize_into_groups(self, out: "GroupedTensor", x: Tensor, cast_args: CastArgs) -> None:
        from octavo.quant import grouped  # grouped imports this file

        if not isinstance(out, grouped.GroupedTensor):
            raise UnsupportedConfig(
                f"quantize_into writes to a QTensor, a pair of them or a GroupedTensor, got {type(out).__name__}."
            )
        if cast_args.amax[0] is not None or cast_args.inverse_scale is not None:
            raise UnsupportedConfig("quantize_into measures each group of a GroupedTensor. Leave out amax and encode.")
        if out.q.spec != self:
            raise UnsupportedShape(f"{self} cannot write into {out!r}, which {out.q.spec} made. Use out.q.spec.")
        row, column = grouped.both_orientations(out)
        specs = [t.q.spec for t in (row, column) if t is not None]
        self._check_seed(cast_args, x, any([spec.is_stochastic for spec in specs]))
        grouped.fill_groups(x, (row, column), cast_args._replace(amax=(None, None)))

    def amax(self, x: Tensor, axis: int = -1, *, skip: Tensor | None = None) -> Tensor:
        """Returns the largest magnitudes of x, for `quantize(x, axis, amax=...)`.

        Take the maximum of them over ranks to give all ranks equal scales.

        Args:
            x: float32, bfloat16 or float16, of any shape and strides; leading dims are rows.
            axis: the orientation: -1 for x, 0 for x.T.
            skip: one element on x's device. If it is not zero, the result is unspecified. None always measures.

        Returns:
            float32, of the scale's shape: one for each block. NVFP4 returns [1], the amax of the tensor.

        Raises:
            UnsupportedDtype: x is no tensor of these dtypes.
            UnsupportedShape: axis is another number.
            UnsupportedDevice: skip is not one element on x's device.

        Example:
            >>> octavo.quant.Rowwise().amax(torch.tensor([[3.0, -5.0], [1.0, 0.0]]))
            tensor([[5.],
                    [1.]])
        """
        matrix, column = as_matrix(x), is_column(x.dim(), axis)
        specs = (None, self) if column else (self, None)
        found: AmaxPair = backend.implementation(self.package, x).amax(matrix, *specs, check_flag(skip, x))
        wanted = found[column]
        assert wanted is not None
        return wanted

    def amax_both(self, x: Tensor, *, column: "Quantizer | None" = None) -> AmaxPair:
        """Returns the largest magnitudes of x and of its transpose, for `quantize_both(x, amax=...)`.

        Args:
            x: float32, bfloat16 or float16, of any shape and strides; leading dims are rows.
            column: the quantizer of the transpose if its settings differ; None uses this one for both.

        Returns:
            `amax(x)` and `amax(x, axis=0)`.

        Raises:
            UnsupportedDtype: x is no tensor of these dtypes.
            UnsupportedConfig: the two quantizers cannot share one read.

        Example:
            >>> octavo.quant.Rowwise().amax_both(torch.tensor([[3.0, -5.0]]))
            (tensor([[5.]]), tensor([[3.],
                    [5.]]))
        """
        matrix, column = as_matrix(x), self if column is None else column
        self._check_fuses(column)
        found: AmaxPair = backend.implementation(self.package, x).amax(matrix, self, column, None)
        return found

    def _check_fuses(self, column: "Quantizer") -> None:
        if not self._fuses_with(column):
            raise UnsupportedConfig(
                f"{self} and {column} cannot share one read of x: {type(self).__name__}.quantize_both needs "
                "the same scheme with equal settings, rht and stochastic of NVFP4 aside. Quantize each orientation on "
                "its own, with quantize(x, axis)."
            )

    def _fuses_with(self, column: "Quantizer") -> bool:
        """Whether one kernel casts x with this quantizer and x.T with `column`, as `quantize_both` requires."""
        return column == self

    def _checked(self, cast_args: CastArgs, x: Tensor, row: "Quantizer | None", column: "Quantizer | None") -> CastArgs:
        """Check `cast_args` and return it, detached: it has every tensor that the cast needs and none that the cast
        would ignore, each of the right size."""
        self._check_multiplier(cast_args, x)
        self._check_seed(cast_args, x, any(spec is not None and spec.is_stochastic for spec in (row, column)))
        inverse_scale = None if cast_args.inverse_scale is None else cast_args.inverse_scale.detach()
        return cast_args._replace(amax=self._checked_amax(cast_args.amax, x, row, column), inverse_scale=inverse_scale)

    def _check_multiplier(self, cast_args: CastArgs, x: Tensor) -> None:
        if cast_args.inverse_scale is not None and not self.takes_inverse_scale:
            raise UnsupportedConfig(f"{self} derives its scales from the data; inverse_scale= is for Tensorwise.")
        if cast_args.inverse_scale is not None and any(a is not None for a in cast_args.amax):
            raise UnsupportedConfig(
                "inverse_scale= is given, and amax=, from which it would be computed, too. Give one of them."
            )
        inverse_scale = cast_args.inverse_scale
        if inverse_scale is not None and (
            inverse_scale.numel() != 1 or inverse_scale.dtype != torch.float32 or inverse_scale.device != x.device
        ):
            raise UnsupportedShape(
                f"inverse_scale= is the inverse scale, one float32 on {x.device}; "
                f"got {inverse_scale.dtype} {tuple(inverse_scale.shape)} on {inverse_scale.device}."
            )

    def _check_seed(self, cast_args: CastArgs, x: Tensor, is_stochastic: bool) -> None:
        if cast_args.seed is None and is_stochastic:
            raise UnsupportedConfig(
                f"{self} rounds stochastically and needs seed=, an int64 tensor [seed, step] that advances every step."
            )
        if cast_args.seed is not None and not is_stochastic:
            raise UnsupportedConfig(f"{self} rounds to nearest; seed= is for NVFP4(stochastic=True).")
        seed = cast_args.seed
        if seed is not None and (tuple(seed.shape) != (2,) or seed.dtype != torch.int64 or seed.device != x.device):
            raise UnsupportedShape(
                f"seed= is an int64 tensor [seed, step] on {x.device}; "
                f"got {seed.dtype} {tuple(seed.shape)} on {seed.device}."
            )

    def _checked_amax(self, amax: AmaxPair, x: Tensor, row: "Quantizer | None", column: "Quantizer | None") -> AmaxPair:
        if amax[0] is None and amax[1] is None:
            return amax
        if any((spec is None) != (a is None) for spec, a in zip((row, column), amax, strict=True)):
            raise UnsupportedConfig("Give amax= for both orientations, as amax_both(x) returns them, or for neither.")
        checked = []
        for spec, a, axis in ((row, amax[0], -1), (column, amax[1], column_axis(x.dim()))):
            if spec is not None and a is not None:
                scale = cached_proto(spec.number, x.shape, x.dtype, x.device, axis).scale
                want = (1,) if spec.two_level else scale.shape
                if tuple(a.shape) != want or a.dtype != torch.float32 or a.device != x.device:
                    raise UnsupportedShape(
                        f"amax= must be float32 {want} on {x.device}, as amax(x, axis) returns it; "
                        f"got {a.dtype} {tuple(a.shape)} on {a.device}."
                    )
                a = a.detach().contiguous()
            checked.append(a)
        # both orientations keep one shared amax: a tensorwise cast then reads x once
        return checked[0], checked[0] if amax[0] is amax[1] else checked[1]

    def _fill(self, x: Tensor, pair: tuple[QTensor | None, QTensor | None], cast_args: CastArgs) -> None:
        """Cast the matrix x into the orientations of `pair` that are not None, which must fit it. Checks nothing."""
        implementation = backend.implementation(self.package, x)
        if (
            self.two_pass
            and cast_args.inverse_scale is None
            and cast_args.amax[0] is None
            and cast_args.amax[1] is None
        ):
            row, column = pair
            specs = None if row is None else row.spec, None if column is None else column.spec
            found = self._measured(x, *specs, cast_args.skip, cast_args.groups, cast_args.source)
            cast_args = cast_args._replace(amax=found)
        implementation.cast(x, *pair, cast_args)

    def _measured(
        self,
        x: Tensor,
        row: "Quantizer | None",
        column: "Quantizer | None",
        skip: Tensor | None,
        groups: Groups | None,
        source: Tensor | None,
    ) -> AmaxPair:
        """Return the largest magnitudes of the matrix x that a two-pass cast computes first. Checks nothing. Only a
        scheme that `gathers` takes a `source`."""
        more = () if source is None else (source,)
        found: AmaxPair = backend.implementation(self.package, x).amax(x, row, column, skip, groups, *more)
        return found

    # -- and back ------------------------------------------------------------------------------------------------

    def code_values(self, q: QTensor) -> Tensor:
        """Returns the values of a QTensor's codes, without scales.

        Args:
            q: a QTensor of this quantizer.

        Returns:
            float32 [rows, K]. Packed codes include their padding.

        Example:
            >>> spec = octavo.quant.Tensorwise()
            >>> spec.code_values(spec.quantize(torch.tensor([[224.0, 1.0]])))
            tensor([[448.,   2.]])
        """
        return self.fmt.decode(unpack_nibbles(q.codes) if self.fmt.packed == 2 else q.codes)

    def scale_values(self, q: QTensor) -> Tensor:
        """Returns the scales of a QTensor as numbers. Those of MX and NVFP4 are stored as bytes.

        Args:
            q: a QTensor of this quantizer.

        Returns:
            float32 of the shape of `q.scale`.

        Example:
            >>> spec = octavo.quant.MX()
            >>> q = spec.quantize(torch.tensor([[896.0, 1.0]]))
            >>> q.scale, spec.scale_values(q)
            (tensor([[128]], dtype=torch.uint8), tensor([[2.]]))
        """
        return q.scale if self.scale_format is None else self.scale_format.decode(q.scale)

    def values(self, q: QTensor) -> Tensor:
        """Returns code times block scale: the numbers that a GEMM multiplies, before NVFP4's global scale.

        `dequantize` also applies the global scale, rotates back and removes the padding.

        Args:
            q: a QTensor of this quantizer.

        Returns:
            float32 [rows, K], padding of packed codes included.

        Example:
            >>> spec = octavo.quant.NVFP4()
            >>> q = spec.quantize(torch.ones(2, 20))
            >>> spec.values(q).shape, q.dequantize().shape
            (torch.Size([2, 32]), torch.Size([2, 20]))
        """
        return self.code_values(q) * self._spread_scale(q)

    def _spread_scale(self, q: QTensor) -> Tensor:
        """Return block scales as float32 [M, padded K], or a shape that broadcasts to it."""
        return scale_blocks.spread(self.scale_values(q), self.block, q.rows, q.codes.shape[1] * self.fmt.packed)

    def dequantize(self, q: QTensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the values that a QTensor stands for. `q.dequantize()` calls it and keeps the gradient.

        Args:
            q: a QTensor of this quantizer.
            dtype: float32, bfloat16 or float16; None for the dtype of the tensor that was quantized.

        Returns:
            Values of the shape of `q`, saturated to the dtype's range, since a scale that was rounded up may decode
            past it. A code of Inf stays Inf.

        Raises:
            UnsupportedDtype: dtype is another one.

        Example:
            >>> spec = octavo.quant.Tensorwise()
            >>> spec.dequantize(spec.quantize(torch.tensor([[448.0, 17.0]])), torch.bfloat16)
            tensor([[448.,  16.]], dtype=torch.bfloat16)
        """
        dtype = check_float(q.dtype if dtype is None else dtype, "dequantize")
        values = self.values(q)
        if q.global_scale is not None:
            values = values * q.global_scale
        return self._finished(values, q.codes, q.columns, dtype).view(q.shape)

    def _finished(self, values: Tensor, codes: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """Return decoded values in x's own basis and without padding, saturated unless their code is Inf."""
        inside = self._turned_back(values)[:, :columns]
        finite = scale_blocks.no_larger(inside, torch.finfo(dtype).max).to(dtype)
        if self.fmt.inf is None:
            return finite
        infinite = (codes.view(torch.uint8)[:, :columns] & 0x7F) == self.fmt.inf
        return torch.where(infinite, inside.to(dtype), finite)

    def _turned_back(self, values: Tensor) -> Tensor:
        """Return decoded values without the rotation of `basis`."""
        return values

    def transpose(self, q: QTensor) -> QTensor:
        """Returns the QTensor of x.T from that of x, without x. `q.transpose()` calls it.

        Only schemes whose blocks are the same in both orientations can do so: Tensorwise, Block2D, and MX and NVFP4
        with square=True.

        Args:
            q: a QTensor of this quantizer.

        Returns:
            The other orientation, in memory of its own.

        Raises:
            TypeError: the blocks are not square, so the codes would have to be quantized a second time.

        Example:
            >>> spec, w = octavo.quant.Block2D(), torch.randn(256, 384)
            >>> torch.equal(spec.transpose(spec.quantize(w)).codes, spec.quantize(w, axis=0).codes)
            True
        """
        self._check_square()
        out = self.proto(TensorProto((q.rows, q.columns), q.dtype, q.device), axis=0).empty()
        self._fill_transposed(q, out)
        return out

    def _check_square(self) -> None:
        """Raise a TypeError unless the blocks are the same in both orientations."""
        if not scale_blocks.is_square(self.block):
            r, c = ("all" if b is None else b for b in self.block)
            raise TypeError(
                f"{self} scales {r}x{c} blocks along the contraction; turning its codes around would "
                "quantize twice. Quantize the other orientation from the source: quantize(x, axis=0) or quantize_both."
            )

    def _fill_transposed(self, q: QTensor, out: QTensor) -> None:
        """Write the other orientation of q, whose blocks are square, to `out`, which must fit it. The bytes are those
        of a cast of the same values with the same amax or inverse scale. Checks nothing."""
        self._transpose_codes(q, out.codes.view(torch.uint8))
        out.scale.copy_(q.scale.T)
        if q.global_scale is not None and out.global_scale is not None:
            out.global_scale.copy_(q.global_scale)

    def _transpose_codes(self, q: QTensor, out: Tensor) -> None:
        transpose_bytes(q.codes.view(torch.uint8), out)


def quantize_pair(
    x: Tensor, row: Quantizer | None, column: Quantizer | None, cast_args: CastArgs, *, one_scale: bool = False
) -> tuple[QTensor | None, QTensor | None]:
    """Quantizes x in the orientations that have a quantizer, from one read of x if one kernel serves both. Does not
    check `cast_args`: the caller's tensors go through `Quantizer._checked` first. `one_scale`: see `empty_pair`."""
    matrix = x if x.dim() == 2 and not (x.requires_grad and torch.is_grad_enabled()) else as_matrix(x)
    pair = empty_pair(x, row, column, one_scale=one_scale)
    if pair[0] is not None and (pair[1] is None or row is column):
        pair[0].spec._fill(matrix, pair, cast_args)
    else:
        fill_pair(matrix, pair, cast_args)
    return pair


def empty_pair(
    like: Tensor | TensorProto, row: Quantizer | None, column: Quantizer | None, *, one_scale: bool = False
) -> tuple[QTensor | None, QTensor | None]:
    """Allocates the orientations that have a quantizer. With `one_scale`, orientations with an equal scale share one
    tensor for it: one allocation less for a caller that will not write to either again."""
    first = second = None
    if row is not None:
        first = cached_proto(row.number, like.shape, like.dtype, like.device, -1).empty()
    if column is not None:
        axis = 0 if len(like.shape) > 1 else column_axis(len(like.shape))
        proto = cached_proto(column.number, like.shape, like.dtype, like.device, axis)
        shared = one_scale and first is not None and row is column and column.block == (None, None)
        second = proto.empty(first.scale if shared and first is not None else None)
    return first, second


def fill_pair(x: Tensor, pair: tuple[QTensor | None, QTensor | None], cast_args: CastArgs) -> None:
    """Casts the matrix x into the orientations of `pair` that are not None, each by its own quantizer."""
    row, column = pair
    if row is not None and column is not None and not row.spec._fuses_with(column.spec):
        row.spec._fill(x, (row, None), cast_args._replace(amax=(cast_args.amax[0], None)))
        column.spec._fill(x, (None, column), cast_args._replace(amax=(None, cast_args.amax[1])))
    elif row is not None:
        row.spec._fill(x, pair, cast_args)
    elif column is not None:
        column.spec._fill(x, pair, cast_args)


@lru_cache(maxsize=4096)
def cached_proto(number: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, axis: int) -> QProto:
    """Checks the size and caches `proto` by the quantizer's number: an eager layer needs the same few at every
    step."""
    check_size(math.prod(shape[:-1]), shape[-1] if shape else 1, shape)
    return KNOWN[number].proto(TensorProto(tuple(shape), dtype, device), axis)


def as_matrix(x: Tensor) -> Tensor:
    """Returns x as [M, K], a view if its strides allow one: leading dims are rows."""
    check_tensor(x)
    matrix = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)
    check_size(matrix.shape[0], matrix.shape[1], x.shape)
    return matrix.detach() if matrix.requires_grad else matrix


def check_size(m: int, k: int, shape: tuple[int, ...]) -> None:
    if m > MAX_DIM or k > MAX_DIM:
        raise UnsupportedShape(
            f"A quantizer takes at most 2^31-256 rows and columns, got {m} x {k} from shape {tuple(shape)}. "
            "Quantize it in pieces."
        )


def check_tensor(x: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        way_out = "Use torch.as_tensor first."
        if hasattr(x, "dequantize"):
            way_out = "Pass its dequantize(); quantize_into takes the codes to overwrite first, then x."
        raise UnsupportedDtype(f"A quantizer takes a torch.Tensor as x, got {type(x).__name__}. {way_out}")
    if x.dtype not in FLOATS:
        raise UnsupportedDtype(f"A quantizer takes float32, bfloat16 or float16, got {x.dtype}. Cast x first.")
    return x


def is_column(dim: int, axis: int) -> bool:
    """Whether `axis` asks for the contraction over the leading dims."""
    if axis == -1 or axis == dim - 1:
        return False
    if (axis == 0 and dim >= 2) or (axis == -2 and dim == 2):
        return True
    raise UnsupportedShape(
        f"axis must be -1 (contract over the last dim) or 0 (over all the others), got {axis} for a tensor of "
        f"{dim} dims. Permute the tensor so that the contracted dim is last."
    )


def column_axis(dim: int) -> int:
    """Returns the axis of the column orientation; a vector's column is [K, 1], which no axis of its own names."""
    return 0 if dim >= 2 else _VECTOR_COLUMN


_VECTOR_COLUMN = -2


def in_order(q: QTensor, strides: tuple[int, int] | None) -> QTensor:
    """Returns q in the strides that kernels read, with its scale in `strides` (None for row-major). A hook on saved
    tensors, for example, may have returned q's tensors in other strides."""
    grid, wanted = q.scale.shape, strides or (q.scale.shape[1], 1)
    moved = any(n > 1 and has != want for n, has, want in zip(grid, q.scale.stride(), wanted, strict=True))
    if not moved and q.codes.is_contiguous():
        return q
    scale = torch.empty_strided(grid, wanted, dtype=q.scale.dtype, device=q.scale.device).copy_(q.scale)
    return QTensor(q.codes.contiguous(), scale, q.spec, q.shape, q.dtype, q.global_scale)


def oriented_shape(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Returns the shape of x, or of its transpose [K, M] with the leading dims folded."""
    if len(shape) < 2 and axis == _VECTOR_COLUMN:
        return (shape[0] if shape else 1), 1
    if not is_column(len(shape), axis):
        return shape
    return shape[-1], math.prod(shape[:-1])


def check_float(dtype: torch.dtype, what: str) -> torch.dtype:
    if dtype not in FLOATS:
        raise UnsupportedDtype(f"{what} gives float32, bfloat16 or float16, got {dtype}. Cast the result instead.")
    return dtype


def check_flag(skip: Tensor | None, x: Tensor) -> Tensor | None:
    if skip is not None and (skip.numel() != 1 or skip.device != x.device):
        raise UnsupportedDevice(
            f"skip is one element on the device of x ({x.device}), so that a captured graph can read it; "
            f"got {skip.numel()} on {skip.device}."
        )
    return skip


def _is_part(q: QTensor, proto: QProto) -> bool:
    """Whether q fits but for larger strides of its rows, or of its columns if those are slower: a view of a larger one,
    as the members of a GroupedTensor are."""
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


def _check_fits(q: QTensor, proto: QProto) -> None:
    why = proto.unsupported_reason(q)
    if why:
        raise UnsupportedShape(
            f"quantize_into cannot write x into {q!r}: it has {why}. Allocate it with proto().empty()."
        )
