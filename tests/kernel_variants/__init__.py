"""Long lists of compilations that `tests.offline` makes; short ones stand beside their kernels, as `variants()`."""
