"""Functions over a model: convert, attach, step, state dicts."""
