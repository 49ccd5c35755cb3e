"""Functions over a model: convert, attach, step, state dicts.

    policy          which recipe the user wants for which layer and step
    selection       the plan for each layer: exclude, the policy, what is refused
    high_precision  finds heads, adapters and routers
    convert         carries the plans out; revert
    conversion      the report that convert returns
    config_file     a conversion as data, from a file
    third_party     layers of other packages
    attach          the end of a training step, by a hook of the optimizer
    step            the same by hand
    step_warnings   warnings of dropped tokens and missed gradients at the end of a step
    refresh         cached weights and weights that are codes, for a whole model
    state_dicts     the state besides the weights: windows of amaxes, counters
    offload         octavo.offload: saved tensors that wait for backward on the host
    layer_lookup    Octavo's layers in a model, by their paths

    model, recipe or policy -> selection: a plan for each layer -> convert -> conversion: the report
    optimizer.step -> attach -> step -> the scales of the next step

For one layer the same is in its module (`octavo.ops`).

This room may import rooms up to `moe`.
"""
