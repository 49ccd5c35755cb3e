"""Reports about a model: what a compiler made of it, and what a recipe does to its tensors.

What a compiler made of it:

    explain             octavo.explain: graphs, nodes, fusions chosen and refused, recipes of layers
    capture             a backend that records graphs and what the compiler logs
    report              the report of explain, as values
    model_memory        the memory of a training step, by module

What a recipe does:

    inspect             octavo.inspect: the errors of a recipe, layer by layer
    inspected_layer     a layer while it is inspected
    measure             one call, beside a float32 reference
    statistics          the numbers that are kept of each tensor
    tensor_rows         the rows of a report
    findings            faults that these numbers show, as sentences
    advice              other recipes for the layers at fault, tried
    compare             octavo.compare: two recipes side by side
    steps               one forward and backward on a batch
    debug               octavo.debug: changes of single tensors and GEMMs, for a block
    changes             what is changed: which layers, GEMM and tensor, and when
    changed_gemms       a Linear whose GEMMs run by themselves, with what was changed

Pages:

    inspection_page     the page of an inspection
    heat                its heat map
    picture             a tensor's magnitudes over what its format can hold
    webpage             how pages are written, for all reports
    charts              curves
    timeline            numbers of a layer by step
    raster              a drawing as PNG
    page_file           a page as a file, replaced whole
    provenance          how a report was made

    a call -> inspected_layer -> measure -> statistics -> tensor_rows -> findings -> advice -> inspection_page

This room may import rooms up to `checkpoints`.
"""
