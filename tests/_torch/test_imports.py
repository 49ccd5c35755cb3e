"""What `import octavo` leaves to the program: the compilers, Triton and the modules of torch that import them."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from octavo._torch.imports import when_imported

SLOW = (
    "sympy", "triton", "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes", "torch.onnx", "torch.utils.flop_counter",
)  # fmt: skip


def printed(code):
    """What a process of its own prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_bare_import_imports_no_compiler():
    """A second on top of torch's own, for programs that do not compile. torch itself may import some."""
    before = "import sys, torch; before = set(sys.modules)"
    code = f"{before}; import octavo; print(set({SLOW}) & (sys.modules.keys() - before))"
    assert printed(code) == "set()"


def test_every_operator_is_there_after_a_bare_import():
    """A graph from the compiler's disk cache calls them by name."""
    names = ("run", "run_bwd", "run_into", "run_into_chain", "run_into_long_chain")
    code = f"import torch, octavo; print(all(hasattr(torch.ops.octavo, name) for name in {names}))"
    assert printed(code) == "True"


def test_a_compiler_imported_after_octavo_runs_marked_functions_as_they_are():
    code = """
import octavo, torch
from octavo._torch.tracing import while_tracing
calls = []
@while_tracing
def asked(): return len(calls.append(1) or calls)
f = torch.compile(lambda x: x + asked(), fullgraph=True, backend="eager")
print([f(torch.zeros(1)).item() for _ in range(2)], len(calls))
"""
    assert printed(code) == "[1.0, 1.0] 1"


def test_the_flop_counter_counts_octavos_nodes_when_imported_later():
    code = """
import octavo, torch
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    octavo.Linear(16, 8, bias=False, recipe="fp8-block")(torch.ones(4, 16))
print(counter.get_total_flops())
"""
    assert printed(code) == str(2 * 4 * 16 * 8)


@pytest.mark.parametrize("first", ["octavo", "torch.distributed.pipelining"])
def test_a_pipelines_inference_of_shapes_is_a_dry_run(first):
    code = f"""
import {first}
import octavo, torch.distributed.pipelining.stage as stages
names = ("_forward_metadata_inference", "_backward_metadata_inference")
print(all(hasattr(getattr(stages.PipelineStage, n), "__wrapped__") for n in names if hasattr(stages.PipelineStage, n)))
"""
    assert printed(code) == "True"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that is not imported yet."""
    (tmp_path / "imported_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "imported_later"
    sys.modules.pop("imported_later", None)


def test_a_change_is_made_once_after_the_import(module):
    changed = []
    when_imported(module, lambda m: changed.append(m.value))
    when_imported(module, lambda m: changed.append(-m.value))
    assert find_spec(module) is not None and changed == []  # to look for a module is not to import it
    __import__(module)
    assert changed == [1, -1]
    when_imported(module, lambda m: changed.append(m.value + 1))  # at once
    __import__(module)
    assert changed == [1, -1, 2]
