"""Reports about a model: what a compiler made of it, and what a recipe does to its tensors.

explain             graphs, nodes, fusions chosen and refused, recipes of layers
inspect, compare    a recipe's errors, layer by layer, beside a float32 reference; two recipes side by side
capture, measure, statistics, findings, tensor_rows, watched, steps   the parts of these
html, webpage, table                                                  how reports are written
"""
