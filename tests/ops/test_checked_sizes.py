"""octavo.backend.use("checked"): a GPU checks sizes and indices that the host does not read."""

import subprocess
import sys

import pytest
import torch

import octavo
from octavo import backend

TEXT = """
import torch, octavo
layer = octavo.GroupedLinear(3, 64, 128, recipe="fp8-block", device="cuda", dtype=torch.bfloat16)
experts = octavo.moe.Experts(4, 64, 128, recipe="fp8-block", device="cuda", dtype=torch.bfloat16)
x = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16)
sizes, probs = torch.tensor([100, 80, 120], device="cuda"), torch.ones(300, 2, device="cuda")
index = torch.zeros(300, 2, device="cuda", dtype=torch.int64)
graph = torch.cuda.CUDAGraph()

def eager(): layer(x, sizes)
def compiled(): call(x, sizes)
def captured(): graph.replay()
def indices(): experts(x, index, probs)

for _ in range(4):  # outside of the block, where calls are recorded and replayed
    layer(x, sizes), experts(x, index, probs)
call = torch.compile(layer, fullgraph=True)
call(x, sizes)
with octavo.backend.use("checked"):
    for _ in range(3):
        layer(x, sizes), experts(x, index, probs), call(x, sizes)
    with torch.cuda.graph(graph):
        layer(x, sizes)
    graph.replay()
    torch.cuda.synchronize()
    print("sizes and indices that may be", flush=True)
    {spoil}
    {run}()
torch.cuda.synchronize()
print("nothing was noticed")
"""
WRONG = {
    "negative": ("sizes[1] = -1", "group sizes must be 0 or more"),
    "too many": ("sizes[2] = 121", "at most the 300 rows"),
    "beyond 64 bits": ("sizes.fill_(2**62)", "at most the 300 rows"),
}
CASES = [
    *[(run, *wrong) for run in ("eager", "compiled", "captured") for wrong in WRONG.values()],
    ("indices", "index[5, 1] = 4", "indices from 0 to 3"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("run", "spoil", "said"), CASES, ids=lambda case: case.split(" ")[0])
def test_the_device_ends_a_process_with_wrong_values_and_prints_the_rule(run, spoil, said):
    text = TEXT.format(run=run, spoil=spoil)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode and "sizes and indices that may be" in done.stdout, done.stderr
    assert "nothing was noticed" not in done.stdout
    assert said in done.stderr + done.stdout


@pytest.mark.gpu
def test_a_gpu_leaves_wrong_sizes_alone_without_the_block():
    layer = octavo.GroupedLinear(3, 64, 128, recipe="fp8-block", device="cuda", dtype=torch.bfloat16)
    x = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16)
    found, want = (layer(x, torch.tensor(sizes, device="cuda")) for sizes in ([100, -1, 500], [100, 0, 200]))
    assert torch.equal(found, want)


def test_a_rule_is_asked_only_in_the_block():
    asked = []

    def rule(holds):
        asked.append(holds)
        return torch.tensor(holds)

    backend.check_on_device(lambda: rule(False), "a rule")
    assert not asked
    with backend.use("checked"):
        backend.check_on_device(lambda: rule(True), "a rule")
        with pytest.raises(RuntimeError, match="a rule of some kind"):
            backend.check_on_device(lambda: rule(False), "a rule of some kind")
    assert asked == [True, False]


def test_the_block_changes_nothing_on_a_cpu():
    assert backend.choose(torch.device("cpu")) == "reference"
    layer, x = octavo.GroupedLinear(2, 64, 32, recipe="fp8-block"), torch.randn(10, 64)
    want = layer(x, torch.tensor([4, 5]))
    with backend.use("checked"):
        assert backend.choose(torch.device("cpu")) == "reference"
        assert torch.equal(layer(x, torch.tensor([4, 5])), want)
