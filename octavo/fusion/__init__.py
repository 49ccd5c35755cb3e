"""Sequential, and the fusion of operations that follow each other.

    sequential          octavo.Sequential: modules in order, extra inputs and outputs, keywords of single operations
    layout              which modules form a run, which tensors go in and out, and one call part by part
    runs                OperationFuser: a run of operations as one forward and one backward node
    stages              the operations of a run as stages of a chain
    plan                which rules match a run, and the chain that follows
    rule                Rule, Condition, FusedOperation, and their registration
    rules/              Octavo's own rules, a file each
    blocks              LayerNormLinear and LayerNormMLP: Sequentials whose fusion must succeed
    custom/             operations and fused operations that users write
    explanation         Sequential.explain; saved_tensor_report: what each operation of a run keeps for backward

    Sequential -> layout -> runs -> stages -> plan(rules) -> a chain of stages -> octavo.runtime.call

Operations themselves are in `octavo.ops`.
"""
