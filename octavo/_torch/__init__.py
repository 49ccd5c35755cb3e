"""The private APIs of torch and Triton that Octavo uses, a file per noun, a line per name: what it is and why Octavo
needs it.

    autograd                    autograd's state during a call or a backward
    compilation                 a compilation by its parts, and its records
    cuda                        the current device and stream, captures, assertions on the device
    dispatcher                  modes and transforms between a call and the kernels
    fakes                       tensors without data
    fast_paths                  shortcuts that prove themselves before they are used
    functional_collectives      collectives by the names of their operators
    imports                     changes of modules that a program may never import
    inductor                    Inductor's code for an operator
    modules                     wrappers of modules, hooks of optimizers, stages of pipelines
    operators                   operators without a public name, and what an operator says of itself
    symmetric_memory            memory of the ranks of a group, mapped by each
    tensors                     kinds of tensors, their memory and layouts
    tracing                     questions to the compiler that traces
    triton                      what differs between versions of Triton

Every name works on torch 2.11 to 2.15, unless its line says otherwise; `make test-versions` runs the tests on each. A
shortcut that a plain call could replace is a `FastPath`.

The rule, which tests/test_private_torch.py enforces: outside of this folder no file imports a private module of torch
or names a private attribute of the `torch` namespace. Re-exports here are plain, so that hot paths pay for no call.
Compilers take a second to import, so the functions here import them when they are called, and what Octavo changes in
such modules it changes when the program imports them.

Two kinds of private names stay where they are used, and the test lists them:

- Attributes of instances: a module's tables (`_parameters`, `_buffers`, `_modules`, hooks) and the methods that modules
  override; a tensor's `_version`, `_base` and hooks. Every subclass of nn.Module and of Tensor depends on them, and a
  function around each would cost a call per use.
- `torch._dynamo.graph_break(msg=...)`: the graph ends in the frame that calls it, so a wrapper would move the break.
  `forward_ad._current_level`: a global that changes, read in every call without gradients.

This room may import rooms up to `memory`.
"""
