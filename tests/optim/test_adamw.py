"""octavo.optim.AdamW: torch's arithmetic, codes as the quantizer writes them, states that travel both ways."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig
from octavo.kernels.adamw import BLOCK, Moments, reference
from tests.support import training

RECIPES = ("fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")


def mlp(recipe="fp8-block", dtype=torch.bfloat16, trainable=True, keep_columns=False):
    torch.manual_seed(0)
    layers = [
        octavo.Linear(48, 160, recipe=recipe, dtype=dtype),
        nn.GELU(),
        octavo.Linear(160, 32, recipe=recipe, dtype=dtype),
    ]
    model = nn.Sequential(*layers)
    if trainable:
        octavo.quantize_weights(model, trainable=True, keep_columns=keep_columns)
    return model


train = partial(training.train, shape=(40, 48), dtype=torch.bfloat16, after=octavo.step)


def codes(model):
    return [t for p in model.parameters() if hasattr(p, "tensors") for t in p.tensors().values()]


@pytest.mark.parametrize(
    "settings", [{}, {"weight_decay": 0.0}, {"maximize": True}, {"betas": (0.5, 0.9), "eps": 1e-3}], ids=str
)
def test_float32_parameters_take_the_bits_of_torch(settings):
    ours = [nn.Parameter(torch.randn(37, 53)), nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(()))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    mine = octavo.optim.AdamW(ours, lr=1e-2, **settings)
    torchs = torch.optim.AdamW(theirs, lr=1e-2, foreach=False, **settings)
    for _ in range(20):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        mine.step()
        torchs.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_are_those_of_the_master_copy(recipe):
    """A step is an update of float32 values, then the quantizer."""
    model = mlp(recipe)
    optimizer = octavo.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    for layer in (model[0], model[2]):
        master = optimizer.state[layer.weight]["master"]
        twin = octavo.Linear(layer.in_features, layer.out_features, recipe=recipe, dtype=torch.bfloat16)
        twin.weight = nn.Parameter(master.clone())  # float32: the codes are made of these values
        octavo.quantize_weights(twin)
        for name, tensor in layer.weight.tensors().items():
            if name != "element":
                assert torch.equal(tensor, twin.weight.tensors()[name]), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_equals_one_on_float32_weights_that_are_cast(recipe):
    """The layer with codes as its weight computes what a float32 weight gives that is cast in every forward."""
    quantized, plain = mlp(recipe, torch.float32, keep_columns=True), mlp(recipe, torch.float32, trainable=False)
    with torch.no_grad():  # begin with the same values, which a cast leaves as they are
        for a, b in zip(quantized.parameters(), plain.parameters(), strict=True):
            b.copy_(a.dequantize() if hasattr(a, "kind") else a)
            a.copy_(b)
            b.copy_(a.dequantize() if hasattr(a, "kind") else a)
    ours, theirs = (
        octavo.optim.AdamW(quantized.parameters(), lr=1e-3),
        torch.optim.AdamW(plain.parameters(), lr=1e-3, foreach=False),
    )
    for i in range(3):
        x = torch.randn(40, 48, generator=torch.Generator().manual_seed(i))
        for model, optimizer in ((quantized, ours), (plain, theirs)):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if recipe != "fp8-delayed":  # there a weight is scaled by earlier amaxes, and codes by their own
                octavo.step(model)
    masters = [ours.state[p].get("master", p) for p in quantized.parameters()]
    same = [torch.equal(a, b) for a, b in zip(masters, plain.parameters(), strict=True)]
    if recipe in ("fp8-current", "fp8-rowwise", "fp8-block", "mxfp8"):
        assert all(same)
    else:
        for a, b in zip(masters, plain.parameters(), strict=True):
            assert (a - b).abs().max() < 0.01


@pytest.mark.parametrize("states", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_a_resumed_run_has_the_bits_of_a_whole_one(master, states, tmp_path):
    def fresh():
        model = mlp()
        return model, octavo.optim.AdamW(model.parameters(), lr=1e-2, master=master, states=states)

    whole, optimizer = fresh()
    train(whole, optimizer, range(4))
    half, optimizer = fresh()
    train(half, optimizer, range(2))
    torch.save({"model": half.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "half.pt")
    resumed, optimizer = fresh()
    loaded = torch.load(tmp_path / "half.pt", weights_only=False)
    resumed.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    train(resumed, optimizer, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(codes(whole), codes(resumed), strict=True))


def test_the_state_travels_to_torch_and_back():
    p = nn.Parameter(torch.randn(8, 8))
    q = nn.Parameter(p.detach().clone())
    ours, theirs = octavo.optim.AdamW([p], lr=0.1), torch.optim.AdamW([q], lr=0.1, foreach=False)
    for optimizer, parameter in ((ours, p), (theirs, q)):
        parameter.grad = torch.ones(8, 8)
        optimizer.step()
    for first, second, parameter in (
        (ours, torch.optim.AdamW([q], lr=0.1, foreach=False), q),
        (theirs, octavo.optim.AdamW([p], lr=0.1), p),
    ):
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        parameter.grad = torch.full((8, 8), 0.5)
        second.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize("states", ["float32", "bfloat16", "8bit"])
def test_states_of_another_format_are_brought_into_this_one(states):
    model = mlp()
    old = octavo.optim.AdamW(model.parameters(), states="8bit")
    train(model, old, range(2))
    new = octavo.optim.AdamW(model.parameters(), states=states)
    new.load_state_dict(old.state_dict())
    train(model, new, range(1))
    state = new.state[model[0].weight]
    assert state["exp_avg"].dtype == {"8bit": torch.uint8}.get(states, getattr(torch, states, None))
    assert ("exp_avg_scale" in state) == (states == "8bit")


def test_a_weight_that_the_program_wrote_to_is_the_new_master():
    model = mlp()
    optimizer = octavo.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, range(1))
    with torch.no_grad():
        model[0].weight.copy_(torch.full((160, 48), 0.25))
    train(model, optimizer, range(1, 2))
    assert (optimizer.state[model[0].weight]["master"] - 0.25).abs().max() < 0.01


def test_groups_with_a_parameter_each_keep_their_masters():
    """They share codes, and each counts the writes to the others."""
    torch.manual_seed(0)
    layer = octavo.GroupedLinear(3, 48, 40, bias=False, recipe="fp8-block", single_grouped_weight=False)
    plain = [nn.Parameter(p.detach().clone()) for p in layer.parameters()]
    octavo.quantize_weights(layer, trainable=True)
    with torch.no_grad():
        for p, q in zip(plain, layer.parameters(), strict=True):
            p.copy_(q.dequantize())
    ours, theirs = octavo.optim.AdamW(layer.parameters(), lr=1e-5), octavo.optim.AdamW(plain, lr=1e-5)
    for step in range(5):
        for i, (p, q) in enumerate(zip(plain, layer.parameters(), strict=True)):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) if i or step != 2 else None
            q.grad = p.grad
        ours.step()
        theirs.step()
    for p, q in zip(plain, layer.parameters(), strict=True):
        assert torch.equal(ours.state[q]["master"], p.detach())
    with torch.no_grad():
        layer.weight1.fill_(0.5)
    before = layer.weight1.dequantize().detach()
    ours.step()
    assert (ours.state[layer.weight1]["master"] - before).abs().max() < 1e-4


def test_a_second_moment_never_becomes_zero_beside_a_gradient():
    square = torch.full((BLOCK,), 1e-12)
    square[0] = 1.0
    moments = Moments.zeros(square, "8bit")
    reference.write(moments, torch.zeros(BLOCK), square)
    assert (reference.read(moments)[1] > 0).all()


def test_bfloat16_masters_round_up_and_down():
    """An update of a tenth of a bfloat16 step arrives on average."""
    p = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = octavo.optim.AdamW([p], lr=2**-7 / 10, weight_decay=0.0, master="bfloat16")
    for _ in range(20):
        p.grad = -torch.ones_like(p)
        optimizer.step()
    assert p.float().mean().item() == pytest.approx(1 + 2 * 2**-7, rel=2e-3)
    assert p.unique().numel() > 1


@pytest.mark.parametrize(("given", "why"), [
    ({"lr": -1.0}, "lr takes a number that is not negative, got -1.0"),
    ({"betas": (1.0, 0.9)}, "betas takes numbers from 0 up to"),
    ({"states": "int8"}, "int8"),
    ({"master": "float16"}, "float16"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(given, why):
    with pytest.raises(UnsupportedConfig, match=why):
        octavo.optim.AdamW([nn.Parameter(torch.ones(2))], **given)


def test_a_sparse_gradient_is_refused():
    p = nn.Parameter(torch.ones(3, 3))
    p.grad = torch.eye(3).to_sparse()
    with pytest.raises(UnsupportedConfig, match="SparseAdam"):
        octavo.optim.AdamW([p]).step()


def test_a_closure_and_a_scheduler():
    p = nn.Parameter(torch.ones(3))
    optimizer = octavo.optim.AdamW([p], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_rate_on_the_device_and_steps_counted_there_give_the_same():
    p, q = (nn.Parameter(torch.ones(7)) for _ in range(2))
    plain = octavo.optim.AdamW([p], lr=0.1)
    capturable = octavo.optim.AdamW([q], lr=torch.tensor(0.1), capturable=True)
    for _ in range(3):
        for parameter, optimizer in ((p, plain), (q, capturable)):
            parameter.grad = torch.ones(7)
            optimizer.step()
    torch.testing.assert_close(p, q)


@pytest.mark.parametrize("capturable", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("states", ["float32", "8bit"])
def test_a_scaler_skips_a_step_whose_gradients_are_not_finite(capturable, states):
    """The steps that are taken have the bits of those without a scaler, whose factor is a power of two."""
    model = mlp()
    plain = copy.deepcopy(model)
    optimizers = [
        octavo.optim.AdamW(m.parameters(), lr=1e-2, capturable=capturable, states=states) for m in (model, plain)
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for i in range(4):
        x = torch.randn(16, 48, generator=torch.Generator().manual_seed(i)).bfloat16()
        factor = float("inf") if i == 1 else 1.0
        scaler.scale(model(x).float().square().mean() * factor).backward()
        before = [t.clone() for t in codes(model)]
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[0].zero_grad()
        if i == 1:
            assert all(torch.equal(a, b) for a, b in zip(before, codes(model), strict=True))
            continue
        plain(x).float().square().mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(codes(plain), codes(model), strict=True))
    assert {float(state["step"]) for state in optimizers[0].state.values()} == {3.0}
