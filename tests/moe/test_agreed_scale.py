"""Codes on the wire of one scale for the rows of all experts: fp8-delayed, whose ranks remember it alike."""

import pytest
import torch

from octavo import moe
from octavo.errors import Unsupported
from tests.support.split_experts import RowCodes, data, everyones, in_one_process, joined, mixture, step
from tests.support.steps import assert_equal, relative_error

FACTORS = (1.0, 0.5, 3.0, 1.0)  # of x and dy, step after step: the third is larger than any before


class Remembering(RowCodes):
    """One process whose codes of x and dy have the scale of the largest amax of the steps before."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def scale(self, name, x, spec):
        before, amax = self.seen.get(name), x.detach().abs().max().float()
        self.seen[name] = amax if before is None else torch.maximum(before, amax)
        return None if before is None else (spec.fmt.max / before).view(1)


def _steps(group, rank, engine):
    model = mixture("fp8-delayed", dispatcher=moe.ExpertParallel(group, engine=engine, payload="codes"))
    x, dy = data(rank)
    found = [step(model, factor * x, factor * dy) for factor in FACTORS]
    scales = [layer._scaling.state(layer, way).inverse_scale[:4] for layer, way in
              ((model.experts.fc1, "forward"), (model.experts.fc2, "backward"))]  # fmt: skip
    return found, scales


@pytest.mark.parametrize("engine", ["all-to-all", "padded", "symmetric"])
def test_ranks_remember_one_scale(ranks, engine):
    answers = ranks.run(_steps, engine, size=2)
    dispatcher = Remembering()
    model = mixture("fp8-delayed", dispatcher=dispatcher)
    dispatcher.owner = lambda: model
    x, dy = everyones(2)
    for i, factor in enumerate(FACTORS):
        found = joined([steps[i] for steps, _ in answers])
        assert_equal(found, step(model, factor * x, factor * dy), f"step {i}")
    (x_scale, dy_scale), (others_x, others_dy) = (scales for _, scales in answers)
    for scale, other in ((x_scale, others_x), (dy_scale, others_dy)):
        assert len(set(scale.tolist() + other.tolist())) == 1


def test_the_first_step_is_that_of_current_scaling(ranks):
    answers = ranks.run(_steps, "all-to-all", size=2)
    assert_equal(joined([steps[0] for steps, _ in answers]), in_one_process("fp8-current", 2, True))


def _from_values(group, rank):
    """A model that remembers scales of each expert, and sends codes from then on."""
    model = mixture("fp8-delayed", dispatcher=moe.ExpertParallel(group))
    x, dy = data(rank)
    step(model, x, dy)
    model.dispatcher = moe.ExpertParallel(group, payload="codes")
    found = step(model, x, dy)
    return found, model.experts.fc1._scaling.state(model.experts.fc1, "forward").inverse_scale[:4]


def test_scales_that_experts_remembered_each_for_itself_become_the_smallest(ranks):
    answers = ranks.run(_from_values, size=2)
    assert len(set(torch.cat([scales for _, scales in answers]).tolist())) == 1
    want = in_one_process("fp8-current", 2, True)  # the largest amax is that of all tokens
    for found, right in zip(joined([found for found, _ in answers]), want, strict=True):
        assert relative_error(found, right) < 0.05


def test_what_has_no_scale_of_all_rows_is_still_refused():
    model = mixture("nvfp4", dispatcher=moe.ExpertParallel(payload="codes"))
    with pytest.raises(Unsupported, match="do not have scales of their own"):
        model(data(0)[0])
