"""Grids of Transformer Engine's own suites in our words, against references in float64. A sample runs, in which every
two values of two parameters meet, or over ranks every value has a case; the rest of each grid is marked slow."""
