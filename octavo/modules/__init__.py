"""Modules: parameters, state as buffers, and one layer call."""
