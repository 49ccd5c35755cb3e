"""Operations and fused operations that users write, as layers of the contract.

basic_operation     BasicOperation: op_forward_compute, op_forward_save_ctx, op_backward
legacy              the older form with an OperationContext
class_checks        what is refused when such a class is defined
user_op             the Layer that runs a user's functions; user_fusion: one for a fused operation
saved_values        what a user's functions may keep for backward, packed into tensors
gradient_check      the gradients that they return, checked
custom_plan         their shapes and dtypes, found by a run without data
"""
