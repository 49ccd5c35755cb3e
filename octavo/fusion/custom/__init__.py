"""Operations and fused operations that users write, as layers of the contract.

    basic_operation     BasicOperation: op_forward_compute, op_forward_save_ctx, op_backward
    class_functions     which functions a class runs, and what is refused when it is defined
    user_layer          the Layer that runs them, for one operation or for several that are fused
    returned_values     what they return: checked, and packed into tensors for backward
    custom_plan         the plan of an operation, found by a run without data
    own_functions       what one of Octavo's operations computes and saves, for a fused operation with a forward alone
    legacy              the older form, a forward in one piece with an OperationContext

    a class -> class_functions -> user_layer in LAYERS
    a call -> custom_plan: a stage -> user_layer -> the functions -> returned_values

Both kinds of functions pass the same checks, and are layers like Octavo's own.
"""
