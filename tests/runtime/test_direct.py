"""Inductor's code calls plain functions in place of Octavo's operators: with the same bits, for as long as the layout
of the tensors is the same, and not where somebody watches operators."""

import re

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo._torch.inductor import DIRECT_CALLS
from octavo.ops import BasicOperation
from octavo.recipes import SHIPPED
from octavo.runtime import call_cache as calls
from tests.support.processes import output_of
from tests.support.recorded_calls import assert_equal, build, example, on_gpu, step
from tests.support.steps import assert_state

K, ROWS = 64, 32


@pytest.fixture(autouse=True)
def replayed(monkeypatch):
    """Calls are recorded on a CPU too; nothing is known from an earlier test."""
    monkeypatch.setattr(calls, "DEVICES", {"cpu"})
    calls.forget()
    torch.compiler.reset()
    assert DIRECT_CALLS.is_on(), DIRECT_CALLS.reason()  # before a test reads code: the check compiles some too


def code_of(module, *arguments):
    """The code that Inductor writes for forward and backward."""
    with torch._inductor.config.patch(force_disable_caches=True):
        return run_fw_bw_and_get_code(lambda: module(*arguments))[1]


def node_of(code):
    """The function that this code calls."""
    line = next(line for line in code.splitlines() if line.startswith("call_of_"))
    return eval(line.partition(" = ")[2], {"octavo": octavo})


def compiled(module, **settings):
    return torch.compile(module, fullgraph=True, **settings)


@pytest.mark.parametrize("device", ["cpu", on_gpu])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "nvfp4"])
def test_code_calls_no_operator_of_ours(recipe, device):
    model = octavo.Linear(K, K, recipe=recipe, device=device)
    codes = code_of(compiled(model), torch.randn(ROWS, K, device=device, requires_grad=True))
    assert len(codes) == 2
    for code, side in zip(codes, ("forward", "backward"), strict=True):
        assert f"octavo.runtime.direct_calls.{side}(" in code and "fixed=True" in code
        assert "torch.ops.octavo." not in code


@pytest.mark.parametrize(
    ("kind", "recipe"), [("norm", "bf16"), *[(kind, r) for kind in ("linear", "mlp", "grouped") for r in SHIPPED]]
)
def test_recorded_nodes_have_the_bits_of_eager(kind, recipe):
    torch.manual_seed(0)
    mine, theirs = build(kind, recipe, "cpu"), build(kind, recipe, "cpu")
    theirs.load_state_dict(mine.state_dict())
    octavo.load_state_dict(theirs, octavo.state_dict(mine))
    call = compiled(mine)
    for _ in range(5):
        x, dy, more = example(kind, "cpu")
        assert_equal(step(mine, x, dy, more, call), step(theirs, x, dy, more))


def test_a_fixed_node_is_recorded_once_and_replayed():
    model = octavo.Linear(K, K, recipe="fp8-delayed")
    for _ in range(2):
        step(model, torch.randn(ROWS, K), torch.randn(ROWS, K))
    calls.forget()
    call = compiled(model)
    for _ in range(4):
        step(model, torch.randn(ROWS, K), torch.randn(ROWS, K), call=call)
    assert len(calls.sources()) == 2  # forward and backward


def test_inputs_of_another_alignment_have_a_recording_of_their_own():
    model = octavo.Linear(K, K, recipe="fp8-current")
    call = compiled(model)
    memory = torch.randn(ROWS * K + 1)
    aligned, shifted = memory[:-1].view(ROWS, K), memory[1:].view(ROWS, K)
    assert aligned.data_ptr() % 16 == 0 != shifted.data_ptr() % 16
    for x in (aligned, aligned, aligned, shifted, shifted, shifted, aligned):
        dy = torch.randn(ROWS, K)
        assert_equal(step(model, x, dy, call=call), step(model, x, dy))


def test_a_graph_for_any_number_of_rows_tells_layouts_apart():
    model = octavo.Linear(K, K, recipe="fp8-block")
    call = compiled(model, dynamic=True)
    assert "fixed=False" in code_of(call, torch.randn(ROWS, K))[0]
    for rows in (32, 48, 32, 48, 32, 48, 5, 7, 0):
        x, dy = torch.randn(rows, K), torch.randn(rows, K)
        assert_equal(step(model, x, dy, call=call), step(model, x, dy))


class Seen(TorchDispatchMode):
    """Lists the operators that are called."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_that_watches_operators_sees_them():
    model = octavo.Linear(K, K, bias=False, recipe="fp8-current")
    nodes = [node_of(code) for code in code_of(compiled(model), torch.randn(ROWS, K, requires_grad=True))]
    x, dy = torch.randn(ROWS, K), torch.randn(ROWS, K)
    for _ in range(3):
        made = nodes[0]([model.weight.detach(), x])
        back = nodes[1]([*made[1:], dy])
    with Seen() as seen:
        assert_equal(nodes[0]([model.weight.detach(), x]), made)
        assert_equal(nodes[1]([*made[1:], dy]), back)
    assert [op for op in seen.operators if op.namespace == "octavo"] == [
        torch.ops.octavo.run.default,
        torch.ops.octavo.run_bwd.default,
    ]


def test_hooks_on_saved_tensors_leave_state_where_it_is():
    model, twin = (octavo.Linear(K, K, recipe="fp8-delayed") for _ in range(2))
    twin.load_state_dict(model.state_dict())
    call = compiled(model)

    def hooked(x):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            return call(x)

    for i in range(4):
        x, dy = torch.randn(ROWS, K), torch.randn(ROWS, K)
        assert_equal(step(model, x, dy, call=hooked if i > 1 else call), step(twin, x, dy))
        octavo.step(model), octavo.step(twin)
    assert_state(model, twin)


def test_results_are_aligned_where_an_input_is_not():
    """A multiplier of fp8-delayed is a slice of a buffer. Kernels that read y would else load it in small pieces."""
    model = nn.Sequential(octavo.Linear(K, K, recipe="fp8-delayed"), nn.GELU())
    for _ in range(2):
        step(model[0], torch.randn(ROWS, K), torch.randn(ROWS, K))
    code = code_of(compiled(model), torch.randn(ROWS, K, requires_grad=True))[0]
    assert "reinterpret_tensor(" in code and "not aligned" not in code


class Shifted(BasicOperation):
    """An operation of a user's, whose y is a part of other memory."""

    @staticmethod
    def op_forward_compute(config, inputs):
        return torch.cat((inputs.x.new_zeros(1), inputs.x.flatten()))[1:].view(inputs.x.shape), ()

    @staticmethod
    def op_forward_save_ctx(config, inputs, y, fresh):
        return ()

    @staticmethod
    def op_backward(config, saved, dy, wants):
        return (dy.clone(),)


def test_results_of_users_operations_are_checked():
    forward, backward = code_of(compiled(Shifted()), torch.randn(ROWS, K, requires_grad=True))
    for code, side in ((forward, "forward"), (backward, "backward")):
        assert f"octavo.runtime.direct_calls.{side}(" in code
        assert re.search(r"assert_(size_stride|tensor_metadata)\(buf1", code)  # since 2.15 one check of both


def test_autocast_is_told_apart():
    model = octavo.Linear(K, K, recipe="fp8-current")
    call = compiled(model)
    x, dy = torch.randn(ROWS, K), torch.randn(ROWS, K)
    for _ in range(3):
        plain = step(model, x, dy, call=call)
        with torch.autocast("cpu", torch.bfloat16):
            low = step(model, x, dy.bfloat16(), call=call)
        assert plain[0].dtype == torch.float32 and low[0].dtype == torch.bfloat16


def test_while_the_fast_path_is_off_code_calls_the_operator():
    """In a process of its own: a lowering that is registered stays."""
    script = """
        import torch
        from torch._inductor.utils import run_fw_bw_and_get_code
        import octavo
        from octavo._torch.inductor import DIRECT_CALLS

        DIRECT_CALLS._check = lambda: "this test says so"
        model = octavo.Linear(64, 64, recipe="fp8-current")
        x = torch.randn(32, 64, requires_grad=True)
        call = torch.compile(model, fullgraph=True)
        with torch._inductor.config.patch(force_disable_caches=True):
            y, codes = run_fw_bw_and_get_code(lambda: call(x))
        assert torch.equal(y, model(x))
        print(DIRECT_CALLS.reason(), [("octavo.runtime.direct_calls" in c, "torch.ops.octavo.run" in c) for c in codes])
    """
    assert output_of(script).splitlines()[-1] == "this test says so [(False, True), (False, True)]"


def test_a_node_that_is_loaded_from_its_string_alone():
    """Code from the disk cache has the strings, and nothing of the process that compiled it."""
    model = octavo.Linear(K, K, bias=False, recipe="fp8-current")
    code = code_of(compiled(model), torch.randn(ROWS, K, requires_grad=True))[0]
    node = node_of(code)
    x = torch.randn(ROWS, K)
    for _ in range(3):
        assert_equal([node([model.weight.detach(), x])[0]], [model(x)])
