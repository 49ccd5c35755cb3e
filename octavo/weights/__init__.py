"""A weight as codes: cached beside the weight, or held in its place."""
