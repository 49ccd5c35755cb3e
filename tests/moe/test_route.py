"""octavo.moe's router: choice, weights, losses and loads against loops in float64, gradients, graphs, refusals."""

import math

import pytest
import torch
from torch._dynamo.utils import counters

from octavo import moe
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from tests.support.linear_oracle import assert_same, randn
from tests.support.steps import compiled

device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
scores = pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
WAYS = {
    "plain": {},
    "raw": {"normalize": False},
    "scaled": {"scale": 2.5},
    "biased": {"bias": True},
    "groups": {"groups": 4, "top_groups": 2},
    "groups, biased": {"groups": 4, "top_groups": 2, "bias": True, "scale": 2.5},
    "groups by their best": {"groups": 8, "top_groups": 3, "group_best": 1, "normalize": False, "bias": True},
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def bias_of(way, experts, device="cpu"):
    """The settings, with a bias of quarters where one is asked for: sums of it are exact."""
    steps = torch.randint(-2, 3, (experts,), generator=torch.Generator().manual_seed(7)) / 4
    return {**way, **({"bias": steps.to(device)} if way.get("bias") else {})}


# -- a loop in float64 -------------------------------------------------------------------------------------------------


def scored(row, score):
    if score == "softmax":
        top = max(row)
        total = math.fsum(math.exp(x - top) for x in row)
        return [math.exp(x - top) / total for x in row]
    if score == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in row]
    return [math.sqrt(math.log1p(math.exp(x))) for x in row]


def best(values, among, k):
    return sorted(among, key=lambda i: (-values[i], i))[:k]


def routed(row, k, score="softmax", normalize=None, bias=None, groups=None, top_groups=None, group_best=2, scale=1.0):
    """The weights and the experts of one token."""
    found = scored(row, score)
    ranked = found if bias is None else [s + b for s, b in zip(found, bias.tolist(), strict=True)]
    allowed = list(range(len(row)))
    if groups is not None:
        size = len(row) // groups
        parts = [allowed[g * size : (g + 1) * size] for g in range(groups)]
        sums = [sum(sorted((ranked[i] for i in part), reverse=True)[:group_best]) for part in parts]
        allowed = [i for g in best(sums, range(groups), top_groups) for i in parts[g]]
    chosen = best(ranked, allowed, k)
    weights = [found[i] for i in chosen]
    if normalize or (normalize is None and k > 1):
        weights = [w / math.fsum(weights) for w in weights]
    return [scale * w for w in weights], chosen


def by_loop(logits, k, **settings):
    pairs = [routed(row, k, **settings) for row in logits.double().tolist()]
    return tuple(torch.tensor(part) for part in zip(*pairs, strict=True))


def assert_routed(logits, k, **settings):
    weights, index = moe.route(logits, k, **settings)
    want, chosen = by_loop(logits, k, **settings)
    assert weights.dtype == torch.float32 and index.dtype == torch.int64
    assert torch.equal(index.cpu(), chosen)
    torch.testing.assert_close(weights.cpu().double(), want.double(), rtol=2e-6, atol=1e-12)


# -- choice and weights ------------------------------------------------------------------------------------------------


@device
@ways
@scores
def test_a_choice_is_that_of_a_loop(device, score, way):
    assert_routed(2 * randn(40, 16).to(device), 3, score=score, **bias_of(way, 16, device))


@device
@ways
@scores
def test_of_equal_experts_the_first_is_chosen(device, score, way):
    """Whole numbers from -1 to 1 among 16 experts: every token has ties, zeros of both signs among them."""
    logits = torch.randint(-1, 2, (64, 16), generator=torch.Generator().manual_seed(3)).float().to(device)
    logits[::2] = logits[::2] * -1.0
    assert_routed(logits, 5, score=score, **bias_of(way, 16, device))


@device
@scores
def test_many_experts_and_slots(device, score):
    assert_routed(randn(9, 1024).to(device), 32, score=score)
    whole = torch.randint(-3, 4, (9, 1024), generator=torch.Generator().manual_seed(1)).float().to(device)
    assert_routed(whole, 32, score=score, groups=32, top_groups=4)


@device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_computed_in_float32(device, dtype):
    assert_routed(randn(40, 64).to(device, dtype), 6, score="sigmoid")


def test_one_expert_for_a_token_is_not_normalized():
    logits = randn(10, 4)
    weights, index = moe.route(logits, 1)
    assert_same(weights, logits.softmax(-1).gather(-1, index))
    assert (moe.route(logits, 1, normalize=True)[0] == 1).all()


def test_one_expert_and_groups_of_one():
    assert [t.tolist() for t in moe.route(randn(3, 1), 1)] == [[[1.0]] * 3, [[0]] * 3]
    logits = randn(5, 4)
    assert torch.equal(moe.route(logits, 2, groups=4, top_groups=2)[1], moe.route(logits, 2)[1])


def test_leading_dims_are_kept():
    logits = randn(2, 3, 5, 8)
    weights, index = moe.route(logits, 2, groups=2, top_groups=1)
    assert weights.shape == index.shape == (2, 3, 5, 2)
    flat = moe.route(logits.flatten(0, 2), 2, groups=2, top_groups=1)
    assert torch.equal(weights.flatten(0, 2), flat[0]) and torch.equal(index.flatten(0, 2), flat[1])
    assert [t.shape for t in moe.route(logits[0, 0, 0], 2)] == [(2,), (2,)]
    assert [t.shape for t in moe.route(torch.empty(0, 8), 2)] == [(0, 2), (0, 2)]


@scores
def test_scores_that_round_to_one_number_are_no_ties(score):
    """Far from zero every score is 0 or 1 in float32, and the order of logits still decides."""
    for base in (-200.0, 200.0 if score == "sigmoid" else -150.0):
        logits = base + torch.arange(8.0)[None]
        logits[:, 0] += 200 if score == "softmax" else 0
        assert moe.route(logits, 3, score=score)[1][0].tolist() == ([0, 7, 6] if score == "softmax" else [7, 6, 5])


def test_an_expert_of_another_group_is_never_chosen():
    """Biased scores may all be below what a mask would write."""
    logits, bias = randn(20, 8), torch.full((8,), -1e30)
    bias[6] = float("-inf")
    _, index = moe.route(logits, 4, score="sigmoid", groups=2, top_groups=1, bias=bias)
    assert ((index // 4) == (index[:, :1] // 4)).all()


@device
@scores
@pytest.mark.parametrize("groups", [None, 2])
def test_a_nan_is_seen_in_the_weights(device, score, groups):
    logits = randn(4, 8).to(device)
    logits[1, 5] = float("nan")
    for bias in (None, torch.zeros(8, device=device)):
        for normalize in (True, False):
            settings = {"normalize": normalize, "bias": bias, "groups": groups, "top_groups": groups and 1}
            weights, index = moe.route(logits, 2, score=score, **settings)
            assert weights[1, 0].isnan() and (not normalize or weights[1].isnan().all())
            assert weights[[0, 2, 3]].isfinite().all()
            assert ((index >= 0) & (index < 8)).all()
            if score != "softmax":  # there all scores of the token are NaN
                assert index[1, 0] == 5


# -- gradients ---------------------------------------------------------------------------------------------------------


def in_torch(logits, index, score, normalize, scale):
    """Weights of a given choice, for autograd in float64."""
    found = {
        "softmax": lambda x: x.softmax(-1),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda x: x.exp().log1p().sqrt(),
    }[score](logits)
    chosen = found.gather(-1, index)
    return scale * (chosen / chosen.sum(-1, keepdim=True) if normalize else chosen)


@ways
@scores
def test_gradients_of_weights(score, way):
    logits, dy = (2 * randn(30, 16)).requires_grad_(), randn(30, 3, seed=1)
    weights, index = moe.route(logits, 3, score=score, **bias_of(way, 16))
    weights.backward(dy)
    exact = logits.detach().double().requires_grad_()
    in_torch(exact, index, score, way.get("normalize", True), way.get("scale", 1.0)).backward(dy.double())
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


@scores
def test_gradients_at_the_ends_of_the_range_are_finite(score):
    logits = torch.tensor([[-math.inf, -200.0, -90.0, -15.1, -14.9, 0.0, 90.0]]).requires_grad_()
    weights, index = moe.route(logits, 7, score=score, normalize=False)
    weights.sum().backward()
    assert weights.isfinite().all() and logits.grad.isfinite().all()
    assert index[0].tolist() == [6, 5, 4, 3, 2, 1, 0]


def test_the_root_of_softplus_has_no_jump():
    x = torch.linspace(-15.001, -14.999, 1001)[None].requires_grad_()
    weights, index = moe.route(x, 1001, score="sqrtsoftplus", normalize=False)
    weights.sum().backward()
    exact = x.detach().double().exp().log1p().sqrt().gather(-1, index)
    torch.testing.assert_close(weights.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(x.grad.gather(-1, index).double(), exact / 2, rtol=1e-5, atol=0)


def test_a_bias_gets_no_gradient():
    logits, bias = randn(6, 8).requires_grad_(), torch.zeros(8, requires_grad=True)
    moe.route(logits, 2, bias=bias)[0].sum().backward()
    assert bias.grad is None and logits.grad is not None


# -- losses, loads, the bias -------------------------------------------------------------------------------------------


def losses_by_loop(logits, index, score, tokens):
    """(auxiliary loss, z-loss) of the first tokens."""
    logits, index = logits.double().flatten(0, -2)[:tokens].tolist(), index.flatten(0, -2)[:tokens].tolist()
    if not logits:
        return 0.0, 0.0
    experts, assignments, number = len(logits[0]), len(index[0]), len(logits)
    found = [scored(row, score) for row in logits]
    probs = [[s / math.fsum(row) for s in row] for row in found]
    aux = 0.0
    for e in range(experts):
        share = sum(row.count(e) for row in index) / (number * assignments)
        aux += share * math.fsum(row[e] for row in probs) / number
    return experts * aux, math.fsum(math.log(math.fsum(map(math.exp, row))) ** 2 for row in logits) / number


@device
@scores
def test_losses_with_a_count_on_the_device(device, score):
    """A graph would read the count at each replay: here it changes in place, and padding holds NaN."""
    logits, count = randn(4, 10, 8).to(device), torch.zeros((), dtype=torch.int64, device=device)
    index = moe.route(logits, 2, score=score)[1]
    for tokens in (40, 17, 1, 0):
        count.fill_(tokens)
        padded = logits.flatten(0, 1).clone()
        padded[tokens:] = float("nan")
        padded = padded.view_as(logits).requires_grad_()
        aux, z = moe.aux_loss(padded, index, score=score, tokens=count), moe.z_loss(padded, tokens=count)
        want = losses_by_loop(logits, index, score, tokens)
        torch.testing.assert_close(torch.stack([aux, z]).double().cpu(), torch.tensor(want).double())
        (aux + z).backward()
        gradient = padded.grad.flatten(0, 1)
        assert gradient[:tokens].isfinite().all() and not gradient[tokens:].any()
        torch.testing.assert_close(aux, moe.aux_loss(padded, index, score=score, tokens=tokens))
    whole = losses_by_loop(logits, index, score, None)
    got = moe.aux_loss(logits, index, score=score), moe.z_loss(logits)
    torch.testing.assert_close(torch.stack(got).double().cpu(), torch.tensor(whole).double())


def test_an_index_without_slots_and_other_mistakes_are_refused():
    with pytest.raises(UnsupportedShape, match="K from 1 up"):
        moe.counts(torch.zeros(4, 0, dtype=torch.int64), 8)
    with pytest.raises(UnsupportedDtype, match="counts as a tensor, got list"):
        moe.update_bias(torch.zeros(3), [1, 2, 3])
    with pytest.raises(UnsupportedDevice, match="tokens is on meta and the data on cpu"):
        moe.counts(torch.zeros(4, 2, dtype=torch.int64), 8, tokens=torch.ones((), dtype=torch.int64, device="meta"))


@scores
def test_gradients_of_losses(score):
    logits = randn(20, 8).requires_grad_()
    index = moe.route(logits, 3, score=score)[1]
    (moe.aux_loss(logits, index, score=score) + moe.z_loss(logits)).backward()
    exact = logits.detach().double().requires_grad_()
    probs = in_torch(exact, torch.arange(8).expand(20, 8), score, True, 1.0).mean(0)
    shares = torch.bincount(index.flatten(), minlength=8) / 60
    (8 * (shares.double() * probs).sum() + exact.logsumexp(-1).square().mean()).backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-4, atol=1e-7)


def test_the_auxiliary_loss_tells_a_balanced_load():
    even, skewed = torch.zeros(16, 4), torch.tensor([[5.0, 0, 0, 0]]).expand(16, 4)
    assert moe.aux_loss(even, torch.arange(16)[:, None] % 4).item() == 1
    assert moe.aux_loss(skewed, moe.route(skewed, 1)[1]) > 3


@device
def test_counts(device):
    index = torch.tensor([[[0, 3], [1, -1]], [[9, 3], [3, 0]]], device=device)
    assert moe.counts(index, 5).tolist() == [2, 1, 0, 3, 0]
    assert moe.counts(index, 5, tokens=2).tolist() == [1, 1, 0, 1, 0]
    assert moe.counts(index.int(), 5, torch.tensor([3], device=device)).tolist() == [1, 1, 0, 2, 0]
    assert moe.counts(index[:0], 5).tolist() == [0] * 5


def test_a_bias_moves_towards_a_balanced_load():
    bias, logits = torch.zeros(8), randn(400, 8) + torch.arange(8) / 4
    loads = []
    for _ in range(200):
        _, index = moe.route(logits, 2, score="sigmoid", bias=bias)
        loads.append(moe.counts(index, 8))
        moe.update_bias(bias, loads[-1], rate=5e-3)
    assert loads[0].max() > 2 * loads[0].min()
    assert loads[-1].max() < 1.15 * loads[-1].min()
    before = bias.clone()
    moe.update_bias(bias, torch.full((8,), 3), rate=1.0)
    assert torch.equal(bias, before)  # an expert with the mean stays


# -- graphs ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
def test_one_graph_for_any_number_of_tokens_with_the_bits_of_eager():
    score = "sigmoid"
    settings = {"score": score, "groups": 4, "top_groups": 2, "bias": randn(16, seed=5)}

    def step(logits, tokens):
        weights, index = moe.route(logits, 3, **settings)
        loss = moe.aux_loss(logits, index, score=score, tokens=tokens) + moe.z_loss(logits, tokens=tokens)
        return weights, index, loss, moe.counts(index, 16, tokens)

    call = compiled(step, dynamic=True)
    for number in (20, 30, 41):
        logits, tokens = randn(number, 16, seed=number), torch.tensor(number - 4)
        found = []
        for each in (call, step):
            x = logits.clone().requires_grad_()
            made = each(x, tokens)
            (made[0].square().sum() + made[2]).backward()
            found.append([*made, x.grad])
        for a, b in zip(*found, strict=True):
            assert_same(a, b)
    assert counters["stats"]["unique_graphs"] == 1


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"score": "relu"}, "score must be one of"),
        ({"normalize": 1}, "normalize"),
        ({"top_k": 9}, "top_k is a number from 1 to 8"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"groups": 2}, "both groups and top_groups"),
        ({"groups": 3, "top_groups": 1}, "groups divides"),
        ({"groups": 2, "top_groups": 3}, "top_groups is a number from 1 to 2"),
        ({"top_k": 5, "groups": 4, "top_groups": 2}, "experts in top_groups"),
        ({"groups": 2, "top_groups": 1, "group_best": 0}, "group_best"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, match):
    with pytest.raises(UnsupportedConfig, match=match):
        moe.route(randn(4, 8), **{"top_k": 2, **settings})


def test_tensors_that_do_not_fit_are_refused():
    logits, index = randn(4, 8), torch.zeros(4, 2, dtype=torch.int64)
    for wrong in (logits.double(), logits.long(), logits.tolist()):
        with pytest.raises(UnsupportedDtype, match="logits"):
            moe.route(wrong, 2)
    with pytest.raises(UnsupportedShape, match="at least one expert"):
        moe.route(logits[:, :0], 1)
    with pytest.raises(UnsupportedShape, match=r"The bias is \[8\]"):
        moe.route(logits, 2, bias=torch.zeros(4))
    with pytest.raises(UnsupportedDevice, match="the bias on meta"):
        moe.route(logits, 2, bias=torch.zeros(8, device="meta"))
    with pytest.raises(UnsupportedShape, match="the same tokens"):
        moe.aux_loss(logits, index[:3])
    with pytest.raises(UnsupportedDtype, match="index as a tensor"):
        moe.aux_loss(logits, index.float())
    with pytest.raises(UnsupportedShape, match=r"K from 1 up, got \(\)"):
        moe.counts(index[0, 0], 8)
    for wrong, error in (
        (torch.ones(2).long(), UnsupportedShape),
        (torch.ones(()), UnsupportedDtype),
        (3.0, TypeError),
    ):
        with pytest.raises(error, match="tokens is"):
            moe.z_loss(logits, tokens=wrong)
    with pytest.raises(UnsupportedShape, match="update_bias"):
        moe.update_bias(torch.zeros(8), torch.zeros(4))
    with pytest.raises(UnsupportedDtype, match="Keep the bias itself in float32: the update is in place"):
        moe.update_bias(torch.zeros(8).bfloat16(), torch.zeros(8))


def test_lengths_and_masks_of_sequences_are_told_how_to_become_one_number():
    logits = randn(2, 6, 8)
    with pytest.raises(UnsupportedShape, match=r"got a tensor \(2,\)\. Pack sequences .* the sum of the lengths"):
        moe.z_loss(logits, tokens=torch.tensor([4, 5]))
    with pytest.raises(UnsupportedDtype, match=r"got torch\.bool\. For a mask, pass x\[mask\] alone"):
        moe.z_loss(logits, tokens=torch.ones(2, 6, dtype=torch.bool))


def test_masks_and_weights_are_no_index_and_no_cast_is_advised():
    mask = torch.tensor([[True, False, True], [False, True, False]])
    with pytest.raises(UnsupportedDtype, match=r"got torch.bool. Make one of a mask by torch.where\(mask, torch.ara"):
        moe.counts(mask, 3)
    assert moe.counts(torch.where(mask, torch.arange(3), -1), 3).tolist() == mask.sum(0).tolist()
    for call in (lambda weights: moe.counts(weights, 3), lambda weights: moe.sort(weights, 3)):
        with pytest.raises(UnsupportedDtype, match=r"got torch\.float32\. octavo\.moe\.route returns weights first"):
            call(torch.ones(4, 2))


@pytest.mark.parametrize(
    ("bias", "counts", "message"),
    [
        (None, torch.zeros(3), "got NoneType. This octavo.MoE was built without expert_bias=True"),
        (torch.zeros(3), torch.zeros(3, device="meta"), "bias is on cpu and the counts on meta"),
    ],
)
def test_update_bias_refuses_a_bias_that_it_cannot_move(bias, counts, message):
    with pytest.raises((UnsupportedDevice, UnsupportedDtype), match=message):
        moe.update_bias(bias, counts)


@scores
def test_normalized_weights_of_a_token_sum_to_one(score):
    weights, _ = moe.route(randn(9, 8), 3, score=score, normalize=True, bias=torch.zeros(8))
    torch.testing.assert_close(weights.sum(-1), torch.ones(9))
