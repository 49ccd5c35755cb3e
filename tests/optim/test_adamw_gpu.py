"""The AdamW kernel against its reference, and whole steps on a GPU: eager, captured, with every format of state."""

import pytest
import torch
from torch import nn

import octavo
from octavo import backend
from octavo.kernels.adamw import Moments, adamw, reference

pytestmark = pytest.mark.gpu

SETTINGS = [1 - 1e-4, 1e-2, 0.3, 0.1, 0.999, 0.001, 1e-8, 1.0, 0.0]


def step(kind, dtype, n, on):
    g = torch.Generator().manual_seed(n)
    values, grad = (torch.randn(n, generator=g).to("cuda") for _ in range(2))
    moments = Moments.zeros(values, kind)
    settings = torch.tensor(SETTINGS, device="cuda")
    values = values.to(dtype)
    seed = None if dtype == torch.float32 else torch.tensor([7, 1], device="cuda")
    with backend.use(on):
        for i in range(2):
            amax = adamw(values, grad * (i + 1), moments, settings, seed=seed)
    return values, amax, *reference.read(moments)


@pytest.mark.gpu_smoke
@pytest.mark.parametrize("n", [1, 127, 128, 5000, 128 * 1024 + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "8bit"])
def test_triton_updates_as_the_reference_does(kind, dtype, n):
    found, want = step(kind, dtype, n, "triton"), step(kind, dtype, n, "reference")
    # products and sums may be fused: the last bits differ, and with them single codes of states and of values
    bounds = {"float32": 2e-6, "bfloat16": 1e-2, "8bit": 0.15}
    for a, b in zip(found, want, strict=True):
        scale = b.float().abs().max()
        assert (a.float() - b.float()).abs().max() <= (2e-2 if dtype != torch.float32 else bounds[kind]) * scale
    assert torch.equal(found[1], found[0].abs().amax().float().view(1))
    if kind == "float32" and dtype == torch.bfloat16:  # both draw the same bits for the same element
        assert (found[0] == want[0]).float().mean() > 0.9


@pytest.mark.parametrize("kind", ["float32", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_that_is_skipped_changes_nothing_and_measures(kind, dtype):
    values = torch.randn(5000, device="cuda").to(dtype)
    moments = Moments.zeros(values, kind)
    seed = None if dtype == torch.float32 else torch.tensor([7, 1], device="cuda")
    adamw(values, values.float() * 3, moments, torch.tensor(SETTINGS, device="cuda"), seed=seed)
    before = [t.clone() for t in (values, *moments) if t is not None]
    skipped = torch.tensor([*SETTINGS[:-1], 1.0], device="cuda")
    amax = adamw(values, torch.full_like(values, float("inf")), moments, skipped, seed=seed)
    assert all(map(torch.equal, before, [t for t in (values, *moments) if t is not None]))
    assert amax.item() == values.abs().max().item()
    doubled = torch.tensor([*SETTINGS[:-2], 2.0, 0.0], device="cuda")
    twice = [t.clone() for t in before]
    adamw(values, torch.ones_like(values), moments, doubled, seed=seed)
    grad = torch.full_like(values, 2.0)
    adamw(twice[0], grad, Moments(*twice[1:]), torch.tensor(SETTINGS, device="cuda"), seed=seed)
    assert torch.equal(values, twice[0])


def test_a_captured_step_reads_the_flag_of_a_scaler():
    model = mlp("fp8-block")
    optimizer = octavo.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.grad_scale, optimizer.found_inf = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for flag, changes in ((1.0, False), (0.0, True)):
        before = [t.clone() for p in model.parameters() if hasattr(p, "tensors") for t in p.tensors().values()]
        optimizer.found_inf.fill_(flag)
        graph.replay()
        after = [t for p in model.parameters() if hasattr(p, "tensors") for t in p.tensors().values()]
        assert all(map(torch.equal, before, after)) != changes


def mlp(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(octavo.Linear(256, 384, recipe=recipe), nn.GELU(), octavo.Linear(384, 128, recipe=recipe))
    model = model.to("cuda", torch.bfloat16)
    octavo.quantize_weights(model, trainable=True)
    return model


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"])
def test_codes_are_those_of_the_master_copy(recipe):
    model = mlp(recipe)
    optimizer = octavo.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(4):
        model(torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        octavo.step(model)
    for layer in (model[0], model[2]):
        twin = octavo.Linear(layer.in_features, layer.out_features, recipe=recipe, device="cuda")
        twin.weight = nn.Parameter(optimizer.state[layer.weight]["master"].clone())
        octavo.quantize_weights(twin)
        for name, tensor in layer.weight.tensors().items():
            if name != "element":
                assert torch.equal(tensor, twin.weight.tensors()[name]), name


@pytest.mark.parametrize("states", ["float32", "8bit"])
def test_a_captured_step_has_the_bits_of_an_eager_one(states):
    def run(captured):
        model = mlp("fp8-block")
        x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(1))
        optimizer = octavo.optim.AdamW(
            model.parameters(), lr=torch.tensor(1e-2, device="cuda"), capturable=True, states=states
        )

        def train():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                train()
        torch.cuda.current_stream().wait_stream(stream)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                train()
            for _ in range(2):
                graph.replay()
        else:
            for _ in range(2):
                train()
        torch.cuda.synchronize()
        return [t.clone() for p in (model[0].weight, model[2].weight) for t in p.tensors().values()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))
