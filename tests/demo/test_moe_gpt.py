"""The small GPT with mixtures of experts: the plain torch baseline equals octavo.MoE, the load is counted, and
`octavo train --model moe` trains and shows it."""

import json
from dataclasses import replace

import pytest
import torch

import octavo
from octavo.cli import main
from octavo.demo import corpus, training
from octavo.demo.gpt import GPT, Shape
from octavo.demo.moe_gpt import LoadMeter, MixtureShape, TorchMoE, make_mixture, mixtures
from octavo.recipes import SHIPPED, recipe
from tests.support.demo_runs import trained

SIZES = MixtureShape(experts=4, top_k=2, ffn=32, balance=0.1)
SMALL = Shape(width=32, layers=2, heads=2, context=16, mixture=SIZES)
TEXT, HELD_OUT = corpus.load()


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """A model and a text of a moment's work."""
    monkeypatch.setitem(training.SIZES, "small", replace(SMALL, mixture=None))
    monkeypatch.setitem(training.MODELS, "moe", {"mixture": SIZES})
    monkeypatch.setattr(corpus, "load", lambda path=None: (TEXT[:4000], HELD_OUT[:500]))


def pair():
    """The mixture in plain torch, and an octavo.MoE with the same weights."""
    torch.manual_seed(0)
    plain, ours = make_mixture(32, SIZES, plain=True), make_mixture(32, SIZES, plain=False)
    plain.load_state_dict(ours.state_dict())
    return plain, ours


# -- the baseline ------------------------------------------------------------------------------------------------------


def test_the_plain_mixture_equals_octavos():
    """In float32: values, both losses' gradients, and the load."""
    plain, ours = pair()
    x = torch.randn(2, 16, 32)
    found = []
    for layer in (plain, ours):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        (y.square().mean() + layer.aux_loss).backward()
        found.append([y, layer.aux_loss, leaf.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert torch.equal(plain.load, ours.load) and plain.load.sum() == 2 * 16 * 2


def test_under_autocast_the_plain_mixture_rounds_as_octavos_does():
    plain, ours = pair()
    x = torch.randn(64, 32)
    with torch.autocast("cpu", torch.bfloat16):
        a, b = plain(x), ours(x)
    assert a.dtype == b.dtype == torch.bfloat16
    torch.testing.assert_close(a, b, rtol=0.02, atol=2e-3)
    assert torch.equal(plain.load, ours.load)


def test_both_models_start_from_the_same_weights():
    plain, ours = (GPT(SMALL, seed=3, plain=flag) for flag in (True, False))
    weights = ours.state_dict()
    assert list(plain.state_dict()) == list(weights)
    assert all(torch.equal(value, weights[name]) for name, value in plain.state_dict().items())
    assert [type(m) for m in mixtures(plain)] == [TorchMoE] * 2 and [type(m) for m in mixtures(ours)] == [
        octavo.MoE
    ] * 2
    assert all(weight.std() > 0.01 for name, weight in weights.items() if "norm" not in name)


def test_the_experts_run_as_one_operation():
    """Under autocast too: a cast inside the run would split it."""
    model = GPT(SMALL, seed=0)
    octavo.convert(model, "fp8-block")
    taken = []
    handle = mixtures(model)[0].experts.register_forward_pre_hook(lambda module, inputs: taken.append(inputs))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randint(256, (1, 16)))
        handle.remove()
        assert mixtures(model)[0].experts.explain(*taken[0]).fired == ("experts",)


def test_the_load_of_several_calls_is_added_up():
    model = GPT(SMALL, seed=0)
    meter = LoadMeter(model)
    call = meter.around(model)
    for _ in range(3):
        call(torch.randint(256, (2, 16)))
    assert [int(total.sum()) for total in meter.totals] == [3 * 2 * 16 * 2] * 2
    for shares in meter.shares():
        assert len(shares) == 4 and sum(shares) == pytest.approx(1)
    assert LoadMeter(GPT(replace(SMALL, mixture=None), seed=0)).shares() == []


# -- training ----------------------------------------------------------------------------------------------------------


def test_training_balances_the_experts():
    """The loss of balance reaches the router, and is no part of the losses that are noted."""
    first = {}
    for balance in (0.0, 0.1):
        shape = replace(SMALL, mixture=replace(SIZES, balance=balance))
        for plain in (True, False):
            model = GPT(shape, seed=0, plain=plain)
            noted = []
            plan = training.Plan(1, 2, shape=shape)
            data = corpus.batches(TEXT, steps=1, batch=2, context=16, seed=0)
            training.optimize(
                model, model, data, plan, lambda step, loss, to=noted: to.append(loss), quantized=not plain
            )
            first[balance, plain] = noted[0].item(), mixtures(model)[0].router.weight.detach().clone()
    for plain in (True, False):
        assert first[0.0, plain][0] == first[0.1, plain][0]
        assert not torch.equal(first[0.0, plain][1], first[0.1, plain][1])


@pytest.mark.parametrize("name", [None, *SHIPPED])
def test_a_seed_fixes_a_run(name):
    first, again, other = (
        trained(name, SMALL, steps=2),
        trained(name, SMALL, steps=2),
        trained(name, SMALL, steps=2, seed=1),
    )
    assert first.losses == again.losses and first.loss == again.loss and first.load == again.load
    assert first.losses[0] != other.losses[0]


def test_every_recipe_starts_from_the_same_weights_and_batches():
    losses = {name: trained(name, SMALL, steps=1).losses[0] for name in (None, *SHIPPED)}
    assert max(losses.values()) / min(losses.values()) < 1.005
    assert len({round(loss, 7) for loss in losses.values()}) > 3  # and each quantizes in its own way


@pytest.mark.filterwarnings("error")
def test_delayed_scaling_is_stepped(monkeypatch):
    """fc2 is measured too: its dy has a history only if the experts run as one operation."""
    models = []
    monkeypatch.setattr(training, "GPT", lambda *given, **more: models.append(GPT(*given, **more)) or models[-1])
    trained("fp8-delayed", SMALL, steps=3)
    windows = {key: value for key, value in octavo.state_dict(models[0]).items() if key.endswith("history")}
    assert any(".mlp.experts." in key for key in windows)
    assert all((window.count_nonzero(1) > 0).all() for window in windows.values())


def test_compile_takes_both_runs_whole(monkeypatch):
    """By a compiler that only traces: no code is generated, so that none needs to be here."""
    graphs, compile_ = [], torch.compile

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda model, **settings: compile_(model, backend=backend, **settings))
    plan = training.Plan(4, 2, shape=SMALL, compile=True)
    for name in (None, "fp8-current"):
        graphs.clear()
        run, eager = training.train(plan, recipe(name) if name else None), trained(name, SMALL)
        assert run.losses == pytest.approx(eager.losses, rel=1e-4)
        assert run.load == eager.load
        # in training, and in the evaluation of whole and of last batches, without a graph for each step
        assert len(graphs) <= 4, len(graphs)
    assert {sum("octavo.run" in target for target in graph) for graph in graphs} == {
        5 * SMALL.layers
    }  # qkv, out, router, sort, experts


# -- what the command prints -------------------------------------------------------------------------------------------


def test_the_command_shows_the_load_of_each_layer(tmp_path, capsys):
    path = tmp_path / "run.json"
    command = ["train", "--model", "moe", "--device", "cpu", "--steps", "4", "--batch", "2", "--json", str(path)]
    assert main(command) == 0
    report = json.loads(path.read_text())
    assert report["plan"]["shape"]["mixture"] == {"experts": 4, "top_k": 2, "ffn": 32, "balance": 0.1}
    out = capsys.readouterr().out
    lines = out[out.index("expert load") :].splitlines()
    assert lines[0].split() == ["expert", "load", "layer", "1", "layer", "2"]
    for line, run in zip(lines[2:4], (report["bf16"], *report["recipes"]), strict=True):
        shares = run["load"]
        assert [len(layer) for layer in shares] == [4, 4] and all(sum(layer) == pytest.approx(1) for layer in shares)
        assert line.startswith(run["recipe"])
        assert all(f"{100 * min(layer):.1f} - {100 * max(layer):.1f} %" in line for layer in shares)
    assert lines[4] == "even load: 25.0 %"


def test_an_unknown_model_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--model", "rnn"])
    assert stop.value.code == 2
    assert "invalid choice: 'rnn'" in capsys.readouterr().err
