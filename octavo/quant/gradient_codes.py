"""Codes of a gradient, past autograd: it carries tensors between nodes, and codes are no tensor of values."""

import torch
from torch import Tensor

from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from octavo.quant.grouped import GroupedTensor


class GradientCodes:
    """Pass the gradient of a GroupedLinear's y to its backward as codes, such as those that a dispatch sent.

    Autograd carries only tensors of values. So the operation after the layer puts its GroupedTensor here and returns a
    stand-in, one NaN that looks like the gradient of y; the layer's backward takes the codes instead of casting. One
    object serves one call of the layer at a time. In a graph of torch.compile it raises.

    Example:
        >>> class Combine(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, y, sizes, dy_codes):
        ...         ctx.sizes, ctx.dy_codes = sizes, dy_codes
        ...         return y.clone()
        ...
        ...     @staticmethod
        ...     def backward(ctx, dy):
        ...         sent = octavo.quant.Block1D().quantize_groups(dy, ctx.sizes)  # by a dispatch, in codes
        ...         return ctx.dy_codes.put(sent), None, None
        >>> layer, sizes = octavo.GroupedLinear(2, 32, 16, recipe="fp8-block"), torch.tensor([3, 5])
        >>> dy_codes = octavo.quant.GradientCodes()
        >>> Combine.apply(layer(torch.ones(8, 32), sizes, dy_codes=dy_codes), sizes, dy_codes).sum().backward()
        >>> bool(layer.weight.grad.isfinite().all())
        True
    """

    def __init__(self) -> None:
        self._codes: GroupedTensor | None = None
        self._stand_in: Tensor | None = None

    def put(self, codes: GroupedTensor) -> Tensor:
        """Store codes for the layer's backward. Codes that no backward took are dropped.

        Args:
            codes: rows of the gradient of y, in the groups of x. Their `dtype` is that of y.

        Returns:
            The stand-in: return it as the gradient of y. It has y's shape, in one stored element, and is NaN for
            everyone else.

        Raises:
            UnsupportedDtype: this is no GroupedTensor.
            UnsupportedShape: it has columns alone.

        Example:
            >>> dy = octavo.quant.Block1D().quantize_groups(torch.ones(8, 16), torch.tensor([3, 5]))
            >>> octavo.quant.GradientCodes().put(dy).shape
            torch.Size([8, 16])
        """
        if not isinstance(codes, GroupedTensor):
            raise UnsupportedDtype(f"GradientCodes takes a GroupedTensor, got {type(codes).__name__}.")
        if codes.orientation != "row":
            raise UnsupportedShape("GradientCodes takes codes of rows, got those of columns. Quantize the rows.")
        self._codes = codes.detach()
        self._stand_in = torch.full((1,), torch.nan, dtype=codes.dtype, device=codes.device).expand(codes.shape)
        return self._stand_in

    def take(self, dy: Tensor) -> GroupedTensor | None:
        """Return the codes that `dy` stands for, and keep them no longer. The layer's backward calls it.

        Args:
            dy: the gradient of y that autograd passed.

        Returns:
            The codes; None if there are none, so that dy holds values.

        Raises:
            UnsupportedConfig: there are codes, and dy is not their stand-in.

        Example:
            >>> dy_codes, dy = octavo.quant.GradientCodes(), torch.ones(8, 16)
            >>> stand_in = dy_codes.put(octavo.quant.Block1D().quantize_groups(dy, torch.tensor([3, 5])))
            >>> dy_codes.take(stand_in)
            GroupedTensor(8x16 in 2 groups, row, block-1d, cpu)
            >>> dy_codes.take(dy)
        """
        codes, stand_in = self._codes, self._stand_in
        if codes is None or stand_in is None:
            return None
        self._codes = self._stand_in = None
        if dy.untyped_storage().data_ptr() != stand_in.untyped_storage().data_ptr():
            raise UnsupportedConfig(
                "The gradient of y is not the tensor that GradientCodes.put returned: y is used more than once, the "
                "codes have another dtype than y, or they are left from a backward that failed. Use y once, by the "
                "operation that puts the codes, and a new GradientCodes() after a failure."
            )
        return codes
