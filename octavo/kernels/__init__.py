"""Kernels: tensors in, tensors out. No autograd, no recipes, no modules."""
