"""The one driver of the layer contract (`octavo.layers.contract`): `octavo.lower.call` is its entry."""
