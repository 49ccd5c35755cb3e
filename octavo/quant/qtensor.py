"""A quantized matrix: codes, the scales that multiply them back, and the quantizer that made both.

A `QTensor` has one orientation: its last dim is the one a GEMM contracts over, and its codes are contiguous along it.
The operand that the other GEMM needs, contracted over the other dim, is another `QTensor`, that of `x.T`.

    value = code * scale                       scale [ceil(M/r), ceil(K/c)] for blocks of r rows by c columns
    value = code * scale * global_scale        NVFP4, whose block scales are eight bits themselves

It is not a `torch.Tensor`: an operation that does not know it fails loudly instead of computing on codes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo._torch.tensors import register_pytree_node
from octavo.errors import UnsupportedShape
from octavo.quant.proto import TensorProto

if TYPE_CHECKING:
    from octavo.quant.quantizer import Quantizer

Parts = tuple[Tensor, ...]  # the tensors of a QTensor; may be empty
ORIENTATIONS = ("row", "column")  # of an operand: contracted over its last dim, or over all the others


class Join(torch.autograd.Function):
    """Return the values and send their gradient to an anchor."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, anchor: Tensor) -> Tensor:
        ctx.dtype = anchor.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, dy.to(ctx.dtype)


@dataclass(frozen=True, eq=False)
class QTensor:
    """A quantized matrix: codes, the scales that multiply them back, and the quantizer that made both.

    A quantizer of `octavo.quant` makes one, and so does a Linear with `fp8_output=True`. A Linear takes one as x. It is
    no torch.Tensor: an operation that does not know it raises instead of computing with codes. It cannot be changed or
    pickled.

    Args:
        codes: the codes [M, K], in the dtype of the format, contiguous. E2M1 packs two codes to a byte: uint8
            [M, 8 * ceil(K / 16)].
        scale: the scales of blocks of r rows and c columns, [ceil(M / r), ceil(K / c)]: float32, or the bytes of the
            quantizer's scale format. With blocks of one row, neighbouring rows are adjacent in memory.
        spec: the quantizer.
        shape: the shape of the tensor. Its leading dims are folded to the M rows of the codes.
        dtype: the default dtype of `dequantize`.
        global_scale: the second level of NVFP4's scales, [1] float32; None in other schemes.
        anchor: a tensor that receives the gradient of the values, if there is one. It has this shape and dtype, in one
            stored element.

    Example:
        >>> q = octavo.quant.MX().quantize(torch.ones(4, 64))
        >>> q
        QTensor(4x64, mx, cpu)
        >>> q.codes.dtype, q.scale.shape, q.nbytes()
        (torch.float8_e4m3fn, torch.Size([4, 2]), 264)
        >>> torch.equal(q.dequantize(), torch.ones(4, 64))
        True
        >>> q[2:].shape
        (2, 64)
    """

    codes: Tensor
    scale: Tensor
    spec: "Quantizer"
    shape: tuple[int, ...]
    dtype: torch.dtype
    global_scale: Tensor | None = None
    anchor: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        return self.codes.device

    @property
    def rows(self) -> int:
        """The number of rows of the codes: the product of all dims but the last."""
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        """The size of the dim that a matrix product contracts, without padding."""
        return self.shape[-1] if self.shape else 1

    @property
    def requires_grad(self) -> bool:
        """Whether the values take a gradient."""
        return self.anchor is not None and self.anchor.requires_grad

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over the tensors inside, in the order that `Quantizer.assemble` takes.

        Yields:
            The codes, the scales, and the global scale if there is one.

        Example:
            >>> q = octavo.quant.NVFP4().quantize(torch.ones(4, 64))
            >>> [tuple(t.shape) for t in q.tensors()]
            [(4, 32), (4, 4), (1,)]
        """
        yield self.codes
        yield self.scale
        if self.global_scale is not None:
            yield self.global_scale

    def nbytes(self) -> int:
        """Count the bytes of codes and scales.

        Returns:
            The number of bytes.
        """
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values that the codes stand for, with a gradient if there is an anchor.

        Args:
            dtype: float32, bfloat16 or float16; None is the dtype of the tensor that was quantized.

        Returns:
            A tensor of this shape. Values beyond the range of the dtype become its largest, unless their code is Inf.

        Raises:
            UnsupportedDtype: `dtype` is none of these.
        """
        values = self.spec.dequantize(self, dtype)
        return values if self.anchor is None else Join.apply(values, self.anchor)  # type: ignore[no-untyped-call]

    def transpose(self) -> "QTensor":
        """Return the codes of the transpose, without quantizing again.

        Returns:
            A QTensor of shape [K, M], which is contracted over M. It carries no gradient.

        Raises:
            TypeError: the scheme's blocks are not square, so that the transpose has other codes. Quantize it from the
                source: `spec.quantize(x, axis=0)` or `spec.quantize_both(x)`.

        Example:
            >>> octavo.quant.Tensorwise().quantize(torch.ones(4, 64)).transpose().shape
            (64, 4)
        """
        return self.spec.transpose(self)

    def __getitem__(self, rows: slice) -> "QTensor":
        """Return a range of rows as views, if it cuts no block: `q[128:256]`."""
        if not isinstance(rows, slice) or rows.step not in (None, 1) or len(self.shape) != 2:
            raise UnsupportedShape(f"A QTensor matrix is sliced by a range of rows, q[a:b]; got {rows!r} of {self!r}.")
        start, stop, _ = rows.indices(self.rows)
        height = self.spec.block[0]
        if height is not None and (start % height or (stop % height and stop != self.rows)):
            raise UnsupportedShape(
                f"q[{start}:{stop}] cuts blocks of {height} rows that share a scale. Slice at multiples of {height}, "
                "or dequantize() first."
            )
        scale = self.scale if height is None else self.scale[start // height : -(-stop // height)]
        shape = (max(stop - start, 0), self.shape[1])
        anchor = None if self.anchor is None else self.anchor[start:stop]
        return QTensor(self.codes[start:stop], scale, self.spec, shape, self.dtype, self.global_scale, anchor)

    def __reduce__(self) -> Any:
        raise TypeError(
            "A QTensor is not pickled: save its tensors (codes, scale) and str(spec), and build it with spec.assemble."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "QTensor":
        parts = [t.clone() for t in self.tensors()]
        return self.spec.assemble(parts, self.shape, self.dtype)

    def __repr__(self) -> str:
        return f"QTensor({'x'.join(map(str, self.shape))}, {self.spec.key}, {self.device})"


@dataclass(frozen=True)
class QProto:
    """Shapes, dtypes and layouts of a QTensor that need not exist. `Quantizer.proto` returns one.

    Args:
        codes: the codes.
        scale: the scales.
        spec: the quantizer.
        shape: the shape of the tensor that is quantized, or of its transpose.
        dtype: the default dtype of `dequantize`.
        global_scale: the second level of NVFP4's scales; None in other schemes.

    Example:
        >>> proto = octavo.quant.NVFP4().proto(octavo.quant.TensorProto.of(torch.ones(8, 64)))
        >>> proto.codes.shape, proto.codes.dtype, proto.scale.shape
        ((8, 32), torch.uint8, (8, 4))
    """

    codes: TensorProto
    scale: TensorProto
    spec: "Quantizer"
    shape: tuple[int, ...]
    dtype: torch.dtype
    global_scale: TensorProto | None = None

    def empty(self, scale: Tensor | None = None) -> QTensor:
        """Allocate the QTensor, uninitialized: memory for `Quantizer.quantize_into`.

        Args:
            scale: the tensor to use for the scales; None allocates one.

        Returns:
            A QTensor of these shapes.

        Example:
            >>> spec = octavo.quant.Block2D()
            >>> spec.proto(octavo.quant.TensorProto.of(torch.ones(256, 384))).empty()
            QTensor(256x384, block-2d, cpu)
        """
        level2 = None if self.global_scale is None else self.global_scale.empty()
        scale = self.scale.empty() if scale is None else scale
        return QTensor(self.codes.empty(), scale, self.spec, self.shape, self.dtype, level2)

    def unsupported_reason(self, q: QTensor) -> str:
        """Return how a QTensor differs from this description, in words.

        Args:
            q: the QTensor to compare.

        Returns:
            The differences; "" if there are none.

        Example:
            >>> x = torch.ones(256, 384)
            >>> proto = octavo.quant.Block2D().proto(octavo.quant.TensorProto.of(x))
            >>> proto.unsupported_reason(octavo.quant.Block1D().quantize(x))
            'quantizer block-1d instead of block-2d'
        """
        if q.spec != self.spec:
            return f"quantizer {q.spec} instead of {self.spec}"
        if (q.global_scale is None) != (self.global_scale is None):
            return "a global_scale on one side only"
        pairs = [("codes", self.codes, q.codes), ("scale", self.scale, q.scale)]
        if self.global_scale is not None and q.global_scale is not None:
            pairs.append(("global_scale", self.global_scale, q.global_scale))
        found = ((name, proto.unsupported_reason(tensor)) for name, proto, tensor in pairs)
        return "; ".join(f"{name} with {why}" for name, why in found if why)


def _flatten(q: QTensor) -> tuple[list[Tensor | None], tuple[Any, ...]]:
    return [q.codes, q.scale, q.global_scale, q.anchor], (q.spec, q.shape, q.dtype)


def _unflatten(tensors: Iterable[Any], settings: tuple[Any, ...]) -> QTensor:
    codes, scale, global_scale, anchor = tensors
    spec, shape, dtype = settings
    return QTensor(codes, scale, spec, shape, dtype, global_scale, anchor)


register_pytree_node(QTensor, _flatten, _unflatten)  # a tree of tensors to torch.func, DDP and the compiler
