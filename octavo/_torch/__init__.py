"""The private APIs of torch and Triton that Octavo uses, a file per noun, a line per name: what it is and why Octavo
needs it.

Every name works on torch 2.11 to 2.15, unless its line says otherwise; `make test-versions` runs the tests on each. A
shortcut that a plain call could replace is a `FastPath` (`fast_paths.py`): it proves itself before it is used.

The rule, which tests/test_private_torch.py enforces: outside of this folder no file imports a private module of torch
or names a private attribute of the `torch` namespace. Re-exports here are plain, so that hot paths pay for no call.
Compilers take a second to import, so the functions here import them when they are called, and what Octavo changes in
such modules it changes when the program imports them (`imports.py`).

Two kinds of private names stay where they are used, and the test lists them:

- Attributes of instances: a module's tables (`_parameters`, `_buffers`, `_modules`, hooks) and the methods that modules
  override; a tensor's `_version`, `_base` and hooks. Every subclass of nn.Module and of Tensor depends on them, and a
  function around each would cost a call per use.
- `torch._dynamo.graph_break(msg=...)`: the graph ends in the frame that calls it, so a wrapper would move the break.
  `forward_ad._current_level`: a global that changes, read in every call without gradients.
"""
