"""Layers of other packages that `octavo.convert` runs in a recipe without replacing them: the owner keeps its class,
its parameters and its state dict."""
