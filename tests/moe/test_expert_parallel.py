"""Experts over the ranks of gloo, against one process with the tokens of all ranks: bit by bit."""

import pytest
import torch
import torch.distributed as dist

import octavo
from octavo import moe
from octavo.moe.symmetric_exchange import Symmetric
from tests.support.linear_oracle import assert_same
from tests.support.split_experts import CODED, RECIPES, E, T, data, in_one_process, joined, mixture, step
from tests.support.steps import assert_equal

STEPS = {"fp8-delayed": 3}  # the first has no scales


def _steps(group, rank, cases, tokens=T):
    found = {}
    for recipe, engine, payload in cases:
        dispatcher = moe.ExpertParallel(group, engine=engine, payload=payload)
        model = mixture(recipe, dispatcher=dispatcher)
        mine = tokens if isinstance(tokens, int) else tokens[rank]
        found[recipe, engine, payload] = step(model, *data(rank, mine), STEPS.get(recipe, 1))
    return found


def compare(ranks, size, cases, tokens=T):
    answers = ranks.run(_steps, cases, tokens, size=size)
    for recipe, engine, payload in cases:
        found = joined([answer[recipe, engine, payload] for answer in answers])
        codes = payload == "codes"
        want = in_one_process(recipe, size, codes, tokens, STEPS.get(recipe, 1))
        number = 1 if recipe == "nvfp4" else 4  # each rank rounds gradients by its own numbers
        assert_equal(found[:number], want[:number], f"{recipe} {engine} {payload}")


SAMPLE = [("fp8-block", "all-to-all", "codes"), ("mxfp8", "padded", "codes"), ("fp8-delayed", "all-to-all", "values"),
          ("fp8-current", "padded", "values"), ("fp8-current", "all-to-all", "codes"),
          ("fp8-block", "symmetric", "codes"), ("bf16", "symmetric", "values"),
          ("fp8-delayed", "symmetric", "values")]  # fmt: skip
ENGINES = ("all-to-all", "padded", "symmetric")
GRID = [(recipe, engine, "values") for recipe in RECIPES for engine in ENGINES]
GRID += [(recipe, engine, "codes") for recipe in CODED for engine in ENGINES]


@pytest.mark.parametrize(
    ("size", "cases"),
    [(2, SAMPLE), *[pytest.param(size, GRID, marks=pytest.mark.slow) for size in (2, 4)]],
    ids=["two", "two, all", "four, all"],
)
def test_ranks_compute_what_one_process_does(ranks, size, cases):
    compare(ranks, size, cases)


def test_numbers_of_tokens_may_differ_and_one_rank_may_have_none(ranks):
    compare(ranks, 4, [("fp8-block", "all-to-all", "codes"), ("bf16", "all-to-all", "values")], [30, 0, 1, 57])


def _uneven(group, rank, engine, tokens):
    """Several calls of one layer with other numbers of tokens, for which there is room."""
    model = mixture("fp8-block", dispatcher=moe.ExpertParallel(group, engine=engine, capacity=200, payload="codes"))
    found = [step(model, *data(rank, call[rank])) for call in tokens]
    return found, model.overflow()


@pytest.mark.parametrize("engine", ["padded", "symmetric"])
def test_numbers_of_tokens_may_differ_where_there_is_room(ranks, engine):
    tokens = [(30, 57), (0, 90), (70, 0), (0, 0)]
    answers = ranks.run(_uneven, engine, tokens, size=2)
    for i, call in enumerate(tokens):
        found = joined([calls[i] for calls, _ in answers])
        assert_equal(found, in_one_process("fp8-block", 2, True, list(call)), f"call {i}")
    assert [dropped for _, dropped in answers] == [0, 0]


def _with_nan(group, rank, engine):
    model = mixture("fp8-block", dispatcher=moe.ExpertParallel(group, engine=engine))
    x, dy = data(rank)
    if rank == 1:
        x[3] = torch.nan
    y, dx, dw, _ = step(model, x, dy)
    return y.isnan().any(1).nonzero()[:, 0].tolist(), dx.isnan().any(1).nonzero()[:, 0].tolist(), dw.isnan().any()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_that_is_nan_stays_one_row(ranks, engine):
    (y, dx, _), (others_y, others_dx, _) = answers = ranks.run(_with_nan, engine, size=2)
    assert (y, dx) == ([], []) and (others_y, others_dx) == ([3], [3])
    assert any(dw for *_, dw in answers)  # and the experts that saw it learn that it was


def _sent(group, rank):
    """The bytes and addresses of a call, by payload."""
    found, send = {}, dist.all_to_all_single
    for payload in ("values", "codes"):
        calls = []

        def noted(out, x, *given, calls=calls, **more):
            calls.append((x.dtype, x.numel() * x.element_size(), x.data_ptr(), tuple(x.shape)))
            return send(out, x, *given, **more)

        model = mixture("fp8-block", dispatcher=moe.ExpertParallel(group, payload=payload))
        outputs = []
        model.experts.fc2.register_forward_hook(lambda module, given, y, outputs=outputs: outputs.append(y.detach()))
        dist.all_to_all_single = noted
        try:
            step(model, *data(rank))
        finally:
            dist.all_to_all_single = send
        local = E // group.size()
        assert len(calls) == 4 * local
        passes = [calls[i * local : (i + 1) * local] for i in range(4)]
        begin = 0  # combine sends each expert's rows out of the memory that FC2 wrote
        for _, _, address, shape in passes[1]:
            assert address == outputs[0].data_ptr() + begin * outputs[0].stride(0) * 2
            begin += shape[0]
        assert begin == outputs[0].shape[0]
        found[payload] = [(part[0][0], sum(number for _, number, *_ in part)) for part in passes]
    return found


def test_codes_take_half_of_the_bytes_and_results_leave_from_where_they_were_written(ranks):
    for found in ranks.run(_sent, size=2):
        values, codes = found["values"], found["codes"]
        assert [dtype for dtype, _ in codes] == [torch.uint8, torch.bfloat16, torch.uint8, torch.bfloat16]
        for i in (0, 2):
            assert codes[i][1] <= 0.52 * values[i][1]
        assert codes[1] == values[1] and codes[3] == values[3]


def _addresses(group, rank, payload):
    """Where the experts of `symmetric` write, against the memory that other ranks read."""
    model = mixture("fp8-block", dispatcher=moe.ExpertParallel(group, engine="symmetric", payload=payload))
    found, returned = {}, Symmetric.returned
    model.experts.fc2.register_forward_hook(lambda module, given, y: found.update(y=y.data_ptr()))

    def noted(plan, rows):
        found.setdefault("read", []).append(rows.data_ptr())
        found["parts"] = [t.data_ptr() for t in plan.buffers()]
        return returned(plan, rows)

    Symmetric.returned = noted
    try:
        step(model, *data(rank))
    finally:
        Symmetric.returned = returned
    return found


@pytest.mark.parametrize("payload", ["values", "codes"])
def test_other_ranks_read_results_and_dx_where_the_gemms_wrote_them(ranks, payload):
    for found in ranks.run(_addresses, payload, size=2):
        assert found["read"] == found["parts"] and found["y"] == found["parts"][0]


def _all_to_one(group, rank, engine):
    """All tokens choose the experts 0 and 1."""
    model = mixture("fp8-block", dispatcher=moe.ExpertParallel(group, engine=engine), expert_bias=True)
    with torch.no_grad():
        model.expert_bias[:2] = 100.0
    found = step(model, *data(rank))
    return found, model.load


@pytest.mark.parametrize("engine", ENGINES)
def test_all_tokens_may_go_to_one_rank(ranks, engine):
    found, loads = zip(*ranks.run(_all_to_one, engine, size=2), strict=True)
    assert loads[0].tolist() == [T, T, *[0] * (E - 2)]
    y, dx, dw1, dw2 = joined(found)
    assert y.isfinite().all() and dx.any() and dw1[:2].any() and not dw1[2:].any() and not dw2[2:].any()


def _dropped(group, rank, capacity):
    model = mixture("fp8-block", dispatcher=moe.ExpertParallel(group, capacity=capacity))
    x, dy = data(rank)
    found = step(model, x, dy)
    weights, index = moe.route(model.router(x), 2)
    permutation = moe.sort_by_rank(index, E, group.size(), capacity)
    kept = torch.where(permutation.positions >= 0, index, -1)
    lost = int((kept < 0).sum())
    return found, lost, model.overflow(), kept, weights.detach()


def test_assignments_beyond_the_capacity_are_dropped_and_counted(ranks):
    answers = ranks.run(_dropped, 20, size=2)
    assert all(lost == counted > 0 for _, lost, counted, *_ in answers)
    model = mixture("fp8-block")
    kept, weights = (torch.cat([answer[i] for answer in answers]) for i in (3, 4))
    x = torch.cat([data(rank)[0] for rank in (0, 1)])
    assert_same(torch.cat([answer[0][0] for answer in answers]), model.experts(x, kept, weights).detach())


def _shared(group, rank):
    model = octavo.MoE(
        64, 96, 4, 2, recipe="fp8-block", shared_ffn_size=128, shared_gate=True, aux_loss_coef=0.1, ep_group=group
    )
    x = torch.randn(3, 7, 64, requires_grad=True)
    y = model(x)
    (y.sum() + model.aux_loss).backward()
    return (
        y.detach(),
        x.grad,
        model.experts.fc1.weight.shape,
        [name for name, p in model.named_parameters() if p.grad is None],
    )


def test_shared_experts_run_while_rows_travel(ranks):
    torch.manual_seed(0)
    model = octavo.MoE(64, 96, 4, 2, recipe="fp8-block", shared_ffn_size=128, shared_gate=True, aux_loss_coef=0.1)
    x = torch.randn(3, 7, 64, requires_grad=True)
    y = model(x)
    for found, dx, shape, without in ranks.run(_shared, size=2):  # both ranks have the same tokens
        assert_same(found, y.detach())
        assert shape == (2, 192, 64) and without == [] and dx.isfinite().all()
