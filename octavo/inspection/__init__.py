"""Reports about a model: what a compiler made of it, and what a recipe does to its tensors.

explain             graphs, nodes, fusions chosen and refused, recipes of layers
inspect, compare    a recipe's errors, layer by layer, beside a float32 reference; two recipes side by side
capture, measure, statistics, findings, advice, tensor_rows, inspected_layer, steps   the parts of these
webpage             the one writer of pages, and their style, for these reports and those of `octavo train` and `bench`
provenance, heat, charts, timeline, picture, raster, page_file        the parts of a page, and its file
"""
