"""Every recipe trains: its gradients follow float32's step for step, and its loss ends where bf16's does.

Lock-step: weights are taken at several points of a run in plain bf16, and the gradient of one batch is computed from
them in float32 and in each recipe. This tells a right recipe from a wrong one; the loss of a small run cannot, since
any change of rounding moves it by up to a percent.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import octavo
from benchmarks import parity
from octavo.demo import corpus, training
from octavo.demo.gpt import GPT
from octavo.recipes import SHIPPED
from tests.support.recipe_traits import by_bits

CHECKPOINTS = (10, 30, 50, 80)  # steps of the run in bf16; later, a batch's gradient is mostly noise of its sampling
PLAN = training.Plan(steps=200, batch=8)
WARMUP = 3  # batches that a delayed scale sees before it is used
# least cosine, largest relative error of the whole gradient, of the loss: those of eight bits, and of the others
GATES = by_bits(unquantized=(0.9999, 0.02, 5e-4), eight=(0.997, 0.085, 3e-3), four=(0.97, 0.30, 2e-2))
RESULTS = sorted((Path(parity.__file__).parent / "results").glob("parity-*.json"))
SHORT = Path(parity.__file__).parent / "results" / "short-parity-moe-cpu.json"


def batches(steps, batch, seed):
    text, _ = corpus.load()
    return corpus.batches(text, steps=steps, batch=batch, context=PLAN.shape.context, seed=seed)


@pytest.fixture(scope="module")
def checkpoints():
    """The weights at each checkpoint of one run in plain bf16."""
    model, found = GPT(PLAN.shape, seed=0), []

    def keep(step, loss):
        if step in CHECKPOINTS:
            found.append({name: weight.clone() for name, weight in model.state_dict().items()})

    training.optimize(model, model, batches(CHECKPOINTS[-1], PLAN.batch, 0), PLAN, keep, quantized=False)
    return found


@pytest.fixture(scope="module")
def exact(checkpoints):
    """Loss and gradient in float32 at each checkpoint."""
    return [lockstep(weights, None) for weights in checkpoints]


def lockstep(weights, recipe, exclude=training.HEAD):
    """Loss and whole gradient of one batch from these weights; recipe None is float32."""
    torch.manual_seed(0)  # of stochastic rounding
    model = GPT(PLAN.shape, seed=0)
    model.load_state_dict(weights)
    *warmup, batch = batches(WARMUP + 1, 16, 1)
    if recipe is not None:
        octavo.convert(model, recipe, exclude=exclude, high_precision=())
        if octavo.recipe(recipe).stateful:
            for before in warmup:
                training.loss_of(model, before).backward()
                octavo.step(model)
            model.zero_grad()
    loss = training.loss_of(model, batch, torch.float32 if recipe is None else torch.bfloat16)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten().double() for p in model.parameters()])


def error(found, gradient):
    return ((found - gradient).norm() / gradient.norm()).item()


def check(recipe, found, exact):
    cosine, relative, loss_error = GATES[recipe]
    assert torch.cosine_similarity(found[1], exact[1], dim=0).item() >= cosine
    assert error(found[1], exact[1]) <= relative
    assert abs(found[0] / exact[0] - 1) <= loss_error


@pytest.mark.parametrize("recipe", SHIPPED)
def test_gradients_in_lock_step(recipe, checkpoints, exact):
    for weights, want in zip(checkpoints, exact, strict=True):
        check(recipe, lockstep(weights, recipe), want)


@pytest.mark.parametrize("recipe", SHIPPED)
def test_gradients_with_the_head_quantized_too(recipe, checkpoints, exact):
    """While the loss is far from its floor. Near it the head's gradient is a small difference of large sums, and two
    percent on every logit weigh more."""
    check(recipe, lockstep(checkpoints[0], recipe, exclude=()), exact[0])


def test_the_gates_tell_a_worse_recipe_apart(checkpoints, exact):
    """Four bits do not pass for eight; nor do MX scales rounded down, which clip the largest values."""
    assert error(lockstep(checkpoints[-1], "nvfp4")[1], exact[-1][1]) > GATES["mxfp8"][1]
    assert error(lockstep(checkpoints[0], "mxfp8(rounding='floor')", exclude=())[1], exact[0][1]) > GATES["mxfp8"][1]


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-delayed"])
def test_codes_train_as_the_values_that_they_are_cast_from(recipe):
    """The optimizer has the float32 values that a plain weight would have; the two optimizers sum in other orders."""
    plan = training.Plan(steps=12, batch=2)
    weights = []
    runs = [
        training.train(replace(plan, codes=codes), octavo.recipe(recipe), ended=lambda m: weights.append(m))
        for codes in (False, True)
    ]
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=2e-3)
    values, codes = (sum(p.untyped_storage().nbytes() for p in model.parameters()) for model in weights)
    assert codes < 0.6 * values  # head and embedding stay float32


# -- 400 steps, four seeds -------------------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize("model", training.MODELS)
def test_losses_after_400_steps(model):
    assert parity.main(["--model", model]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "limit"), [("fp8-delayed", 1.5), ("nvfp4", 3.0)])
def test_a_mixture_follows_bf16_in_a_short_run(recipe, limit):
    """-0.40 % and +0.58 % when this was written; the run of 400 steps and four seeds has the narrow limits."""
    plan = training.Plan(steps=60, batch=4, shape=training.shape_of("moe"))
    base, found = training.train(plan, None), training.train(plan, octavo.recipe(recipe))
    assert base.losses[0] > 5 and base.loss < 2.7
    assert abs(training.gap(found, base)) <= limit
    for shares in (*base.load, *found.load):
        assert max(shares) < 0.4, shares  # no expert has taken over


BEYOND = {"parity-moe-h200": {"nvfp4"}}  # recipes whose gap is larger than the limit, as docs/benchmarks-loss.md says


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_measured_parity_is_within_its_limits_but_where_the_page_says_so(path):
    report = json.loads(path.read_text())
    assert (report["steps"], tuple(report["seeds"])) == (parity.STEPS, parity.SEEDS)
    limits = {name: parity.limit_of(name, report.get("model", "gpt")) for name, _ in measured(report)}
    beyond = {name for name, gaps in measured(report) if not limits[name].admits(gaps)}
    assert beyond == BEYOND.get(path.stem, set())


def measured(report):
    """The name and the gaps of each recipe, which follow from the losses."""
    for row in report["results"]:
        gaps = [100 * (loss / base - 1) for loss, base in zip(row["losses"], report["bf16"]["losses"], strict=True)]
        assert gaps == pytest.approx(row["gaps_percent"])
        yield row["recipe"], gaps


def test_the_short_run_of_mixtures_says_what_it_is():
    """It is no proof of parity: fewer and smaller steps, two seeds, and two recipes beyond the limits of the mean."""
    report = json.loads(SHORT.read_text())
    assert (report["model"], report["steps"], report["tokens_per_step"], report["seeds"]) == ("moe", 200, 1024, [0, 1])
    assert "short run" in report["note"] and report["machine"]["gpu"] is None
    for name, gaps in measured(report):
        assert max(gaps) <= parity.limit_of(name, "moe").single, name


@pytest.mark.parametrize(
    ("name", "gaps", "ok"),
    [
        ("fp8-block", [1.9, -1.0, 1.0, 1.0], True),
        ("fp8-block", [2.1, -1.0, 0.0, 0.0], False),  # one run too far off
        ("fp8-block", [-1.1] * 4, False),  # lower is as suspicious as higher
        ("nvfp4", [4.9, 3.0, 2.0, 2.0], True),
        ("nvfp4", [3.1] * 4, False),
        ("nvfp4(stochastic=False)", [-9.0] * 4, True),
    ],
)
def test_limits_on_gaps(name, gaps, ok):
    assert parity.limit_of(name).admits(gaps) is ok


def test_limits_on_mixtures_are_narrower():
    assert parity.limit_of("fp8-block", "moe").mean == 0.5 and parity.limit_of("nvfp4", "moe").mean == 1.5


def test_parity_of_mixtures_records_the_load(tmp_path, monkeypatch):
    text, held_out = corpus.load()
    monkeypatch.setattr(corpus, "load", lambda path=None: (text, held_out[:300]))
    path = tmp_path / "parity.json"
    small = ["--model", "moe", "--device", "cpu", "--steps", "1", "--batch", "1", "--seeds", "4", "7"]
    assert parity.main([*small, "--recipes", "fp8-current", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["model"] == "moe"
    for row in (report["bf16"], *report["results"]):
        assert [[len(layer) for layer in seed] for seed in row["load"]] == [[8, 8], [8, 8]]


def test_parity_measures_seed_by_seed(tmp_path, capsys, monkeypatch):
    """The script end to end, on a text that takes no time; a gap beyond its limit is exit code 1."""
    text, held_out = corpus.load()
    monkeypatch.setattr(corpus, "load", lambda path=None: (text, held_out[:300]))
    path = tmp_path / "parity.json"
    small = ["--device", "cpu", "--steps", "2", "--batch", "1", "--seeds", "4", "7", "--recipes", "bf16", "fp8-current"]
    assert parity.main([*small, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["seeds"] == [4, 7] and len(report["bf16"]["losses"]) == 2
    assert [len(row["gaps_percent"]) for row in report["results"]] == [2, 2]
    assert "fp8-current" in capsys.readouterr().out
    monkeypatch.setattr(parity, "FP8", parity.Limit(0.0, 0.0))
    assert parity.main(small) == 1
    assert parity.main(["--recipes", "fp9"]) == 2
    assert "There is no recipe 'fp9'" in capsys.readouterr().err
