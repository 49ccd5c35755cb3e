"""The layer contract, and how a call of a layer runs: eagerly, as nodes of a graph, or replayed.

    contract            what a layer defines: config, forward, abstract, save, backward; LAYERS finds it by name
    adapter             a layer around another
    chain               several layers as one, as a run of a Sequential needs it
    chain_config        its config, and what follows from it
    stage               one call of a layer, without its x
    call                the decision between eager mode and graph nodes
    eager               the autograd function of eager mode
    call_cache          recorded calls, and the guards of a hit: on a GPU the third call of a kind runs a recording
    replay              how a call is recorded, and its source
    graph_nodes         octavo::run and octavo::run_bwd, the two operators of every layer in a compiled graph
    node_call           what these operators run, from the string that names a call
    weight_nodes        operators of weights: cached codes, codes in a weight's place, steps of optimizers
    digest              of the package's sources, in the string of every node's call
    direct_calls        a node's call without torch's dispatcher, where a check in the process allows it
    gradient_targets    buffers of main_grad, and writes that wait until a backward is computed
    deferred_wgrad      a dw that a graph leaves to `backward_dw()`
    split_backward      a backward in two passes, dx first
    named_gradients     gradients that a user's backward returns by name, in the order of the inputs
    caller_memory       y and dx in memory of the caller
    written_buffers     buffers that a graph's backward writes, under hooks on saved tensors
    dry_run             users' functions on tensors without data
    modified            the error for a tensor that was written to before backward
    transforms          the transforms that layers refuse

    module -> Lookup -> call_cache: a hit? -> its recording
    module -> Stage -> call -+- eager: call_cache -> Layer.forward, save ... Layer.backward
                             +- graph: octavo::run  ...  octavo::run_bwd

Nothing here knows a module, a recipe's class (but for a message of `modified`) or a particular layer: layers register
themselves. Modules and operations are in `octavo.ops`.

This room may import rooms up to `scaling`.
"""
