"""Lists of compilations that `tests.offline` makes, as `variants()`; short ones may stand beside their kernels."""
