"""Delayed scaling: the memory of a layer, and casts by it."""
