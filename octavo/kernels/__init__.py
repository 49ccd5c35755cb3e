"""Kernels: tensors in, tensors out. No autograd, no recipes, no modules.

    gemm, grouped_gemm      products of codes: a · bᵀ, and the same for each group of rows
    decode                  codes to the bfloat16 values that an emulated GEMM multiplies
    norm, activation        y and the gradients in one pass each; `cast` in them: results that leave as codes
    rotary                  rotary positions of q and k, with a `cast` too
    column_sums             the gradient of a bias
    permute                 rows to their experts and back
    tile_cast               the cast of a tile in registers, which the folders `cast` share
    probe                   whether a GEMM of the chip's own is right here

A folder has three files: the function that layers call (`__init__.py`), its definition in torch (`reference.py`), and
its kernel (`triton.py`). `octavo.backend` chooses between the two. Casts of whole tensors are in `octavo.quant`.
"""
