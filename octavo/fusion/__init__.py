"""Sequential, and the fusion of operations that follow each other.

    sequential              octavo.Sequential: modules in order, extra inputs and outputs, keywords of single operations
    layout                  which modules form a run, which tensors go in and out, and one call part by part
    runs                    OperationFuser: a run of operations as one forward and one backward node
    stages                  the operations of a run as stages of a chain
    plan                    which rules match a run, and the chain that follows
    rule                    Rule, Condition, FusedOperation, and their registration
    rules                   Octavo's own rules, a file each
    blocks                  LayerNormLinear and LayerNormMLP: Sequentials whose fusion must succeed
    recomputation           a forward that backward runs again
    custom                  operations and fused operations that users write
    split_call              forward, save and backward of one call, for code that runs backward itself
    explanation             Sequential.explain
    saved_tensor_report     what each operation of a run keeps for backward

    Sequential -> layout -> runs -> stages -> plan(rules) -> a chain of stages -> octavo.runtime.call

Operations themselves are in `octavo.ops`.

This room may import rooms up to `ops`.
"""
