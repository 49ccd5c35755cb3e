"""Published checkpoints are loaded alike in any state of torch, again, and after training."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

import octavo
from octavo.errors import UnsupportedConfig
from tests.support.published_folders import Net, on_meta, saved

x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def folder(tmp_path):
    return saved(tmp_path / "out", "fp8-block")


def loaded(folder):
    model = on_meta()
    octavo.load_fp8(model, folder, device="cpu")
    return model


def trained(model):
    optimizer = octavo.optim.AdamW(model.parameters(), lr=1e-2)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model(x)


@pytest.mark.parametrize(
    "block", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")], ids=["no_grad", "inference", "device"]
)
def test_a_load_in_a_block_of_torch_is_like_any_other(block, folder, tmp_path):
    plain = loaded(folder)
    with block():
        model = loaded(folder)
        octavo.save_fp8(model, tmp_path / "again", like=folder)
    assert torch.equal(model(x), plain(x))
    assert torch.equal(trained(model), trained(plain))
    assert torch.equal(loaded(tmp_path / "again")(x), loaded(folder)(x))


def test_a_compiled_model_loads(folder):
    model = on_meta()
    compiled = torch.compile(model, backend="aot_eager")
    octavo.load_fp8(compiled, folder, device="cpu")
    assert torch.equal(compiled(x), loaded(folder)(x))


def test_a_second_load_takes_the_place_of_trained_weights(folder):
    model = loaded(folder)
    y = model(x)
    assert not torch.equal(trained(model), y)
    octavo.load_fp8(model, folder)
    assert torch.equal(model(x), y)
    assert torch.equal(trained(model), trained(loaded(folder)))


def test_fakes_are_refused(folder):
    with FakeTensorMode():
        model = Net()
        with pytest.raises(UnsupportedConfig, match="Leave that mode"):
            octavo.load_fp8(model, folder)
    assert type(model.up) is torch.nn.Linear
