"""The layer contract, and how a call of a layer runs: eagerly, as nodes of a graph, or replayed.

    contract            what a layer defines: config, forward, abstract, save, backward; LAYERS finds it by name
    chain, chain_config several layers as one, as a run of a Sequential needs it
    stage, call         one call of a layer, and the decision between eager mode and graph nodes
    eager               the autograd function of eager mode
    call_cache          recorded calls, and the guards of a hit: on a GPU the third call of a kind runs a recording
    replay/             how a call is recorded, and its source
    graph_nodes         octavo::run and octavo::run_bwd, the two operators of every layer in a compiled graph
    node_call           what these operators run, from the string that names a call
    weight_nodes        operators of weights: cached codes, codes in a weight's place, steps of optimizers
    digest              of the package's sources, in the string of every node's call
    direct_calls        a node's call without torch's dispatcher, where a check in the process allows it
    gradient_targets    buffers of main_grad, and writes that wait until a backward is computed
    named_gradients     gradients that a user's backward returns by name, in the order of the inputs
    caller_memory       y and dx in memory of the caller

    module -> Lookup -> call_cache: a hit? -> its recording
    module -> Stage -> call -+- eager: call_cache -> Layer.forward, save ... Layer.backward
                             +- graph: octavo::run  ...  octavo::run_bwd

Nothing here knows a module, a recipe's class (but for a message of `modified`) or a particular layer: layers register
themselves. Modules and operations are in `octavo.ops`.
"""
