"""Delayed scaling (the recipe fp8-delayed): scales that follow from amaxes of earlier steps.

    delayed_state       DelayedState: windows of amaxes and inverse scales, as tensors
    delayed_scaling     the state that one module owns: when it is made, which calls raise a running amax,
                        and what a cast gets from it
    update_operators    the end of a step, as operators that a graph can hold
    saved_state         this state in a checkpoint

    cast of x, w, dy  raises a running amax  ->  octavo.step moves it into the window  ->  the next step's scale

The state is tensors at fixed addresses, so that a CUDA graph may read and write it. Scales that are measured in the
call itself (fp8-current, blocks) need nothing of this room.

This room may import rooms up to `recipes`.
"""
