"""moe.DeepEP over a stand-in for deep_ep.Buffer, against one process."""

import pytest
import torch

from octavo import moe
from octavo.errors import Unsupported
from tests.support.deep_ep_buffer import Buffer
from tests.support.split_experts import E, data, in_one_process, joined, mixture, step
from tests.support.steps import relative_error


def _steps(group, rank, payload):
    size = group.size()
    model = mixture("fp8-block", dispatcher=moe.DeepEP(Buffer(group), payload=payload), num_local_experts=E // size)
    state = mixture("fp8-block").state_dict()
    for name in ("experts.fc1.weight", "experts.fc2.weight"):
        state[name] = state[name].chunk(size)[rank]
    model.load_state_dict(state)
    return [*step(model, *data(rank)), model.router.weight.grad]


@pytest.mark.parametrize("payload", ["values", pytest.param("codes", marks=pytest.mark.slow)])
def test_ranks_compute_what_one_process_does_but_for_sums_of_ranks(ranks, payload):
    answers = ranks.run(_steps, payload, size=2)
    found, want = joined([answer[:4] for answer in answers]), in_one_process("fp8-block", 2, payload == "codes")
    assert relative_error(found[0], want[0]) < 4e-3  # each rank rounds its sum to bfloat16
    for a, b in zip(found[1:], want[1:], strict=True):
        assert relative_error(a, b) < 0.03  # gradients are quantized after they are weighted
    assert all(answer[4].isfinite().all() and answer[4].any() for answer in answers)


class _Alone:
    """A buffer whose methods no test calls."""

    group_size = 1
    get_dispatch_layout = dispatch = combine = None


def test_what_it_does_not_take_is_refused():
    with pytest.raises(Unsupported, match=r"takes a deep_ep.Buffer .* got object without get_dispatch_layout"):
        moe.DeepEP(object())
    x, index, weights = torch.zeros(3, 64), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with pytest.raises(Unsupported, match=r"sends bfloat16, got torch.float32"):
        moe.DeepEP(_Alone()).dispatch(x, index, weights, 4)
    model = mixture("mxfp8", dispatcher=moe.DeepEP(_Alone(), payload="codes"))
    with pytest.raises(Unsupported, match=r"float32 scale for each 128 elements of a row, .* x is quantized by mx"):
        model(data(0)[0])
