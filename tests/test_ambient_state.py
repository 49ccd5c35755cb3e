"""The package makes no tensor by torch's defaults: every call of a factory names its device and dtype, and every
generator its device. `tests/strange/` shows that results do not follow the defaults either."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._device import _device_constructors

import octavo
from octavo.errors import UnsupportedHardware
from tests.strange.states import default_dtype
from tests.support.state_tensors import state_tensors

ROOT = Path(octavo.__file__).parent
SETS_A_DEFAULT = {  # around a call of other people's code, which may make tensors
    "model/third_party/expert_activation.py",
    "model/third_party/linear_trial.py",
    "checkpoints/tensor_file.py",
}
FACTORIES = _device_constructors()  # the functions of torch that follow torch.set_default_device
DEFAULTS = (
    torch.set_default_device, torch.set_default_dtype, torch.get_default_device, torch.get_default_dtype,
    torch.Tensor, torch.FloatTensor, torch.DoubleTensor, torch.HalfTensor, torch.BFloat16Tensor, torch.LongTensor,
)  # fmt: skip


def named_in(tree, module):
    """Maps names of a file to the dotted names of what they stand for: imports, and the file's own definitions."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named = ((a.asname, a.name) if a.asname else (a.name.split(".")[0],) * 2 for a in node.names)
            found |= dict(named)
        if isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    own = (node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return found | {name: f"{module}.{name}" for name in own}


def resolved(expression, names):
    """Returns the object of torch or octavo that an expression such as `nn.Linear` stands for, or None."""
    head, *rest = ast.unparse(expression).split(".")
    parts = [*names.get(head, "").split("."), *rest]
    if parts[0] not in ("torch", "octavo"):
        return None
    value = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(value, part) and inspect.ismodule(value):
            try:
                importlib.import_module(".".join(parts[:i]))
            except (ModuleNotFoundError, UnsupportedHardware):  # the package that an integration is for is not here
                return None
        value = getattr(value, part, None)
    return value


def is_ours(function):
    """Whether torch's defaults reach a call through arguments that are None: of a module, or a function of the
    package."""
    if inspect.isclass(function):
        return issubclass(function, nn.Module)
    return inspect.isfunction(function) and function.__module__.startswith("octavo.")


def left_out(call, function):
    """Lists what a call leaves to torch's defaults. `**settings` passes on what a caller chose."""
    given = {k.arg for k in call.keywords if not (isinstance(k.value, ast.Constant) and k.value.value is None)}
    if None in given:
        return []
    if function is torch.Generator:
        return [] if given or call.args else ["device"]
    if inspect.isroutine(function) and function in FACTORIES:
        return sorted({"device", "dtype"} - given)
    if not is_ours(function) or any(isinstance(argument, ast.Starred) for argument in call.args):
        return []
    parameters = inspect.signature(function).parameters
    given |= set(list(parameters)[: len(call.args)])
    optional = {name for name, parameter in parameters.items() if parameter.default is None}
    return sorted(optional & {"device", "dtype"} - given)


def contexts(node):
    """Yields the calls that a `with` statement enters."""
    if isinstance(node, ast.With):
        yield from (item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call))


def violations(source, module="octavo.example"):
    """Lists "line: call, what it leaves out" of a file."""
    tree = ast.parse(source)
    names = named_in(tree, module)
    found = []
    for node in ast.walk(tree):
        sets = (call for call in contexts(node) if resolved(call.func, names) is torch.device)
        found += [(call.lineno, "with torch.device") for call in sets]
        if not isinstance(node, ast.Call):
            continue
        function = resolved(node.func, names)
        if any(function is each for each in DEFAULTS):
            found.append((node.lineno, ast.unparse(node.func)))
        elif function is not None and (names_missing := left_out(node, function)):
            found.append((node.lineno, f"{ast.unparse(node.func)} without {' and '.join(names_missing)}"))
    return [f"{line}: {what}" for line, what in sorted(found)]


def files():
    return sorted(ROOT.rglob("*.py"))


def module_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_factory_names_its_device_and_dtype(path):
    found = violations(path.read_text(), module_of(path))
    sets = [line for line in found if line.endswith("with torch.device")]
    assert len(sets) == (path.relative_to(ROOT).as_posix() in SETS_A_DEFAULT)
    assert found == sets


FORBIDDEN = {
    "import torch\ntorch.empty(2)": ["2: torch.empty without device and dtype"],
    "import torch\ntorch.arange(2, device='cpu')": ["2: torch.arange without dtype"],
    "import torch\ntorch.zeros(2, device=None, dtype=torch.int8)": ["2: torch.zeros without device"],
    "import torch\ntorch.empty(*shape, dtype=torch.int8)": ["2: torch.empty without device"],
    "import torch as t\nt.as_tensor([2.0]).to('cpu')": ["2: t.as_tensor without device and dtype"],
    "def f():\n    from torch import full\n    return full((2,), 1)": ["3: full without device and dtype"],
    "import torch\ntorch.Generator().manual_seed(0)": ["2: torch.Generator without device"],
    "from torch import nn\nnn.Linear(2, 2)": ["2: nn.Linear without device and dtype"],
    "import octavo\noctavo.Linear(2, 2, device='cpu')": ["2: octavo.Linear without dtype"],
    "from octavo import ops\nops.RMSNorm(2)": ["2: ops.RMSNorm without device and dtype"],
    "import torch\nwith torch.device('cpu'):\n    pass": ["2: with torch.device"],
    "import torch\ntorch.set_default_dtype(torch.int8)": ["2: torch.set_default_dtype"],
    "import torch\ntorch.Tensor([1.0])": ["2: torch.Tensor"],
}
ALLOWED = (
    "import torch\ndef f(device=None, dtype=None):\n    return torch.empty(2, device=device, dtype=dtype)",
    "import torch\ndef f(**settings):\n    return torch.empty(2, **settings)",
    "import torch\ntorch.Generator('cpu'), torch.Generator(device='cuda')",
    "import torch\ntorch.empty_like(x), x.new_zeros(2)",
    "from torch import nn\nnn.Embedding(2, 2, device='cpu', dtype=w.dtype), nn.ReLU()",
    "import triton.language as tl\ntl.zeros((2,), tl.float32)",
    "import torch\nif isinstance(x, torch.Tensor):\n    torch.device('cpu')",
)


@pytest.mark.parametrize("source", FORBIDDEN)
def test_the_checker_finds(source):
    assert violations(source) == FORBIDDEN[source]


@pytest.mark.parametrize("source", ALLOWED)
def test_the_checker_lets_through(source):
    assert violations(source) == []


# -- where torch's defaults are meant ----------------------------------------------------------------------------------

LAYERS = {
    "Linear": lambda: octavo.Linear(16, 16, recipe="fp8-current"),
    "GroupedLinear": lambda: octavo.GroupedLinear(2, 16, 16, recipe="fp8-delayed"),
    "LayerNormMLP": lambda: octavo.LayerNormMLP(16, 32, recipe="nvfp4"),
    "MoE": lambda: octavo.MoE(16, 32, 4, 2, recipe="fp8-block", expert_bias=True),
    "RMSNorm": lambda: octavo.ops.RMSNorm(16),
    "Bias": lambda: octavo.ops.Bias(16),
    "RotaryAttention": lambda: octavo.ops.RotaryAttention(2, 8, positions=4),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_without_a_device_and_dtype_takes_torchs_defaults(name):
    with torch.device("meta"), default_dtype(torch.bfloat16):
        layer = LAYERS[name]()
    tensors = [*layer.parameters(), *layer.buffers(), *state_tensors(layer)]
    assert tensors and all(t.is_meta for t in tensors)
    assert all(p.dtype == torch.bfloat16 for p in layer.parameters())


def test_a_buffer_without_a_device_and_dtype_takes_torchs_defaults():
    with torch.device("meta"), default_dtype(torch.bfloat16):
        buffer = octavo.buffer(2, 3)
    assert buffer.is_meta and buffer.dtype == torch.bfloat16
