"""Published codes straight to a GPU: the bytes of the file, no more memory than the codes, training and saving."""

import pytest
import torch
from torch import nn

import octavo
from octavo.checkpoints.published.layouts import LAYOUTS
from tests.support.published_folders import WRITTEN, bytes_of, tensors

pytestmark = pytest.mark.gpu


def stack(count=4, **options):
    return nn.Sequential(*[nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16, **options) for _ in range(count)])


@pytest.mark.parametrize("layout", WRITTEN)
def test_codes_on_a_gpu_are_those_of_the_file(layout, tmp_path):
    made = stack(device="cpu")
    octavo.convert(made, LAYOUTS[layout].recipe)
    octavo.save_fp8(made, tmp_path / "out", layout=layout)
    model = stack(device="meta")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    octavo.load_fp8(model, tmp_path / "out", device="cuda")
    own = sum(t.nbytes for p in model.parameters() for t in p.tensors().values())
    assert torch.cuda.max_memory_allocated() - before < own + 1024 * 1024 * 2
    x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    optimizer = octavo.optim.AdamW(model[2].parameters(), lr=1e-2)
    model(x).float().square().mean().backward()
    optimizer.step()
    octavo.save_fp8(model, tmp_path / "trained", like=tmp_path / "out")
    one, two = tensors(tmp_path / "out"), tensors(tmp_path / "trained")
    changed = {name for name in one if not torch.equal(bytes_of(one[name]), bytes_of(two[name]))}
    assert changed and all(name.startswith("2.") for name in changed)
    on_gpu = octavo.fp8_state_dict(model, layout=layout)
    assert all(t.is_cuda for t in on_gpu.values())
    again = stack(device="meta")
    octavo.load_fp8(again, tmp_path / "trained", device="cuda")
    same = torch.allclose if LAYOUTS[layout].divides else torch.equal
    assert same(again(x), model(x))


def test_host_and_device_write_the_same_checkpoint(tmp_path):
    model = stack(device="cpu")
    octavo.convert(model, "fp8-block(scale='fp32')")
    octavo.save_fp8(model, tmp_path / "host", layout="fp8-block")
    octavo.save_fp8(model.cuda(), tmp_path / "device", layout="fp8-block")
    one, two = tensors(tmp_path / "host"), tensors(tmp_path / "device")
    assert all(torch.equal(bytes_of(one[name]), bytes_of(two[name])) for name in one)
