"""Operations and fused operations that users write, as layers of the contract.

basic_operation     BasicOperation: op_forward_compute, op_forward_save_ctx, op_backward
class_functions     which functions a class runs, and what is refused when it is defined
user_layer          the Layer that runs them, for one operation or for several that are fused
returned_values     what they return: checked, and packed into tensors for backward
custom_plan         the plan of an operation, found by a run without data
legacy              the older form, a forward in one piece with an OperationContext
"""
