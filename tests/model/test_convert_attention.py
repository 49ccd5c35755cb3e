"""octavo.convert on modules that hold the weights of linear layers: nn.MultiheadAttention, and GPT-2's Conv1D."""

import copy
import itertools

import pytest
import torch
from torch import nn

import octavo
from octavo.recipes import SHIPPED
from tests.support.recipe_traits import is_stochastic

ATTENTIONS = {
    "packed": {},
    "batch first": {"batch_first": True},
    "own sizes": {"kdim": 32, "vdim": 48},
    "no bias": {"bias": False},
    "bias of keys": {"add_bias_kv": True},
}


class Conv1D(nn.Module):
    __module__ = "transformers.pytorch_utils"

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * nx**-0.5), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


def attention(seed=0, **settings):
    torch.manual_seed(seed)
    return nn.MultiheadAttention(64, 4, **settings)


def inputs(settings):
    generator = torch.Generator().manual_seed(1)
    sizes = (6, 64), (5, settings.get("kdim", 64)), (5, settings.get("vdim", 64))
    shapes = [(2, *size) if settings.get("batch_first") else (size[0], 2, size[1]) for size in sizes]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def masks():
    seen = torch.arange(6)[:, None] < torch.arange(5)
    padding = torch.tensor([[False] * 5, [False, True, False, False, True]])
    yield from itertools.product([None, seen], [None, padding])
    yield torch.randn(6, 5), None
    yield torch.randn(8, 6, 5), torch.zeros(2, 5).masked_fill(padding, -1e4)


@pytest.mark.parametrize("settings", ATTENTIONS.values(), ids=ATTENTIONS)
@pytest.mark.parametrize("need_weights", [True, False])
def test_an_attention_computes_what_torchs_does(settings, need_weights):
    found, plain = attention(**settings), attention(**settings)
    keys = list(plain.state_dict())
    octavo.convert(found, "bf16")
    assert list(found.state_dict()) == keys
    for mask, padding in masks():
        call = {"attn_mask": mask, "key_padding_mask": padding, "need_weights": need_weights}
        tensors = inputs(settings)
        mine, theirs = found(*tensors, **call), plain(*tensors, **call)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    own, other = (
        torch.autograd.grad(y[0].sum(), [*tensors, *m.parameters()]) for y, m in ((mine, found), (theirs, plain))
    )
    torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)


def test_an_attention_without_a_batch():
    found, plain = attention(), attention()
    octavo.convert(found, "bf16")
    x = torch.randn(5, 64)
    torch.testing.assert_close(found(x, x, x), plain(x, x, x), rtol=1e-4, atol=1e-5)
    with pytest.raises(octavo.errors.UnsupportedConfig, match="is_causal=True is a hint"):
        found(x, x, x, is_causal=True)


@pytest.mark.parametrize("recipe", SHIPPED)
def test_an_encoder_trains_and_reverts(recipe):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0), 2)
    keys = list(model.state_dict())
    report = octavo.convert(model, recipe)
    assert report.shares()["converted"].share == 1.0 and list(model.state_dict()) == keys
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    octavo.attach(model, optimizer)
    x, losses = torch.randn(8, 2, 64), []
    for _ in range(3):
        loss = (model(x) - x.roll(1, 0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    octavo.revert(model)
    assert {type(m).__name__ for m in model.modules() if "ttention" in type(m).__name__} == {"MultiheadAttention"}
    assert not any(isinstance(m, octavo.Linear) for m in model.modules())


def test_an_attention_with_zero_attention_is_left():
    model = nn.Sequential(nn.Linear(4, 4), attention(add_zero_attn=True))
    with pytest.warns(UserWarning, match="left 1 as it was: its class is MultiheadAttention, and it has add_zero_attn"):
        octavo.convert(model, "fp8-block")
    assert type(model[1]) is nn.MultiheadAttention


@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_conv1d_computes_what_a_linear_does(recipe):
    torch.manual_seed(0)
    conv, linear = Conv1D(96, 64), octavo.Linear(64, 96, recipe=recipe)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.T)
        linear.bias.copy_(conv.bias)
    octavo.convert(conv, recipe)
    if is_stochastic(recipe):
        conv.octavo._hidden.rounding_seed.copy_(linear._hidden.rounding_seed)
    x = torch.randn(2, 8, 64)
    dy = torch.randn(2, 8, 96)
    y, wanted = conv(x), linear(x)
    assert torch.equal(y, wanted)
    (dw, db), (other_dw, other_db) = (
        torch.autograd.grad(out, [m.weight, m.bias], dy) for out, m in ((y, conv), (wanted, linear))
    )
    assert torch.equal(dw.T, other_dw) and torch.equal(db, other_db)


def test_a_conv1d_is_copied_compiled_and_keeps_its_layout(fresh_compiler):
    model = nn.Sequential(Conv1D(96, 64))
    octavo.convert(model, "fp8-current")
    x = torch.randn(8, 64)
    y = model(x)
    assert torch.equal(copy.deepcopy(model)(x), y)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), y)
    y.sum().backward()
    assert model[0].weight.grad.stride() == model[0].weight.stride() == (96, 1)
