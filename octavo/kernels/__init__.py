"""Kernels: tensors in, tensors out. No autograd, no recipes, no modules.

    gemm                products of codes: a · bᵀ
    grouped_gemm        the same for each group of rows
    decode              codes to the bfloat16 values that an emulated GEMM multiplies
    norm                y and the gradients in one pass each; `cast` in it: results that leave as codes
    activation          the same of activations, and their `cast`
    rotary              rotary positions of q and k, with a `cast` too
    column_sums         the gradient of a bias
    permute             rows to their experts and back
    peer_rows           rows in memory of other ranks
    adamw               one step of AdamW on one tensor
    stochastic_codes    stochastic rounding to E4M3
    tile_cast           the cast of a tile in registers, which the folders `cast` share
    probe               whether a GEMM of the chip's own is right here

A folder has three files: the function that layers call (`__init__.py`), its definition in torch (`reference.py`), and
its kernel (`triton.py`). Casts of whole tensors are in `octavo.quant`.

    a layer -> __init__.py: checks -> octavo.backend -+- reference.py    a CPU
                                                      +- triton.py       a GPU

This room may import rooms up to `quant`.
"""
