"""What tests expect of a recipe, from the quantizers that it chooses: errors by format, bytes by block.

A recipe that is added gets its expectations here, and needs no line of its own in a test.
"""

import octavo
from octavo.formats import E4M3, E5M2

ERROR = {E4M3: 0.045, E5M2: 0.07}  # of a product whose worse operand has this format
E2M1_ERROR, E2M1_STOCHASTIC_ERROR = 0.17, 0.20


def gemm_error(recipe, gemm):
    """The most that a product of codes differs from the product of the values, relative, in the Frobenius norm."""
    quant = getattr(octavo.recipe(recipe).linear(), gemm)
    return max(_operand_error(quant.left), _operand_error(quant.right))


def _operand_error(quantizer):
    if quantizer.fmt.packed == 1:
        return ERROR[quantizer.fmt]
    return E2M1_STOCHASTIC_ERROR if quantizer.is_stochastic else E2M1_ERROR


def fused_error(recipe):
    """The most that fused experts differ from their operations one by one: the root of the mean square, relative."""
    recipe = octavo.recipe(recipe)
    quant = recipe.linear()
    if quant.fprop.left is None:
        return 1e-5
    if quant.fprop.left.fmt.packed > 1:
        return 0.5
    if recipe.stateful:
        return 0.35
    return 0.08 if quant.dgrad.left.fmt == E4M3 else 0.15


def stored_bytes(quantizer, rows, columns, groups=1):
    """Codes and scales of a matrix [rows, columns] that is contracted over columns, in groups of whole blocks."""
    per_scale = 4 if quantizer.scale_format is None else 1
    down, along = quantizer.block
    scales = (rows // down if down else 1) * (columns // along if along else groups)
    return rows * columns // quantizer.fmt.packed + per_scale * scales + (4 * groups if quantizer.two_level else 0)
