"""Delayed scaling: the amaxes that a layer remembers, and the casts that use them."""
