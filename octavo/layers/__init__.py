"""Differentiable layers, a file each: a frozen config and pure functions over tensors (`contract.py`)."""
