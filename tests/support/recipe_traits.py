"""What tests expect of a recipe, from the quantizers that it chooses: errors by format, bytes by block.

A recipe that is added gets its expectations here, and needs no line of its own in a test.
"""

import octavo
from octavo.formats import E4M3, E5M2
from octavo.recipes import SHIPPED
from octavo.recipes.recipe import GEMMS

ERROR = {E4M3: 0.045, E5M2: 0.07}  # of a product whose worse operand has this format
E2M1_ERROR, E2M1_STOCHASTIC_ERROR = 0.17, 0.20


def is_stateful(recipe):
    """Whether a layer of this recipe scales by the amaxes of earlier steps."""
    return octavo.recipe(recipe).stateful


def is_stochastic(recipe):
    """Whether each backward rounds by random numbers of its own."""
    return octavo.recipe(recipe).linear().is_stochastic


def has_four_bits(recipe, gemms=GEMMS):
    """Whether one of these GEMMs multiplies codes of four bits."""
    quant = octavo.recipe(recipe).linear()
    operands = [each for name in gemms for each in (getattr(quant, name).left, getattr(quant, name).right)]
    return any(each is not None and each.fmt.packed > 1 for each in operands)


def by_bits(*, unquantized, eight, four, gemms=GEMMS):
    """A bound for each recipe, by the narrowest codes that these GEMMs multiply."""
    return {
        name: unquantized if name not in QUANTIZED else four if has_four_bits(name, gemms) else eight
        for name in SHIPPED
    }


QUANTIZED = tuple(name for name in SHIPPED if octavo.recipe(name).linear().quantizes_weight)
STATELESS = tuple(name for name in QUANTIZED if not is_stateful(name))
WITHOUT_BUFFERS = tuple(name for name in SHIPPED if not is_stateful(name) and not is_stochastic(name))


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
    if has_four_bits(recipe):
        return 0.5
    if recipe.stateful:
        return 0.35
    return 0.08 if quant.dgrad.left.fmt == E4M3 else 0.15


def has_own_scale_of_dy(recipe):
    """Whether ranks that have parts of dy scale it by amaxes of their own: one scale for a tensor, from the tensor."""
    dy = octavo.recipe(recipe).linear().dgrad.left
    return dy is not None and dy.block == (None, None) and not is_stateful(recipe)


def stored_bytes(quantizer, rows, columns, groups=1):
    """Codes and scales of a matrix [rows, columns] that is contracted over columns, in groups of whole blocks."""
    per_scale = 4 if quantizer.scale_format is None else 1
    down, along = quantizer.block
    scales = (rows // down if down else 1) * (columns // along if along else groups)
    return rows * columns // quantizer.fmt.packed + per_scale * scales + (4 * groups if quantizer.two_level else 0)
