"""Advice of an inspection: the recipe that it names improves what it measured, on other batches too."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

import octavo
from octavo.inspection.advice import LESS, Advice, policy_of
from tests.support.recipe_traits import QUANTIZED

WIDTH, TOKENS = 256, 64


class Planted(NamedTuple):
    """A fault: what it does to the weight, to x and to dy. `size` is how far it goes."""

    weight: object = None
    x: object = None
    dy: object = None


def tiny(tensor, size):
    """Most values so much smaller than the rest of their blocks that codes beside these cannot hold them."""
    scales = torch.full((tensor.shape[1],), 2.0**-size)
    scales[::48] = 1.0
    return tensor * scales


def outlier(tensor, size):
    """A channel in each 128 that is far above the others."""
    scales = torch.ones(tensor.shape[1])
    scales[::128] = 2.0**size
    return tensor * scales


def dead(tensor, size):
    """Rows that hardly differ from zero, between a few that do."""
    scales = torch.full((tensor.shape[0], 1), 2.0 ** (-2 * size))
    scales[::64] = 1.0
    return outlier(tensor, size) * scales


def exploding(tensor, size):
    """A gradient that is large for a channel in each 96, and as it was for the others."""
    scales = torch.ones(tensor.shape[1])
    scales[::96] = 2.0 ** (2 * size)
    return tensor * scales


FAULTS = {
    "tiny scale": Planted(x=tiny),
    "outlier channel": Planted(x=outlier),
    "dead layer": Planted(weight=dead),
    "exploding dy": Planted(dy=exploding),
}
SIZES = (16, 17, 18, 20)
CASES = [(fault, recipe, size) for fault in FAULTS for recipe in QUANTIZED for size in SIZES]


class Sick(nn.Module):
    """Two layers, the second with a fault. Its gradient is of the size of `direction`."""

    def __init__(self, fault, size):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fault, self.size = fault, size
        if fault.weight is not None:
            self.second.weight.data.copy_(fault.weight(self.second.weight.data, size))

    def forward(self, x, direction):
        x = self.first(x)
        x = x if self.fault.x is None else self.fault.x(x, self.size)
        direction = direction if self.fault.dy is None else self.fault.dy(direction, self.size)
        return (self.second(x) * direction).sum()


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(TOKENS, WIDTH, generator=generator) for _ in range(2))


def inspected(model, *seeds):
    with octavo.inspect(model) as report:
        for seed in seeds:
            model.zero_grad()
            model(*batch(seed)).backward()
            octavo.step(model)
    return report


class Outcome(NamedTuple):
    """The advice, the finding's number before and after it was followed, and the tensors and numbers with a finding
    that were without one before. The recipe is None if no recipe helped."""

    advice: Advice
    before: float
    after: float
    exposed: tuple

    def improves(self):
        less = self.after < self.before if self.advice.number in LESS else self.after > self.before
        return self.advice.recipe is not None and less


def outcome(name, recipe, size):
    """Return what following the advice does on batches that it was not tried on; None if there is no finding."""
    torch.manual_seed(size)
    model = Sick(FAULTS[name], size)
    octavo.convert(model, recipe)
    report = inspected(model, 0, 1)
    advice = [one for one in report.try_recipes([batch(0)]) if one.layer == "second"]
    if not advice:
        return None
    (one,) = advice
    assert one.recipe != recipe and one.recipe != "bf16" and one.in_use == recipe
    if one.recipe is None:
        return Outcome(one, 0.0, 0.0, ())
    before = inspected(model, 2, 3)
    octavo.convert(model, report.policy(), overwrite=True)
    assert str(model.second.recipe) == str(octavo.recipe(one.recipe))
    after = inspected(model, 2, 3)
    return Outcome(one, number(before, one), number(after, one), tuple(faults(after) - faults(before)))


def number(report, one):
    return next(getattr(row, one.number) for row in report.rows() if (row.layer, row.tensor) == ("second", one.tensor))


def faults(report):
    """Return the tensors with a finding, and the verbs of these."""
    return {tuple(text.split()[1:3]) for text in report.findings() if text.startswith("second: ")}


@pytest.mark.parametrize(
    ("fault", "recipe"), [("outlier channel", "fp8-current"), ("exploding dy", "nvfp4"), ("tiny scale", "nvfp4")]
)
def test_advice_improves_what_it_measured_and_exposes_no_other_fault(fault, recipe):
    found = outcome(fault, recipe, SIZES[1])
    assert found is not None and found.improves() and not found.exposed, found


def test_advice_says_what_is_still_wrong():
    found = outcome("tiny scale", "fp8-current", SIZES[2])
    assert found.advice.left == ("x underflow",), "half of the values that become zero is still too many"
    assert str(found.advice).endswith("in fp8-current. It still has a finding there: x underflow.")
    cured = found.advice._replace(left=())
    assert str(cured).endswith("in fp8-current.")


@pytest.mark.slow
def test_advice_improves_planted_faults_in_every_recipe():
    found = {case: outcome(*case) for case in CASES}
    judged = {case: one for case, one in found.items() if one is not None}
    good = [case for case, one in judged.items() if one.improves()]
    bad = {case: str(one.advice) for case, one in judged.items() if case not in good}
    exposed = {case: one.exposed for case, one in judged.items() if one.exposed}
    print(f"{len(good)} of {len(judged)} improved, of {len(CASES)} planted; not improved: {bad}; exposed: {exposed}")
    assert len(judged) >= 60 and len(good) >= 0.9 * len(judged), bad
    assert len(exposed) <= 0.05 * len(judged), exposed


def test_a_policy_names_the_layers_of_the_rarer_recipe_alone():
    in_use = {"a": "fp8-current", "b": "fp8-current", "c": "mxfp8", "sick": "fp8-current"}
    advice = [Advice("sick", "w", "underflow", "fp8-current", 1.0, "mxfp8", 0.0, (("mxfp8", 0.0),))]
    found = [(rule.layers, str(rule.recipe)) for rule in policy_of(advice, in_use).rules]
    assert found == [(("sick",), "mxfp8"), (("c",), "mxfp8"), (("*",), "fp8-current")]
