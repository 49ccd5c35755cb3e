"""Functions over a model: convert, attach, step, state dicts.

    policy          which recipe the user wants for which layer and step
    selection       the plan for each layer: exclude, the policy, heads and routers in high precision, what is refused
    convert         carries the plans out; revert
    conversion      the report that convert returns
    third_party/    layers of other packages
    attach, step    the end of a training step, by a hook of the optimizer or by hand
    step_warnings   warnings of dropped tokens and missed gradients at the end of a step
    refresh         cached weights and weights that are codes, for a whole model
    state_dicts     the state besides the weights: windows of amaxes, counters
    layer_lookup    Octavo's layers in a model, by their paths

For one layer the same is in its module (`octavo.ops`).
"""
