"""Calls of layers, recorded once and replayed as lists of launches."""
