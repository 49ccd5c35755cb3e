"""Private APIs of torch are behind octavo/_torch: other files neither import them nor name them, but for what is listed
here. octavo/_torch/__init__.py says why."""

import ast
from pathlib import Path

import pytest

import octavo

ROOT = Path(octavo.__file__).parent
DIRECT = {"torch._dynamo.graph_break"}  # the graph ends in the frame that calls it
# attributes of torch's objects: modules' tables and the methods that modules override, tensors' marks and hooks
OF_INSTANCES = {
    "_apply", "_buffers", "_load_from_state_dict", "_modules", "_parameters", "_save_to_state_dict",
    "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks", "_post_accumulate_grad_hooks",
    "_base", "_is_view", "_is_zerotensor", "_version",
    "_current_level",  # of torch.autograd.forward_ad: a global that changes
}  # fmt: skip
OF_TUPLES = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}  # public methods of NamedTuples


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def dotted(node):
    """`torch.ops.aten.mm` of a chain of attributes; None if it does not begin with a name."""
    if isinstance(node, ast.Name):
        return node.id
    head = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return head and f"{head}.{node.attr}"


def names_of_torch(tree):
    """Names in a file that stand for a module of torch, and the dotted name of each."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or "torch": a.name if a.asname else "torch" for a in node.names if of_torch(a.name)}
        if isinstance(node, ast.ImportFrom) and of_torch(node.module or ""):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):  # aten = torch.ops.aten
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and (full := expanded(node.value, found))
        ):
            found[node.targets[0].id] = full
    return found


def of_torch(module):
    return module.split(".")[0] == "torch"


def expanded(node, known):
    """The name in torch that an expression stands for, or None."""
    name = dotted(node)
    head, _, rest = (name or "").partition(".")
    return ".".join(filter(None, [known[head], rest])) if head in known else None


def violations(source):
    """Lists the private names of torch that a file uses."""
    tree = ast.parse(source)
    known = names_of_torch(tree)
    found = {
        name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names if of_torch(name := a.name)
    }
    found |= set(known.values()) | {full for node in ast.walk(tree) if (full := expanded(node, known))}
    private = {name for name in found if any(map(is_private, name.split(".")))}
    heads = {direct.rpartition(".")[0] for direct in DIRECT}
    alone = {name for name in private if name not in heads or f"{name}.graph_break" not in private}
    return sorted(name for name in alone if name not in DIRECT and name.split(".")[-1] not in OF_INSTANCES)


def defined(tree):
    """Private names that a file gives to something of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # __slots__
            yield node.value


def files():
    return [path for path in sorted(ROOT.rglob("*.py")) if path.parent != ROOT / "_torch"]


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_names_a_private_api_of_torch(path):
    assert violations(path.read_text()) == []


def test_private_attributes_of_instances_are_those_listed():
    trees = [ast.parse(path.read_text()) for path in files()]
    used = {n.attr for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Attribute) and is_private(n.attr)}
    ours = {name for tree in trees for name in defined(tree)}
    assert used - ours - OF_TUPLES - {"_dynamo"} == OF_INSTANCES - ours


FORBIDDEN = {
    "import torch._dynamo": ["torch._dynamo"],
    "import torch.utils._pytree as p\np.tree_map": ["torch.utils._pytree", "torch.utils._pytree.tree_map"],
    "from torch._C import _x": ["torch._C._x"],
    "from torch.autograd.grad_mode import _unsafe": ["torch.autograd.grad_mode._unsafe"],
    "def f():\n    from torch import _inductor": ["torch._inductor"],
    "import torch\ntorch._scaled_mm(a, b)": ["torch._scaled_mm"],
    "import torch\naten = torch.ops.aten\naten._to_copy": ["torch.ops.aten._to_copy"],
    "from torch import nn\nnn.modules.conv._ConvNd": ["torch.nn.modules.conv._ConvNd"],
    "import torch\ntorch._dynamo.reset()\ntorch._dynamo.graph_break()": ["torch._dynamo.reset"],
}
ALLOWED = (
    "import torch\ntorch._dynamo.graph_break(msg='')",
    "import torch\ntorch.__version__",
    "from octavo._torch.operators import scaled_mm\nscaled_mm(a, b)",
    "from torch import nn\ndef f(module, t):\n    return module._buffers, t._version",
)


@pytest.mark.parametrize("source", FORBIDDEN)
def test_the_checker_finds(source):
    assert violations(source) == FORBIDDEN[source]


@pytest.mark.parametrize("source", ALLOWED)
def test_the_checker_lets_through(source):
    assert violations(source) == []
